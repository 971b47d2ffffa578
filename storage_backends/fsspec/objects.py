"""Put, publish and remove objects on each kind of file system (see ``FsspecBackend``).

``action`` describes the operation in error messages. All functions raise ``StorageError`` (``UnansweredError`` where
the store may still take the object), except ``remove``, ``remove_if_exists`` and ``open_in_directory``, which raise the
file system's exceptions.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
from contextlib import suppress
from typing import Any

from ...errors import KeyExistsError, StorageError
from ..keys import TEMPORARY_PREFIX
from ..posix import sync_directory
from .connection import Connection
from .errors import map_error, translated_errors

__all__ = [
    "flush_to_device",
    "has_objects",
    "open_in_directory",
    "publish",
    "put_object",
    "put_object_if_absent",
    "remove",
    "remove_empty_directories",
    "remove_if_exists",
    "temporary_path",
]

# A delete in another thread or process may remove a directory between makedirs and open, repeatedly.
_MAX_TRIES = 16

_memory_lock = threading.Lock()


def put_object(connection: Connection, action: str, key: str, content: bytes) -> None:
    """Store a complete object and replace what has its key."""
    path = connection.path(key)
    if connection.kind in ("objects", "memory"):
        with translated_errors(action, putting=True):
            connection.fs.pipe_file(path, content)
        return
    temporary = _write_temporary(connection, action, path, content)
    publish(connection, action, temporary, path, len(content))


def put_object_if_absent(connection: Connection, action: str, key: str, content: bytes) -> None:
    """Store a complete object unless its key exists.

    Raises ``KeyExistsError`` if it does, and ``StorageError`` if the store cannot decide this.
    """
    path = connection.path(key)
    fs = connection.fs
    if connection.kind == "memory":
        with _memory_lock, translated_errors(action, putting=True):
            if fs.isfile(path):
                raise KeyExistsError(f"{action}: the key is taken")
            fs.pipe_file(path, content)
    elif connection.kind == "file":
        temporary = _write_temporary(connection, action, path, content)
        try:
            with translated_errors(action):
                fs.link(temporary, path)
        finally:
            remove_if_exists(connection, temporary)
    elif connection.has_rename:
        temporary = _write_temporary(connection, action, path, content)
        try:
            with translated_errors(action, putting=True):
                fs.mv(temporary, path, overwrite=False)
        except KeyExistsError:
            remove_if_exists(connection, temporary)
            raise
    elif connection.has_conditional_put:
        try:
            fs.pipe_file(path, content, mode="create")
        except Exception as error:
            if _is_precondition(error) and _exists(connection, path):
                raise KeyExistsError(f"{action}: the key is taken") from error
            raise map_error(error, action, reading=False, putting=True) from error
    else:
        raise StorageError(
            f"{action}: {connection.name} has no conditional put, so it cannot decide which of two writers wins; "
            "use s3://, gs://, az:// or a local path instead"
        )


def _write_temporary(connection: Connection, action: str, path: str, content: bytes) -> str:
    temporary = temporary_path(path)
    try:
        with translated_errors(action):
            connection.call(_write_file, connection.fs, temporary, content)
    except StorageError:
        remove_if_exists(connection, temporary)
        raise
    return temporary


def _write_file(fs: Any, path: str, content: bytes) -> None:
    with open_in_directory(fs, path) as file:
        file.write(content)
        flush_to_device(file)


def flush_to_device(file: Any) -> None:
    """Flush a file, and make it durable if it is a file of the operating system."""
    file.flush()
    with suppress(AttributeError, OSError):
        os.fsync(file.fileno())


def publish(connection: Connection, action: str, temporary: str, path: str, size: int) -> None:
    """Give the finished file ``temporary``, of ``size`` bytes, the name ``path``."""
    fs = connection.fs
    if connection.kind == "file":
        with translated_errors(action):
            os.replace(temporary, path)
            sync_directory(os.path.dirname(path))
        return
    if connection.has_rename:
        with translated_errors(action, putting=True):
            fs.mv(temporary, path, overwrite=True)
        return
    with translated_errors(action, putting=True):
        try:
            fs.mv(temporary, path)
        except Exception:
            if not _exists(connection, path):
                raise
        # Some stores refuse to rename over an object with an error, others (WebHDFS) silently.
        if _exists(connection, temporary):
            fs.rm_file(path)
            fs.mv(temporary, path)
        found = fs.info(path)["size"]
    if found != size:
        raise StorageError(f"{action}: it has {found} bytes after the rename, not the {size} that were written")


def remove(connection: Connection, path: str) -> None:
    """Delete the object at ``path``. A missing object is not an error on object stores, but may be one on others."""
    # Object stores accept the deletion of a missing key. On others, the path may be a directory.
    if connection.kind == "objects" or connection.fs.isfile(path):
        connection.fs.rm_file(path)


def remove_if_exists(connection: Connection, path: str) -> None:
    """Delete the object at ``path`` if it exists."""
    with suppress(FileNotFoundError):
        remove(connection, path)


def remove_empty_directories(connection: Connection, directory: str) -> None:
    """Remove empty directories up to, but without, the root. A directory that is filled at the same time remains."""
    root = connection.path("").rstrip("/")
    while directory.startswith(root + "/") and directory != root:
        try:
            if connection.fs.ls(directory, detail=False):
                return
            connection.fs.rmdir(directory)
        except FileNotFoundError:
            pass
        except Exception:  # noqa: BLE001 - clients raise anything about a directory that is not empty any more
            return
        directory = os.path.dirname(directory)


def has_objects(connection: Connection, action: str, directory: str) -> bool:
    """Whether there is a file anywhere below ``directory``."""
    with translated_errors(action, reading=True):
        return connection.call(lambda: any(files for _, _, files in connection.fs.walk(directory)))


def _exists(connection: Connection, path: str) -> bool:
    connection.fs.invalidate_cache()
    return bool(connection.fs.exists(path))


def temporary_path(path: str) -> str:
    """Return a new name for a temporary file in the directory of ``path``."""
    return f"{os.path.dirname(path)}/{TEMPORARY_PREFIX}{secrets.token_hex(8)}"


def open_in_directory(fs: Any, path: str) -> Any:
    """Create a file and its directory; retry if a delete elsewhere removes the directory in between."""
    for tries_left in reversed(range(_MAX_TRIES)):
        try:
            fs.makedirs(os.path.dirname(path), exist_ok=True)
            return fs.open(path, "wb")
        except FileNotFoundError:
            if not tries_left:
                raise
        except FileExistsError as error:
            # makedirs also raises this if a directory that it has found is removed before it checks again.
            if not tries_left:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from error
    raise AssertionError("not reached")


def _is_precondition(error: Exception) -> bool:
    """Whether an error means that the key exists: 412, or 409 if two conditional writes collide."""
    if isinstance(error, FileExistsError):
        return True
    if isinstance(error, OSError) and error.errno in (errno.EINVAL, errno.EBUSY):
        return True
    return getattr(error, "code", None) in (409, 412) or getattr(error, "status_code", None) in (409, 412)
