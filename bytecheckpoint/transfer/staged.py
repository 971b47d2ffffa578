"""Upload what a save has committed in a staging folder: each rank its own files, and the last one the manifest.

Each rank of the save opens a journal in the folder before the commit there, so a checkpoint in the folder has a journal
as long as files of this machine are not uploaded. Another process can continue from a journal, on the same machine and
without the other ranks: the process that completes the last file writes the manifest.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from ..checkpoint.attempts import remove_attempt
from ..checkpoint.manifest_file import commit, decode_manifest, read_manifest, read_manifest_bytes
from ..checkpoint.references import let_go, release
from ..errors import CheckpointError, CheckpointNotFoundError, KeyExistsError, NotACheckpointError, StorageError
from ..format.manifest import Manifest
from ..storage_backends.base import StorageBackend
from ..storage_backends.local.backend import LocalBackend
from .copying import discard_transfer, missing_files, protect
from .journal import Journal, JournalHead, find_journals
from .transfer import Transfer, TransferReport

__all__ = ["commit_upload", "continue_upload", "is_pending", "remove_superseded", "upload_files"]

_log = logging.getLogger(__name__)


def upload_files(
    staging: LocalBackend,
    store: StorageBackend,
    manifest: Manifest,
    journal: Journal | None,
    *,
    rank: int,
    rate_limit: float | None = None,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> TransferReport:
    """Upload the files that ``rank`` wrote. Raises as ``Transfer.run``."""
    rows = [row for row, writer in enumerate(manifest.files.rank.tolist()) if writer == rank]
    return Transfer(
        staging, store, manifest, rows=rows, journal=journal, rate_limit=rate_limit, progress=progress
    ).run()


def commit_upload(
    store: StorageBackend,
    manifest: Manifest,
    data: bytes,
    *,
    admit: Callable[[], None] = lambda: None,
    pins: Sequence[str] = (),
) -> None:
    """Write the manifest, and remove ``pins`` and the files of the checkpoint that it replaces. Raises as ``commit``.

    A checkpoint that was saved later is not replaced: ``KeyExistsError``.
    """
    replaced = commit(store, data, unless_after=manifest.created, admit=admit)
    let_go(store, pins)
    if replaced is not None:
        try:
            release(store, replaced)
        except StorageError as error:
            _log.warning("%s: cannot remove the replaced checkpoint's files: %s", store.display_url, error)


def continue_upload(
    staging: LocalBackend,
    store: StorageBackend,
    head: JournalHead,
    *,
    rate_limit: float | None = None,
    progress: Callable[[int], None] = lambda nbytes: None,
    admit: Callable[[], None] = lambda: None,
    awaits_others: bool = False,
) -> TransferReport | None:
    """Continue the upload that a journal of a rank describes.

    Commits the checkpoint if all files of all ranks are in the store then. If they are not, the last rank that
    completes its files will do it; with ``awaits_others``, the journal remains, so that loads go on to find the
    checkpoint in this folder. If this folder holds another checkpoint by now, or the store a later one, the upload is
    discarded, unless the store has committed it, and None is returned.

    Raises ``UsageError`` if another process continues it, and as ``upload_files`` and ``commit_upload``.
    """
    assert head.rank is not None
    with Journal(staging.url, head) as journal:
        report, is_awaited = None, False
        data = _manifest_of(staging, head.attempt)
        if data is not None:
            manifest = decode_manifest(data, staging.url)
            send = partial(
                upload_files,
                staging,
                store,
                manifest,
                journal,
                rank=head.rank,
                rate_limit=rate_limit,
                progress=progress,
            )
            pins = protect(store, journal)
            report = send()
            try:
                if missing_files(store, manifest):
                    is_awaited = awaits_others
                else:
                    commit_upload(store, manifest, data, admit=admit, pins=pins)
                    if missing_files(store, manifest):
                        _log.warning("%s: another program has removed files; sending them again", store.display_url)
                        send()
            except KeyExistsError as error:
                _log.warning("%s is not uploaded: %s", staging.url, error)
                report = None
        if report is None:
            _discard(store, head.attempt, journal)
        if not is_awaited:
            journal.remove()
    remove_superseded(staging, head.attempt)
    return report


def _discard(store: StorageBackend, attempt: str, journal: Journal) -> None:
    """Remove what an upload has sent, unless the store has committed it: then only the journal was left."""
    try:
        is_committed = read_manifest(store).attempt == attempt
    except (CheckpointNotFoundError, NotACheckpointError):
        is_committed = False
    if is_committed:
        let_go(store, journal.pins)
    else:
        discard_transfer(store, journal)


def is_pending(folder: str, attempt: str) -> bool:
    """Whether files of this attempt in a staging folder are not uploaded."""
    return any(head.attempt == attempt and head.direction == "to" for _, head in find_journals(folder))


def remove_superseded(staging: LocalBackend, attempt: str) -> None:
    """Remove an attempt's files from a staging folder, unless some are not uploaded or the manifest names them."""
    with suppress(CheckpointError, StorageError):
        if not is_pending(staging.url, attempt) and _manifest_of(staging, attempt) is None:
            above, name = os.path.split(staging.url)
            remove_attempt(LocalBackend(above), f"{name}/{attempt}")  # and the folder, if nothing else is in it


def _manifest_of(staging: LocalBackend, attempt: str) -> bytes | None:
    """Return the manifest in a staging folder if it is that of ``attempt``."""
    try:
        data = read_manifest_bytes(staging)
    except (CheckpointNotFoundError, NotACheckpointError):
        return None
    return data if decode_manifest(data, staging.url).attempt == attempt else None
