"""The pictures of the documentation are what the script draws, and use only colors that both schemes have."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

DRAWINGS = runpy.run_path(str(Path(__file__).resolve().parents[2] / "docs" / "drawings.py"))


def test_the_pictures_are_drawn_by_the_script() -> None:
    drawn = DRAWINGS["files"]()
    assert {*DRAWINGS["FOLDER"].rglob("concepts/*.svg")} == {*drawn}
    stale = [path.name for path, text in drawn.items() if path.read_text(encoding="utf-8") != text]
    assert not stale, "run `make drawings`"


def test_both_schemes_have_every_color_of_the_pictures() -> None:
    used = {name for text in DRAWINGS["files"]().values() for name in re.findall(r"var\(--(\w+)\)", text)}
    assert used <= DRAWINGS["LIGHT"].keys() == DRAWINGS["DARK"].keys()
