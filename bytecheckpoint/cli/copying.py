"""``bcp copy`` and ``bcp upload``, which copy checkpoints between stores and continue what was interrupted."""

from __future__ import annotations

from typing import Any

import click

from .. import api
from ..convert.copy import copy, finish_upload, unfinished_uploads
from ..errors import BytecheckpointError
from ..transfer.transfer import TransferReport
from .options import Locate, command, exit_code, parse_size
from .output import Output, printable, size_text

_INTERRUPTED = "the same command continues the copy"
_rate_limit = click.option(
    "--rate-limit",
    metavar="SIZE",
    callback=parse_size,
    help="Bytes per second that are sent at most, on average, such as 50MB.",
)


@command("copy", interrupted=_INTERRUPTED)
@click.argument("source")
@click.argument("target")
@_rate_limit
@click.option(
    "--journal",
    metavar="DIR",
    help="Local directory that records what is done. Default: SOURCE or TARGET, if one of them is a local directory, "
    "else $XDG_STATE_HOME/bytecheckpoint/copies (~/.local/state/bytecheckpoint/copies).",
)
def copy_command(
    out: Output, at: Locate, source: str, target: str, rate_limit: int | None, journal: str | None
) -> None:
    """Copy the checkpoint SOURCE to TARGET, on the same store or another.

    Every byte is verified before it is written. Run the same command again after a failure: it continues where the
    first one stopped.
    """
    found = api.open(at(source))
    with out.progress("copy", found.manifest.flattened().file_bytes) as progress:
        report = copy(
            found,
            at(target),
            rate_limit=rate_limit,
            progress=progress,
            journal=journal,
        )
    out.line(_described(report))
    out.document(_document(found.url, report))


@command("upload", finds_urls=True, interrupted=_INTERRUPTED)
@click.argument("root")
@click.argument("destination", required=False)
@_rate_limit
def upload_command(out: Output, at: Locate, root: str, destination: str | None, rate_limit: int | None) -> None:
    """Finish the uploads of checkpoints below the local directory ROOT that were interrupted.

    These are copies to other stores that bcp copy has begun and not completed, and uploads of saves with a
    tier. On several machines, run it on each. With DESTINATION, only those to this URL, or below it.
    """
    uploads = unfinished_uploads(root, None if destination is None else at(destination))
    done: list[dict[str, Any]] = []
    failures: list[BytecheckpointError] = []
    for upload in uploads:
        try:
            target = None if upload.problem else at(upload.url)
            with out.progress("upload", upload.size) as progress:
                report = finish_upload(upload, target, rate_limit=rate_limit, progress=progress)
            if report is None:
                out.line(f"{upload.url}: nothing was uploaded")
                report = TransferReport(upload.url)
            else:
                out.line(_described(report))
            done.append(_document(upload.path, report))
        except BytecheckpointError as error:
            failures.append(error)
            done.append({"source": upload.path, "url": upload.url, "error": f"{type(error).__name__}: {error}"})
            click.echo(f"bcp: {printable(error)}", err=True)
    out.document({"root": root, "uploads": done})
    if not uploads:
        out.line(f"{root}: no upload is unfinished")
    if failures:
        raise click.exceptions.Exit(exit_code(failures[0]))


def _described(report: TransferReport) -> str:
    kept = report.size - report.sent
    earlier = f", {size_text(kept)} of it already there" if kept > 0 else ""
    return f"{report.url}: {report.files} file(s), {size_text(report.size)}{earlier}"


def _document(source: str, report: TransferReport) -> dict[str, Any]:
    return {"source": source, "url": report.url, "files": report.files, "bytes": report.size, "sent": report.sent}
