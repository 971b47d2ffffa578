"""Draw the pictures of the documentation as SVG files: ``make drawings``.

A picture is 400 units wide, so that its text can be read at the width of a phone. There is one file for each color
scheme, between which the pages choose. It has its own background, so that it can be read alone too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from html import escape
from pathlib import Path

WIDTH = 400
FOLDER = Path(__file__).parent
LIGHT = {
    "bg": "#ffffff", "edge": "#d5dae1", "ink": "#1c2430", "soft": "#566173", "none": "#eef1f5",
    "a": "#cfe1f7", "A": "#2f6fb7", "b": "#fbe3b3", "B": "#a86a00", "c": "#cdeccf", "C": "#2b8038",
    "d": "#f3d3e3", "D": "#b03a74",
}  # fmt: skip
DARK = {
    "bg": "#161b22", "edge": "#3a4350", "ink": "#eef2f7", "soft": "#a7b3c3", "none": "#252c36",
    "a": "#1d3f66", "A": "#7db4f0", "b": "#5a4210", "B": "#f0b94d", "c": "#1e4d28", "C": "#76cf83",
    "d": "#5b2442", "D": "#ee8cbb",
}  # fmt: skip
FONTS = "text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;font-size:13px}"
FONTS += ".mono{font-family:ui-monospace,SFMono-Regular,Menlo,'DejaVu Sans Mono',monospace;font-size:11.5px}"
FONTS += ".bold{font-weight:600}.small{font-size:11.5px}"


class Drawing:
    """One picture. Coordinates are in units, from the top left; ``fill`` and ``stroke`` are names of colors."""

    def __init__(self, title: str, height: int) -> None:
        self.title, self.height = title, height
        self._shapes: list[str] = []

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str = "none",
        stroke: str = "edge",
        radius: float = 4,
    ) -> None:
        self._add(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}"', fill, stroke)

    def text(self, x: float, y: float, text: str, look: str = "", color: str = "ink", at: str = "start") -> None:
        looks = f' class="{look}"' if look else ""
        self._shapes.append(
            f'<text x="{x:g}" y="{y:g}"{looks} text-anchor="{at}" style="fill:var(--{color})">{escape(text)}</text>'
        )

    def line(self, *points: tuple[float, float], color: str = "soft", dashed: bool = False, arrow: bool = True) -> None:
        """Draw a line through the points, with an arrowhead at its end."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        dashes = ' stroke-dasharray="4 3"' if dashed else ""
        self._add(f'<polyline points="{path}" stroke-width="1.5"{dashes}', "", color)
        if arrow:
            (x0, y0), (x1, y1) = points[-2:]
            length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
            dx, dy = (x1 - x0) / length, (y1 - y0) / length
            back = [(x1 - 7 * dx - side * 3.5 * dy, y1 - 7 * dy + side * 3.5 * dx) for side in (1, -1)]
            corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in [(x1, y1), *back])
            self._add(f'<polygon points="{corners}"', color, color)

    def svg(self, colors: dict[str, str]) -> str:
        """Return the file, in the colors of a scheme."""
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" width="520" '
        head += f'height="{520 * self.height / WIDTH:.0f}" role="img" aria-label="{escape(self.title)}">'
        ground = f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{self.height - 1}" rx="8" '
        ground += 'style="fill:var(--bg);stroke:var(--edge)"/>'
        lines = [
            head,
            f"<title>{escape(self.title)}</title>",
            f"<style>{variables(colors)}{FONTS}</style>",
            ground,
            *self._shapes,
        ]
        return "\n".join([*lines, "</svg>", ""])

    def _add(self, start: str, fill: str, stroke: str) -> None:
        inside = f"var(--{fill})" if fill else "none"
        self._shapes.append(f'{start} style="fill:{inside};stroke:var(--{stroke})"/>')


def variables(colors: dict[str, str]) -> str:
    return "svg{" + "".join(f"--{name}:{value};" for name, value in colors.items()) + "}"


