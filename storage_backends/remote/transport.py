"""HTTP requests that blocking threads send from the caller's memory, and whose replies they read straight into it.

An event loop copies each byte of a reply three times and of an upload once, and encrypts or decrypts all of them on one
thread. A thread needs no copy besides the kernel's, and works without the GIL, which takes less than half of the
processor time.
"""

from __future__ import annotations

import asyncio
import http.client
import select
import socket
import ssl
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar
from urllib.parse import urlsplit

from ...errors import StorageError
from ...runtime.threads import Threads
from .failures import ShortReplyError

_T = TypeVar("_T")

_QUICK: int | None = getattr(socket, "TCP_QUICKACK", None)  # Linux
_READ_BYTES = 1 << 20
_MAX_IDLE_S = 12.0  # stores close connections that are idle for longer


class Connections:
    """Connections for the requests of one client. Thread-safe; a forked child needs its own."""

    def __init__(self, make_tls: Callable[[], ssl.SSLContext], *, connect_s: float, threads: int) -> None:
        """``make_tls`` is called for the first https request; ``connect_s`` is how long connecting may take."""
        self._make_tls, self._connect_s = make_tls, connect_s
        self._threads = Threads(threads, thread_name_prefix="bcp-http")
        self._lock = threading.Lock()
        self._tls: ssl.SSLContext | None = None
        self._idle: dict[tuple[str, str], list[tuple[float, _Connection]]] = defaultdict(list)
        self._is_closed = False

    def close(self) -> None:
        """Close the idle connections, and those in use after their requests."""
        with self._lock:
            self._is_closed = True
            idle = [connection for found in self._idle.values() for _, connection in found]
            self._idle.clear()
        for connection in idle:
            connection.close()

    async def send(self, method: str, url: str, headers: dict[str, str], body: bytes | memoryview | None) -> Reply:
        """Send a request; return the reply, whose body is still to be read."""
        parts = urlsplit(url)
        connection = self._connect((parts.scheme, parts.netloc))
        target = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
        if not connection.is_open:
            await self.run(connection, connection.open)
        send = partial(connection.send, method, target, headers, body)
        return Reply(self, connection, await self.run(connection, send, waits=bool(body)))

    async def run(self, connection: _Connection, work: Callable[[], _T], *, waits: bool = False) -> _T:
        """Run ``work``, which uses the connection, in a thread.

        Cancelling it ends the connection; with ``waits``, it then returns only once ``work`` has ended.
        """
        future = asyncio.get_running_loop().run_in_executor(self._threads, connection.guard, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            connection.interrupt()

            def end(future: asyncio.Future[_T]) -> None:
                future.exception()  # otherwise asyncio reports that it was not retrieved
                connection.close()

            future.add_done_callback(end)
            while waits and not future.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([future])
            raise

    def keep(self, connection: _Connection) -> None:
        """Keep a connection for the next request, after a reply was read completely."""
        with self._lock:
            if not self._is_closed:
                self._idle[connection.origin].append((time.monotonic(), connection))
                return
        connection.close()

    def _connect(self, origin: tuple[str, str]) -> _Connection:
        while True:
            with self._lock:
                idle = self._idle[origin]
                if not idle:
                    if origin[0] == "https" and self._tls is None:
                        self._tls = self._make_tls()
                    return _Connection(origin, self._tls if origin[0] == "https" else None, self._connect_s)
                since, connection = idle.pop()
            if time.monotonic() - since < _MAX_IDLE_S and connection.is_alive():
                return connection
            connection.close()


class _Connection:
    """One connection, which one thread uses at a time. ``origin`` is its scheme and host."""

    def __init__(self, origin: tuple[str, str], tls: ssl.SSLContext | None, connect_s: float) -> None:
        self.origin = origin
        self._http = (
            http.client.HTTPConnection(origin[1], timeout=connect_s)
            if tls is None
            else http.client.HTTPSConnection(origin[1], timeout=connect_s, context=tls)
        )
        self._socket: socket.socket | None = None
        self._response: http.client.HTTPResponse | None = None
        self._is_ended = False

    @property
    def is_open(self) -> bool:
        """Whether ``open`` has connected it."""
        return self._socket is not None

    def send(
        self, method: str, target: str, headers: dict[str, str], body: bytes | memoryview | None
    ) -> http.client.HTTPResponse:
        """Send a request; return the reply without its body."""
        if self._is_ended:
            raise ConnectionAbortedError("the request was cancelled")
        try:
            self._http.request(method, target, body, headers)
        except ConnectionError:
            # A store that refuses an upload may reply and close the connection before it has read the body.
            with suppress(Exception):
                self._response = self._http.response_class(self._http.sock, method=method)
                self._response.begin()
                self._response.will_close = True
                return self._response
            raise
        self.confirm_at_once()
        self._response = self._http.getresponse()
        self.confirm_at_once()
        return self._response

    def confirm_at_once(self) -> None:
        """Let the kernel confirm the next bytes at once.

        A server that waits for a confirmation before it sends the last, incomplete packet of a reply (Ceph does, by
        default) would otherwise wait for the 40 ms by which Linux may delay it. The kernel soon forgets this setting.
        """
        if _QUICK is not None and self._socket is not None:
            self._socket.setsockopt(socket.IPPROTO_TCP, _QUICK, 1)

    def open(self) -> None:
        """Connect."""
        try:
            self._http.connect()
        except OSError as error:
            raise ConnectionError(f"cannot connect to {'://'.join(self.origin)}: {error}") from error
        opened: socket.socket = self._http.sock
        opened.settimeout(None)  # ``interrupt`` ends what takes too long
        self._socket = opened

    def guard(self, work: Callable[[], _T]) -> _T:
        """Return the result of ``work``. If it fails, close the connection; an error of it is a ``ConnectionError``."""
        try:
            return work()
        except BaseException as error:
            self.close()
            if isinstance(error, OSError | http.client.HTTPException) and not isinstance(
                error, ConnectionError | StorageError
            ):
                raise ConnectionError(f"{type(error).__name__}: {error}") from error
            raise

    def interrupt(self) -> None:
        """Make the thread at work fail soon. Any thread may call it."""
        self._is_ended = True
        if self._socket is not None:
            with suppress(OSError):
                # Without TLS's own shutdown, which would change the state that the other thread is using.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def is_alive(self) -> bool:
        """Whether an idle connection is still open. (Only its end could make it readable.)"""
        if self._socket is None:
            return False
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        """Close it; no thread may be using it."""
        self._http.close()
        if self._response is not None:
            self._response.close()


class Reply:
    """A reply whose body was not read yet."""

    def __init__(self, connections: Connections, connection: _Connection, response: http.client.HTTPResponse) -> None:
        self.status, self.reason, self.headers = response.status, response.reason, response.headers
        self._connections, self._connection, self._response = connections, connection, response
        self._content: bytes | None = None

    async def read(self, check_size: Callable[[int], None] = lambda size: None) -> bytes:
        """Return the whole body. ``check_size`` may raise for as many bytes as have been read so far."""

        def read() -> bytes:
            found = bytearray()
            while piece := self._response.read(_READ_BYTES):
                found += piece
                check_size(len(found))
            return bytes(found)

        if self._content is None:
            self._content = await self._connections.run(self._connection, read)
            self._end()
        return self._content

    async def fill(self, views: Sequence[memoryview]) -> None:
        """Fill ``views``. Raises ``ShortReplyError`` if the body has another length than all of them."""
        await self._connections.run(self._connection, partial(self._fill, views), waits=True)
        self._end()

    def _fill(self, views: Sequence[memoryview]) -> None:
        count, done = sum(map(len, views)), 0
        for view in views:
            rest = view
            while len(rest):
                read = self._response.readinto(rest)
                if not read:
                    raise ShortReplyError(f"requested {count} bytes, the reply has {done}")
                done, rest = done + read, rest[read:]
        if self._response.read(1):
            raise ShortReplyError(f"requested {count} bytes, the reply has more")

    def _end(self) -> None:
        if self._response.isclosed() and not self._response.will_close:
            self._connections.keep(self._connection)
        else:
            self._connection.close()

    async def aclose(self) -> None:
        """Close the connection if the body was not read completely."""
        if not self._response.isclosed():
            self._connection.close()
