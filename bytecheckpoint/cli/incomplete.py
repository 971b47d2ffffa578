"""What failed saves and killed uploads have left: ``bcp clean``, and for other commands."""

from __future__ import annotations

import os
from dataclasses import asdict

import click

from ..checkpoint.location import Location
from ..checkpoint.sweep import remove_uncommitted, sweep_older, uncommitted
from ..storage_backends.local.backend import LocalBackend
from ..transfer.journal import find_upload_journals
from .options import EXIT_NEGATIVE, Locate, command, not_negative
from .output import Output, size_text


@command("clean", excludes={"--yes": ["--dry-run"]})
@click.argument("root")
@click.option(
    "--older-than",
    type=float,
    callback=not_negative,
    default=24.0,
    show_default=True,
    metavar="HOURS",
    help="Only what was begun so long ago. Younger ones may belong to a running save, which would fail.",
)
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--dry-run", is_flag=True, help="Only list what would be removed.")
def clean_command(out: Output, at: Locate, root: str, *, older_than: float, yes: bool, dry_run: bool) -> None:
    """Remove what failed saves have left in ROOT, and the uploads below it that were not completed.

    These are attempts that were never committed, shared files of incremental saves that no checkpoint needs, and parts
    of uploads that an object store keeps, and bills, without listing them. They are listed before it asks.
    """
    backend, limit_s = at(root).open(), older_than * 3600
    uploads, attempts = [*backend.incomplete()], uncommitted(backend)
    old = [one for one in uploads if one.age_s >= limit_s]
    removed = [name for name, age_s in attempts.items() if age_s >= limit_s]
    swept = sweep_older(backend, limit_s, is_dry_run=True)
    younger = len(uploads) - len(old) + len(attempts) - len(removed)
    rows = [(one.key, f"{one.age_s / 3600:.1f} h", one.upload_id) for one in old]
    rows += [(name, f"{attempts[name] / 3600:.1f} h", "-") for name in removed]
    out.table(("NAME", ">AGE", "UPLOAD"), rows)
    if swept.files:
        out.line(f"{swept.files} shared file(s) that no checkpoint needs, {size_text(swept.size)}")
    if not dry_run:
        if (
            (rows or swept.files)
            and not yes
            and not click.confirm(f"Remove them from {backend.display_url}?", err=True)
        ):
            click.echo("bcp: nothing removed", err=True)
            raise click.exceptions.Exit(EXIT_NEGATIVE)
        backend.abort_incomplete(old)
        removed, swept = remove_uncommitted(backend, limit_s)
    out.document(
        {
            "root": backend.display_url,
            "dry_run": dry_run,
            "uploads": [asdict(one) for one in old],
            "attempts": [{"name": name, "age_s": attempts.get(name)} for name in removed],
            "shared": asdict(swept),
            "younger": younger,
        }
    )
    found = f"{len(old)} upload(s), {len(removed)} attempt(s) and {swept.files} shared file(s)"
    done = "would be removed" if dry_run else "removed"
    out.line(f"{backend.display_url}: {found} {done}, {younger} younger kept")
    if swept.problem:
        out.line(f"attempts and shared files may remain: {swept.problem}")


def waiting_uploads(root: Location) -> list[str]:
    """Return the names of the checkpoints below a local root whose upload has not ended, such as those in a tier."""
    folder = root.open()
    if not isinstance(folder, LocalBackend):
        return []
    return sorted({os.path.relpath(os.path.dirname(path), folder.url) for path in find_upload_journals(folder.url)})