def overview() -> Drawing:
    """A save by four ranks, and a load of the same checkpoint by two."""
    d = Drawing("Four ranks save their rows of a matrix into one checkpoint; two ranks load its columns from it", 400)
    colors = "abcd"
    d.text(200, 26, "save: FSDP-2 on 4 ranks", "bold", at="middle")
    for rank, color in enumerate(colors):
        x = 26 + 90 * rank
        d.box(x, 38, 78, 26, color, color.upper())
        d.text(x + 39, 55, f"rank {rank}", at="middle")
        d.line((x + 39, 68), (x + 39, 92))
    d.box(26, 98, 348, 134, "none")
    d.text(40, 118, "runs/7b/step-1000", "mono bold")
    d.text(40, 138, "model.wte.weight", "mono")
    for rank, color in enumerate(colors):
        d.box(40, 146 + 19 * rank, 130, 19, color, color.upper(), 0)
    notes = ["each rank wrote its rows,", "each byte once,", "with checksums;", "committed by one manifest"]
    for number, note in enumerate(notes):
        d.text(184, 159 + 19 * number, note, "small", "soft")
    for rank in range(2):
        x = 70 + 195 * rank
        d.line((x + 32, 236), (x + 32, 260))
        for part, color in enumerate(colors):
            d.box(x, 266 + 19 * part, 65, 19, color, color.upper(), 0)
        d.text(x + 32, 360, f"rank {rank}", at="middle")
    d.text(200, 292, "each rank", "small", "soft", at="middle")
    d.text(200, 309, "reads only the bytes", "small", "soft", at="middle")
    d.text(200, 326, "of its columns", "small", "soft", at="middle")
    d.text(200, 386, "load: tensor parallel on 2 ranks", "bold", at="middle")
    return d


def checkpoint() -> Drawing:
    """The state, and the files that a save makes of it."""
    d = Drawing("The sections of a state become data files, and one manifest says where everything is", 330)
    d.text(20, 26, "your state, on each rank", "bold")
    sections = [("model", "a", 20, 100), ("optimizer", "b", 130, 120), ("extra_state", "c", 260, 120)]
    for name, color, x, width in sections:
        d.box(x, 36, width, 30, color, color.upper())
        d.text(x + width / 2, 55, name, "mono", at="middle")
        d.line((x + width / 2, 70), (x + width / 2, 92))
    d.text(20, 112, "a folder: runs/7b/step-1000/", "bold")
    d.box(20, 122, 360, 134, "none")
    d.text(32, 142, "attempt-20261126T200123Z-e75d.../", "mono")
    files = [
        ("model-00000.safetensors", "rank 0's part", "a"), ("model-00001.safetensors", "rank 1's part", "a"),
        ("optimizer-00000.safetensors", "...", "b"), ("extra_state-00000.msgpack", "plain values", "c"),
    ]  # fmt: skip
    for number, (name, note, color) in enumerate(files):
        y = 150 + 25 * number
        d.box(44, y, 220, 21, color, color.upper())
        d.text(52, y + 15, name, "mono")
        d.text(274, y + 15, note, "small", "soft")
    d.box(20, 272, 360, 44, "d", "D")
    d.text(32, 290, "manifest.msgpack", "mono bold")
    d.text(32, 307, "names, shapes, boxes, checksums; written last", "small")
    return d


def names() -> Drawing:
    """How a load pairs names."""
    d = Drawing("A load pairs stored names with those of the state, and reports what has no partner", 322)
    d.text(20, 26, "a full name", "bold")
    parts = [("model", "a", 20, 54), (".blocks.0.attention.weight", "c", 74, 196)]
    for text, color, x, width in parts:
        d.box(x, 36, width, 26, color, color.upper(), 0)
        d.text(x + width / 2, 53, text, "mono", at="middle")
    d.text(47, 78, "section", "small", "soft", at="middle")
    d.text(172, 78, "name in the section", "small", "soft", at="middle")
    d.line((10, 92), (390, 92), color="edge", arrow=False)
    d.text(20, 114, "stored", "bold")
    d.text(240, 114, "your state", "bold")
    pairs = [
        ("model.wte.weight", "model.wte.weight", "c", ""), ("model.norm.weight", "model.ln.weight", "b", "rename="),
        ("", "model.head.weight", "d", "missing"), ("model.bias", "", "d", "unexpected"),
        ("optimizer....", "", "none", "not requested"),
    ]  # fmt: skip
    for number, (left, right, color, note) in enumerate(pairs):
        y = 124 + 38 * number
        stroke = "edge" if color == "none" else color.upper()
        if left:
            d.box(20, y, 140, 26, color, stroke)
            d.text(28, y + 17, left, "mono")
        if right:
            d.box(240, y, 140, 26, color, stroke)
            d.text(248, y + 17, right, "mono")
        if left and right:
            d.line((164, y + 13), (236, y + 13))
            d.text(200, y + 6, note, "small", "soft", at="middle")
        else:
            d.text(
                170 if left else 230,
                y + 17,
                note,
                "small",
                "D" if color == "d" else "soft",
                "start" if left else "end",
            )
    return d


