"""``bcp diff``, ``bcp reshard``, ``bcp average`` and ``bcp rm``, which handle whole checkpoints, and ``bcp trace``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Literal, get_args

import click

from .. import api
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.rollback import roll_back
from ..checkpointer import session_of
from ..convert.average import average
from ..convert.copy import remove
from ..convert.diff import DiffReport, diff
from ..convert.reshard import Layout, reshard
from ..errors import UsageError
from ..foreign.opening import CheckpointSource
from ..loading.options import LoadOptions
from ..rules import Rules
from ..telemetry.trace_files import merge_traces
from .options import EXIT_NEGATIVE, Locate, checked, command, not_negative
from .output import Output, size_text
from .rules_options import rules_options


@command("diff", excludes={"--rtol": ["--no-values"], "--atol": ["--no-values"]})
@click.argument("a")
@click.argument("b")
@click.option(
    "--values/--no-values",
    "values",
    default=True,
    help="Compare elements and plain values, or only names, shapes and dtypes.",
)
@click.option("--rtol", type=float, default=0.0, callback=not_negative, help="Tolerance, relative to the value in B.")
@click.option("--atol", type=float, default=0.0, callback=not_negative, help="Absolute tolerance.")
def diff_command(out: Output, at: Locate, a: str, b: str, *, values: bool, rtol: float, atol: float) -> None:
    """Compare the checkpoints A and B, whatever their layouts: names, shapes, dtypes, elements and plain values.

    Elements are equal if their bits are equal or their difference is within the tolerances. Shards with equal checksums
    are not read; run verify to check the files against the checksums. Exits with 1 if there is a difference.
    """
    left = api.open(at(a))
    right = api.open(at(b))
    with out.progress("diff", left.manifest.nbytes) as progress:
        report = diff(left, right, values=values, rtol=rtol, atol=atol, progress=progress)
    out.document({**asdict(report), "same": report.same})
    _print_differences(out, report)
    if not report.same:
        raise click.exceptions.Exit(EXIT_NEGATIVE)


def _print_differences(out: Output, report: DiffReport) -> None:
    for url, names in ((report.a, report.only_a), (report.b, report.only_b)):
        for name in names:
            out.line(f"{name}: only in {url}")
    for one in report.tensors:
        metas = one.a if one.a == one.b else f"{one.a} and {one.b}"
        counted = "" if one.differing is None else f", {one.differing} of {one.elements} elements differ"
        largest = "" if not one.differing else f", by at most {one.max_abs:.6g}"
        out.line(f"{one.name}: {one.kind}: {metas}{counted}{largest}")
    for value in report.values:
        out.line(f"{value.name}: value: {value.a} and {value.b}")
    counts = {"values differ": len(report.values), "only in A": len(report.only_a), "only in B": len(report.only_b)}
    found = [
        f"{report.compared} tensors" if report.same else f"{len(report.tensors)} of {report.compared} tensors differ"
    ]
    found += [f"{count} {what}" for what, count in counts.items() if count]
    read = f"{report.skipped} compared by checksum, {size_text(report.bytes_read)} read"
    out.line(f"{'identical' if report.same else 'different'}: {', '.join(found)}; {read}")


@command("reshard", needs={"--average": "--rules"})
@click.argument("source")
@click.argument("target")
@click.option(
    "-n", "--files", type=click.IntRange(1), required=True, help="Maximum number of tensor files per section."
)
@click.option(
    "--layout",
    type=click.Choice(get_args(Layout)),
    default="whole",
    show_default=True,
    help="Store each tensor whole, or split along its first dimension into one part per file.",
)
@rules_options
@click.option(
    "--average",
    type=click.Choice(("mean",)),
    help="Compute tensors that rules of kind averaged describe as the mean of what the ranks stored.",
)
@click.option("--dry-run", is_flag=True, help="Only print the plan.")
def reshard_command(
    out: Output,
    at: Locate,
    source: str,
    target: str,
    files: int,
    layout: Layout,
    rules: Rules | None,
    average: Literal["mean"] | None,
    *,
    dry_run: bool,
) -> None:
    """Rewrite the checkpoint SOURCE as a new checkpoint at TARGET, in different files.

    Streams in bounded memory. Loading never requires this, because any layout can be loaded into any other. Use it to
    combine many small files, or to split large ones.
    """
    if average is None or rules is None:
        found = api.open(at(source), options=LoadOptions(rules=rules))
    else:
        contents = CheckpointSource(at(source), at(source).open(), rules, average)
        found = Checkpoint(contents.index(), session_of().engine)
    with out.progress("reshard", found.manifest.file_bytes) as progress:
        report = reshard(
            found,
            at(target),
            files=files,
            layout=layout,
            dry_run=dry_run,
            progress=progress,
        )
    new_files = [{"name": f.name, "section": f.section, "shards": f.shards, "bytes": f.size} for f in report.files]
    out.document({"source": found.url, **asdict(report), "files": new_files, "bytes": report.size})
    rows = [(file.name, file.section, file.shards, size_text(file.size)) for file in report.files]
    out.table(("FILE", "SECTION", ">SHARDS", ">SIZE"), rows)
    done = "would be" if dry_run else "were"
    read = size_text(report.bytes_to_read if dry_run else report.bytes_read)
    out.line(f"{report.url}: {len(report.files)} files of {size_text(report.size)} {done} written, and {read} read")


def _numbers(context: click.Context, parameter: click.Parameter, value: str | None) -> list[float] | None:
    try:
        return None if value is None else [float(part) for part in value.split(",")]
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of numbers such as 0.5,0.3,0.2") from None


@command("average")
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE SOURCE...")
@click.option("--output", "target", required=True, metavar="TARGET", help="Where to put the new checkpoint.")
@click.option("--weights", callback=_numbers, metavar="N,N,...", help="A weight for each SOURCE. By default all equal.")
@click.option(
    "--section", "sections", multiple=True, default=("model",), show_default=True, help="What to average. Repeatable."
)
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Leave out full names that match. Repeatable.")
@click.option("--step", type=int, callback=checked, help="The training step to store.")
def average_command(
    out: Output,
    at: Locate,
    sources: tuple[str, ...],
    target: str,
    weights: list[float] | None,
    sections: tuple[str, ...],
    exclude: tuple[str, ...],
    step: int | None,
) -> None:
    """Create a checkpoint with the average of the tensors of two or more checkpoints, in bounded memory.

    Sums in float32 or float64 and rounds once to the stored dtype. Names, shapes, dtypes, plain values and integers
    must be equal; otherwise all differences are listed (exit code 1) and nothing is written.
    """
    found = [api.open(at(source)) for source in sources]
    with out.progress("average", found[0].manifest.nbytes) as progress:
        report = average(
            found,
            at(target),
            weights=weights,
            sections=sections,
            exclude=exclude,
            step=step,
            progress=progress,
        )
    out.document({"sources": [one.url for one in found], **asdict(report)})
    copied = f", {report.copied} equal and copied" if report.copied else ""
    out.line(f"{report.url}: {report.averaged} tensors averaged{copied}, {size_text(report.bytes_read)} read")


@command("rm")
@click.argument("checkpoint")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
def rm_command(out: Output, at: Locate, checkpoint: str, *, yes: bool) -> None:
    """Remove CHECKPOINT: first its manifest, then the files that the manifest lists, and nothing else.

    Of an incremental checkpoint, the files that no other one in the same folder needs are removed.

    Refuses to remove anything that is not a checkpoint.
    """
    found = api.open(at(checkpoint))
    what = f"{found.url} (step {found.step}, {size_text(found.manifest.file_bytes)})"
    if not yes and not click.confirm(f"Remove {what}?", err=True):
        click.echo("bcp: nothing removed", err=True)
        raise click.exceptions.Exit(EXIT_NEGATIVE)
    report = remove(at(checkpoint))
    out.document(
        {
            "url": report.url,
            "files": report.files,
            "bytes": report.size,
            "left": list(report.left),
            "problem": report.problem,
        }
    )
    out.line(f"{report.url}: {report.files} file(s) removed, {size_text(report.size)}")
    if report.problem:
        out.line(f"files that no checkpoint needs may remain: {report.problem}")
    if report.left:
        out.line(f"{len(report.left)} other object(s) are still there: {', '.join(report.left[:5])}")


@command("rollback")
@click.argument("root")
@click.argument("step", type=click.IntRange(0))
def rollback_command(out: Output, at: Locate, root: str, step: int) -> None:
    """Let the checkpoint of STEP be the newest one below ROOT, and abandon those of later steps.

    No search for the newest checkpoint returns abandoned ones, so that the next job resumes from STEP. Nothing is
    removed, and a rollback to a later step takes it back. Refuses a root below which a job saves.
    """
    report = roll_back(at(root), step)
    out.document({"root": root, **asdict(report), "abandoned": list(report.abandoned)})
    for name in report.abandoned:
        out.line(f"{name}: abandoned")
    out.line(f"{report.url} is the newest checkpoint")


@command("trace", uses_storage=False)
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), help="File to write; by default DIRECTORY/trace.json."
)
def trace_command(out: Output, directory: Path, output: Path | None) -> None:
    """Merge the traces that ranks wrote to DIRECTORY into one file for ui.perfetto.dev or chrome://tracing.

    Ranks write traces if BYTECHECKPOINT_TRACE=DIRECTORY is set in their environment.
    """
    paths = sorted(directory.glob("rank-*.json"))
    if not paths:
        raise UsageError(f"there are no traces in {directory}; set BYTECHECKPOINT_TRACE for the job")
    target = output or directory / "trace.json"
    events = merge_traces(paths, target)
    out.document({"trace": str(target), "ranks": len(paths), "events": events})
    out.line(f"{target}: {events} events of {len(paths)} process(es); open it in ui.perfetto.dev")
