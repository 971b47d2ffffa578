"""Output of commands: tables or one JSON document on standard output, progress on standard error."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from ..errors import without_userinfo

if TYPE_CHECKING:
    from rich.progress import Progress

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_COUNT_UNITS = ("", " K", " M", " B", " T")
_TIME_UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


def size_text(nbytes: int) -> str:
    """``1536`` as ``1.5 KiB``."""
    value, unit = float(nbytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{nbytes} B" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def count_text(count: int) -> str:
    """``22700000`` as ``22.7 M``."""
    value, unit = float(count), 0
    while value >= 999.95 and unit < len(_COUNT_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return str(count) if unit == 0 else f"{value:.1f}{_COUNT_UNITS[unit]}"


def age_text(time: str) -> str:
    """How long ago a time was (UTC, RFC 3339), in its largest unit: ``5 min ago``. A text that is no time as it is."""
    try:
        age_s = (datetime.now(UTC) - datetime.fromisoformat(time)).total_seconds()
    except (ValueError, TypeError):
        return time
    if age_s < 0:
        return time[:19]  # of a host whose clock is ahead
    unit, seconds = next((one for one in _TIME_UNITS if age_s >= one[1]), _TIME_UNITS[-1])
    return f"{int(age_s / seconds)} {unit} ago"


def printable(text: object) -> str:
    """Escape control characters: names come from untrusted files and must not control the terminal. Hide passwords."""
    shown = without_userinfo(str(text))
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in shown)


def plain(value: Any) -> Any:
    """Convert a value to JSON types; values that JSON cannot represent become their ``repr``. Hide passwords."""
    if isinstance(value, str):
        return without_userinfo(value)
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return repr(value)


class Output:
    """Prints the output of one command. With ``as_json``, only ``document`` prints to standard output."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json

    def document(self, document: Mapping[str, Any]) -> None:
        """Print the result as JSON if ``as_json`` is set."""
        if self.as_json:
            click.echo(json.dumps(plain(document), indent=2, ensure_ascii=False, allow_nan=False))

    def line(self, text: str = "") -> None:
        """Print a line of text unless ``as_json`` is set."""
        if not self.as_json:
            click.echo(printable(text))

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Print a table unless ``as_json`` is set. Columns whose title begins with ``>`` are right-aligned."""
        if self.as_json or not rows:
            return
        titles = [column.lstrip(">") for column in columns]
        cells = [titles, *([printable(cell).replace("\n", "\\n") for cell in row] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        justify = [str.rjust if column.startswith(">") else str.ljust for column in columns]
        lines = [
            "  ".join(place(cell, width) for place, cell, width in zip(justify, row, widths, strict=True)).rstrip()
            for row in cells
        ]
        click.echo("\n".join([click.style(lines[0], bold=True), *lines[1:]]))

    @contextmanager
    def progress(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        """Show a bar over ``total`` bytes if standard error is a terminal. Yields a function that advances it."""
        with _bars() as bars:
            if bars is None:
                yield lambda nbytes: None
            else:
                task = bars.add_task(what, total=total)
                yield lambda nbytes: bars.advance(task, nbytes)

    @contextmanager
    def stages(self) -> Iterator[Callable[[str, int, int], None]]:
        """Like ``progress`` for consecutive stages. The function takes the stage, the bytes done in it, and its total,
        or 0 if the total is unknown."""
        with _bars() as bars:
            if bars is None:
                yield lambda stage, done, total: None
            else:
                yield _StageBar(bars)


class _StageBar:
    def __init__(self, bars: Progress) -> None:
        self._bars, self._stage = bars, ""
        self._task = bars.add_task("", total=None)

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage:
            self._stage = stage
            # A new task, because a task cannot return to an unknown total.
            self._bars.remove_task(self._task)
            self._task = self._bars.add_task(stage, total=None)
        self._bars.update(self._task, completed=done, total=total or None)


@contextmanager
def _bars() -> Iterator[Progress | None]:
    """Yield None if standard error is not a terminal."""
    if not (sys.stderr.isatty() or os.environ.get("FORCE_COLOR")):
        yield None
        return
    from rich.console import Console  # here, because it takes a tenth of the time that a short command has
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(file=sys.stderr, markup=False, highlight=False)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(binary_units=True))
    speed = (TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, *speed, console=console, transient=True) as bars:
        yield bars
