"""The connections of one rank: an asyncio event loop on one thread accepts, connects, sends and receives.

Control messages travel on one connection per pair of ranks, each with its length in front. Streams get connections of
their own, which are handed over after the handshake. Every listener accepts both.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import queue
import socket
import struct
import weakref
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, NamedTuple, Protocol

from ..runtime.exit import before_exit
from .handshake import Introduction, introduce, welcome
from .timings import ACCEPT_RETRY_S, CONNECT_S, END_CHECK_S, END_CONFIRMATION_S, FLUSH_S, HANDSHAKE_S

__all__ = ["LOOPBACK", "Endpoint", "MessageHandler", "Network"]

_log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"

_LENGTH = struct.Struct("<Q")
_BACKLOG = 4096
_MOST_UNAUTHENTICATED = 1024


class Endpoint(NamedTuple):
    """Where a rank listens: its addresses, most likely first, and its port."""

    addresses: Sequence[str]
    port: int


class MessageHandler(Protocol):
    """What a network calls on its thread. No method may block or raise."""

    def receive(self, sender: int, data: bytes) -> None:
        """Handle a message."""

    def add_peer(self, peer: int) -> None:
        """Note that a peer has connected for messages."""

    def add_stream(self, introduction: Introduction, connection: socket.socket) -> None:
        """Take over the non-blocking connection of a stream."""

    def lose_peer(self, peer: int, reason: str) -> None:
        """Note that the connection for messages with a peer is lost."""

    def may_see_end_of(self, peer: int) -> bool:
        """Whether the peer runs on this host and has not ended."""


class Network:
    """Thread-safe. One thread runs from construction until ``close``."""

    def __init__(self, rank: int, key: bytes) -> None:
        self.pid = os.getpid()
        self._rank, self._key = rank, key
        self._endpoints: dict[int, Endpoint] = {}
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._outboxes: dict[int, list[bytes]] = {}
        self._lost: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._unauthenticated: dict[asyncio.Task[None], None] = {}
        self._is_closing = False
        self._handler: MessageHandler
        self._loop: asyncio.AbstractEventLoop
        self._executor = ThreadPoolExecutor(1, "bytecheckpoint-control")
        started: Future[None] = Future()
        self._executor.submit(self._run_loop, started)
        started.result()
        _open_networks.add(self)

    def attach(self, handler: MessageHandler) -> None:
        """Set the handler, before the first connection."""
        self._handler = handler

    def set_endpoints(self, endpoints: dict[int, Endpoint]) -> None:
        """Set where other ranks listen."""
        self._endpoints = endpoints

    def listen(self, address: str) -> int:
        """Accept connections on ``address`` (empty for every interface); return the port."""
        listener = _listener(address)
        listener.setblocking(False)
        self._call(self._start, self._accept(listener))
        return int(listener.getsockname()[1])

    def connect(self, peer: int, timeout_s: float) -> None:
        """Connect to a peer for messages. Raises ``OSError`` or ``TimeoutError``."""
        future = self._submit(self._connect(peer))
        try:
            future.result(timeout_s)
        except FutureTimeoutError:
            raise TimeoutError(f"no answer in {timeout_s:g} s") from None
        finally:
            future.cancel()

    def open_stream(self, peer: int, operation: str, channel: str) -> Future[socket.socket]:
        """Connect a stream. The result is a non-blocking socket, which belongs to the caller."""
        return self._submit(self._dial(peer, Introduction(self._rank, "stream", operation, channel)))

    def send(self, peer: int, message: bytes) -> None:
        """Send a message without waiting, in order. Connects first if needed; drops messages to a lost peer."""
        self._call(self._write, peer, message)

    def flush(self) -> None:
        """Wait, for a moment at most, until the operating system has the messages sent so far.

        It then delivers them even if this process is killed. Messages to a peer that does not read may stay queued.
        """
        done: queue.SimpleQueue[None] = queue.SimpleQueue()
        if self._call(done.put, None):
            with contextlib.suppress(queue.Empty):
                done.get(timeout=FLUSH_S)

    def connected_peers(self) -> set[int]:
        """Return the peers with an open connection for messages."""
        return set(self._writers)

    def close(self) -> None:
        """Send what is pending, for a moment at most, close every connection and end the thread."""
        self._call(self._stop)
        self._executor.shutdown()
        _open_networks.discard(self)

    def _call(self, function: Any, *arguments: Any) -> bool:
        """Run a function on the thread; return False if it has ended."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            for argument in arguments:
                if isinstance(argument, Coroutine):
                    argument.close()
            return False
        return True

    def _submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError as error:
            coroutine.close()
            raise ConnectionError("this communicator is closed") from error

    def _run_loop(self, started: Future[None]) -> None:
        try:
            asyncio.run(self._run(started))
        except BaseException as error:
            _log.exception("the network thread of rank %d failed", self._rank)
            if not started.done():
                started.set_exception(error)
            raise

    async def _run(self, started: Future[None]) -> None:
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        started.set_result(None)
        await self._stopped.wait()
        writers = list(self._writers.values())
        for writer in writers:
            writer.close()
        flushed = asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(flushed, FLUSH_S)
        for writer in writers:
            writer.transport.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _stop(self) -> None:
        self._is_closing = True
        self._stopped.set()

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self, listener: socket.socket) -> None:
        with listener:
            while True:
                try:
                    connection, _address = await self._loop.sock_accept(listener)
                except OSError:
                    _log.debug("accepting a connection failed", exc_info=True)
                    await asyncio.sleep(ACCEPT_RETRY_S)
                    continue
                _configure(connection)
                if len(self._unauthenticated) >= _MOST_UNAUTHENTICATED:
                    next(iter(self._unauthenticated)).cancel()
                task = self._start(self._admit(connection))
                self._unauthenticated[task] = None
                task.add_done_callback(lambda done: self._unauthenticated.pop(done, None))

    async def _admit(self, connection: socket.socket) -> None:
        try:
            introduction = await asyncio.wait_for(welcome(connection, self._key), HANDSHAKE_S)
        except (TimeoutError, OSError, ValueError) as error:
            _log.debug("refused a connection: %s", error)
            connection.close()
        except BaseException:
            connection.close()
            raise
        else:
            if introduction.purpose == "stream":
                self._handler.add_stream(introduction, connection)
            else:
                await self._add_peer(introduction.sender, connection)

    async def _connect(self, peer: int) -> None:
        await self._add_peer(peer, await self._dial(peer, Introduction(self._rank, "messages")))

    async def _add_peer(self, peer: int, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connection)
        self._writers[peer] = writer
        self._handler.add_peer(peer)
        self._start(self._read(peer, reader, writer))

    async def _read(self, peer: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on messages until the connection ends."""
        reason = "it was closed"
        try:
            while True:
                (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                self._handler.receive(peer, await reader.readexactly(size))
        except OSError as error:
            reason = str(error)
        except asyncio.IncompleteReadError:
            pass
        except Exception as error:  # noqa: BLE001 - a bad message ends this connection and not the thread
            _log.exception("rank %d sent a message that could not be handled", peer)
            reason = repr(error)
        finally:
            writer.close()
            is_current = self._writers.get(peer) is writer
            if is_current:
                del self._writers[peer]
        if is_current and not self._is_closing:
            await self._confirm_loss(peer, reason)

    async def _confirm_loss(self, peer: int, reason: str) -> None:
        """Report a loss, on this host once the peer's process has ended, so that the report can give the cause."""
        self._lost.add(peer)
        give_up = self._loop.time() + END_CONFIRMATION_S
        while self._handler.may_see_end_of(peer) and self._loop.time() < give_up:
            await asyncio.sleep(END_CHECK_S)
        self._handler.lose_peer(peer, reason)

    def _write(self, peer: int, message: bytes) -> None:
        data = _LENGTH.pack(len(message)) + message
        if peer in self._writers:
            self._writers[peer].write(data)
        elif peer in self._outboxes:
            self._outboxes[peer].append(data)
        elif peer in self._endpoints and peer not in self._lost and not self._is_closing:
            self._outboxes[peer] = [data]
            self._start(self._connect_and_send(peer))

    async def _connect_and_send(self, peer: int) -> None:
        try:
            await self._connect(peer)
        except (TimeoutError, OSError) as error:
            self._lost.add(peer)
            self._handler.lose_peer(peer, str(error))
        for data in self._outboxes.pop(peer):
            if peer in self._writers:
                self._writers[peer].write(data)

    async def _dial(self, peer: int, introduction: Introduction) -> socket.socket:
        """Connect to the first address that answers. The last one has no limit: the peer may be stopped for a while."""
        endpoint, refused = self._endpoints[peer], []
        for number, address in enumerate(endpoint.addresses, 1):
            limit_s = CONNECT_S if number < len(endpoint.addresses) else None
            try:
                return await asyncio.wait_for(self._dial_address(address, endpoint.port, introduction), limit_s)
            except TimeoutError:
                refused.append(f"{address}: no answer in time")
            except OSError as error:
                refused.append(f"{address}: {error}")
        raise ConnectionError(f"cannot connect to port {endpoint.port} of " + "; ".join(refused))

    async def _dial_address(self, address: str, port: int, introduction: Introduction) -> socket.socket:
        connection = socket.socket(await self._family(address, port), socket.SOCK_STREAM)
        try:
            _configure(connection)
            await self._loop.sock_connect(connection, (address, port))
            await introduce(connection, self._key, introduction)
        except BaseException:
            connection.close()
            raise
        return connection

    async def _family(self, address: str, port: int) -> int:
        try:
            return socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
        except ValueError:
            found = await self._loop.getaddrinfo(address, port, type=socket.SOCK_STREAM)
            return found[0][0]


def _configure(connection: socket.socket) -> None:
    connection.setblocking(False)
    # asyncio does this only for sockets with an explicit protocol number.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _listener(address: str) -> socket.socket:
    if not address and socket.has_dualstack_ipv6():
        # IPv6 may be compiled in and yet switched off on this host.
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    return socket.create_server((address, 0), backlog=_BACKLOG)


_open_networks: weakref.WeakSet[Network] = weakref.WeakSet()
"""The networks of this process whose threads run; only the exit hook below reads it."""


def _close_all() -> None:
    for network in list(_open_networks):
        if network.pid == os.getpid():
            network.close()


# The interpreter joins executor threads at exit, so they must end first. Saves that still run at exit register later
# and therefore end earlier.
before_exit(_close_all)
