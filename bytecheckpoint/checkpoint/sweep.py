"""The files that the incremental checkpoints of a root share, and the removal of those that none of them needs.

    <root>/objects/<attempt>/<file>        written by an incremental save, and never changed
    <root>/<checkpoint>/manifest.msgpack   names files in objects/<any attempt>/

A checkpoint consists of its manifest and what the manifest names. Nothing else states what is needed: removing a
checkpoint removes its manifest, by whatever means, and a *sweep* lists the objects, reads all manifests of the root,
and deletes what no manifest names.

**No committed checkpoint lacks a file because of a sweep.** A process that commits such a manifest, or sweeps, holds
the lease of the root while it does so (``checkpoint.lease``), and does one of the two at a time. Under the lease, a
save checks right before its commit that every file that it names is there with its size. So a manifest that is
committed before a sweep is read by it; one that is committed after it names only files that are there after the sweep.

What a running save has written, or will refer to, is left to it for two reasons: the process that sweeps has a record
of its own saves (``SharedSaves``), and no other job that holds the lease is alive. Files of saves without a manager,
and of uploads, may belong to running ones until they are 24 hours old. Should a sweep be wrong about that, the save
finds that a file is missing, and commits nothing.

A sweep that cannot read a manifest removes nothing: it does not know what is needed. Nor does one on a file system
where a listing may lack what another host has just written (``StorageBackend.staleness_s``), until its lease has been
held for that long: what others have committed before is listed then. What this process itself has committed is known
without a listing. There, whether a file exists is never decided by a listing either.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

from ..engine.objects import OBJECTS, attempts_of, data_of, files_of
from ..errors import CheckpointError, KeyNotFoundError, RootInUseError, StorageError
from ..format.manifest.document import Manifest
from ..format.manifest.envelope import MANIFEST_KEY, MAX_MANIFEST_BYTES
from ..runtime.threads import Threads
from ..storage_backends import folder_name, join, open_like, parent_url
from ..storage_backends.base import StorageBackend
from ..storage_backends.local.backend import LocalBackend
from .attempts import ATTEMPT_PREFIX, attempt_time, attempts_among, has_expired, remove_attempt
from .lease import hold_root
from .manifest_file import decode_manifest, find_manifest

_READERS = 8  # manifests that are read at the same time
_PATIENCE_S = 10.0  # for others that commit or sweep

_log = logging.getLogger(__name__)


class FilesGoneError(StorageError):
    """Files of a checkpoint that is not committed yet were removed."""


@dataclass(frozen=True)
class Swept:
    """What a sweep did: the ``files`` and bytes (``size``) that it removed, or ``problem``, why it removed nothing."""

    files: int = 0
    size: int = 0
    problem: str = ""


def root_of(checkpoint: StorageBackend) -> StorageBackend:
    """Return the root that a checkpoint's folder is in, whose objects it shares."""
    return open_like(checkpoint, parent_url(checkpoint))


def missing_files(checkpoint: StorageBackend, manifest: Manifest) -> dict[str, int | None]:
    """Return the names of the files of a checkpoint that are missing or truncated, with the size of what is there.

    Lists the attempts that the manifest names if listings are consistent, and reads nothing. Raises ``StorageError``.
    """
    data, expected, stored = data_of(checkpoint, manifest), files_of(manifest), dict[str, int | None]()
    if data.staleness_s():
        with Threads(_READERS, thread_name_prefix="bcp-stat") as threads:
            stored |= zip(expected, threads.map(partial(_size_of, data), expected), strict=True)
    else:
        for attempt in attempts_of(manifest):
            stored |= {stat.key: stat.size for stat in data.list(f"{attempt}/")}
    return {name: stored.get(name) for name, size in expected.items() if stored.get(name) != size}


def _size_of(data: StorageBackend, name: str) -> int | None:
    try:
        return data.stat(name).size
    except KeyNotFoundError:
        return None


