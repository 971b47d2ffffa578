"""Check that pages are easy to read as text: lines of prose fit into 120 columns."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = 120


def test_lines_of_pages_are_short() -> None:
    """Tables, commands and their output are as long as they must be, and `make gpu` writes its page."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    pages.remove(ROOT / "docs" / "performance" / "gpu.md")
    assert len(pages) > 20
    long = [
        f"{page.relative_to(ROOT)}:{number}: {len(line)} columns"
        for page in pages
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > COLUMNS and not line.startswith(("|", "    "))
    ]
    assert not long, "\n".join(long)
