"""``bcp report``: one file in HTML that shows the checkpoints of a root, and where the time of saves and loads went."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import click

from ..errors import StorageError, UsageError
from ..version import VERSION
from .options import Locate, command
from .output import Output, plain, printable, size_text
from .report_data import TimedOperation, root_document
from .report_floor import measure_floor
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
    def part(name: str) -> str:
        return files(__package__).joinpath("page", name).read_text(encoding="utf-8")

    data = zlib.compress(json.dumps(document, separators=(",", ":"), allow_nan=False).encode(), 9)
    title = document["root"] or "Traces"
    return Template(part("report.html")).substitute(
        title=_text(title),
        created=_text(_time(document)),
        version=_text(document["version"]),
        style=part("report.css"),
        figures="".join(
            f"<div><dt>{_text(name)}</dt><dd>{_text(text)}</dd></div>" for name, text in _figures(document)
        ),
        checkpoints=_table(_CHECKPOINT_COLUMNS, map(_checkpoint_row, reversed(document["checkpoints"]))),
        operations="".join(_operation(one, document["floor"] or {}) for one in document["operations"]),
        data=base64.b64encode(data).decode(),
        echarts=part("echarts.min.js"),
        script=part("report.js"),
    )


def _figures(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what a person would ask first."""
    found = document["checkpoints"]
    newest = next((one for one in found if one["newest"]), None)
    if newest is not None:
        yield "Newest checkpoint", newest["name"] if newest["step"] is None else f"step {newest['step']:,}"
        yield "Saved at (UTC)", _time(newest)
        yield "Size", size_text(newest["bytes"] + newest["shared_bytes"])
        yield "Ranks", f"{newest['world_size']:,}"
        if newest["seconds"] is not None:
            yield "Training waited", _seconds(newest["stall"])
            yield "Saved in", _seconds(newest["seconds"])
    if found:
        complete = sum(one["status"] == "checkpoint" and not one["problem"] for one in found)
        yield "Complete", f"{complete} of {len(found)}"
        yield "Uploads pending", str(len(document["uploads_waiting"]))
    if document["floor"]:
        yield "This machine writes", _rate(document["floor"]["write"])
        yield "This machine reads", _rate(document["floor"]["read"])


_CHECKPOINT_COLUMNS = (
    "Checkpoint",
    ">Step",
    "Saved at (UTC)",
    ">Written",
    ">Shared",
    ">Duration",
    ">Stall",
    ">Rate",
    ">Ranks",
    "State",
)


def _checkpoint_row(one: Mapping[str, Any]) -> Sequence[str]:
    if one["status"] != "checkpoint":
        return (one["name"], *[""] * 8, one["problem"])
    times = ["" if one[key] is None else _seconds(one[key]) for key in ("seconds", "stall")]
    state = one["problem"] or ("complete, newest" if one["newest"] else "complete")
    return (
        one["name"],
        "" if one["step"] is None else f"{one['step']:,}",
        _time(one),
        size_text(one["bytes"]),
        size_text(one["shared_bytes"]) if one["shared_bytes"] else "",
        *times,
        _rate(one["bytes"] / one["seconds"]) if one["seconds"] else "",
        f"{one['world_size']:,}",
        state,
    )


def _time(one: Mapping[str, Any]) -> str:
    return str(one["created"])[:16].replace("T", " ")


def _operation(one: Mapping[str, Any], floor: Mapping[str, float]) -> str:
    """Return the tables of a save or load: its slow ranks, its rates, and where the bytes of a load came from."""
    slowest = [
        (
            str(slow["rank"]),
            slow["host"],
            slow["step"],
            _seconds(slow["seconds"]),
            _seconds(slow["median"]),
            f"{slow['seconds'] / slow['median']:.1f}" if slow["median"] else "",
        )
        for slow in one["slowest"]
    ]
    moved = [
        (
            moved["step"],
            size_text(moved["bytes"]),
            _seconds(moved["seconds"]),
            _rate(rate := moved["bytes"] / moved["seconds"]),
            *([f"{rate / floor[moved['step']]:.0%}" if moved["step"] in floor else ""] if floor else []),
        )
        for moved in one["moved"]
    ]
    tables = (
        _table((">Rank", "Host", "Step", ">Seconds", ">Median of all ranks", ">Times the median"), slowest),
        _table(("Step", ">Bytes", ">Slowest rank", ">Rate", *([">Of this machine's"] if floor else [])), moved),
        _table(("Source", ">Bytes", ">Share", ">Ranks", ">Most", ">By rank"), [*_sources(one["sources"])]),
    )
    slow = tables[0] or "<p class=muted>No rank was slow.</p>"
    heading = f"<h3>{_text(one['kind'])} of {_text(one['name'])}</h3>"
    return f"<section class=tables>{heading}{slow}{tables[1]}{tables[2]}</section>"


def _sources(sources: Mapping[str, Sequence[int]]) -> Iterator[Sequence[str]]:
    whole = sum(map(sum, sources.values()))
    for source, by_rank in sources.items():
        nbytes, most = sum(by_rank), max(by_rank)
        ranks = f"{sum(map(bool, by_rank)):,}"
        share = f"{nbytes / max(whole, 1):.0%}"
        yield source, size_text(nbytes), share, ranks, size_text(most), str(by_rank.index(most))


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; columns whose title begins with ``>`` are right-aligned."""
    marks = [" class=n" if column.startswith(">") else "" for column in columns]
    head = "".join(
        f"<th scope=col{mark}>{_text(column.lstrip('>'))}</th>" for mark, column in zip(marks, columns, strict=True)
    )
    body = "".join(
        "<tr>" + "".join(f"<td{mark}>{_text(cell)}</td>" for mark, cell in zip(marks, row, strict=True)) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if body else ""


def _text(text: str) -> str:
    return escape(printable(text))


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def _rate(rate: float) -> str:
    return f"{size_text(int(rate))}/s"