def boxes() -> Drawing:
    """The boxes that a load reads are the overlaps of what is stored and what is requested."""
    d = Drawing("A rank's request overlaps stored boxes; each overlap is some ranges of bytes in a file", 346)
    d.text(20, 26, "stored: 4 boxes", "bold")
    d.text(214, 26, "requested by rank 1", "bold")
    colors = "abcd"
    for row, color in enumerate(colors):
        d.box(20, 38 + 26 * row, 140, 26, color, color.upper(), 0)
        d.text(90, 55 + 26 * row, f"file {row}", "small", at="middle")
    d.box(214, 38, 140, 104, "none", "edge", 0)
    d.box(284, 38, 70, 104, "bg", "ink", 0)
    d.text(319, 86, "columns", "small", at="middle")
    d.text(319, 101, "4 to 7", "small", at="middle")
    d.text(249, 94, "rank 0", "small", "soft", at="middle")
    d.text(20, 172, "the load plan: their overlaps", "bold")
    for row, color in enumerate(colors):
        y = 184 + 28 * row
        d.text(20, y + 15, f"file {row}", "small", "soft")
        for run in range(2):
            d.box(64 + 96 * run, y, 48, 20, "none", "edge", 0)
            d.box(112 + 96 * run, y, 48, 20, color, color.upper(), 0)
        d.line((264, y + 10), (292, 206 + 17 * row))
    d.box(298, 194, 72, 80, "none", "edge", 0)
    for row, color in enumerate(colors):
        d.box(298, 194 + 20 * row, 72, 20, color, color.upper(), 0)
    d.text(334, 290, "memory", "small", at="middle")
    d.text(334, 304, "of rank 1", "small", at="middle")
    d.text(20, 316, "Colored ranges are read, gray ones are not.", "small", "soft")
    d.text(20, 332, "Each is checked against its checksum.", "small", "soft")
    return d


def asynchronous() -> Drawing:
    """What training waits for in a synchronous, an asynchronous and a gated save."""
    d = Drawing("Training waits for a whole synchronous save, for a copy, or with a gate for the rest of a copy", 396)

    def lane(y: float, label: str, spans: list[tuple[float, float, str, str]]) -> None:
        d.text(12, y + 16, label, "small", "soft")
        for begin, end, text, color in spans:
            d.box(begin, y, end - begin, 24, color, "edge" if color == "none" else color.upper(), 2)
            d.text((begin + end) / 2, y + 16, text, "small", at="middle")

    d.text(12, 26, "a synchronous save", "bold")
    lane(36, "training", [(76, 136, "step", "none"), (136, 316, "waits", "d"), (316, 386, "step", "none")])
    lane(64, "saving", [(136, 296, "copy, hash and write", "a"), (296, 316, "", "c")])
    d.text(12, 120, "async_save=True", "bold")
    steps = [(214, 274, "step", "none"), (274, 334, "step", "none"), (334, 386, "step", "none")]
    lane(130, "training", [(76, 136, "step", "none"), (136, 214, "waits", "d"), *steps])
    lane(158, "saving", [(136, 214, "copy", "b"), (214, 340, "hash and write", "a"), (340, 360, "", "c")])
    d.line((214, 204), (214, 186))
    d.text(214, 217, "staged(): tensors", "small", at="middle")
    d.text(214, 231, "may change", "small", at="middle")
    d.line((360, 204), (360, 186))
    d.text(392, 217, "result(): durable", "small", at="end")
    d.text(12, 264, "with gate=True", "bold")
    gated = [(76, 128, "step", "none"), (128, 142, "", "d"), (142, 250, "forward, backward", "none")]
    lane(274, "training", [*gated, (250, 266, "", "d"), (266, 324, "optimizer", "none"), (324, 386, "step", "none")])
    lane(302, "saving", [(128, 266, "copy", "b"), (266, 354, "hash and write", "a"), (354, 374, "", "c")])
    d.line((258, 348), (258, 330))
    d.text(258, 361, "optimizer.step() waits for the rest", "small", at="middle")
    for x, color, text in ((12, "d", "training waits"), (130, "c", "commit")):
        d.box(x, 376, 10, 10, color, color.upper(), 2)
        d.text(x + 16, 385, text, "small", "soft")
    return d