@contextmanager
def admitted(
    checkpoint: StorageBackend, manifest: Manifest, *, lock: threading.Lock | None, patience_s: float
) -> Iterator[None]:
    """Let the block commit a manifest only if everything that it names is there.

    For shared files, this holds ``lock``, that of the process (``SharedSaves``), if its job holds the lease of the
    root; if it is None, the lease itself.

    Raises ``FilesGoneError`` before the block, ``RootInUseError`` if another job holds the root, and ``StorageError``.
    """
    with (lock or hold_root(root_of(checkpoint), patience_s=patience_s)) if manifest.is_shared else nullcontext():
        missing = sorted(missing_files(checkpoint, manifest))
        if missing:
            raise FilesGoneError(
                f"{checkpoint.url} is not committed: {len(missing)} of its files are missing or truncated, such as "
                f"{missing[0]}; another program removed them"
            )
        yield


def remove_checkpoint(checkpoint: StorageBackend, manifest: Manifest) -> Swept:
    """Remove a checkpoint: its manifest first, so that no half of it is ever visible, and then what nothing else needs.

    Returns what was removed of the files. Raises ``StorageError``; then files may remain.
    """
    _delete(checkpoint, [MANIFEST_KEY])
    return remove_files_of(checkpoint, manifest)


def remove_files_of(checkpoint: StorageBackend, manifest: Manifest) -> Swept:
    """Remove the files that a removed or replaced manifest named and that no checkpoint needs. Raises ``StorageError``.

    If another job holds the root, it sweeps later.
    """
    if not manifest.is_shared:
        _delete(checkpoint, manifest.files.name)
        return Swept(len(manifest.files), manifest.file_bytes)
    root = root_of(checkpoint)
    try:
        with hold_root(root, patience_s=_PATIENCE_S):
            return sweep(root, ended=attempts_of(manifest))
    except RootInUseError as error:
        return Swept(problem=str(error))


def sweep(
    root: StorageBackend,
    *,
    ended: Collection[str] = (),
    has_ended: Callable[[str], bool] = lambda attempt: False,
    needed: Collection[str] = (),
    held_s: float = 0.0,
    is_dry_run: bool = False,
) -> Swept:
    """Remove the objects that no checkpoint of the root needs. The caller holds the lease of the root.

    Args:
        root: The folder of the checkpoints.
        ended: Attempts whose saves have certainly ended.
        has_ended: Whether that of another attempt has; those that are older than 24 hours have anyway.
        needed: Names of objects that are needed according to the caller.
        held_s: For how long the caller has held the lease.
        is_dry_run: Remove nothing, which needs no lease.

    Raises:
        StorageError: The store failed. Objects may remain.
    """
    try:
        stored = {stat.key.removeprefix(f"{OBJECTS}/"): stat.size for stat in root.list(f"{OBJECTS}/")}
        if not stored:
            return Swept()
        named, over = {*needed}, {*ended}
        with Threads(_READERS, thread_name_prefix="bcp-sweep") as threads:
            for files, writers in threads.map(partial(_needed_by, root), _folders(root)):
                named.update(files)
                over.update(writers)
    except (CheckpointError, StorageError, OSError) as error:
        _log.warning("%s: nothing is removed, because it is unknown what is needed: %s", root.display_url, error)
        return Swept(problem=str(error))

    def is_over(attempt: str) -> bool:
        return attempt in over or has_ended(attempt) or has_expired(attempt)

    attempts = {attempt for attempt in {key.partition("/")[0] for key in stored} if is_over(attempt)}
    unneeded = sorted(key for key in stored if key not in named and key.partition("/")[0] in attempts)
    found = Swept(len(unneeded), sum(stored[key] for key in unneeded))
    if is_dry_run or not unneeded:
        return found
    if held_s < root.staleness_s():
        return Swept(
            problem=f"{len(unneeded)} shared files that seem unneeded are kept: on this file system, a listing may "
            f"lack what another host has just saved. A manager removes them once it has held the root for "
            f"{root.staleness_s():g} s, and bcp clean waits for that"
        )
    root.delete([f"{OBJECTS}/{key}" for key in unneeded])
    _log.info("%s: removed %d objects that no checkpoint needs", root.display_url, len(unneeded))
    return found


