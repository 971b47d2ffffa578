"""``bcp reshard``: the same state in other files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import click

from .. import api
from ..resharding import ReshardReport, reshard
from .options import command, options_for
from .output import Output, size_text

__all__ = ["reshard_command"]


@command("reshard")
@click.argument("source")
@click.argument("target")
@click.option("-n", "--files", type=click.IntRange(1), required=True, help="Tensor files a section, at most.")
@click.option(
    "--layout",
    type=click.Choice(["whole", "sharded"]),
    default="whole",
    show_default=True,
    help="Tensors in one piece, or cut along their first dimension into one part a file.",
)
@click.option("--dry-run", is_flag=True, help="Show the plan, read and write nothing.")
def reshard_command(
    out: Output,
    options: Mapping[str, Any],
    source: str,
    target: str,
    files: int,
    layout: Literal["whole", "sharded"],
    dry_run: bool,
) -> None:
    """Rewrite the checkpoint SOURCE for another world as a new one at TARGET, streaming, in bounded memory.

    No load needs it: every layout is loaded from every other. It turns many small files into few, or one large one
    into parts.
    """
    found = api.open(source, storage_options=options_for(source, options))
    with out.progress("reshard", found.manifest.file_bytes) as progress:
        report = reshard(
            found,
            target,
            files=files,
            layout=layout,
            dry_run=dry_run,
            progress=progress,
            storage_options=options_for(target, options),
        )
    out.document(_document(found.url, report))
    rows = [(file.name, file.section, file.shards, size_text(file.size)) for file in report.files]
    out.table(("FILE", "SECTION", ">SHARDS", ">SIZE"), rows)
    done = "would be" if dry_run else "were"
    read = size_text(report.bytes_to_read if dry_run else report.bytes_read)
    out.line(f"{report.url}: {len(report.files)} files of {size_text(report.size)} {done} written, {read} read")


def _document(source: str, report: ReshardReport) -> dict[str, Any]:
    return {
        "source": source,
        "url": report.url,
        "layout": report.layout,
        "dry_run": report.dry_run,
        "files": [
            {"name": file.name, "section": file.section, "shards": file.shards, "bytes": file.size}
            for file in report.files
        ],
        "bytes": report.size,
        "bytes_to_read": report.bytes_to_read,
        "bytes_read": report.bytes_read,
    }
