"""Check that every guarantee in docs/reliability.md names an existing test."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reliability.md"


def test_every_named_test_exists() -> None:
    named = set(re.findall(r"`((?:\w+/)+test_\w+\.py)`", PAGE.read_text().replace("`tests/", "`")))
    assert len(named) > 15
    assert [name for name in sorted(named) if not (ROOT / "tests" / name).exists()] == []


def test_every_guarantee_names_a_test() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and not line.startswith("| ---")]
    guarantees = [row for row in rows if not row.startswith(("| guarantee", "| figure", "| fault"))]
    assert len(guarantees) > 20
    untested = [row for row in guarantees if "`" not in row.rstrip(" |").rpartition("|")[2]]
    assert untested == []
