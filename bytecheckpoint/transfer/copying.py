"""Copy a committed checkpoint: its files, and then its manifest with a conditional put."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace

from ..checkpoint.attempts import copy_of_attempt, is_copy_of, remove_attempt
from ..checkpoint.manifest_file import check_name, commit, decode_manifest, read_manifest_bytes
from ..checkpoint.sweep import missing_files
from ..engine.objects import data_of
from ..errors import CheckpointError, CommitUnknownError, KeyExistsError, KeyNotFoundError, StorageError
from ..format.manifest.document import Manifest
from ..format.manifest.envelope import MANIFEST_KEY, MAX_MANIFEST_BYTES, encode
from ..storage_backends.base import StorageBackend
from ..storage_backends.local.backend import LocalBackend
from .journal import Journal, JournalHead, Progress, user_directory
from .transfer import WINDOW, Transfer, TransferReport

_log = logging.getLogger(__name__)


def copy_checkpoint(
    source: StorageBackend,
    target: StorageBackend,
    *,
    window: int = WINDOW,
    rate_limit: float | None = None,
    progress: Callable[[int], None] = lambda nbytes: None,
    journals: str | None = None,
) -> TransferReport:
    """Copy a checkpoint, and check every byte before it is sent.

    The copy is a separate attempt, with the same files. That of an incremental checkpoint is complete: it has the
    frames that other checkpoints have of the source, and shares nothing.

    A journal lets a later call continue after a failure. It is in the local directory ``journals``; by default in the
    target or the source, if one of them is a local directory, else in ``user_directory``. A damaged source, and without
    a journal any failure, leaves nothing at the target. ``rate_limit`` is in bytes per second; ``progress`` is called
    in another thread with the bytes done since the last call.

    Raises ``KeyExistsError`` if the target holds another checkpoint; one that holds this checkpoint is left as it is.
    """
    check_name(target)
    stored = decode_manifest(read_manifest_bytes(source), source.url)
    if source.url == target.url and source.endpoint() == target.endpoint():
        raise KeyExistsError(f"{target.url} is both source and target; give another target")
    is_there = _holds(target, stored.attempt)
    with _open_journal(source, target, stored.attempt, journals) or nullcontext() as journal:
        if journal is not None and journal.outdated is not None:
            _discard(target, journal.outdated.attempt, journal.outdated)
        begun = "" if journal is None else journal.attempt
        manifest = _copied(stored, begun or copy_of_attempt(stored.attempt))
        if is_there:
            progress(manifest.file_bytes)
            report = TransferReport(target.url, len(manifest.files), manifest.file_bytes)
            _discard(target, begun, journal)  # another copy has stored these files
        else:

            def send(rows: Sequence[int]) -> TransferReport:
                return Transfer(
                    source=data_of(source, stored),
                    target=target,
                    manifest=stored,
                    names=manifest.files.name,
                    rows=rows,
                    journal=journal,
                    window=window,
                    rate_limit=rate_limit,
                    progress=progress,
                ).run()

            is_committed = False
            try:
                if journal is not None and not begun:
                    journal.begin_attempt(manifest.attempt)
                report = send(range(len(manifest.files)))
                _send_missing(target, manifest, send)
                commit(target, encode(manifest), may_replace=False)
                is_committed = True
                _send_missing(target, manifest, send)
            except CommitUnknownError:
                raise
            except BaseException as error:
                is_useless = isinstance(error, (CheckpointError, KeyExistsError)) and not is_committed
                if journal is None or is_useless:
                    _discard(target, manifest.attempt, journal)
                    if journal is not None:
                        journal.remove()
                raise
        if journal is not None:
            journal.remove()
    return report


def _copied(manifest: Manifest, attempt: str) -> Manifest:
    """Return the manifest of a complete copy, whose files are those of ``attempt``."""
    full = manifest.flattened()
    names = [attempt + name.removeprefix(manifest.attempt) for name in full.files.name]
    return replace(full, attempt=attempt, files=replace(full.files, name=names))


def _send_missing(target: StorageBackend, manifest: Manifest, send: Callable[[Sequence[int]], object]) -> None:
    """Send again what another program has removed, as a manager does after a day: the manifest must not refer to it."""
    gone = missing_files(target, manifest)
    rows = [row for row, name in enumerate(manifest.files.name) if name in gone]
    if rows:
        _log.warning("%s: another program has removed %d file(s); sending them again", target.display_url, len(rows))
        send(rows)


def _open_journal(
    source: StorageBackend, target: StorageBackend, attempt: str, directory: str | None
) -> Journal | None:
    """Open the journal of a copy. Returns None, after a warning, if it cannot be written."""
    try:
        if directory is None and isinstance(target, LocalBackend):
            return Journal(target.url, JournalHead("from", source.display_url, attempt))
        if directory is None and isinstance(source, LocalBackend):
            return Journal(source.url, JournalHead("to", target.display_url, attempt))
        head = JournalHead("between", _place(target), attempt, source=_place(source))
        return Journal(user_directory() if directory is None else directory, head)
    except StorageError as error:
        _log.warning("%s; if the copy fails, it begins again: choose a directory with --journal", error)
        return None


def _place(backend: StorageBackend) -> str:
    """Return the URL of a root and of its endpoint: other endpoints may have the same bucket."""
    endpoint = backend.endpoint()
    return f"{backend.display_url} at {endpoint}" if endpoint else backend.display_url


def _holds(target: StorageBackend, attempt: str) -> bool:
    """Return whether the target holds the checkpoint of this attempt, or a copy of it, complete.

    Raises ``KeyExistsError`` if it holds another one, or an incomplete one.
    """
    try:
        data = target.get(MANIFEST_KEY, max_size=MAX_MANIFEST_BYTES)
    except KeyNotFoundError:
        return False
    try:
        manifest = decode_manifest(data, target.url)
        is_same = is_copy_of(manifest.attempt, attempt)
    except CheckpointError:
        is_same = False
    if not is_same:
        raise KeyExistsError(
            f"{target.url} already holds a checkpoint, which was not changed; give another target, or remove it first"
        )
    for name in missing_files(target, manifest):
        raise KeyExistsError(
            f"{target.url} already holds this checkpoint, but {name} is missing or has another size; nothing was "
            f"changed; give another target, or remove it first"
        )
    return True


def end_uploads(target: StorageBackend, done: Progress) -> None:
    """End the uploads of a transfer, whose files are not complete. Logs a failure and never raises."""
    for key, upload in done.uploads.items():
        try:
            target.create_parts(key, upload.size, token=upload.token).abort()
        except StorageError as error:
            _log.warning("%s/%s: cannot end its upload, which may cost money: %s", target.display_url, key, error)


def _discard(target: StorageBackend, attempt: str, done: Progress | None) -> None:
    """Remove what a copy has written, unless it is committed. Logs a failure and never raises."""
    if done is not None:
        end_uploads(target, done)
    try:
        data = target.get(MANIFEST_KEY, max_size=MAX_MANIFEST_BYTES)
        is_committed = decode_manifest(data, target.url).attempt == attempt
    except KeyNotFoundError:
        is_committed = False
    except (CheckpointError, StorageError) as error:
        _log.warning("%s: cannot remove %s: %s", target.display_url, attempt, error)
        return
    if attempt and not is_committed:
        remove_attempt(target, attempt)
