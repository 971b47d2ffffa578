"""Upload what a save has committed in a tier: each rank its own files, and the last one the manifest.

Each rank of the save opens a journal in the folder before the commit there, so a checkpoint in the folder has a journal
as long as files of this machine are not uploaded. Another process can continue from a journal, on the same machine and
without the other ranks: the process that completes the last file writes the manifest.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from ..checkpoint.attempts import ATTEMPT_PREFIX, attempt_time, has_expired, remove_attempt
from ..checkpoint.manifest_file import commit, decode_manifest, read_manifest, read_manifest_bytes, remove_files
from ..checkpoint.sweep import FilesGoneError, admitted, missing_files, remove_files_of
from ..engine.objects import OBJECTS, data_of, objects_next_to
from ..errors import CheckpointError, CheckpointNotFoundError, KeyExistsError, NotACheckpointError, StorageError
from ..format.manifest.document import Manifest
from ..storage_backends.base import StorageBackend
from ..storage_backends.local.backend import LocalBackend
from .copying import end_uploads
from .journal import Journal, JournalHead, find_journals
from .transfer import Stop, Transfer, TransferReport

_log = logging.getLogger(__name__)


def upload_files(
    tier_folder: LocalBackend,
    store: StorageBackend,
    manifest: Manifest,
    journal: Journal | None,
    *,
    rank: int,
    rate_limit: float | None = None,
    progress: Callable[[int], None] = lambda nbytes: None,
    stop: Stop | None = None,
) -> TransferReport:
    """Upload the files that ``rank`` wrote. Raises as ``Transfer.run``."""
    rows = [row for row, writer in enumerate(manifest.files.rank.tolist()) if writer == rank]
    transfer = Transfer(
        source=data_of(tier_folder, manifest),
        target=data_of(store, manifest),
        manifest=manifest,
        names=manifest.files.name,
        rows=rows,
        journal=journal,
        keeps_references=True,
        rate_limit=rate_limit,
        progress=progress,
    )
    with (stop or Stop()).calling(transfer.stop):
        return replace(transfer.run(), url=store.url)


def commit_upload(
    store: StorageBackend,
    manifest: Manifest,
    data: bytes,
    *,
    admit: Callable[[], None] = lambda: None,
    lock: threading.Lock | None = None,
) -> None:
    """Write the manifest, and remove the files of the checkpoint that it replaces.

    A checkpoint that was saved later is not replaced: ``KeyExistsError``. Otherwise raises as ``admitted``, whose
    argument is ``lock``, and as ``commit``.
    """
    with admitted(store, manifest, lock=lock, patience_s=store.deadline_s):
        replaced = commit(store, data, unless_after=manifest.created, admit=admit)
    if replaced is not None and not (lock is not None and replaced.is_shared):  # whose manager sweeps
        try:
            remove_files_of(store, replaced)
        except StorageError as error:
            _log.warning("%s: cannot remove the replaced checkpoint's files: %s", store.display_url, error)


def continue_upload(
    tier_folder: LocalBackend,
    store: StorageBackend,
    head: JournalHead,
    *,
    rate_limit: float | None = None,
    progress: Callable[[int], None] = lambda nbytes: None,
    admit: Callable[[], None] = lambda: None,
    gives_up: bool = False,
    is_superfluous: bool = False,
    stop: Stop | None = None,
    lock: threading.Lock | None = None,
) -> TransferReport | None:
    """Continue the upload that a journal of a rank describes.

    Commits the checkpoint if all files of all ranks are in the store then. If they are not, the last machine that
    completes its files will do it. The journal remains until the store has the checkpoint or a later one, and for 24
    hours after the save at most: so long, loads find the checkpoint in this folder, and nothing removes it there.

    ``lock`` is as in ``commit_upload``. If the checkpoint ``is_superfluous``, the upload is discarded.

    If this folder does not hold the checkpoint, another machine may have committed it: then the journal remains as
    well, unless ``gives_up``. If a later checkpoint has replaced it here or in the store, the upload is discarded.

    Returns what was done; None if nothing could be. Raises ``UsageError`` if another process continues the upload, and
    as ``upload_files`` and ``commit_upload``.
    """
    assert head.rank is not None
    with Journal(tier_folder.url, head) as journal:
        report, is_over = None, True
        data, stored = _manifest_of(tier_folder, head.attempt), _committed(store)
        manifest = None if data is None else decode_manifest(data, tier_folder.url)
        is_stored = stored is not None and stored.attempt == head.attempt
        if data is None or manifest is None:
            is_replaced = journal.is_committed or _is_later(_committed(tier_folder), head) or _is_later(stored, head)
            is_over = is_stored or is_replaced or gives_up or has_expired(head.attempt)
            if not is_over:
                _log.info(
                    "%s: another machine may have committed %s; its files are kept", tier_folder.url, head.attempt
                )
        elif is_superfluous:
            _log.info("%s is not uploaded: retention would remove it", tier_folder.url)
        elif has_expired(head.attempt) or not _was_removed(store, manifest, journal, head.rank):
            send = partial(
                upload_files,
                tier_folder,
                store,
                manifest,
                journal,
                rank=head.rank,
                rate_limit=rate_limit,
                progress=progress,
                stop=stop,
            )
            report = send()
            try:
                gone = missing_files(store, manifest)
                if gone.keys() & set(manifest.files.name):
                    is_over = has_expired(head.attempt) or not report.files or _is_later(stored, head)
                else:
                    commit_upload(store, manifest, data, admit=admit, lock=lock)
                    if missing_files(store, manifest).keys() & set(manifest.files.name):
                        _log.warning("%s: another program has removed files; sending them again", store.display_url)
                        send()
            except (KeyExistsError, FilesGoneError) as error:
                _log.warning("%s is not uploaded: %s", tier_folder.url, error)
                report = None
        if is_over:
            if report is None and not is_stored:
                for place in (store, objects_next_to(store)):  # without the manifest, it is unknown which
                    if place is not None:
                        end_uploads(place, journal)
                        remove_files(place, [key for key in journal.stored if key.startswith(ATTEMPT_PREFIX)])
            journal.remove()
    remove_superseded(tier_folder, head.attempt)
    return report


def _is_later(manifest: Manifest | None, head: JournalHead) -> bool:
    """Whether a manifest is of a save that began after the one of a journal, by the clock of rank 0."""
    one, other = (attempt_time(manifest.attempt) if manifest else None), attempt_time(head.attempt)
    return one is not None and other is not None and one > other


def _was_removed(store: StorageBackend, manifest: Manifest, journal: Journal, rank: int) -> bool:
    """Whether the store had committed the checkpoint, which was then removed there.

    That is the case if all files of the rank were stored, and none of them is left: for a day, only a removal of the
    checkpoint takes them.
    """
    own = {key for key, writer in zip(manifest.files.name, manifest.files.rank.tolist(), strict=True) if writer == rank}
    is_stored = bool(own) and own <= journal.stored
    return is_stored and not any(True for _ in data_of(store, manifest).list(f"{manifest.attempt}/"))


def _committed(store: StorageBackend) -> Manifest | None:
    try:
        return read_manifest(store)
    except (CheckpointNotFoundError, NotACheckpointError):
        return None


def is_pending(folder: str, attempt: str) -> bool:
    """Whether files of this attempt in a tier are not uploaded."""
    return any(head.attempt == attempt and head.direction == "to" for _, head in find_journals(folder))


def remove_superseded(tier_folder: LocalBackend, attempt: str) -> None:
    """Remove an attempt's files from a tier, unless some are not uploaded or the manifest names them."""
    with suppress(CheckpointError, StorageError):
        if not is_pending(tier_folder.url, attempt) and _manifest_of(tier_folder, attempt) is None:
            above, name = os.path.split(tier_folder.url)
            for folder in (name, OBJECTS):  # which are removed as well, if nothing else is in them
                remove_attempt(LocalBackend(above), f"{folder}/{attempt}")


def _manifest_of(tier_folder: LocalBackend, attempt: str) -> bytes | None:
    """Return the manifest in a tier if it is that of ``attempt``."""
    try:
        data = read_manifest_bytes(tier_folder)
    except (CheckpointNotFoundError, NotACheckpointError):
        return None
    return data if decode_manifest(data, tier_folder.url).attempt == attempt else None
