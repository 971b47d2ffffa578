"""Copy a committed checkpoint: its files, and then its manifest with a conditional put."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext

from ..checkpoint.attempts import PIN_PREFIX, new_attempt
from ..checkpoint.manifest_file import commit, decode_manifest, read_manifest_bytes
from ..checkpoint.references import hold, sweep, unpin
from ..errors import CheckpointError, CommitUnknownError, KeyExistsError, KeyNotFoundError, StorageError
from ..format.manifest import MANIFEST_KEY, MAX_MANIFEST_BYTES, Manifest, encode
from ..storage_backends.base import StorageBackend
from ..storage_backends.local.backend import LocalBackend
from .journal import Journal, JournalHead, Progress, user_directory
from .transfer import WINDOW, Transfer, TransferReport

__all__ = ["copy_checkpoint", "end_uploads", "missing_files", "protect"]

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
    """Copy a checkpoint exactly, and check every byte before it is sent.

    The copy of an incremental checkpoint is complete: it has the frames that other checkpoints have of the source.

    A journal lets a later call continue after a failure. It is in the local directory ``journals``; by default in the
    target or the source, if one of them is a local directory, else in ``user_directory``. A damaged source, and without
    a journal any failure, leaves nothing at the target. ``rate_limit`` is in bytes per second; ``progress`` is called
    in another thread with the bytes done since the last call.

    Raises ``KeyExistsError`` if the target holds another checkpoint; one that holds this checkpoint is left as it is.
    """
    data = read_manifest_bytes(source)
    manifest = decode_manifest(data, source.url)
    stored = manifest
    if manifest.references.name:
        manifest = stored.flattened()
        data = encode(manifest)
    if source.url == target.url and source.endpoint() == target.endpoint():
        raise KeyExistsError(f"{target.url} is both source and target; give another target")
    is_there = _holds(target, manifest)
    with _open_journal(source, target, manifest.attempt, journals) or nullcontext() as journal:
        if journal is not None and journal.outdated is not None:
            _discard(target, journal.outdated.attempt, journal.outdated)
        if is_there:
            progress(manifest.file_bytes)
            report = TransferReport(len(manifest.files), manifest.file_bytes)
            if journal is not None:
                end_uploads(target, journal)  # another copy has stored these files
                unpin(target, journal.pins)
        else:

            def send(rows: Sequence[int]) -> TransferReport:
                return Transfer(
                    source,
                    target,
                    stored,
                    rows=rows,
                    journal=journal,
                    window=window,
                    rate_limit=rate_limit,
                    progress=progress,
                ).run()

            pins: Sequence[str] = ()
            is_committed = False
            try:
                pins = protect(target, journal)
                report = send(range(len(manifest.files)))
                pins = [*pins, *protect(target, journal)]  # the transfer may have taken longer than a pin protects
                _send_missing(target, manifest, send)
                commit(target, data, may_replace=False)
                is_committed = True
                _send_missing(target, manifest, send)
            except CommitUnknownError:
                raise
            except BaseException as error:
                is_useless = isinstance(error, (CheckpointError, KeyExistsError)) and not is_committed
                if journal is None or is_useless:
                    _discard(target, manifest.attempt, journal, pins)
                    if journal is not None:
                        journal.remove()
                raise
            unpin(target, pins)
        if journal is not None:
            journal.remove()
    return report


def protect(target: StorageBackend, journal: Journal | None) -> Sequence[str]:
    """Keep other programs from removing what a transfer writes; return the pins to remove at its end.

    They remain if a transfer with a journal fails, so that a later one may continue. Raises ``StorageError``.
    """
    pin, earlier = PIN_PREFIX + new_attempt(), [] if journal is None else [*journal.pins]
    if journal is not None:
        journal.add_pin(pin)
    hold(target, pin)
    unpin(target, earlier)  # they may be old
    return [pin]


def missing_files(target: StorageBackend, manifest: Manifest) -> Sequence[int]:
    """Return the rows of the files that the target does not hold, or with another size."""
    found = {stat.key: stat.size for stat in target.list(f"{manifest.attempt}/")}
    sizes = manifest.files.size.tolist()
    return [row for row, key in enumerate(manifest.files.name) if found.get(key) != sizes[row]]


def _send_missing(target: StorageBackend, manifest: Manifest, send: Callable[[Sequence[int]], object]) -> None:
    """Send what another program has removed although it is protected: the manifest must not refer to it."""
    rows = missing_files(target, manifest)
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


def _holds(target: StorageBackend, manifest: Manifest) -> bool:
    """Return whether the target holds this checkpoint, complete.

    Raises ``KeyExistsError`` if it holds another one, or an incomplete one.
    """
    try:
        data = target.get(MANIFEST_KEY, max_size=MAX_MANIFEST_BYTES)
    except KeyNotFoundError:
        return False
    try:
        is_same = decode_manifest(data, target.url).attempt == manifest.attempt
    except CheckpointError:
        is_same = False
    if not is_same:
        raise KeyExistsError(
            f"{target.url} already holds a checkpoint, which was not changed; give another target, or remove it first"
        )
    rows = missing_files(target, manifest)
    if rows:
        raise KeyExistsError(
            f"{target.url} already holds this checkpoint, but {manifest.files.name[rows[0]]} is missing or has another "
            f"size; nothing was changed; give another target, or remove it first"
        )
    return True


def end_uploads(target: StorageBackend, done: Journal | Progress) -> None:
    """End the uploads of a transfer, whose files are not complete. Logs a failure and never raises."""
    for key, upload in done.uploads.items():
        try:
            target.create_parts(key, upload.size, token=upload.token).abort()
        except StorageError as error:
            _log.warning("%s/%s: cannot end its upload, which may cost money: %s", target.display_url, key, error)


def _discard(target: StorageBackend, attempt: str, done: Journal | Progress | None, pins: Sequence[str] = ()) -> None:
    """Remove what a copy has written, but nothing that a committed checkpoint or another transfer may need."""
    if done is not None:
        end_uploads(target, done)
        pins = done.pins
    unpin(target, pins)
    try:
        is_removed = sweep(target, [attempt], lambda one: False)
    except StorageError as error:
        _log.warning("%s: cannot remove %s: %s", target.display_url, attempt, error)
    else:
        if not is_removed:
            _log.warning("%s: %s remains, because another program may be writing there", target.display_url, attempt)
