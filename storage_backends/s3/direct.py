"""Requests that blocking threads send from the caller's memory, and whose replies they read straight into it.

An event loop copies each byte of a reply three times and of an upload once, and encrypts or decrypts all of them on one
thread. A thread needs no copy besides the kernel's, and works without the GIL, which takes less than half of the
processor time. aiobotocore still makes and signs each request, and interprets the reply; only the transport is another.
"""

from __future__ import annotations

import asyncio
import http.client
import io
import os
import select
import socket
import ssl
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

from botocore.awsrequest import HeadersDict
from botocore.exceptions import EndpointConnectionError, SSLError
from botocore.httpsession import get_cert_path
from botocore.utils import get_environ_proxies

from .replies import ShortReplyError

__all__ = ["Body", "Connections", "DirectReply"]

_T = TypeVar("_T")

_QUICK: int | None = getattr(socket, "TCP_QUICKACK", None)  # Linux
_PIECE_BYTES = 256 << 10
_MAX_IDLE_S = 12.0  # stores close connections that are idle for longer


class Body:
    """The bytes of a request's body, which are sent without a copy of all of them.

    botocore reads them to sign them. Where aiohttp sends them, it iterates: a file it would read in other threads,
    64 KiB at a time, which takes longer than to send them.
    """

    def __init__(self, data: memoryview) -> None:
        self.data, self._at = data, 0

    async def __aiter__(self) -> AsyncIterator[memoryview | bytes]:
        while piece := self.read(_PIECE_BYTES):
            yield piece

    def read(self, size: int = -1) -> memoryview | bytes:
        """Return a view of the next bytes; ``b""`` at the end."""
        end = len(self.data) if size < 0 else self._at + size
        piece = self.data[self._at : end]
        self._at += len(piece)
        return piece or b""

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self.data)}[whence]
        self._at = start + offset
        return self._at

    def tell(self) -> int:  # word-ok: botocore calls it
        return self._at

    def __len__(self) -> int:
        return len(self.data)


class Connections:
    """Connections for the requests of one client. Thread-safe.

    Attributes:
        verify: Whether to check certificates, or the path of those of the authorities.
        connect_s: How long connecting may take.
    """

    def __init__(self, *, verify: bool | str, connect_s: float, threads: int) -> None:
        self.verify, self.connect_s = verify, connect_s
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="bytecheckpoint-s3")
        self._lock = threading.Lock()
        self._tls: ssl.SSLContext | None = None
        self._idle: dict[tuple[str, str], list[tuple[float, _Connection]]] = defaultdict(list)

    @classmethod
    def attach(cls, client: Any, *, verify: bool | str | None, threads: int) -> Connections | None:
        """Take over the requests of aiobotocore's ``client``.

        Returns None, and leaves the client as it is, if it needs a proxy, a client certificate or other connectors.
        """
        config = client.meta.config
        proxies = config.proxies or get_environ_proxies(client.meta.endpoint_url)
        connector = set(getattr(config, "connector_args", None) or ()) - {"keepalive_timeout"}  # which has a default
        if proxies or config.client_cert or connector:
            return None
        if verify is None:
            verify = os.environ.get("REQUESTS_CA_BUNDLE") or True
        made = cls(verify=verify, connect_s=config.connect_timeout, threads=threads)
        client.meta.events.register("before-send.s3", made._send)
        return made

    def close(self) -> None:
        """Close the idle connections."""
        with self._lock:
            idle = [connection for found in self._idle.values() for _, connection in found]
            self._idle.clear()
        for connection in idle:
            connection.close()

    async def _send(self, request: Any, **_: object) -> DirectReply | None:
        """Send a signed request. botocore takes the result for the reply, and sends it itself if there is none."""
        body = request.body
        if hasattr(body, "read"):
            if not isinstance(body, Body):
                return None
            body = body.data
        url = urlsplit(request.url)
        connection = self._connect((url.scheme, url.netloc))
        target = f"{url.path or '/'}?{url.query}" if url.query else url.path or "/"
        headers = {name: value if isinstance(value, str) else value.decode() for name, value in request.headers.items()}
        # http.client would send the body without waiting for "100 Continue".
        headers.pop("Expect", None)
        if not connection.is_open:
            await self.run(connection, connection.open)
        send = partial(connection.send, request.method, target, headers, body or None)
        return DirectReply(self, connection, await self.run(connection, send, waits=bool(body)))

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
            self._idle[connection.origin].append((time.monotonic(), connection))

    def _connect(self, origin: tuple[str, str]) -> _Connection:
        while True:
            with self._lock:
                idle = self._idle[origin]
                if not idle:
                    return _Connection(origin, self._context() if origin[0] == "https" else None, self.connect_s)
                since, connection = idle.pop()
            if time.monotonic() - since < _MAX_IDLE_S and connection.is_alive():
                return connection
            connection.close()

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            if not self.verify:
                self._tls.check_hostname, self._tls.verify_mode = False, ssl.CERT_NONE
            elif os.path.isdir(path := get_cert_path(self.verify)):
                self._tls.load_verify_locations(capath=path)
            else:
                self._tls.load_verify_locations(path)
        return self._tls


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
        """Connect. Raises errors of botocore."""
        url = "://".join(self.origin)
        try:
            self._http.connect()
        except ssl.SSLError as error:
            raise SSLError(endpoint_url=url, error=error) from error
        except OSError as error:
            raise EndpointConnectionError(endpoint_url=url, error=error) from error
        opened: socket.socket = self._http.sock
        opened.settimeout(None)  # ``interrupt`` ends what takes too long
        self._socket = opened

    def guard(self, work: Callable[[], _T]) -> _T:
        """Return the result of ``work``. If it fails, close the connection; an error of it is a ``ConnectionError``."""
        try:
            return work()
        except BaseException as error:
            self.close()
            if isinstance(error, (OSError, http.client.HTTPException)) and not isinstance(error, ConnectionError):
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


class DirectReply:
    """A reply whose body was not read yet. aiobotocore's parser sees its own kind of reply."""

    def __init__(self, connections: Connections, connection: _Connection, response: http.client.HTTPResponse) -> None:
        self.status_code = response.status
        self.headers = HeadersDict(response.getheaders())
        self._connections, self._connection, self._response = connections, connection, response
        self._content: bytes | None = None

    @property
    def raw(self) -> DirectReply:
        """The body, for aiobotocore."""
        return self

    @property
    def raw_stream(self) -> DirectReply:
        """The body, also where an older aiobotocore wraps ``raw``."""
        return self

    @property
    def content(self) -> Awaitable[bytes]:
        """The whole body, for aiobotocore; it reads the body of an error twice."""
        return self.read()

    async def read(self) -> bytes:
        """Return the whole body."""
        if self._content is None:
            self._content = await self._connections.run(self._connection, self._response.read)
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
