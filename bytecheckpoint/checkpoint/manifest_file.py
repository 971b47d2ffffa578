"""Read a checkpoint's manifest, commit a new one, and remove files that no manifest names."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from ..engine.objects import OBJECTS
from ..errors import (
    BytecheckpointError,
    CheckpointError,
    CheckpointNotFoundError,
    CommitUnknownError,
    KeyChangedError,
    KeyExistsError,
    KeyNotFoundError,
    NotACheckpointError,
    StorageError,
    UnansweredError,
    UsageError,
)
from ..format.hf_index import refuse_pointer
from ..format.manifest.document import Manifest, Summary
from ..format.manifest.envelope import MANIFEST_KEY, MAX_MANIFEST_BYTES, START, decode, decode_summary, encode
from ..storage_backends import folder_name
from ..storage_backends.base import Conditions, StorageBackend
from .attempts import ATTEMPT_PREFIX

_MAX_TRIES = 16  # to replace a manifest that other saves replace at the same moments

# What a store that has not answered gets again, twice at most: to end its uploads, and to remove files.
_LEAST_S = 0.75

_T = TypeVar("_T")

_log = logging.getLogger(__name__)


def read_manifest_bytes(backend: StorageBackend) -> bytes:
    """Return the encoded manifest.

    Raises ``CheckpointNotFoundError`` if nothing is stored there and ``NotACheckpointError`` if other files are.
    """
    children: Sequence[str] = ()
    for _ in range(2):
        try:
            found = backend.get(MANIFEST_KEY, max_size=MAX_MANIFEST_BYTES)
        except KeyNotFoundError:
            children = backend.list_children("")
            if MANIFEST_KEY not in children:
                break
        else:
            refuse_pointer(found[:16], f"{backend.url}/{MANIFEST_KEY}")
            return found
    else:
        raise CheckpointError(
            f"{backend.url}/{MANIFEST_KEY} is listed but cannot be opened: another host may have just written it, and "
            f"this one still caches that it was missing; try again in a minute"
        )
    if not children:
        raise CheckpointNotFoundError(f"no checkpoint at {backend.url}: nothing is stored there; check the path")
    if all(name.startswith(ATTEMPT_PREFIX) for name in children):
        raise NotACheckpointError(
            f"no checkpoint at {backend.url}: {len(children)} save(s) began there but none was committed; "
            f"load an earlier checkpoint"
        )
    inner = [name for name in children if name.endswith("/")]
    hint = f"; did you mean one of {', '.join(inner[-3:])} below it?" if inner else ""
    raise NotACheckpointError(
        f"{backend.url} is not a checkpoint: it has no {MANIFEST_KEY} but holds {', '.join(children[:5])}"
        f"{', ...' if len(children) > 5 else ''}{hint}"
    )


def read_manifest(backend: StorageBackend) -> Manifest:
    """Return the decoded and validated manifest. Errors name the checkpoint's URL."""
    return _read(backend, decode)


def read_summary(backend: StorageBackend) -> Summary:
    """Return the summary of a manifest, whose checksum is verified. Errors name the checkpoint's URL."""
    return _read(backend, decode_summary)


def _read(backend: StorageBackend, decoded: Callable[[bytes], _T]) -> _T:
    data = read_manifest_bytes(backend)
    try:
        return _decode(data, backend.url, decoded)
    except CheckpointError:
        again = read_manifest_bytes(backend)
        if again == data:
            raise
    return _decode(again, backend.url, decoded)


def find_manifest(backend: StorageBackend) -> Manifest | None:
    """Return the manifest; None if there certainly is none, which a listing alone does not show. Raises otherwise."""
    try:
        return read_manifest(backend)
    except (CheckpointNotFoundError, NotACheckpointError):
        return None


def decode_manifest(data: bytes, url: str) -> Manifest:
    """Decode and validate a manifest. Errors name ``url``."""
    return _decode(data, url, decode)