def commit() -> Drawing:
    """What a crash leaves, at each moment of a save."""
    d = Drawing("A crash before the manifest is written leaves the old checkpoint; a crash after it, the new one", 300)
    d.text(20, 26, "one save, in the order of time", "bold")
    stages = [
        (20, 100, "data files", "a"), (120, 56, "sync", "a"), (176, 68, "confirm", "a"), (244, 62, "commit", "c"),
        (306, 74, "clean up", "none"),
    ]  # fmt: skip
    for x, width, text, color in stages:
        stroke = "edge" if color == "none" else color.upper()
        d.box(x, 38, width, 30, color, stroke, 0)
        d.text(x + width / 2, 57, text, "small", at="middle")
    d.line((275, 96), (275, 72))
    d.text(380, 111, "the manifest is written: one atomic operation", "small", at="end")
    d.text(20, 146, "a crash or an error here ...", "bold")
    d.box(20, 156, 255, 30, "b", "B", 0)
    d.text(147, 175, "leaves the old checkpoint", at="middle")
    d.box(275, 156, 105, 30, "c", "C", 0)
    d.text(327, 175, "the new one", at="middle")
    d.text(20, 212, "what a reader finds", "bold")
    rows = [
        ("manifest of step 900", "it and its files: a checkpoint"),
        ("no manifest yet", "files of an attempt: ignored"),
    ]
    for number, (left, right) in enumerate(rows):
        y = 222 + 32 * number
        d.box(20, y, 150, 26, "d" if number == 0 else "none", "D" if number == 0 else "edge")
        d.text(95, y + 17, left, "small", at="middle")
        d.text(182, y + 17, right, "small", "soft")
    return d


def tiers() -> Drawing:
    """Where a checkpoint is at which moment."""
    d = Drawing(
        "Ranks save to the disk of their host, and the files are uploaded to the store while training goes on", 344
    )
    for host in range(2):
        x = 20 + 190 * host
        colors = "ab" if host == 0 else "cd"
        d.box(x, 34, 170, 146, "none")
        d.text(x + 12, 54, f"host {host}", "bold")
        for number, color in enumerate(colors):
            left = x + 12 + 77 * number
            d.box(left, 64, 69, 26, color, color.upper())
            d.text(left + 34, 81, f"rank {2 * host + number}", "small", at="middle")
            d.line((left + 34, 94), (left + 34, 116))
            d.box(left, 140, 69, 26, color, color.upper(), 0)
        d.text(x + 85, 133, "/local/nvme", "mono", at="middle")
        d.line((x + 85, 184), (x + 85, 228), dashed=True)
    d.text(200, 22, "1. committed on the disks: handle.result()", "small bold", at="middle")
    d.text(200, 210, "upload, in the background", "small", "soft", at="middle")
    d.box(20, 234, 360, 62, "none")
    d.text(32, 253, "s3://runs/7b/step-1000", "mono bold")
    for number, color in enumerate("abcd"):
        d.box(32 + 85 * number, 262, 81, 24, color, color.upper(), 0)
    d.text(200, 316, "2. committed in the store: handle.uploaded()", "small bold", at="middle")
    d.text(200, 333, "A load reads the disk where it can, and the store for the rest.", "small", "soft", at="middle")
    return d


PICTURES: tuple[Callable[[], Drawing], ...] = (overview, checkpoint, names, boxes, asynchronous, commit, tiers)
SCHEMES = {"light": LIGHT, "dark": DARK}


def files() -> dict[Path, str]:
    """Return the text of each file."""
    return {
        FOLDER / "concepts" / f"{draw.__name__}-{scheme}.svg": draw().svg(colors)
        for draw in PICTURES
        for scheme, colors in SCHEMES.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the pictures of the documentation.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file differs")
    check = parser.parse_args().check
    for path, text in files().items():
        if not check:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            sys.exit(f"{path} is not what docs/drawings.py draws; run `make drawings`")


if __name__ == "__main__":
    main()
