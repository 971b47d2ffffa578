"""Files that several checkpoints share, and the removal of what no checkpoint needs.

An incremental checkpoint, the *referrer*, refers to files in the folders of older checkpoints, its own folder among
them. Before a save writes data, it puts a *pin* into each of these folders: an object whose name has the save's
attempt, and whose content is where its manifest will be. Then it checks that its base is still committed; if not, it
saves everything. A removal first deletes, or has replaced, the manifest that named the files, and then looks for pins.
So either the save finds that its base is gone, or the removal finds the pin, whatever their order.

A pin of a committed referrer protects the files that the referrer's manifest names. A pin of a save that may still be
running protects all files of the folder. Whether a save has ended can only be known to others by its lease or its age.

A copy or an upload of a checkpoint that another job has saved also puts a pin, into the folder that it writes to: the
name of its attempt says only when the checkpoint was saved, and by which job. An upload also needs the pins of its
save, which therefore outlive the job: others remove them after 24 hours only. An upload that ends later holds the
folders, checks that the checkpoints that named the files are still committed, and only then puts its pins again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from ..errors import (
    CheckpointError,
    CheckpointNotFoundError,
    FormatError,
    KeyNotFoundError,
    NotACheckpointError,
    StorageError,
)
from ..format.manifest import MANIFEST_KEY, PARENT, Manifest, split_reference
from ..runtime.threads import Threads
from ..storage_backends import folder_name, open_like, open_sibling, parent_url
from ..storage_backends.base import StorageBackend
from .attempts import PIN_PREFIX, is_old, new_attempt
from .manifest_file import read_manifest

__all__ = [
    "ReferencesGoneError",
    "hold",
    "holds_only_pinned",
    "is_pinned",
    "older_attempts",
    "pin",
    "pins_of",
    "protecting_references",
    "release",
    "remove_checkpoint",
    "settle",
    "sweep",
    "unpin",
]

_MAX_PIN_BYTES = 4096
_FOR_UPLOAD = "\nupload"  # the second line of a pin that outlives the job of its save
_MAX_TRIES = 16  # to look at pins while other saves put new ones

_log = logging.getLogger(__name__)


class ReferencesGoneError(StorageError):
    """Files to which a checkpoint refers may be gone, so it must not be committed."""


def pin(backend: StorageBackend, attempt: str, folders: Iterable[str], *, for_upload: bool = False) -> None:
    """Protect all files in these folders until the save of ``attempt`` to ``backend`` has ended.

    With ``for_upload``, another job or program may commit it later, so the end of the job is not the end of the save.

    ``folders`` are siblings of the root of ``backend``; "" is the root itself. Puts all pins at the same time, and ends
    when all puts have ended. Raises ``StorageError``.
    """

    def put(folder: str) -> None:
        where = f"{PARENT}{folder_name(backend)}/{MANIFEST_KEY}" if folder else MANIFEST_KEY
        _sibling(backend, folder).put(PIN_PREFIX + attempt, (where + _FOR_UPLOAD * for_upload).encode())

    folders = tuple(folders)
    with Threads(max(1, len(folders)), "bcp-pin") as threads:
        puts = [threads.submit(put, folder) for folder in folders]
    for done in puts:
        done.result()


def hold(folder: StorageBackend, pin: str) -> None:
    """Protect all files in a folder while a transfer writes there: for 24 hours, or until ``unpin``.

    ``pin`` is ``PIN_PREFIX`` and a new attempt. Raises ``StorageError``.
    """
    folder.put(pin, MANIFEST_KEY.encode())


def unpin(folder: StorageBackend, pins: Sequence[str]) -> None:
    """Remove the pins of a transfer that has ended. Logs a failure and never raises."""
    try:
        _delete(folder, pins)
    except StorageError as error:
        _log.warning("%s: %s remain for 24 hours: %s", folder.display_url, ", ".join(pins), error)


def settle(
    backend: StorageBackend, attempt: str, older: Mapping[str, Collection[str]], referred: Container[str]
) -> None:
    """After a save has ended, remove its pins but those of the folders ``referred``, and what remained only for it.

    ``older`` maps each folder that the save pinned to the attempts that its base names there. Logs a failure and never
    raises. If the store does not answer, it is not asked about the other folders.
    """
    for folder, attempts in older.items():
        try:
            holder = _sibling(backend, folder)
            if not folder or folder not in referred:
                _delete(holder, [PIN_PREFIX + attempt])
            if not _has_manifest(holder):
                sweep(holder, attempts, lambda one: one == attempt)
        except StorageError as error:
            _log.warning("%s: cannot clean up after %s: %s", backend.display_url, attempt, error)
            if error.is_late:
                return


def is_pinned(backend: StorageBackend, attempt: str, folders: Iterable[str]) -> bool:
    """Return whether all pins of a save are there. Raises ``StorageError``."""
    try:
        for folder in folders:
            _sibling(backend, folder).stat(PIN_PREFIX + attempt)
    except KeyNotFoundError:
        return False
    return True


@contextmanager
def protecting_references(backend: StorageBackend, manifest: Manifest) -> Iterator[None]:
    """Keep the files to which a manifest refers while an upload commits it at the root of ``backend`` in the block.

    Raises ``ReferencesGoneError`` before the block if some may be gone, and ``StorageError``; ``CheckpointError`` if
    the manifest of another checkpoint cannot be read.
    """
    older, attempt = older_attempts(manifest), manifest.attempt
    if not is_old(attempt) and is_pinned(backend, attempt, older):
        yield  # no other program removes a young pin
        return
    holders, held = [_sibling(backend, folder) for folder in older], PIN_PREFIX + new_attempt()
    try:
        for holder in holders:
            hold(holder, held)
        # A removal deletes the manifest before it looks for pins, so what is committed now keeps its files.
        for folder, holder in zip(older, holders):
            committed = _committed(holder)
            if committed is None or not _references(manifest, folder) <= _named(committed, ""):
                raise ReferencesGoneError(
                    f"{backend.display_url}: another program has removed {folder or 'the older checkpoint here'}, and "
                    f"may have removed files that this checkpoint needs"
                )
        pin(backend, attempt, older, for_upload=True)
        yield
        pin(backend, attempt, older, for_upload=True)  # a clean-up that began before the hold may have removed them
    finally:
        for holder in holders:
            unpin(holder, [held])


def pins_of(children: Iterable[str]) -> list[str]:
    """Return the pins among the names in a folder."""
    return [name for name in children if name.startswith(PIN_PREFIX)]


def holds_only_pinned(children: Collection[str]) -> bool:
    """Return whether a folder with these names is a removed checkpoint of which other ones still need files."""
    return MANIFEST_KEY not in children and bool(pins_of(children))


def remove_checkpoint(
    backend: StorageBackend, manifest: Manifest, *, has_ended: Callable[[str], bool] = lambda attempt: False
) -> list[str]:
    """Remove a checkpoint: its manifest, and then the files that no other checkpoint refers to.

    ``has_ended`` states whether the save of an attempt has certainly ended. Returns the folders in which files remain
    for saves that may still be running. Raises ``StorageError``; then files may remain.
    """
    _delete(backend, [MANIFEST_KEY])
    return release(backend, manifest, has_ended=has_ended)


def release(
    backend: StorageBackend, manifest: Manifest, *, has_ended: Callable[[str], bool] = lambda attempt: False
) -> list[str]:
    """Remove the files that a removed or replaced manifest named and that no other checkpoint refers to.

    Arguments and result are those of ``remove_checkpoint``.
    """
    if not manifest.is_shared:
        _delete(backend, manifest.files.name)  # no save has used it as its base, so nothing refers to its files
        return []
    older = {"": set(), **older_attempts(manifest)}
    remaining = []
    for folder, attempts in older.items():
        holder = _sibling(backend, folder)

        def is_over(attempt: str, attempts: set[str] = attempts) -> bool:
            return attempt in attempts or attempt == manifest.attempt or has_ended(attempt)

        if folder and not _needed_elsewhere(holder, manifest.attempt):
            holder.delete([PIN_PREFIX + manifest.attempt])
        if not sweep(holder, attempts, is_over, files=() if folder else manifest.files.name):
            remaining.append(folder or folder_name(backend))
    return remaining


def older_attempts(manifest: Manifest) -> dict[str, set[str]]:
    """Return the attempts to whose files a manifest refers, by folder; "" is its own."""
    found: dict[str, set[str]] = {}
    for name in manifest.references.name:
        folder, key = split_reference(name)
        found.setdefault(folder, set()).add(key.partition("/")[0])
    return found


def sweep(
    folder: StorageBackend,
    attempts: Collection[str],
    has_ended: Callable[[str], bool],
    *,
    files: Collection[str] = (),
) -> bool:
    """Remove, of old attempts in a folder and of ``files``, what no committed checkpoint needs.

    Args:
        folder: The folder of a checkpoint, committed or removed.
        attempts: The old attempts. Nothing writes them any more.
        has_ended: Whether the save of an attempt has certainly ended.
        files: Other files that have become unnecessary.

    Returns:
        False if everything remains, because a save that may still be running may refer to it.

    Raises:
        StorageError: The store failed. Files may remain.
    """
    children = folder.list_children("")
    for _ in range(_MAX_TRIES):
        pins = pins_of(children)
        try:
            by_pin = {name: _needed_by(folder, name) for name in pins}
            manifest = _committed(folder) if pins or MANIFEST_KEY in children else None  # read after the pins
            pending = [name.removeprefix(PIN_PREFIX) for name, needed in by_pin.items() if needed is None]
            if not all(is_old(one) or (has_ended(one) and not _is_for_upload(folder, one)) for one in pending):
                return False
            by_pin |= {PIN_PREFIX + one: _needed_elsewhere(folder, one) for one in pending}
            old = [attempt for attempt in attempts if manifest is None or attempt != manifest.attempt]
            begun = [upload for attempt in old for upload in folder.incomplete(f"{attempt}/")]
            stored = {stat.key for attempt in old for stat in folder.list(f"{attempt}/")}
            # A save that has pinned the folder since then may have found a manifest that was removed before it was
            # read above. A transfer may have written, or even committed, one of the attempts.
            children = folder.list_children("")
            latest = _committed(folder) if MANIFEST_KEY in children else None
        except CheckpointError as error:
            _log.warning("%s: nothing is removed, because it is unknown what needs it: %s", folder.display_url, error)
            return False
        if set(pins_of(children)) <= set(pins) and _attempt_of(latest) == _attempt_of(manifest):
            break
    else:
        return False
    needed = set().union(*(found for found in by_pin.values() if found), _named(manifest, "") if manifest else ())
    folder.abort_incomplete(begun)
    unneeded = stored.union(files) - needed
    _delete(folder, [*sorted(unneeded), *(name for name, found in by_pin.items() if not found)])
    return True


def _delete(folder: StorageBackend, keys: Sequence[str]) -> None:
    """Delete through the parent, so that a store with directories also removes the folder when it is empty."""
    parent, name = parent_url(folder), folder_name(folder)
    if parent:
        open_like(folder, parent).delete([f"{name}/{key}" for key in keys])
    else:
        folder.delete(keys)


def _needed_by(folder: StorageBackend, pin: str) -> set[str] | None:
    """Return the files that the committed referrer of a pin names in this folder; None if it is not committed.

    That is nothing for a pin of the folder's own manifest. Raises ``CheckpointError`` if that cannot be found out.
    """
    try:
        where = _content(folder, pin)
    except KeyNotFoundError:
        return set()  # its save has ended
    name, key = split_reference(where.removesuffix(_FOR_UPLOAD))
    if key != MANIFEST_KEY:
        raise FormatError(f"{folder.url}/{pin} is not a pin of this library")
    manifest = _committed(_sibling(folder, name))
    if manifest is None or PIN_PREFIX + manifest.attempt != pin:
        return None
    return _named(manifest, folder_name(folder)) if name else set()


def _is_for_upload(folder: StorageBackend, attempt: str) -> bool:
    try:
        return _content(folder, PIN_PREFIX + attempt).endswith(_FOR_UPLOAD)
    except KeyNotFoundError:
        return False


def _content(folder: StorageBackend, pin: str) -> str:
    return folder.get(pin, max_size=_MAX_PIN_BYTES).decode(errors="replace")


def _needed_elsewhere(folder: StorageBackend, attempt: str) -> set[str]:
    """Return the files in a folder that a renamed or copied referrer names: a sibling with this attempt.

    Raises ``CheckpointError`` if that cannot be found out.
    """
    parent, needed = parent_url(folder), set[str]()
    if not parent:
        return needed
    root = open_like(folder, parent)
    for child in root.list_children(""):
        if not child.endswith("/") or not {MANIFEST_KEY, f"{attempt}/"} <= {*root.list_children(child)}:
            continue
        manifest = _committed(open_sibling(folder, child[:-1]))
        if manifest is not None and manifest.attempt == attempt:
            needed |= _named(manifest, folder_name(folder))
    return needed


def _named(manifest: Manifest, folder: str) -> set[str]:
    """Return the files in a folder that a manifest names; "" is the manifest's own."""
    return _references(manifest, folder).union(() if folder else manifest.files.name)


def _references(manifest: Manifest, folder: str) -> set[str]:
    return {key for where, key in map(split_reference, manifest.references.name) if where == folder}


def _committed(folder: StorageBackend) -> Manifest | None:
    """Return the manifest in a folder; None if there is none. Raises ``CheckpointError`` if it cannot be read."""
    try:
        return read_manifest(folder)
    except (CheckpointNotFoundError, NotACheckpointError):
        return None


def _has_manifest(folder: StorageBackend) -> bool:
    try:
        folder.stat(MANIFEST_KEY)
    except KeyNotFoundError:
        return False
    return True


def _attempt_of(manifest: Manifest | None) -> str:
    return "" if manifest is None else manifest.attempt


def _sibling(backend: StorageBackend, folder: str) -> StorageBackend:
    return open_sibling(backend, folder) if folder else backend