def _decode(data: bytes, url: str, decoded: Callable[[bytes], _T]) -> _T:
    try:
        return decoded(data)
    except BytecheckpointError as error:
        raise type(error)(f"{url}/{MANIFEST_KEY}: {error}") from error


def check_replaceable(backend: StorageBackend) -> bool:
    """Return whether there is a manifest, which a save would overwrite.

    Raises ``UsageError`` if it is a ``manifest.msgpack`` of another program, or if the folder is not for checkpoints. A
    damaged manifest of this library may be overwritten.
    """
    check_name(backend)
    start, begun = bytearray(len(START)), time.monotonic()
    try:
        backend.read_into(MANIFEST_KEY, 0, start)
    except KeyNotFoundError:
        return False
    except StorageError as error:
        with rest_of_deadline(backend, begun):
            start = bytearray(_size_of_stub(backend, error))
        backend.read_into(MANIFEST_KEY, 0, start)
    if not START.startswith(start) and any(start):  # a crash may leave zeros
        raise UsageError(
            f"{backend.url}/{MANIFEST_KEY} was not written by this library, and the save would overwrite it; remove "
            f"it, or save to another path"
        )
    return True


def check_name(backend: StorageBackend) -> None:
    """Raise ``UsageError`` for the objects of a root: no search looks there, and a sweep would remove the files."""
    if folder_name(backend) == OBJECTS:
        raise UsageError(f"{backend.url} is where incremental checkpoints keep their files; use another name")


@contextmanager
def rest_of_deadline(backend: StorageBackend, begun: float) -> Iterator[None]:
    """Limit calls of ``backend``, which nothing else uses, to what remains of its deadline after an error.

    If the store does not answer, an error has taken all of it already, and the caller waits for that error.

    Args:
        backend: The backend.
        begun: When the wait for it began, by ``time.monotonic``.
    """
    deadline_s = backend.deadline_s
    backend.deadline_s = max(min(_LEAST_S, deadline_s), begun + deadline_s - time.monotonic())
    try:
        yield
    finally:
        backend.deadline_s = deadline_s


def _size_of_stub(backend: StorageBackend, error: StorageError) -> int:
    """Return the size of a manifest that is too short for ``START``; raise ``error`` if that is not why it arose."""
    try:
        size = backend.stat(MANIFEST_KEY).size
    except StorageError:
        # No such key: S3 replies the same about a missing bucket, which `error` names.
        raise error from None
    if size >= len(START):
        raise error
    return size


@dataclass(frozen=True)
class _Replaced:
    """The manifest that a commit replaces; no bytes if there is none."""

    data: bytes = b""
    version: str = ""

    @classmethod
    def read(cls, backend: StorageBackend) -> _Replaced:
        try:
            return cls(*backend.get_versioned(MANIFEST_KEY, max_size=MAX_MANIFEST_BYTES))
        except KeyNotFoundError:
            return cls()

    def put(self, backend: StorageBackend, data: bytes, conditions: Conditions) -> None:
        """Put ``data`` in its place; raise ``KeyExistsError`` or ``KeyChangedError`` if something else is there."""
        is_none = self == _Replaced()
        if is_none and conditions.if_absent:
            backend.put(MANIFEST_KEY, data, if_absent=True)
        elif not is_none and conditions.if_version:
            backend.put(MANIFEST_KEY, data, if_version=self.version)
        else:
            backend.put(MANIFEST_KEY, data)

    def is_later_than(self, time: str) -> bool:
        """Whether this is the manifest of a checkpoint that was created after ``time``."""
        try:
            return bool(self.data) and decode(self.data).created > time
        except CheckpointError:
            return False

    def decode(self, url: str) -> Manifest | None:
        """Return the manifest; None if there is none, or if it is unknown which files belong to it."""
        if not self.data:
            return None
        try:
            return decode_manifest(self.data, url)
        except CheckpointError as error:
            _log.warning("cannot read the checkpoint that this save overwrites; its files are kept: %s", error)
            return None


