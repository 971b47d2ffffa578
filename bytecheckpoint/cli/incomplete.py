"""``bcp ls --incomplete`` and ``bcp rm --incomplete``: uploads that no process will complete, and that cost money."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import click

from ..storage_backends import IncompleteUpload
from .options import EXIT_NEGATIVE, Locate
from .output import Output


def list_incomplete(out: Output, at: Locate, root: str) -> None:
    """List all uploads below ``root``."""
    backend = at(root).open()
    found = [*backend.incomplete()]
    out.document({"root": backend.display_url, "uploads": [asdict(one) for one in found]})
    _print(out, found)
    if not found:
        out.line(f"{backend.display_url}: no incomplete uploads")


def remove_incomplete(out: Output, at: Locate, root: str, *, older_than_hours: float, yes: bool) -> None:
    """End the uploads below ``root`` that are older, after showing them and asking."""
    backend = at(root).open()
    found = [*backend.incomplete()]
    old = [one for one in found if one.age_s >= older_than_hours * 3600]
    _print(out, old)
    if old and not yes and not click.confirm(f"End {len(old)} upload(s) below {backend.display_url}?", err=True):
        click.echo("bcp: nothing ended", err=True)
        raise click.exceptions.Exit(EXIT_NEGATIVE)
    backend.abort_incomplete(old)
    out.document({"root": backend.display_url, "ended": [asdict(one) for one in old], "younger": len(found) - len(old)})
    out.line(f"{backend.display_url}: {len(old)} upload(s) ended, {len(found) - len(old)} younger one(s) kept")


def _print(out: Output, uploads: Sequence[IncompleteUpload]) -> None:
    rows = [(one.key, f"{one.age_s / 3600:.1f} h", one.upload_id) for one in uploads]
    out.table(("KEY", ">AGE", "UPLOAD"), rows)
