"""The backend for every store that fsspec can reach: GCS, Azure, HDFS, SFTP, SMB, WebDAV and others.

S3 has its own (``storage_backends.s3``), and so have GCS and Azure if obstore is installed and has the options that are
passed (``storage_backends.obstore``). A chain (``dir::s3://...``) does not use them.

How atomic an operation is depends on the store:

==================  =================================  =============================  ==============================
kind                ``put``                            ``put(if_absent=True)``        ``create``
==================  =================================  =============================  ==============================
object stores       one PUT, atomic and durable        the store's conditional PUT    a multipart upload, visible
(``async_impl``)                                       on S3, GCS and Azure           once ``complete`` returns
all others          temporary file, ``mv``             refused: ``StorageError``      the same temporary file
(HDFS, SFTP, ...)
==================  =================================  =============================  ==============================

``if_version`` is always refused, and ``if_absent`` where the store cannot decide it: if the client checked and then
put, two writers could both succeed. On "all others" a ``put`` that replaces an object is atomic if the store's rename
replaces (SFTP, WebDAV, HDFS through hdfs-native). Otherwise (HDFS through pyarrow, SMB) the old object is removed
first, and a crash in between leaves only the temporary file. hdfs-native's rename also decides ``if_absent``.

``incomplete`` lists the temporary files of "all others". Uploads that a killed process has left on GCS and Azure are
not listed: the stores remove them after a week, and a listing would need their own clients.

fsspec's own files and memory are "others", for chains; open a path as a path. fsspec's caches are rejected, because
they serve objects that have been replaced.

``deadline_s`` bounds each call; retries and timeouts of single requests are up to the file system. After a lost reply,
its retry of a conditional PUT may find the key that its first try has created: read the object back to find out.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, TypeVar

from fsspec.spec import AbstractBufferedFile
from typing_extensions import Buffer

from ...errors import StorageFullError
from ...runtime.threads import run_daemon
from ..base import Conditions, IncompleteUpload, ObjectStat
from ..keys import TEMPORARY_PREFIX, check_children_prefix, check_prefix, is_object_key
from ..posix import map_os_error
from ..remote.backend import Condition, Found, RemoteBackend
from ..remote.failures import Failure, Meaning, OutOfRangeError, Secrets, common_failure
from ..remote.parts import OrderedUpload, Upload, part_bytes_for
from ..remote.session import EndpointSession, Request, states_of_files
from .connection import Connection, connect, flush_to_device, reject_caches, temporary_path

_T = TypeVar("_T")

_CONCURRENT_DELETES = 8
_LOST = frozenset({errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE, errno.ENOTCONN, errno.ESHUTDOWN})
_TRANSPORTS = frozenset({"aiohttp", "azure", "botocore", "google", "httpx", "paramiko", "requests", "urllib3"})
"""Packages whose errors say that there was no reply, unless they have the status of one."""

_JAVA_STACK = re.compile(r"(?:\n|\\n)\s*(?:\t|\\t)at ")  # HDFS appends the stack of its server


def explain(error: BaseException) -> Failure:
    """Return what an error means.

    File systems raise almost anything: OSErrors with and without errno, errors of their client library, timeouts.
    """
    if isinstance(error, OutOfRangeError):
        return common_failure(error)
    text = _JAVA_STACK.split(str(error), maxsplit=1)[0]
    shown = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if _is_unanswered(error):
        return Failure(Meaning.UNANSWERED, f"the store did not reply: {shown}")
    if isinstance(error, NotADirectoryError):
        return Failure(Meaning.MISSING, f"{shown}: a component of the key is itself an object")
    if isinstance(error, FileNotFoundError | IsADirectoryError):
        return Failure(Meaning.MISSING, f"no such object: {text}" if text else "no such object")
    if isinstance(error, PermissionError):
        return Failure(Meaning.DENIED, shown)
    if isinstance(error, FileExistsError):
        return Failure(Meaning.REFUSED, shown)
    if isinstance(error, NotImplementedError):
        return Failure(Meaning.OTHER, f"this file system does not support it: {text or 'not implemented'}")
    if isinstance(error, OSError) and error.errno:
        mapped = map_os_error(error, "", absent_is_missing_key=True)
        full = isinstance(mapped, StorageFullError)
        return Failure(Meaning.FULL if full else Meaning.OTHER, str(mapped).removeprefix(": "))
    return Failure(Meaning.OTHER, shown)


def _is_unanswered(error: BaseException | None) -> bool:
    """Whether no reply came, so that the operation may have had an effect, or may still have one."""
    while error is not None:
        if isinstance(error, TimeoutError | ConnectionError | EOFError):
            return True
        if isinstance(error, OSError) and error.errno in _LOST:
            return True
        replied = any(getattr(error, name, None) is not None for name in ("status", "status_code", "code", "response"))
        if type(error).__module__.partition(".")[0] in _TRANSPORTS:
            return not replied
        error = error.__cause__ or error.__context__
    return False


class FsspecBackend(RemoteBackend[EndpointSession]):
    """Objects below a URL of an fsspec file system.

    The file system is created at the first use, for this backend alone, without caching of listings. A forked child
    creates another one, and so does every call while another thread uses the file system, if its implementation is not
    thread-safe.
    """

    concurrent_deletes = 1  # until it is known that threads may share the file system

    def __init__(self, url: str, **options: Any) -> None:
        """Create a backend.

        Args:
            url: The URL or chain of the root.
            **options: Options of the fsspec file system.

        Raises:
            UnsupportedURLError: The chain contains one of fsspec's caches.
        """
        super().__init__(url)
        self._options, self._pid = options, os.getpid()
        self._retries = EndpointSession(explain, repeats=False, secrets=Secrets(url, options))
        self._idle: list[Connection] = []
        self._abandoned: list[Connection] = []
        reject_caches(url)

    def conditions(self) -> Conditions:
        def find(connection: Connection) -> Conditions:
            return Conditions(if_absent=connection.has_conditional_put)

        return self._ask(f"opening {self.display_url}", lambda _: self._call(find))

    async def _send_put(
        self, session: EndpointSession, key: str, content: memoryview, condition: Condition | None
    ) -> str:
        given_up = threading.Event()

        def put(connection: Connection) -> None:
            connection.put(key, bytes(content), if_absent=condition is not None, is_given_up=given_up.is_set)

        try:
            await self._call(put)
        except asyncio.CancelledError:
            given_up.set()
            raise
        return ""  # fsspec does not return it

    async def _send_read(
        self,
        session: EndpointSession,
        key: str,
        start: int,
        views: Sequence[memoryview],
        accept: Callable[[Found], None],
    ) -> Buffer:
        end = start + sum(map(len, views))
        try:
            content: Buffer = await self._call(lambda connection: connection.read(key, start, end))
        except Exception as error:
            if explain(error).meaning is not Meaning.OTHER:
                raise
            # A range beyond the end is an error of the store's client library.
            raise OutOfRangeError(explain(error).text) from error
        if (count := memoryview(content).nbytes) != end - start:
            raise OutOfRangeError(f"requested bytes [{start}, {end}), got {count} bytes; try again")
        return content

    async def _send_get(
        self, session: EndpointSession, key: str, check_size: Callable[[int], None]
    ) -> tuple[bytes, str]:
        def get(connection: Connection) -> tuple[bytes, str]:
            info = connection.info(key)
            check_size(int(info["size"]))
            # start=0 makes it one request. Without it, s3fs fetches a large object in parallel ranges, which could
            # belong to two objects if it is replaced at the same time.
            content = connection.fs.cat_file(connection.path(key), start=0) if info["size"] else b""
            check_size(len(content))
            return bytes(content), _version(info)

        return await self._call(get)

    async def _send_stat(self, session: EndpointSession, key: str) -> ObjectStat:
        info = await self._call(lambda connection: connection.info(key))
        return ObjectStat(key, int(info["size"]), _version(info))

    async def _send_delete(self, session: EndpointSession, key: str) -> None:
        await self._call(lambda connection: connection.delete(key))

    async def _delete(self, session: EndpointSession, keys: Sequence[str]) -> None:
        await super()._delete(session, keys)
        # Once for each directory: one is listed to find out whether it is empty.
        request = Request(f"deleting empty directories in {self.display_url}", self.deadline_s)
        await session.repeat(request, lambda: self._call(lambda connection: connection.remove_empty_directories(keys)))

    def _upload(self, session: EndpointSession, action: str, key: str, size: int) -> Upload:
        begun = call_daemon(lambda: _FsspecUpload(self._take(), key, size, self.deadline_s))
        return session.run(action, asyncio.wait_for(begun, self.deadline_s))

    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        check_prefix(prefix)
        found = self._ask(
            self._action("listing", prefix), lambda _: self._call(lambda connection: connection.find(prefix))
        )
        stats = [ObjectStat(key, int(info["size"]), _version(info)) for key, info in found if is_object_key(key)]
        return iter(sorted(stats, key=lambda stat: stat.key))

    def list_children(self, prefix: str = "") -> Sequence[str]:
        check_children_prefix(prefix)
        action = self._action("listing", prefix)
        found = self._ask(action, lambda _: self._call(lambda connection: connection.children(prefix)))
        names = [
            (key[len(prefix) :], is_file) for key, is_file in found if key.startswith(prefix) and is_object_key(key)
        ]
        return sorted({name if is_file else name + "/" for name, is_file in names if "/" not in name})

    def incomplete(self, prefix: str = "") -> Iterator[IncompleteUpload]:
        check_prefix(prefix)

        def find(connection: Connection) -> Sequence[tuple[str, dict[str, Any]]]:
            return () if connection.is_object_store else connection.find(prefix)

        action = self._action("listing temporary files below", prefix)
        for key, info in self._ask(action, lambda _: self._call(find)):
            if os.path.basename(key).startswith(TEMPORARY_PREFIX):
                yield IncompleteUpload(key, key, _age_s(info))

    def abort_incomplete(self, uploads: Sequence[IncompleteUpload]) -> None:
        keys = [one.key for one in uploads if os.path.basename(one.key).startswith(TEMPORARY_PREFIX)]
        for key in keys:
            check_prefix(key)
        if keys:
            session = self._session()
            session.run(f"deleting temporary files in {self.display_url}", self._delete(session, keys))

    def close(self) -> None:
        self._idle.clear()

    def _session(self) -> EndpointSession:
        if self._pid != os.getpid():
            # Their event loops, sockets and locks belong to the parent. Finalizing them could hang, so keep them alive.
            self._pid, self._abandoned, self._idle = os.getpid(), [*self._abandoned, *self._idle], []
        return self._retries

    async def _call(self, function: Callable[[Connection], _T]) -> _T:
        """Return the result of a function, which is called in a thread with a connection.

        A connection whose call is given up, and may never return, is not used again.
        """
        taken: list[Connection] = []

        def call() -> _T:
            taken.append(connection := self._take())
            try:
                return function(connection)
            finally:
                self._give_back(connection)

        try:
            return await call_daemon(call)
        except asyncio.CancelledError:
            self._idle = [idle for idle in self._idle if not any(idle is one for one in taken)]
            raise

    def _take(self) -> Connection:
        """Return a connection that no other thread uses, unless threads may share it."""
        files = states_of_files(self._options)
        try:
            while (connection := self._idle.pop()).files != files:
                pass
        except IndexError:
            connection = replace(connect(self._url, self._options), files=files)
        if connection.is_shareable:
            self._idle.append(connection)
            self.concurrent_deletes = _CONCURRENT_DELETES
        return connection

    def _give_back(self, connection: Connection) -> None:
        if not connection.is_shareable:
            self._idle.append(connection)


class _FsspecUpload(OrderedUpload):
    """Writes parts in order to a file that exists under its name once it is complete."""

    def __init__(self, connection: Connection, key: str, size: int, deadline_s: float) -> None:
        super().__init__(deadline_s)
        self._connection, self._is_complete, self._size = connection, False, 0
        self._path = connection.path(key)
        self._temporary = "" if connection.is_object_store else temporary_path(self._path)
        self._file: Any = (
            connection.open_file(self._temporary)
            if self._temporary
            else connection.fs.open(self._path, "wb", autocommit=False, block_size=part_bytes_for(size))
        )

    async def send(self, number: int, data: memoryview) -> str:
        await self._in_turn(lambda: call_daemon(lambda: self._write(data)))
        return ""

    def _write(self, data: memoryview) -> None:
        while len(data):
            # Raw files may write less than requested; others return the full length or None.
            count = self._file.write(data)
            count = len(data) if count is None else count
            self._size, data = self._size + count, data[count:]

    async def complete(self, tags: Sequence[str]) -> None:
        await self._call(self._close)
        self._is_complete = True

    def _close(self) -> None:
        if not isinstance(self._file, AbstractBufferedFile):
            flush_to_device(self._file)
        self._file.close()
        if isinstance(self._file, AbstractBufferedFile) and not self._file.autocommit:
            self._file.commit()
        if self._temporary:
            self._connection.publish(self._temporary, self._path, self._size)

    async def abort(self) -> None:
        await self._call(self._discard)

    def _discard(self) -> None:
        if isinstance(self._file, AbstractBufferedFile):
            try:
                self._file.discard()
            finally:
                # close() would upload the rest and, in some implementations, commit. The finalizer calls it, too.
                self._file.closed = True
                self._file.buffer = None
        else:
            self._file.close()
        if self._temporary:
            self._connection.remove(self._temporary)

    async def _call(self, function: Callable[[], None]) -> None:
        await asyncio.wait_for(call_daemon(function), self._deadline_s)

    def __del__(self) -> None:
        # Without this, the finalizer of an abandoned file would close it and upload what it has buffered.
        file = getattr(self, "_file", None)
        if isinstance(file, AbstractBufferedFile) and not self._is_complete:
            file.closed = True


async def call_daemon(function: Callable[[], _T]) -> _T:
    """Return the result of a function, which runs in another thread.

    Clients wait as they like, some for ever, and cannot be interrupted. If the caller stops waiting, the thread goes
    on: it is a daemon, so that it does not keep the process from ending.
    """
    future = asyncio.wrap_future(run_daemon(function, "bcp-fsspec"))
    # Otherwise asyncio reports that it was not retrieved.
    future.add_done_callback(lambda future: future.cancelled() or future.exception())
    return await asyncio.shield(future)


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
