"""Every store that fsspec can reach: S3, GCS, Azure, HDFS, SFTP, SMB, WebDAV and the rest.

What is atomic depends on the store, and this is what the backend does on each kind:

==================  =================================  =============================  ==============================
kind                ``put``                            ``put(if_absent=True)``        ``create``
==================  =================================  =============================  ==============================
object stores       one PUT, atomic and durable        the store's conditional PUT    a multipart upload; visible as
(``async_impl``)                                       on S3, GCS and Azure           a whole on ``complete``
fsspec ``file``     temporary file, fsync, rename      hard link                      the same temporary file
fsspec ``memory``   one assignment                     a lock of this process         one assignment
all others          temporary file, ``mv``             refused: ``StorageError``      the same temporary file
(HDFS, SFTP, ...)
==================  =================================  =============================  ==============================

Where ``if_absent`` is refused, an emulation (look, then put) would not be decided by the store: two writers could both
win. On "all others" a ``put`` that replaces an object is atomic where the store's rename replaces (SFTP, WebDAV); where
it does not (HDFS, SMB), the old object is removed first, and a crash between the two leaves only the temporary file.

fsspec's ``file`` is here for chains (``dir::file:///...``): directories that it makes are not synced, so a path opened
as a path is what survives a power cut for certain. fsspec's caches are refused, since they serve what was replaced.

Retries and timeouts of single requests are the file system's own. After a lost reply its retry of a conditional PUT
may find the key taken by its own first try: read the object back to know.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from typing_extensions import Buffer

from ..errors import KeyExistsError, KeyNotFoundError, StorageError
from .base import ObjectStat, ObjectWriter, StorageBackend
from .fsspec_connection import Connection, connect, refuse_caches
from .fsspec_errors import map_error, redact
from .fsspec_writers import BufferedWriter, StreamWriter
from .keys import check_children_prefix, check_key, check_prefix, is_key
from .pieces import byte_view
from .posix import sync_directory

__all__ = ["FsspecBackend"]

_TEMPORARY = ".bcp-tmp-"

# Objects up to this size are gathered in memory and stored by one request.
_BUFFERED_BYTES = 8 * 2**20

# S3 takes at most 10,000 parts, of at least 5 MiB each.
_PART_BYTES = 16 * 2**20
_PARTS = 9_000

_DELETES_AT_ONCE = 8

# A delete in another thread or process may remove a directory between our makedirs and our open.
_TRIES = 16

_T = TypeVar("_T")


class FsspecBackend(StorageBackend):
    """Objects below ``url`` in an fsspec file system made with ``options``.

    The file system is made at the first use, for this backend alone (its listings are never cached), again in a forked
    child, and once a thread where fsspec's implementation is not made for threads.
    """

    def __init__(self, url: str, **options: Any) -> None:
        self._url = url.rstrip("/") if not url.endswith("://") else url
        self._shown = redact(self._url)
        self._options = options
        self._shared: Connection | None = None
        self._thread = threading.local()
        self._abandoned: list[Connection] = []
        refuse_caches(url)

    @classmethod
    def from_url(cls, url: str, **options: Any) -> FsspecBackend:
        return cls(url, **options)

    @property
    def url(self) -> str:
        return self._url

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        check_key(key)
        action = f"writing {key!r} in {self._shown}"
        connection = self._connection(action)
        content = bytes(byte_view(data))
        if if_absent:
            self._put_exclusive(connection, action, key, content)
        else:
            self._put(connection, action, key, content)

    def create(self, key: str, size: int) -> ObjectWriter:
        check_key(key)
        action = f"writing {key!r} in {self._shown}"
        connection = self._connection(action, own=True)
        if size <= _BUFFERED_BYTES or connection.kind == "memory":
            return BufferedWriter(action, size, lambda data: self._put(connection, action, key, data))
        path = connection.path(key)
        if connection.kind == "objects":
            part = max(_PART_BYTES, -(-size // _PARTS))
            options = {"autocommit": False, "block_size": part}
            file = self._call(action, lambda: connection.fs.open(path, "wb", **options))
            return StreamWriter(action, size, file, drop=lambda: self._drop(connection, path))
        temporary = _beside(path)
        file = self._call(action, lambda: _open_in_directory(connection.fs, temporary))
        return StreamWriter(
            action,
            size,
            file,
            publish=lambda: self._rename(connection, action, temporary, path, size),
            drop=lambda: self._drop(connection, temporary),
        )

    def read_into(self, key: str, offset: int, buffer: Buffer) -> None:
        check_key(key)
        action = f"reading {key!r} in {self._shown}"
        view = byte_view(buffer)
        if view.readonly:
            raise StorageError(f"{action}: the buffer to read into is read-only")
        if offset < 0:
            raise StorageError(f"{action}: the offset is {offset}")
        end = offset + len(view)
        connection = self._connection(action)
        if not len(view):
            # A range of no bytes cannot be said in HTTP.
            self._check_reaches(connection, action, key, offset, end, 0)
            return
        try:
            content = connection.fs.cat_file(connection.path(key), start=offset, end=end)
        except Exception as error:
            mapped = map_error(error, action, reading=True)
            if type(mapped) is StorageError:
                # Stores answer a range beyond the end with an error of their own.
                self._check_reaches(connection, action, key, offset, end, 0)
            raise mapped from error
        if len(content) != len(view):
            self._check_reaches(connection, action, key, offset, end, len(content))
            raise StorageError(f"{action}: wanted bytes [{offset}, {end}), got {len(content)} bytes; try again")
        view[:] = content

    def get(self, key: str, *, max_size: int | None = None) -> bytes:
        action = f"reading {key!r} in {self._shown}"
        size = self.stat(key).size
        if max_size is not None and size > max_size:
            raise StorageError(f"{action}: it has {size} bytes, at most {max_size} were expected")
        if size == 0:
            return b""
        connection = self._connection(action)
        # start=0 makes it one request: s3fs fetches a large object without it in parallel ranges, and these could be
        # of two objects when it is replaced meanwhile.
        content = self._call(action, lambda: connection.fs.cat_file(connection.path(key), start=0), reading=True)
        if max_size is not None and len(content) > max_size:
            raise StorageError(f"{action}: it has {len(content)} bytes, at most {max_size} were expected")
        return bytes(content)

    def stat(self, key: str) -> ObjectStat:
        check_key(key)
        action = f"looking at {key!r} in {self._shown}"
        connection = self._connection(action)

        def look() -> Any:
            connection.fs.invalidate_cache()
            return connection.fs.info(connection.path(key))

        info = self._call(action, look, reading=True)
        if info["type"] != "file":
            raise KeyNotFoundError(f"{action}: no such object")
        return ObjectStat(key, int(info["size"]), _version(info))

    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        check_prefix(prefix)
        action = f"listing {prefix!r} in {self._shown}"
        connection = self._connection(action)
        directory = connection.path(prefix[: prefix.rfind("/") + 1])

        def find() -> Any:
            connection.fs.invalidate_cache()
            try:
                return connection.fs.find(directory, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return {}

        found = self._call(action, find, reading=True)
        infos = [info for info in found.values() if info["type"] == "file"]
        stats = [
            ObjectStat(key, int(info["size"]), _version(info))
            for key, info in ((connection.key(info["name"]), info) for info in infos)
            if key is not None and key.startswith(prefix) and _is_object_key(key)
        ]
        return iter(sorted(stats, key=lambda found: found.key))

    def list_children(self, prefix: str = "") -> Sequence[str]:
        check_children_prefix(prefix)
        action = f"listing {prefix!r} in {self._shown}"
        connection = self._connection(action)

        def look() -> Any:
            connection.fs.invalidate_cache()
            try:
                return connection.fs.ls(connection.path(prefix), detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return []

        names = set()
        for info in self._call(action, look, reading=True):
            key = connection.key(info["name"].rstrip("/"))
            if key is None or not key.startswith(prefix) or "/" in key[len(prefix) :] or not _is_object_key(key):
                continue
            if info["type"] == "file":
                names.add(key[len(prefix) :])
            elif connection.kind == "objects" or self._holds_objects(connection, action, info["name"]):
                names.add(key[len(prefix) :] + "/")
        return sorted(names)

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(key)
        connection = self._connection(f"deleting in {self._shown}")

        # One request a key: s3fs's bulk delete drops the errors of single keys.
        def delete_one(key: str) -> None:
            action = f"deleting {key!r} in {self._shown}"
            with suppress(KeyNotFoundError):
                self._call(action, lambda: self._remove_file(connection, connection.path(key)), reading=True)

        if connection.fs.async_impl and len(keys) > 1:
            with ThreadPoolExecutor(_DELETES_AT_ONCE, thread_name_prefix="bcp-delete") as pool:
                for _ in pool.map(delete_one, keys):
                    pass
        else:
            for key in keys:
                delete_one(key)
        if connection.kind in ("file", "others"):
            parents = {os.path.dirname(connection.path(key)) for key in keys}
            for parent in sorted(parents, key=len, reverse=True):
                self._prune(connection, parent)

    def close(self) -> None:
        self._shared = None
        self._thread = threading.local()

    def _connection(self, action: str, *, own: bool = False) -> Connection:
        """The file system to use in this thread, or one of its ``own`` for a writer that other threads will use."""
        mine: Connection | None = getattr(self._thread, "connection", None) or self._shared
        if mine is not None and mine.pid != os.getpid():
            # Its event loop, its sockets and its locks are the parent's. Finalizing it could hang, so it is kept.
            self._abandoned.append(mine)
            mine = None
        if mine is None or (own and not mine.shareable):
            mine = self._call(action, lambda: connect(self._url, self._options))
            if mine.shareable:
                self._shared = mine
            elif not own:
                self._thread.connection = mine
        return mine

    def _call(self, action: str, function: Callable[[], _T], *, reading: bool = False) -> _T:
        try:
            return function()
        except Exception as error:
            raise map_error(error, action, reading=reading) from error

    def _put(self, connection: Connection, action: str, key: str, content: bytes) -> None:
        path = connection.path(key)
        if connection.kind in ("objects", "memory"):
            self._call(action, lambda: connection.fs.pipe_file(path, content))
            return
        temporary = self._write_temporary(connection, action, path, content)
        self._rename(connection, action, temporary, path, len(content))

    def _put_exclusive(self, connection: Connection, action: str, key: str, content: bytes) -> None:
        path = connection.path(key)
        fs = connection.fs
        if connection.kind == "memory":
            with _memory_lock:
                if self._call(action, lambda: fs.isfile(path)):
                    raise KeyExistsError(f"{action}: the key is taken")
                self._call(action, lambda: fs.pipe_file(path, content))
        elif connection.kind == "file":
            temporary = self._write_temporary(connection, action, path, content)
            try:
                self._call(action, lambda: fs.link(temporary, path))
            finally:
                self._drop(connection, temporary)
        elif connection.conditional:
            try:
                fs.pipe_file(path, content, mode="create")
            except Exception as error:
                if _is_precondition(error) and self._exists(connection, path):
                    raise KeyExistsError(f"{action}: the key is taken") from error
                raise map_error(error, action, reading=False) from error
        else:
            raise StorageError(
                f"{action}: {type(fs).__name__} has no conditional put, so it cannot decide which of two writers wins; "
                "use s3://, gs://, abfs:// or a local path where that matters"
            )

    def _write_temporary(self, connection: Connection, action: str, path: str, content: bytes) -> str:
        temporary = _beside(path)

        def write() -> None:
            with _open_in_directory(connection.fs, temporary) as file:
                file.write(content)
                file.flush()
                with suppress(AttributeError, OSError):
                    os.fsync(file.fileno())

        try:
            self._call(action, write)
        except StorageError:
            self._drop(connection, temporary)
            raise
        return temporary

    def _rename(self, connection: Connection, action: str, temporary: str, path: str, size: int) -> None:
        fs = connection.fs
        if connection.kind == "file":
            self._call(action, lambda: os.replace(temporary, path))
            self._call(action, lambda: sync_directory(os.path.dirname(path)))
            return
        try:
            try:
                fs.mv(temporary, path)
            except Exception:
                if not self._exists(connection, path):
                    raise
            # Some stores refuse to rename over an object by an error, others (WebHDFS) by saying nothing.
            if self._exists(connection, temporary):
                fs.rm_file(path)
                fs.mv(temporary, path)
            found = fs.info(path)["size"]
        except Exception as error:
            raise map_error(error, action, reading=False) from error
        if found != size:
            raise StorageError(f"{action}: it has {found} bytes after the rename, not the {size} that were written")

    def _remove_file(self, connection: Connection, path: str) -> None:
        # Object stores take the deletion of what is not there; on others a directory is not the object.
        if connection.kind == "objects" or connection.fs.isfile(path):
            connection.fs.rm_file(path)

    def _drop(self, connection: Connection, path: str) -> None:
        with suppress(FileNotFoundError):
            self._remove_file(connection, path)

    def _prune(self, connection: Connection, directory: str) -> None:
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

    def _holds_objects(self, connection: Connection, action: str, directory: str) -> bool:
        walk = connection.fs.walk(directory)
        return self._call(action, lambda: any(files for _, _, files in walk), reading=True)

    def _exists(self, connection: Connection, path: str) -> bool:
        connection.fs.invalidate_cache()
        return bool(connection.fs.exists(path))

    def _check_reaches(self, connection: Connection, action: str, key: str, offset: int, end: int, got: int) -> None:
        size = self.stat(key).size
        if size < end:
            raise StorageError(
                f"{action}: wanted bytes [{offset}, {end}), got {got}: the object has only {size} bytes; it was cut "
                "short or replaced"
            )


_memory_lock = threading.Lock()


def _is_object_key(key: str) -> bool:
    return is_key(key) and not key.rpartition("/")[2].startswith(_TEMPORARY)


def _beside(path: str) -> str:
    return f"{os.path.dirname(path)}/{_TEMPORARY}{secrets.token_hex(8)}"


def _open_in_directory(fs: Any, path: str) -> Any:
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


def _version(info: dict[str, Any]) -> str:
    for name in ("ETag", "etag", "generation", "checksum"):
        if info.get(name):
            return str(info[name])
    parts = [info.get(name) for name in ("ino", "mtime", "LastModified", "created", "modified")]
    return "-".join(str(part) for part in parts if part is not None)


def _is_precondition(error: Exception) -> bool:
    """Whether a store said that its key is taken: 412, or 409 where two conditional writes met."""
    if isinstance(error, FileExistsError):
        return True
    if isinstance(error, OSError) and error.errno in (errno.EINVAL, errno.EBUSY):
        return True
    return getattr(error, "code", None) in (409, 412) or getattr(error, "status_code", None) in (409, 412)
