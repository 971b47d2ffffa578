"""The manifest is the checkpoint: reading it, putting it in place, and removing what no manifest names any more."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Iterable

from ...errors import (
    BytecheckpointError,
    CheckpointError,
    CheckpointNotFoundError,
    CommitUnknownError,
    KeyNotFoundError,
    NotACheckpointError,
    StorageError,
)
from ...manifest import MANIFEST_KEY, MAX_MANIFEST_BYTES, Manifest, decode, encode
from ...storage_backends.base import StorageBackend

__all__ = [
    "ATTEMPT_MARK",
    "JOB_BYTES",
    "attempt_name",
    "commit",
    "decode_manifest",
    "job_of",
    "new_attempt",
    "new_attempt_id",
    "read_manifest",
    "read_manifest_bytes",
    "remove_attempt",
    "remove_files",
    "replaceable",
]

ATTEMPT_MARK = "attempt-"
"""What the name of every attempt's directory begins with."""

JOB_BYTES = 4

_OF_JOB = 1  # in the first byte of an attempt's id, which no time of this age needs
_JOB = re.compile(f"[0-9a-f]{{{2 * JOB_BYTES}}}")

_log = logging.getLogger(__name__)


def new_attempt() -> str:
    """A directory name that no other try will ever use: time, for people, and 64 random bits."""
    return attempt_name(new_attempt_id())


def new_attempt_id(job: bytes = b"") -> bytes:
    """What ``attempt_name`` makes a new name of, in 16 bytes: one rank makes it, all others name it alike.

    ``job``, of ``JOB_BYTES``, is the mark of a job that saves with a lease (``manager.lease``): the name then tells
    whose attempt it is.
    """
    kind = _OF_JOB if job else 0
    return bytes([kind]) + int(time.time()).to_bytes(7, "big") + job + secrets.token_bytes(8 - len(job))


def attempt_name(attempt_id: bytes) -> str:
    """The directory name of this id."""
    when = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(int.from_bytes(attempt_id[1:8], "big")))
    ids = attempt_id[8:]
    parts = [ids[:JOB_BYTES], ids[JOB_BYTES:]] if attempt_id[0] == _OF_JOB else [ids]
    return ATTEMPT_MARK + "-".join([when, *(part.hex() for part in parts)])


def job_of(attempt: str) -> bytes:
    """The mark in the name of an attempt that a job with a lease made; empty for any other."""
    parts = attempt.removeprefix(ATTEMPT_MARK).split("-")
    return bytes.fromhex(parts[1]) if len(parts) == 3 and _JOB.fullmatch(parts[1]) else b""


def read_manifest_bytes(backend: StorageBackend) -> bytes:
    """The raw manifest. Tells "nothing there" (``CheckpointNotFoundError``) from "something, but not a checkpoint"
    (``NotACheckpointError``)."""
    try:
        return backend.get(MANIFEST_KEY, max_size=MAX_MANIFEST_BYTES)
    except KeyNotFoundError:
        pass
    children = backend.list_children("")
    if not children:
        raise CheckpointNotFoundError(f"no checkpoint at {backend.url}: nothing is stored there; check the path")
    if all(name.startswith(ATTEMPT_MARK) for name in children):
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
    """The decoded and validated manifest. Errors name the checkpoint."""
    return decode_manifest(read_manifest_bytes(backend), backend.url)


def decode_manifest(data: bytes, url: str) -> Manifest:
    """Decode and validate; any ``CheckpointError`` is raised again with the checkpoint's URL in front."""
    try:
        return decode(data)
    except BytecheckpointError as error:
        raise type(error)(f"{url}/{MANIFEST_KEY}: {error}") from error


def replaceable(backend: StorageBackend) -> Manifest | None:
    """What is committed at a path that is about to be overwritten; None where there is nothing, or nothing readable:
    then there is no telling which files were its, and all are kept."""
    try:
        return read_manifest(backend)
    except (CheckpointNotFoundError, NotACheckpointError):
        return None
    except CheckpointError as error:
        _log.warning("what is there cannot be read; it is replaced and its files are kept: %s", error)
        return None


def commit(backend: StorageBackend, manifest: Manifest) -> None:
    """Put the manifest in place: from here on, and not before, the checkpoint exists.

    Raises ``StorageError`` if it certainly did not land (the attempt may be removed), ``CommitUnknownError`` if that
    cannot be told (nothing may be removed).
    """
    data = encode(manifest)
    try:
        backend.put(MANIFEST_KEY, data)
    except Exception as error:
        if _landed(backend, data, error):
            raise CommitUnknownError(
                f"{backend.url}: the manifest is in place, but the store reported {type(error).__name__}: {error}; "
                f"it may not survive a power cut. Open the path to check, or save again"
            ) from error
        raise


def _landed(backend: StorageBackend, data: bytes, error: Exception) -> bool:
    try:
        return backend.get(MANIFEST_KEY) == data
    except KeyNotFoundError:
        return False
    except StorageError as second:
        raise CommitUnknownError(
            f"{backend.url}: writing the manifest failed ({error}) and so did reading it back ({second}); the save may "
            f"or may not have been committed. Open the path once the store answers again"
        ) from error


def remove_files(backend: StorageBackend, keys: Iterable[str]) -> None:
    """Delete files that no committed manifest names. Failing to is logged, never raised: the commit stands."""
    try:
        backend.delete(list(keys))
    except StorageError as error:
        _log.warning("%s: files of an older attempt could not be removed and stay behind: %s", backend.url, error)


def remove_attempt(backend: StorageBackend, attempt: str) -> None:
    """Delete everything a failed attempt left. Never raises."""
    try:
        backend.delete([stat.key for stat in backend.list(f"{attempt}/")])
    except StorageError as error:
        _log.warning("%s: the failed attempt %s could not be removed and stays behind: %s", backend.url, attempt, error)
