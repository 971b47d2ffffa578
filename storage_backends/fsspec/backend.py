"""The backend for every store that fsspec can reach: GCS, Azure, HDFS, SFTP, SMB, WebDAV and others.

S3 has its own (``storage_backends.s3``), and so have GCS and Azure if obstore is installed and has the options that are
passed (``storage_backends.obstore``). A chain (``dir::s3://...``) does not use them.

How atomic an operation is depends on the store:

==================  =================================  =============================  ==============================
kind                ``put``                            ``put(if_absent=True)``        ``create``
==================  =================================  =============================  ==============================
object stores       one PUT, atomic and durable        the store's conditional PUT    a multipart upload, visible
(``async_impl``)                                       on S3, GCS and Azure           once ``complete`` returns
fsspec ``file``     temporary file, fsync, rename      hard link                      the same temporary file
fsspec ``memory``   one assignment                     a lock of this process         one assignment
all others          temporary file, ``mv``             refused: ``StorageError``      the same temporary file
(HDFS, SFTP, ...)
==================  =================================  =============================  ==============================

``if_version`` is always refused, and ``if_absent`` where the store cannot decide it: if the client checked and then
put, two writers could both succeed. On "all others" a ``put`` that replaces an object is atomic if the store's rename
replaces (SFTP, WebDAV, HDFS through hdfs-native). Otherwise (HDFS through pyarrow, SMB) the old object is removed
first, and a crash in between leaves only the temporary file. hdfs-native's rename also decides ``if_absent``.

``incomplete`` lists the temporary files of "all others". Uploads that a killed process has left on GCS and Azure are
not listed: the stores remove them after a week, and a listing would need their own clients.

fsspec's ``file`` exists for chains (``dir::file:///...``). It does not sync the directories that it creates; open a
path as a path for durability across power failures. fsspec's caches are rejected, because they serve objects that have
been replaced.

``deadline_s`` bounds each call; retries and timeouts of single requests are up to the file system. After a lost reply,
its retry of a conditional PUT may find the key that its first try has created: read the object back to find out.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime
from typing import Any

from typing_extensions import Buffer

from ...errors import KeyNotFoundError, StorageError
from ..base import Conditions, IncompleteUpload, ObjectStat, ObjectWriter, StorageBackend
from ..buffers import byte_view, check_max_size, writable_view
from ..keys import TEMPORARY_PREFIX, check_children_prefix, check_key, check_prefix, is_object_key
from ..writers import BufferedWriter
from .connection import Connection, connect, reject_caches
from .errors import map_error, translated_errors
from .objects import (
    has_objects,
    open_in_directory,
    publish,
    put_object,
    put_object_if_absent,
    remove,
    remove_empty_directories,
    remove_if_exists,
    temporary_path,
)
from .writers import StreamWriter

__all__ = ["FsspecBackend"]

# Objects up to this size are buffered in memory and stored with one request.
_BUFFERED_BYTES = 8 * 2**20

# S3 accepts at most 10,000 parts of at least 5 MiB each.
_PART_BYTES = 16 * 2**20
_MAX_PARTS = 9_000

_CONCURRENT_DELETES = 8


class FsspecBackend(StorageBackend):
    """Objects below a URL of an fsspec file system.

    The file system is created at the first use, for this backend alone, without caching of listings. A forked child
    creates another one, and so does every thread if fsspec's implementation is not thread-safe.
    """

    def __init__(self, url: str, **options: Any) -> None:
        """Create a backend.

        Args:
            url: The URL or chain of the root.
            **options: Options of the fsspec file system.

        Raises:
            UnsupportedURLError: The chain contains one of fsspec's caches.
        """
        self._url = url.rstrip("/") if not url.endswith("://") else url
        self._options = options
        self._shared: Connection | None = None
        self._thread = threading.local()
        self._abandoned: list[Connection] = []
        reject_caches(url)

    @classmethod
    def from_url(cls, url: str, **options: Any) -> FsspecBackend:
        return cls(url, **options)

    @property
    def url(self) -> str:
        return self._url

    def conditions(self) -> Conditions:
        connection = self._connection(f"opening {self.display_url}")
        return Conditions(if_absent=connection.kind in ("file", "memory") or connection.has_conditional_put)

    def put(self, key: str, data: Buffer, *, if_absent: bool = False, if_version: str = "") -> str:
        check_key(key)
        action = f"writing {key!r} in {self.display_url}"
        if if_version:
            raise StorageError(f"{action}: fsspec has no put that replaces only a given version")
        connection = self._connection(action)
        content = bytes(byte_view(data))
        if if_absent:
            put_object_if_absent(connection, action, key, content)
        else:
            put_object(connection, action, key, content)
        return ""  # fsspec does not return it

    def create(self, key: str, size: int) -> ObjectWriter:
        check_key(key)
        action = f"writing {key!r} in {self.display_url}"
        connection = self._connection(action, own=True)
        if size <= _BUFFERED_BYTES or connection.kind == "memory":
            return BufferedWriter(action, size, lambda data: put_object(connection, action, key, bytes(data)))
        path = connection.path(key)
        if connection.kind == "objects":
            part = max(_PART_BYTES, -(-size // _MAX_PARTS))
            with translated_errors(action):
                file = connection.fs.open(path, "wb", autocommit=False, block_size=part)
            return StreamWriter(action, size, connection, file, discard=lambda: remove_if_exists(connection, path))
        temporary = temporary_path(path)
        with translated_errors(action):
            file = open_in_directory(connection.fs, temporary)
        return StreamWriter(
            action,
            size,
            connection,
            file,
            publish=lambda written: publish(connection, action, temporary, path, written),
            discard=lambda: remove_if_exists(connection, temporary),
        )

    def read_into(self, key: str, offset: int, buffer: Buffer) -> None:
        check_key(key)
        action = f"reading {key!r} in {self.display_url}"
        view = writable_view(action, buffer)
        if offset < 0:
            raise StorageError(f"{action}: the offset is {offset}")
        end = offset + len(view)
        connection = self._connection(action)
        if not len(view):
            # HTTP has no empty range.
            self._check_size(connection, action, key, offset, end, 0)
            return
        try:
            content = connection.fs.cat_file(connection.path(key), start=offset, end=end)
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            # hdfs-native panics about an offset beyond the end, which is no Exception.
            mapped = map_error(error, action, reading=True)
            if type(mapped) is StorageError and not mapped.is_late:
                # A range beyond the end is an error of the store's client library.
                self._check_size(connection, action, key, offset, end, 0)
            raise mapped from error
        if len(content) != len(view):
            self._check_size(connection, action, key, offset, end, len(content))
            raise StorageError(f"{action}: requested bytes [{offset}, {end}), got {len(content)} bytes; try again")
        view[:] = content

    def get(self, key: str, *, max_size: int | None = None) -> bytes:
        action = f"reading {key!r} in {self.display_url}"
        size = self.stat(key).size
        check_max_size(action, size, max_size)
        if size == 0:
            return b""
        connection = self._connection(action)
        # start=0 makes it one request. Without it, s3fs fetches a large object in parallel ranges, which could belong
        # to two objects if it is replaced at the same time.
        with translated_errors(action, reading=True):
            content = connection.fs.cat_file(connection.path(key), start=0)
        check_max_size(action, len(content), max_size)
        return bytes(content)

    def stat(self, key: str) -> ObjectStat:
        check_key(key)
        action = f"looking at {key!r} in {self.display_url}"
        connection = self._connection(action)
        with translated_errors(action, reading=True):
            connection.fs.invalidate_cache()
            info = connection.fs.info(connection.path(key))
        if info["type"] != "file":
            raise KeyNotFoundError(f"{action}: no such object")
        return ObjectStat(key, int(info["size"]), _version(info))

    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        check_prefix(prefix)
        action = f"listing {prefix!r} in {self.display_url}"
        connection = self._connection(action)
        found = _find(connection, action, prefix)
        stats = [ObjectStat(key, int(info["size"]), _version(info)) for key, info in found if is_object_key(key)]
        return iter(sorted(stats, key=lambda stat: stat.key))

    def list_children(self, prefix: str = "") -> Sequence[str]:
        check_children_prefix(prefix)
        action = f"listing {prefix!r} in {self.display_url}"
        connection = self._connection(action)
        found: Sequence[dict[str, Any]] = ()
        with translated_errors(action, reading=True), suppress(FileNotFoundError, NotADirectoryError):
            connection.fs.invalidate_cache()
            found = connection.fs.ls(connection.path(prefix), detail=True)
        names = set()
        for info in found:
            key = connection.key(info["name"].rstrip("/"))
            if key is None or not key.startswith(prefix) or "/" in key[len(prefix) :] or not is_object_key(key):
                continue
            if info["type"] == "file":
                names.add(key[len(prefix) :])
            elif connection.kind == "objects" or has_objects(connection, action, info["name"]):
                names.add(key[len(prefix) :] + "/")
        return sorted(names)

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(key)
        connection = self._connection(f"deleting in {self.display_url}")

        # One request per key, because s3fs's bulk delete ignores the errors of single keys.
        def delete_one(key: str) -> None:
            action = f"deleting {key!r} in {self.display_url}"
            with suppress(KeyNotFoundError), translated_errors(action, reading=True):
                remove(connection, connection.path(key))

        if connection.fs.async_impl and len(keys) > 1:
            with ThreadPoolExecutor(_CONCURRENT_DELETES, thread_name_prefix="bcp-delete") as pool:
                for _ in pool.map(delete_one, keys):
                    pass
        else:
            for key in keys:
                delete_one(key)
        if connection.kind in ("file", "others"):
            parents = {os.path.dirname(connection.path(key)) for key in keys}
            for parent in sorted(parents, key=len, reverse=True):
                remove_empty_directories(connection, parent)

    def incomplete(self, prefix: str = "") -> Iterator[IncompleteUpload]:
        check_prefix(prefix)
        action = f"listing temporary files below {prefix!r} in {self.display_url}"
        connection = self._connection(action)
        if connection.kind != "others":
            return
        for key, info in _find(connection, action, prefix):
            if os.path.basename(key).startswith(TEMPORARY_PREFIX):
                yield IncompleteUpload(key, key, _age_s(info))

    def abort_incomplete(self, uploads: Sequence[IncompleteUpload]) -> None:
        for upload in uploads:
            check_prefix(upload.key)
            action = f"deleting {upload.key!r} in {self.display_url}"
            connection = self._connection(action)
            if connection.kind != "others" or not os.path.basename(upload.key).startswith(TEMPORARY_PREFIX):
                continue
            path = connection.path(upload.key)
            with suppress(KeyNotFoundError), translated_errors(action, reading=True):
                remove(connection, path)
            remove_empty_directories(connection, os.path.dirname(path))

    def close(self) -> None:
        self._shared = None
        self._thread = threading.local()

    def _connection(self, action: str, *, own: bool = False) -> Connection:
        """Return this thread's connection, or, with ``own``, one for a writer that other threads will use."""
        found: Connection | None = getattr(self._thread, "connection", None) or self._shared
        if found is not None and found.pid != os.getpid():
            # Its event loop, sockets and locks belong to the parent. Finalizing it could hang, so keep it alive.
            self._abandoned.append(found)
            found = None
        elif found is not None and found.is_stuck:
            found = None
        if found is None or (own and not found.is_shareable):
            with translated_errors(action):
                found = connect(self._url, self._options, lambda: self.deadline_s)
            if found.is_shareable:
                self._shared = found
            elif not own:
                self._thread.connection = found
        return found

    def _check_size(self, connection: Connection, action: str, key: str, offset: int, end: int, got: int) -> None:
        size = self.stat(key).size
        if size < end:
            raise StorageError(
                f"{action}: requested bytes [{offset}, {end}), got {got}: the object has only {size} bytes; it was cut "
                "short or replaced"
            )


