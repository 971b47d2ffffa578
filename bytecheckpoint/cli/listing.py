"""``bcp ls`` and ``bcp latest``: what is below a root. They need no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, get_args

import click

from ..checkpoint.discovery import (
    BestMode,
    Listing,
    find_best,
    find_milestone,
    find_newest,
    list_checkpoints,
    newest_listed,
)
from ..errors import CheckpointNotFoundError
from .incomplete import waiting_uploads
from .options import EXIT_CORRUPT, Locate, command
from .output import Output, age_text, size_text

_FIELDS_OF_ANY_FOLDER = ("name", "url", "status", "problem", "attempts")


@command("ls")
@click.argument("root")
@click.option(
    "-d",
    "--depth",
    type=click.IntRange(0, 32),
    default=1,
    show_default=True,
    help="How many levels of folders below ROOT to search.",
)
def ls_command(out: Output, at: Locate, root: str, *, depth: int) -> None:
    """List the checkpoints below ROOT, and the folders that are not checkpoints, with the reason.

    Exits with 4 if a manifest cannot be read. Saves that were never committed are listed, but are not an error.
    """
    found = list_checkpoints(at(root), depth=depth)
    latest = newest_listed(at(root), found)
    waiting = waiting_uploads(at(root))
    if out.as_json:
        entries = [_listing(one) for one in found]
        out.document({"root": root, "latest": latest, "entries": entries, "uploads_waiting": waiting})
    _print_checkpoints(out, [one for one in found if one.status == "checkpoint"], latest)
    for one in found:
        if one.status != "checkpoint":
            out.line(f"{one.name}: {one.status}, not a checkpoint: {one.problem}")
        elif one.abandoned:
            out.line(f"{one.name}: abandoned by a rollback")
        if one.status == "checkpoint" and one.attempts:
            out.line(f"{one.name}: {len(one.attempts)} uncommitted attempt(s), left by failed saves or in progress")
    for name in waiting:
        out.line(f"{name}: not uploaded completely from this machine")
    if any(one.status == "broken" for one in found):
        raise click.exceptions.Exit(EXIT_CORRUPT)


def _print_checkpoints(out: Output, found: Sequence[Listing], latest: str | None) -> None:
    rows: list[tuple[object, ...]] = [
        (
            "*" if one.name == latest else "",
            one.name,
            "-" if one.step is None else one.step,
            age_text(one.created),
            size_text(one.size),
            one.world_size,
            ", ".join(one.sections),
            ", ".join([*_metrics(one), *filter(None, [one.milestone])]),
        )
        for one in found
    ]
    columns: tuple[str, ...] = ("", "NAME", ">STEP", ">SAVED", ">SIZE", ">RANKS", "SECTIONS", "METRICS, MILESTONE")
    if not any(row[-1] for row in rows):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    out.table(columns, rows)
    if latest is not None and rows:
        out.line("* is the newest")


def _metrics(one: Listing) -> Iterator[str]:
    for name, value in sorted(one.metrics.items()):
        yield f"{name} {value:.4g}"


def _listing(one: Listing) -> dict[str, Any]:
    document = asdict(one)
    document["bytes"] = document.pop("size")
    is_checkpoint = one.status == "checkpoint"
    return document if is_checkpoint else {key: document[key] for key in _FIELDS_OF_ANY_FOLDER}


@command(
    "latest",
    needs={"--mode": "--best"},
    excludes={"--milestone": ["--best"], "--allow-fresh": ["--best", "--milestone"]},
)
@click.argument("root")
@click.option("--best", "metric", metavar="METRIC", help="The one with the best METRIC, instead of the newest.")
@click.option("--mode", type=click.Choice(get_args(BestMode)), default="min", show_default=True, help="With --best.")
@click.option("--milestone", metavar="NAME", help="The milestone NAME, instead of the newest.")
@click.option("--allow-fresh", is_flag=True, help="Exit with 3, not 4, if saves were made but none of them is valid.")
def latest_command(
    out: Output,
    at: Locate,
    root: str,
    *,
    metric: str | None,
    mode: BestMode,
    milestone: str | None,
    allow_fresh: bool,
) -> None:
    """Print the path of the newest valid checkpoint below ROOT, and nothing else, for use in scripts.

    Exits with 3 if there is none, and with 4 if saves were made but none of them is valid.
    """
    if metric is not None:
        found = find_best(at(root), metric, mode)
    elif milestone is not None:
        found = find_milestone(at(root), milestone)
    else:
        found = find_newest(at(root), allow_fresh=allow_fresh)
    if found is None:
        raise CheckpointNotFoundError(f"there is no such checkpoint below {root}; check the path")
    out.document({"url": found.backend.url, "step": found.manifest.step, "created": found.manifest.created})
    out.line(found.backend.url)
