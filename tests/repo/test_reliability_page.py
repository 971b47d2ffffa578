"""Every promise names a proof that exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reliability.md"


def test_every_named_test_exists() -> None:
    named = set(re.findall(r"`((?:\w+/)+test_\w+\.py)`", PAGE.read_text().replace("`tests/", "`")))
    assert len(named) > 15
    assert [name for name in sorted(named) if not (ROOT / "tests" / name).exists()] == []


def test_every_promise_has_a_proof() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and not line.startswith("| ---")]
    promises = [row for row in rows if not row.startswith(("| promise", "| figure", "| fault"))]
    assert len(promises) > 20
    unproved = [row for row in promises if "`" not in row.rstrip(" |").rpartition("|")[2]]
    assert unproved == []