def uncommitted(root: StorageBackend) -> dict[str, float]:
    """Return the attempts that no manifest names, and their age in seconds: of the root's folders, or of the root.

    Failed saves have left them, or saves are still writing them. A folder whose manifest cannot be read is passed over.
    Raises ``StorageError``.
    """
    found: dict[str, float] = {}
    folders = [child for child in root.list_children("") if child.endswith("/")]
    for prefix in ("", *(one for one in folders if one != f"{OBJECTS}/" and not one.startswith(ATTEMPT_PREFIX))):
        children = root.list_children(prefix)
        attempts = {*attempts_among(children)}
        if attempts:
            folder = open_like(root, join(root.url, prefix[:-1])) if prefix else root
            try:
                manifest = find_manifest(folder)
            except CheckpointError as error:
                _log.warning("not touched, because it cannot be read: %s", error)
                continue
            if manifest is not None:
                attempts.discard(manifest.attempt)
        found |= {f"{prefix}{attempt}": _age_s(attempt) for attempt in sorted(attempts)}
    return found


def _age_s(attempt: str) -> float:
    """Return how long ago an attempt began, by the clock of its writer; 0 if its name has no time."""
    begun = attempt_time(attempt)
    return 0.0 if begun is None else time.time() - begun


def remove_uncommitted(root: StorageBackend, older_than_s: float) -> tuple[list[str], Swept]:
    """Remove the attempts that are older and that no manifest names, and the objects that no checkpoint needs.

    Returns their names, and what was removed of the objects. If another job holds the root, it removes them itself.
    Raises ``StorageError``.
    """
    try:
        with hold_root(root, patience_s=_PATIENCE_S):
            if uncommitted(root) or root.list_children(f"{OBJECTS}/"):
                time.sleep(root.staleness_s())
            old = [name for name, age_s in uncommitted(root).items() if age_s >= older_than_s]
            for name in old:
                remove_attempt(root, name)
            return old, sweep_older(root, older_than_s)
    except RootInUseError as error:
        return [], Swept(problem=str(error))


def sweep_older(root: StorageBackend, older_than_s: float, *, is_dry_run: bool = False) -> Swept:
    """Sweep what attempts have left that are so old. The caller has held the lease as long as a listing may be stale.

    Not if it ``is_dry_run``. Raises as ``sweep``.
    """
    return sweep(
        root,
        has_ended=lambda attempt: _age_s(attempt) >= older_than_s,
        held_s=root.staleness_s(),
        is_dry_run=is_dry_run,
    )


def _folders(root: StorageBackend) -> list[str]:
    """Return the folders of a root. Links count as well: the folder of a checkpoint may have been moved away."""
    if isinstance(root, LocalBackend):
        with os.scandir(root.url) as entries:
            return [entry.name for entry in entries if entry.name != OBJECTS and entry.is_dir()]
    return [child[:-1] for child in root.list_children("") if child.endswith("/") and child != f"{OBJECTS}/"]


def _needed_by(root: StorageBackend, name: str) -> tuple[Collection[str], Collection[str]]:
    """Return the objects that the checkpoint in a folder of the root needs, and the attempts that wrote them.

    Raises ``CheckpointError`` if its manifest cannot be read. Those of all checkpoints need not fit in memory.
    """
    folder = open_like(root, join(root.url, name))
    try:
        manifest = decode_manifest(folder.get(MANIFEST_KEY, max_size=MAX_MANIFEST_BYTES), folder.url)
    except KeyNotFoundError:
        return (), ()
    return (files_of(manifest), attempts_of(manifest)) if manifest.is_shared else ((), ())


def _delete(folder: StorageBackend, keys: Sequence[str]) -> None:
    """Delete keys, and from a store with directories also the folder when it is empty, which takes its parent.

    From a local folder, nothing is deleted through a link: not through one in the folder, whatever its owner, and the
    folder itself stays if it is one.
    """
    parent, name = parent_url(folder), folder_name(folder)
    if not parent or isinstance(folder, LocalBackend):
        folder.delete(keys)
        keys = keys[-1:]
    if parent and not os.path.islink(folder.url):
        open_like(folder, parent).delete([f"{name}/{key}" for key in keys])
