"""``bcp copy`` and ``bcp rm``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from .. import api
from ..copying import copy, remove
from .options import EXIT_NOT_SO, command, options_for
from .output import Output, size_text

__all__ = ["copy_command", "rm_command"]


@command("copy")
@click.argument("source")
@click.argument("target")
def copy_command(out: Output, options: Mapping[str, Any], source: str, target: str) -> None:
    """Copy the checkpoint SOURCE to TARGET, on the same store or another, each byte checked on its way."""
    found = api.open(source, storage_options=options_for(source, options))
    with out.progress("copy", found.manifest.file_bytes) as progress:
        report = copy(found, target, progress=progress, storage_options=options_for(target, options))
    out.document({"source": found.url, "url": report.url, "files": report.files, "bytes": report.size})
    out.line(f"{report.url}: {report.files} file(s), {size_text(report.size)}")


@command("rm")
@click.argument("checkpoint")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
def rm_command(out: Output, options: Mapping[str, Any], checkpoint: str, yes: bool) -> None:
    """Remove CHECKPOINT: its manifest first, then the files that it names, and nothing else.

    Refuses what is no checkpoint.
    """
    found = api.open(checkpoint, storage_options=options_for(checkpoint, options))
    what = f"{found.url} (step {found.step}, {size_text(found.manifest.file_bytes)})"
    if not yes and not click.confirm(f"Remove {what}?", err=True):
        click.echo("bcp: nothing was removed", err=True)
        raise click.exceptions.Exit(EXIT_NOT_SO)
    report = remove(checkpoint, storage_options=options_for(checkpoint, options))
    out.document({"url": report.url, "files": report.files, "bytes": report.size, "left": list(report.left)})
    out.line(f"{report.url}: {report.files} file(s) removed, {size_text(report.size)}")
    if report.left:
        out.line(f"{len(report.left)} object(s) there were no part of it and stay: {', '.join(report.left[:5])}")
