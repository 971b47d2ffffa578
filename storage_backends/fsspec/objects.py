"""How an object gets under its key, and away from it, on each kind of file system (see ``FsspecBackend``).

``action`` says in errors what was being done. All raise members of the errors tree, but for ``remove``, ``drop`` and
``open_in_directory``, which raise what the file system does.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
from contextlib import suppress
from typing import Any

from ..errors import KeyExistsError, StorageError
from .fsspec_connection import Connection
from .fsspec_errors import map_error, mapped
from .keys import TEMPORARY
from .posix import sync_directory

__all__ = [
    "beside",
    "drop",
    "holds_objects",
    "open_in_directory",
    "prune",
    "publish",
    "remove",
    "store",
    "store_exclusive",
]

# A delete in another thread or process may remove a directory between our makedirs and our open.
_TRIES = 16

_memory_lock = threading.Lock()


def store(connection: Connection, action: str, key: str, content: bytes) -> None:
    """Put a whole object, replacing what has its key."""
    path = connection.path(key)
    if connection.kind in ("objects", "memory"):
        mapped(action, lambda: connection.fs.pipe_file(path, content))
        return
    temporary = _write_temporary(connection, action, path, content)
    publish(connection, action, temporary, path, len(content))


def store_exclusive(connection: Connection, action: str, key: str, content: bytes) -> None:
    """Put a whole object unless its key is taken (``KeyExistsError``), or the store cannot tell (``StorageError``)."""
    path = connection.path(key)
    fs = connection.fs
    if connection.kind == "memory":
        with _memory_lock:
            if mapped(action, lambda: fs.isfile(path)):
                raise KeyExistsError(f"{action}: the key is taken")
            mapped(action, lambda: fs.pipe_file(path, content))
    elif connection.kind == "file":
        temporary = _write_temporary(connection, action, path, content)
        try:
            mapped(action, lambda: fs.link(temporary, path))
        finally:
            drop(connection, temporary)
    elif connection.conditional:
        try:
            fs.pipe_file(path, content, mode="create")
        except Exception as error:
            if _is_precondition(error) and _exists(connection, path):
                raise KeyExistsError(f"{action}: the key is taken") from error
            raise map_error(error, action, reading=False) from error
    else:
        raise StorageError(
            f"{action}: {type(fs).__name__} has no conditional put, so it cannot decide which of two writers wins; "
            "use s3://, gs://, abfs:// or a local path where that matters"
        )


def _write_temporary(connection: Connection, action: str, path: str, content: bytes) -> str:
    temporary = beside(path)

    def write() -> None:
        with open_in_directory(connection.fs, temporary) as file:
            file.write(content)
            file.flush()
            with suppress(AttributeError, OSError):
                os.fsync(file.fileno())

    try:
        mapped(action, write)
    except StorageError:
        drop(connection, temporary)
        raise
    return temporary


def publish(connection: Connection, action: str, temporary: str, path: str, size: int) -> None:
    """Give the finished file ``temporary``, of ``size`` bytes, the name ``path``."""
    fs = connection.fs
    if connection.kind == "file":
        mapped(action, lambda: os.replace(temporary, path))
        mapped(action, lambda: sync_directory(os.path.dirname(path)))
        return
    try:
        try:
            fs.mv(temporary, path)
        except Exception:
            if not _exists(connection, path):
                raise
        # Some stores refuse to rename over an object by an error, others (WebHDFS) by saying nothing.
        if _exists(connection, temporary):
            fs.rm_file(path)
            fs.mv(temporary, path)
        found = fs.info(path)["size"]
    except Exception as error:
        raise map_error(error, action, reading=False) from error
    if found != size:
        raise StorageError(f"{action}: it has {found} bytes after the rename, not the {size} that were written")


def remove(connection: Connection, path: str) -> None:
    """Delete the object at ``path``. What is not there is no error on object stores, and may be one on others."""
    # Object stores take the deletion of what is not there; on others a directory is not the object.
    if connection.kind == "objects" or connection.fs.isfile(path):
        connection.fs.rm_file(path)


def drop(connection: Connection, path: str) -> None:
    """``remove`` what may be gone already."""
    with suppress(FileNotFoundError):
        remove(connection, path)


def prune(connection: Connection, directory: str) -> None:
    """Remove empty directories, up to but without the root. One that somebody fills meanwhile stays."""
    root = connection.path("").rstrip("/")
    while directory.startswith(root + "/") and directory != root:
        try:
            if connection.fs.ls(directory, detail=False):
                return
            connection.fs.rmdir(directory)
        except FileNotFoundError:
            pass
        except OSError:
            return
        directory = os.path.dirname(directory)


def holds_objects(connection: Connection, action: str, directory: str) -> bool:
    """Whether there is a file anywhere below ``directory``."""
    walk = connection.fs.walk(directory)
    return mapped(action, lambda: any(files for _, _, files in walk), reading=True)


def _exists(connection: Connection, path: str) -> bool:
    connection.fs.invalidate_cache()
    return bool(connection.fs.exists(path))


def beside(path: str) -> str:
    """A name for a temporary file, in the directory of ``path``."""
    return f"{os.path.dirname(path)}/{TEMPORARY}{secrets.token_hex(8)}"


def open_in_directory(fs: Any, path: str) -> Any:
    """A new file, its directory made; again where a delete elsewhere removes the directory in between."""
    for tries_left in reversed(range(_TRIES)):
        try:
            fs.makedirs(os.path.dirname(path), exist_ok=True)
            return fs.open(path, "wb")
        except FileNotFoundError:
            if not tries_left:
                raise
        except FileExistsError as error:
            # makedirs says so too where a directory that it found was removed before it looked again.
            if not tries_left:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from error
    raise AssertionError("not reached")


def _is_precondition(error: Exception) -> bool:
    """Whether a store said that its key is taken: 412, or 409 where two conditional writes met."""
    if isinstance(error, FileExistsError):
        return True
    if isinstance(error, OSError) and error.errno in (errno.EINVAL, errno.EBUSY):
        return True
    return getattr(error, "code", None) in (409, 412) or getattr(error, "status_code", None) in (409, 412)
