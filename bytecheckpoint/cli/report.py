"""``bcp report``: one file in HTML that shows the checkpoints of a root, and where the time of saves and loads went."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import click

from ..errors import StorageError, UsageError
from ..version import VERSION
from .options import Locate, command
from .output import Output, plain, printable, size_text
from .report_data import TimedOperation, measure_floor, root_document
from .report_traces import trace_operations

_MOST_NUMBERS = 400_000  # of all operations, so that a page of 4,096 ranks has less than 3 MB


@command("report")
@click.argument("sources", metavar="ROOT_OR_TRACES...", nargs=-1, required=True)
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), help="File to write; by default report.html."
)
@click.option(
    "--floor", is_flag=True, help="Measure how fast this machine writes and reads 1 GiB below ROOT, and compare."
)
def report_command(out: Output, at: Locate, sources: tuple[str, ...], *, output: Path | None, floor: bool) -> None:
    """Write a page with the checkpoints below a root, and with a timeline of the saves and loads in traces.

    Give a root (or one checkpoint), traces that ranks have written (a directory or a file), or both. The page is one
    file that loads nothing from elsewhere. Without traces it shows how long each step of the newest saves took on each
    rank. With --json, it is written only if --output is given.
    """
    roots, traces = [], []
    for source in sources:
        found = _trace_files(Path(source))
        traces += found
        roots += [] if found else [source]
    if len(roots) > 1:
        raise UsageError(f"a report has one root, not {len(roots)}: {', '.join(roots)}")
    document: dict[str, Any] = {"version": VERSION, "created": datetime.now(UTC).isoformat(timespec="seconds")}
    document |= {"root": roots[0] if roots else None, "checkpoints": [], "uploads_waiting": [], "layout": None}
    document["floor"] = None
    operations: list[TimedOperation] = []
    if roots:
        of_root, operations = root_document(at(roots[0]))
        document |= of_root
        document["floor"] = measure_floor(at(roots[0]).open()) if floor else None
    elif floor:
        raise UsageError("--floor measures below a root, and no root is named")
    traced = trace_operations(traces)
    names = {(one.kind, one.name) for one in traced}  # of which traces have more than manifests
    kept = _newest([*(one for one in operations if (one.kind, one.name) not in names), *traced])
    document["operations"] = [one.to_document() for one in kept]
    document = plain(document)
    out.document(document)
    if output is not None or not out.as_json:
        target = output or Path("report.html")
        try:
            target.write_text(_page(document), encoding="utf-8")
        except OSError as error:
            raise StorageError(f"cannot write {target}: {error}") from error
        counts = f"{len(document['checkpoints'])} checkpoint(s), {len(kept)} save(s) and load(s)"
        out.line(f"{target}: {counts}; open it in a browser")


def _trace_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(path.glob("rank-*.json")) if path.is_dir() else []


def _newest(operations: Sequence[TimedOperation]) -> list[TimedOperation]:
    """Return the newest operations first, without those for which the page has no room."""
    kept: list[TimedOperation] = []
    left = _MOST_NUMBERS
    for one in reversed(operations):
        left -= one.ranks * (len(one.seconds) + len(one.nbytes) + len(one.begin) + len(one.sources))
        if left < 0 and kept:
            break
        kept.append(one)
    return kept


def _page(document: Mapping[str, Any]) -> str:
    from jinja2 import Environment  # here, because a report with --json does not need it
    from markupsafe import Markup

    def part(name: str) -> str:
        return files(__package__).joinpath("page", name).read_text(encoding="utf-8")

    def shown(value: object) -> object:
        return printable(value) if type(value) is str else value

    data = zlib.compress(json.dumps(document, separators=(",", ":"), allow_nan=False).encode(), 9)
    environment = Environment(autoescape=True, finalize=shown)
    environment.filters |= {"time": _time, "size": size_text, "seconds": _seconds, "rate": _rate}
    environment.filters["count"] = "{:,}".format
    return environment.from_string(part("report.html")).render(
        document,
        data=base64.b64encode(data).decode(),
        style=Markup(part("report.css")),
        echarts=Markup(part("echarts.min.js")),
        script=Markup(part("report.js")),
    )


def _time(created: str) -> str:
    return created[:16].replace("T", " ")


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def _rate(rate: float) -> str:
    return f"{size_text(int(rate))}/s"
