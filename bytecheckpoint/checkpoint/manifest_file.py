"""Read a checkpoint's manifest, commit a new one, and remove files that no manifest names."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from ..errors import (
    BytecheckpointError,
    CheckpointError,
    CheckpointNotFoundError,
    CommitUnknownError,
    KeyNotFoundError,
    NotACheckpointError,
    StorageError,
    UsageError,
)
from ..format.manifest import MANIFEST_KEY, MAX_MANIFEST_BYTES, START, Manifest, decode, encode
from ..storage_backends.base import StorageBackend
from .attempts import ATTEMPT_PREFIX

__all__ = [
    "check_replaceable",
    "commit",
    "decode_manifest",
    "read_manifest",
    "read_manifest_bytes",
    "read_replaced_manifest",
    "remove_files",
]

_log = logging.getLogger(__name__)


def read_manifest_bytes(backend: StorageBackend) -> bytes:
    """Return the encoded manifest.

    Raises ``CheckpointNotFoundError`` if nothing is stored there and ``NotACheckpointError`` if other files are.
    """
    try:
        return backend.get(MANIFEST_KEY, max_size=MAX_MANIFEST_BYTES)
    except KeyNotFoundError:
        pass
    children = backend.list_children("")
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
    return decode_manifest(read_manifest_bytes(backend), backend.url)


def decode_manifest(data: bytes, url: str) -> Manifest:
    """Decode and validate a manifest. Errors name ``url``."""
    try:
        return decode(data)
    except BytecheckpointError as error:
        raise type(error)(f"{url}/{MANIFEST_KEY}: {error}") from error


def read_replaced_manifest(backend: StorageBackend) -> Manifest | None:
    """Return the manifest of the checkpoint that a save is about to overwrite.

    Returns None if there is no checkpoint, or none that can be read. In the second case it is unknown which files
    belong to the old checkpoint, so the save must keep all of them.
    """
    try:
        return decode_manifest(backend.get(MANIFEST_KEY, max_size=MAX_MANIFEST_BYTES), backend.url)
    except KeyNotFoundError:
        return None
    except CheckpointError as error:
        _log.warning("cannot read the checkpoint that this save overwrites; its files are kept: %s", error)
        return None


def check_replaceable(backend: StorageBackend) -> None:
    """Raise ``UsageError`` if a save would overwrite a ``manifest.msgpack`` of another program.

    A damaged manifest of this library may be overwritten.
    """
    start = bytearray(len(START))
    try:
        backend.read_into(MANIFEST_KEY, 0, start)
    except KeyNotFoundError:
        return
    except StorageError as error:
        start = bytearray(_size_of_stub(backend, error))
        backend.read_into(MANIFEST_KEY, 0, start)
    if not START.startswith(start) and any(start):  # a crash may leave zeros
        raise UsageError(
            f"{backend.url}/{MANIFEST_KEY} was not written by this library, and the save would overwrite it; remove "
            f"it, or save to another path"
        )


def _size_of_stub(backend: StorageBackend, error: StorageError) -> int:
    """Return the size of a manifest that is too short for ``START``; raise ``error`` if that is not why it arose."""
    try:
        size = backend.stat(MANIFEST_KEY).size
    except KeyNotFoundError:
        # S3 replies the same about a missing bucket, which `error` names.
        raise error from None
    if size >= len(START):
        raise error
    return size


def commit(backend: StorageBackend, manifest: Manifest) -> None:
    """Write the manifest. The checkpoint exists from this moment on, and not before.

    Raises ``StorageError`` if the manifest is certainly not in place (the attempt may be removed), and
    ``CommitUnknownError`` if its state is unknown (nothing may be removed).
    """
    data = encode(manifest)
    try:
        backend.put(MANIFEST_KEY, data)
    except Exception as error:
        if _is_in_place(backend, data, error):
            raise CommitUnknownError(
                f"{backend.url}: the manifest is in place, but the store reported {type(error).__name__}: {error}; "
                f"it may not survive a power failure. Open the path to check, or save again"
            ) from error
        raise


def _is_in_place(backend: StorageBackend, data: bytes, error: Exception) -> bool:
    try:
        return backend.get(MANIFEST_KEY) == data
    except KeyNotFoundError:
        return False
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
        _log.warning("%s: cannot remove files of an older attempt; they remain: %s", backend.url, error)
