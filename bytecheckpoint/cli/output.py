"""What commands print: tables or one JSON document on standard output, progress and errors on standard error."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

__all__ = ["Output", "plain", "printable", "size_text"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_WIDE = 1000  # columns where no terminal says how many there are: nothing is cut off


def size_text(nbytes: int) -> str:
    """``1536`` as ``1.5 KiB``."""
    value, unit = float(nbytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{nbytes} B" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def printable(text: object) -> str:
    """Names come from files of strangers: what would steer a terminal is escaped."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in str(text))


def plain(value: Any) -> Any:
    """Any stored value as what JSON can say; what it cannot is given as its ``repr``."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return repr(value)


class Output:
    """Where one command prints. With ``as_json``, only ``document`` reaches standard output."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json

    def document(self, document: Mapping[str, Any]) -> None:
        """The result as JSON; prints nothing where JSON was not asked for."""
        if self.as_json:
            click.echo(json.dumps(plain(document), indent=2, ensure_ascii=False, allow_nan=False))

    def line(self, text: str = "") -> None:
        if not self.as_json:
            click.echo(printable(text))

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Columns whose title begins with ``>`` are numbers and stand to the right."""
        if self.as_json or not rows:
            return
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in columns:
            right = column.startswith(">")
            table.add_column(column.lstrip(">"), justify="right" if right else "left", overflow="fold", no_wrap=right)
        for row in rows:
            table.add_row(*(printable(cell) for cell in row))
        console = Console(file=sys.stdout, markup=False, highlight=False, emoji=False)
        if not console.is_terminal:
            console.width = _WIDE
        console.print(table)

    @contextmanager
    def progress(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        """A bar over ``total`` bytes on standard error, where that is a terminal; yields the function that moves it."""
        with _bars() as bars:
            if bars is None:
                yield lambda nbytes: None
            else:
                task = bars.add_task(what, total=total)
                yield lambda nbytes: bars.advance(task, nbytes)

    @contextmanager
    def stages(self) -> Iterator[Callable[[str, int, int], None]]:
        """The same over stages, one after the other. The function takes a stage, the bytes done in it, and how many
        there are, 0 where that is not known."""
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
            # Another task: none forgets a total that it had.
            self._bars.remove_task(self._task)
            self._task = self._bars.add_task(stage, total=None)
        self._bars.update(self._task, completed=done, total=total or None)


@contextmanager
def _bars() -> Iterator[Progress | None]:
    """None where standard error is no terminal."""
    console = Console(file=sys.stderr, markup=False, highlight=False)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(binary_units=True))
    speed = (TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, *speed, console=console, transient=True) as bars:
        yield bars
