"""``bcp verify``: every byte against its checksum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from .. import api
from .options import EXIT_NOT_SO, command, options_for
from .output import Output, size_text

__all__ = ["verify_command"]


@command("verify")
@click.argument("checkpoint")
def verify_command(out: Output, options: Mapping[str, Any], checkpoint: str) -> None:
    """Read every byte of CHECKPOINT and compare it with its checksum. Names each file, tensor and range that is wrong.

    Exits with 1 when a data file is wrong, with 4 when the manifest is (then nothing else can be told).
    """
    found = api.open(checkpoint, storage_options=options_for(checkpoint, options))
    with out.progress("verify", found.manifest.file_bytes) as progress:
        report = found.verify(progress)
    out.document(
        {
            "url": report.url,
            "ok": report.ok,
            "files": report.files,
            "bytes_checked": report.bytes_checked,
            "problems": list(report.problems),
        }
    )
    for problem in report.problems:
        out.line(problem)
    if not report.ok:
        out.line(f"{found.url}: {len(report.problems)} fault(s) in {report.files} file(s)")
        raise click.exceptions.Exit(EXIT_NOT_SO)
    out.line(f"{found.url}: every byte of {report.files} file(s) holds ({size_text(report.bytes_checked)})")