def _find(connection: Connection, action: str, prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the key and the description of each file whose key begins with ``prefix``."""
    found: Any = ()
    with translated_errors(action, reading=True), suppress(FileNotFoundError, NotADirectoryError):
        connection.fs.invalidate_cache()
        found = connection.fs.find(connection.path(prefix[: prefix.rfind("/") + 1]), detail=True)
    # adlfs returns a list if the directory is an object.
    for info in found.values() if isinstance(found, dict) else ():
        key = connection.key(info["name"]) if info["type"] == "file" else None
        if key is not None and key.startswith(prefix):
            yield key, info


def _age_s(info: dict[str, Any]) -> float:
    """Return how long ago a file was written, by this machine's clock; 0 if the store does not say."""
    written = info.get("modification_time") or info.get("mtime") or 0.0  # HDFS: milliseconds
    if isinstance(written, datetime):
        written = written.timestamp()
    elif "modification_time" in info:
        written /= 1000
    return max(0.0, time.time() - written) if written else 0.0


def _version(info: dict[str, Any]) -> str:
    for name in ("ETag", "etag", "generation", "checksum"):
        if info.get(name):
            return str(info[name])
    names = ("ino", "mtime", "modification_time", "LastModified", "created", "modified", "size")
    parts = [info.get(name) for name in names]
    return "-".join(str(part) for part in parts if part is not None)
