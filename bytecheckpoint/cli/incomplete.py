"""What failed saves and killed uploads have left: ``bcp ls --incomplete``, ``bcp rm --incomplete``, and for others."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import click

from ..checkpoint.location import Location
from ..checkpoint.sweep import remove_uncommitted, uncommitted
from ..storage_backends import IncompleteUpload
from ..storage_backends.local.backend import LocalBackend
from ..transfer.journal import find_damaged_journals, find_journals
from .options import EXIT_NEGATIVE, Locate
from .output import Output, size_text


def list_incomplete(out: Output, at: Locate, root: str) -> None:
    """List all uploads below ``root``, and the attempts in it."""
    backend = at(root).open()
    uploads, attempts = [*backend.incomplete()], uncommitted(backend)
    named = [{"name": name, "age_s": age_s} for name, age_s in attempts.items()]
    out.document({"root": backend.display_url, "uploads": [asdict(one) for one in uploads], "attempts": named})
    _print(out, uploads, attempts)
    if not uploads and not attempts:
        out.line(f"{backend.display_url}: nothing is incomplete")


def remove_incomplete(out: Output, at: Locate, root: str, *, older_than_hours: float, yes: bool) -> None:
    """Remove the uploads below ``root`` and the attempts in it that are older, after showing them and asking."""
    backend, limit_s = at(root).open(), older_than_hours * 3600
    uploads, attempts = [*backend.incomplete()], uncommitted(backend)
    old = [one for one in uploads if one.age_s >= limit_s]
    old_attempts = {name: age_s for name, age_s in attempts.items() if age_s >= limit_s}
    _print(out, old, old_attempts)
    count = len(old) + len(old_attempts)
    if count and not yes and not click.confirm(f"Remove {count} below {backend.display_url}?", err=True):
        click.echo("bcp: nothing removed", err=True)
        raise click.exceptions.Exit(EXIT_NEGATIVE)
    backend.abort_incomplete(old)
    removed, swept = remove_uncommitted(backend, limit_s)
    younger = len(uploads) - len(old) + len(attempts) - len(old_attempts)
    out.document(
        {
            "root": backend.display_url,
            "ended": [asdict(one) for one in old],
            "removed": removed,
            "swept": asdict(swept),
            "younger": younger,
        }
    )
    out.line(
        f"{backend.display_url}: {len(old)} upload(s) ended, {len(removed)} attempt(s) removed, {younger} younger kept"
    )
    if swept.files:
        out.line(f"{swept.files} shared file(s) removed that no checkpoint needs, {size_text(swept.size)}")
    if swept.problem:
        out.line(f"attempts and shared files may remain: {swept.problem}")


def _print(out: Output, uploads: Sequence[IncompleteUpload], attempts: Mapping[str, float]) -> None:
    rows = [(one.key, f"{one.age_s / 3600:.1f} h", one.upload_id) for one in uploads]
    rows += [(name, f"{age_s / 3600:.1f} h", "-") for name, age_s in attempts.items()]
    out.table(("NAME", ">AGE", "UPLOAD"), rows)


def waiting_uploads(root: Location) -> list[str]:
    """Return the names of the checkpoints below a local root whose upload has not ended, such as those in a tier."""
    folder = root.open()
    if not isinstance(folder, LocalBackend):
        return []
    journals = [path for path, head in find_journals(folder.url) if head.direction == "to"]
    journals += find_damaged_journals(folder.url)
    return sorted({os.path.relpath(os.path.dirname(path), folder.url) for path in journals})