def commit(
    backend: StorageBackend,
    manifest: Manifest | bytes,
    *,
    is_new: bool = False,
    may_replace: bool = True,
    unless_after: str = "",
    admit: Callable[[], None] = lambda: None,
) -> Manifest | None:
    """Write the manifest. The checkpoint exists from this moment on, and not before.

    It replaces exactly the manifest that this function has read, if the store can decide that (``conditions``). If
    another save is committed in between, this function reads and replaces that one.

    Args:
        backend: The store whose root is the checkpoint.
        manifest: The manifest; or its bytes, which are stored as they are.
        is_new: There was no manifest before, so that none needs to be read.
        may_replace: If false, raise if there is a manifest.
        unless_after: If not empty, raise if there is a manifest that was created after this time.
        admit: Called right before each put. What it raises ends the commit.

    Returns:
        The manifest that was replaced, whose files are no longer needed; None if there was none that can be read.

    Raises:
        KeyExistsError: There is a manifest, and ``may_replace`` is false; or it was created after ``unless_after``.
        StorageError: The manifest is certainly not in place, so that the attempt may be removed.
        CommitUnknownError: It is unknown whether the manifest is in place. Nothing may be removed.
        UsageError: The folder is not for checkpoints.
    """
    check_name(backend)
    data = manifest if isinstance(manifest, bytes) else encode(manifest)
    conditions = backend.conditions()
    expects_none = (is_new or not may_replace) and conditions.if_absent
    replaced = _Replaced() if expects_none else _Replaced.read(backend)
    for tries_left in reversed(range(_MAX_TRIES)):
        if replaced.data == data:
            return None
        if not may_replace and replaced.data:
            raise KeyExistsError(
                f"{backend.url} already holds a checkpoint, which another program has committed; it was not changed"
            )
        if unless_after and replaced.is_later_than(unless_after):
            raise KeyExistsError(f"{backend.url} holds a checkpoint that was saved later; it was not changed")
        admit()
        begun = time.monotonic()
        try:
            replaced.put(backend, data, conditions)
        except (KeyExistsError, KeyChangedError) as error:
            found = _read_back(backend, error, begun)
            if found.data == data:
                break  # the reply to the put was lost, and its repetition was refused
            if not tries_left:
                raise
            replaced = found
        except Exception as error:
            if _read_back(backend, error, begun).data == data:
                raise CommitUnknownError(
                    f"{backend.url}: the manifest is in place, but the store reported {type(error).__name__}: {error}; "
                    f"it may not survive a power failure. Open the path to check, or save again"
                ) from error
            if isinstance(error, UnansweredError):
                raise CommitUnknownError(
                    f"{backend.url}: the manifest is not in place, but the store may still put it there, because it "
                    f"did not reply ({error}); nothing was removed. Open the path later to check, or save again"
                ) from error
            raise
        else:
            break
    return replaced.decode(backend.url)


def adopt(backend: StorageBackend, manifest: bytes) -> Manifest | None:
    """Store a manifest that another machine has committed on a disk that only this one sees.

    Returns the manifest that it replaces, as ``commit`` does; None also if another process has stored it already.
    """
    replaced = _Replaced.read(backend)
    if replaced.data == manifest:
        return None
    backend.put(MANIFEST_KEY, manifest)
    return replaced.decode(backend.url)


def _read_back(backend: StorageBackend, error: Exception, begun: float) -> _Replaced:
    """Return what is in place after a put that began at ``begun`` and raised ``error``."""
    try:
        with rest_of_deadline(backend, begun):
            return _Replaced.read(backend)
    except StorageError as second:
        raise CommitUnknownError(
            f"{backend.url}: writing the manifest failed ({error}), and reading it back failed too ({second}); the "
            f"checkpoint may or may not be committed. Open the path when the store responds again"
        ) from error


def remove_files(backend: StorageBackend, keys: Iterable[str]) -> None:
    """Delete files that no committed manifest names. Logs a failure and never raises: the commit is not affected."""
    try:
        backend.delete(list(keys))
    except StorageError as error:
        _log.warning("%s: cannot remove files of an older attempt; they remain: %s", backend.display_url, error)
