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

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from typing_extensions import Buffer

from ..errors import KeyNotFoundError, StorageError
from .base import ObjectStat, ObjectWriter, StorageBackend
from .fsspec_connection import Connection, connect, refuse_caches
from .fsspec_errors import map_error, mapped, redact
from .fsspec_objects import (
    beside,
    drop,
    holds_objects,
    open_in_directory,
    prune,
    publish,
    remove,
    store,
    store_exclusive,
)
from .fsspec_writers import BufferedWriter, StreamWriter
from .keys import check_children_prefix, check_key, check_prefix, is_object_key
from .pieces import byte_view

__all__ = ["FsspecBackend"]

# Objects up to this size are gathered in memory and stored by one request.
_BUFFERED_BYTES = 8 * 2**20

# S3 takes at most 10,000 parts, of at least 5 MiB each.
_PART_BYTES = 16 * 2**20
_PARTS = 9_000

_DELETES_AT_ONCE = 8


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
            store_exclusive(connection, action, key, content)
        else:
            store(connection, action, key, content)

    def create(self, key: str, size: int) -> ObjectWriter:
        check_key(key)
        action = f"writing {key!r} in {self._shown}"
        connection = self._connection(action, own=True)
        if size <= _BUFFERED_BYTES or connection.kind == "memory":
            return BufferedWriter(action, size, lambda data: store(connection, action, key, data))
        path = connection.path(key)
        if connection.kind == "objects":
            part = max(_PART_BYTES, -(-size // _PARTS))
            options = {"autocommit": False, "block_size": part}
            file = mapped(action, lambda: connection.fs.open(path, "wb", **options))
            return StreamWriter(action, size, file, drop=lambda: drop(connection, path))
        temporary = beside(path)
        file = mapped(action, lambda: open_in_directory(connection.fs, temporary))
        return StreamWriter(
            action,
            size,
            file,
            publish=lambda: publish(connection, action, temporary, path, size),
            drop=lambda: drop(connection, temporary),
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
        content = mapped(action, lambda: connection.fs.cat_file(connection.path(key), start=0), reading=True)
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

        info = mapped(action, look, reading=True)
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

        found = mapped(action, find, reading=True)
        infos = [info for info in found.values() if info["type"] == "file"]
        stats = [
            ObjectStat(key, int(info["size"]), _version(info))
            for key, info in ((connection.key(info["name"]), info) for info in infos)
            if key is not None and key.startswith(prefix) and is_object_key(key)
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
        for info in mapped(action, look, reading=True):
            key = connection.key(info["name"].rstrip("/"))
            if key is None or not key.startswith(prefix) or "/" in key[len(prefix) :] or not is_object_key(key):
                continue
            if info["type"] == "file":
                names.add(key[len(prefix) :])
            elif connection.kind == "objects" or holds_objects(connection, action, info["name"]):
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
                mapped(action, lambda: remove(connection, connection.path(key)), reading=True)

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
                prune(connection, parent)

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
            mine = mapped(action, lambda: connect(self._url, self._options))
            if mine.shareable:
                self._shared = mine
            elif not own:
                self._thread.connection = mine
        return mine

    def _check_reaches(self, connection: Connection, action: str, key: str, offset: int, end: int, got: int) -> None:
        size = self.stat(key).size
        if size < end:
            raise StorageError(
                f"{action}: wanted bytes [{offset}, {end}), got {got}: the object has only {size} bytes; it was cut "
                "short or replaced"
            )


def _version(info: dict[str, Any]) -> str:
    for name in ("ETag", "etag", "generation", "checksum"):
        if info.get(name):
            return str(info[name])
    parts = [info.get(name) for name in ("ino", "mtime", "LastModified", "created", "modified")]
    return "-".join(str(part) for part in parts if part is not None)
