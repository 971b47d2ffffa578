"""Check that every guarantee in docs/reliability.md names a test that exists and runs in every run."""

from __future__ import annotations

import functools
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reliability.md"


def test_every_named_test_exists() -> None:
    named = set(_named(PAGE.read_text()))
    assert len(named) > 15
    assert [name for name in sorted(named) if not (ROOT / "tests" / name).exists()] == []


def test_every_guarantee_has_a_test_outside_of_the_full_set() -> None:
    tables = [part.splitlines() for part in PAGE.read_text().split("\n\n") if part.startswith("| guarantee ")]
    guarantees = [row for table in tables for row in table[2:]]
    assert len(guarantees) > 20
    untested = [row for row in guarantees if not _is_tested(row.rstrip(" |").rpartition("|")[2])]
    assert untested == []


def _named(text: str) -> list[str]:
    return re.findall(r"`((?:\w+/)+test_\w+\.py)`", text.replace("`tests/", "`"))


def _is_tested(tests: str) -> bool:
    """Whether a run that is not full runs one of these tests. The conformance suite is part of every run."""
    return "conformance suite" in tests or any(map(_runs_always, _named(tests)))


@functools.cache
def _runs_always(name: str) -> bool:
    """Whether a module has a test without ``@pytest.mark.full``."""
    text = (ROOT / "tests" / name).read_text()
    if re.search(r"^pytestmark = .*mark\.full", text, re.MULTILINE):
        return False
    tests = re.findall(r"((?:^@.*\n)*)^(?:    )?(?:def test_|class Test|Test\w+ = )", text, re.MULTILINE)
    return any("mark.full" not in decorators for decorators in tests)
