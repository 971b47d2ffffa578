"""The messages between one rank and its peers, which an asyncio event loop on one thread sends and receives.

Control messages travel on one connection per pair of ranks, each with its length in front. Streams get connections of
their own, which are handed over after the handshake. Every listener accepts both.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import socket
import struct
import weakref
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, Protocol

import msgpack

from ..runtime.threads import before_exit
from .addresses import listen
from .connections import Endpoint, LoopThread, accept, dial
from .messages import Introduction
from .timings import END_CHECK_S, END_CONFIRMATION_S, FLUSH_S

_log = logging.getLogger(__name__)

_LENGTH = struct.Struct("<Q")


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
        self._is_closing = False
        self._handler: MessageHandler
        self._thread = LoopThread("bytecheckpoint-control")
        _open_networks.add(self)

    def attach(self, handler: MessageHandler) -> None:
        """Set the handler, before the first connection."""
        self._handler = handler

    def set_endpoints(self, endpoints: dict[int, Endpoint]) -> None:
        """Set where other ranks listen."""
        self._endpoints = endpoints

    def listen(self, address: str = "") -> int:
        """Accept connections on ``address``, by default as ``addresses.listen``; return the port."""
        listener = listen(address)
        port = int(listener.getsockname()[1])
        self._thread.submit(accept(listener, self._key, self._take))
        return port

    def connect(self, peer: int, timeout_s: float) -> None:
        """Connect to a peer for messages. Raises ``OSError`` or ``TimeoutError``."""
        future = self._thread.submit(self._connect(peer))
        try:
            future.result(timeout_s)
        except TimeoutError:
            addresses, port, _ = self._endpoints[peer]
            raise TimeoutError(
                f"no answer in {timeout_s:.4g} s from port {port} of {', '.join(addresses)}; a firewall may discard "
                "the packets"
            ) from None
        finally:
            future.cancel()

    def open_stream(self, peer: int, operation: str, channel: str) -> Future[socket.socket]:
        """Connect a stream. The result is a non-blocking socket, which belongs to the caller."""
        return self._thread.submit(self._dial(peer, Introduction(self._rank, "stream", operation, channel)))

    def send(self, peer: int, message: bytes) -> None:
        """Send a message without waiting, in order. Connects first if needed; drops messages to a lost peer.

        A peer that has not connected, and whose address is not known, is lost.
        """
        self._thread.call(self._write, peer, message)

    def flush(self) -> None:
        """Wait, for a moment at most, until the operating system has the messages sent so far.

        It then delivers them even if this process is killed. Messages to a peer that does not read may stay queued.
        """
        done: queue.SimpleQueue[None] = queue.SimpleQueue()
        if self._thread.call(done.put, None):
            with contextlib.suppress(queue.Empty):
                done.get(timeout=FLUSH_S)

    def connected_peers(self) -> set[int]:
        """Return the peers with an open connection for messages."""
        return set(self._writers)

    def close(self) -> None:
        """Send what is pending, for a moment at most, close every connection and end the thread."""
        with contextlib.suppress(ConnectionError, TimeoutError, CancelledError):  # another thread has closed it
            self._thread.submit(self._close_writers()).result(5 * FLUSH_S)
        self._thread.close()
        _open_networks.discard(self)

    async def _close_writers(self) -> None:
        self._is_closing = True
        closing = {}
        for writer in self._writers.values():
            writer.close()
            closing[asyncio.create_task(writer.wait_closed())] = writer
        if closing:
            _, late = await asyncio.wait(closing, timeout=FLUSH_S)
            for one in late:
                closing[one].transport.abort()
            await asyncio.gather(*closing, return_exceptions=True)

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)  # the loop itself does not keep it
        task.add_done_callback(self._tasks.discard)

    def _take(self, introduction: bytes, connection: socket.socket) -> None:
        found = Introduction(*msgpack.unpackb(introduction))
        if found.purpose == "stream":
            self._handler.add_stream(found, connection)
        else:
            self._start(self._add_peer(found.sender, connection))

    async def _connect(self, peer: int) -> None:
        await self._add_peer(peer, await self._dial(peer, Introduction(self._rank, "messages")))

    async def _dial(self, peer: int, introduction: Introduction) -> socket.socket:
        """The last address has no limit: the peer may be stopped for a while."""
        return await dial(self._endpoints[peer], msgpack.packb(introduction))

    async def _add_peer(self, peer: int, connection: socket.socket) -> None:
        if peer in self._writers:
            # Otherwise a process that has the key could take the place of a living rank.
            _log.warning("refused a second connection that says it is rank %d, which is connected", peer)
            connection.close()
            return
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
        loop = asyncio.get_running_loop()
        give_up = loop.time() + END_CONFIRMATION_S
        while self._handler.may_see_end_of(peer) and loop.time() < give_up:
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
        elif peer not in self._endpoints:
            self._handler.lose_peer(peer, "its address is not known yet")  # so that no one waits for its answer

    async def _connect_and_send(self, peer: int) -> None:
        try:
            await self._connect(peer)
        except OSError as error:
            self._lost.add(peer)
            self._handler.lose_peer(peer, str(error))
        for data in self._outboxes.pop(peer):
            if peer in self._writers:
                self._writers[peer].write(data)


_open_networks: weakref.WeakSet[Network] = weakref.WeakSet()
"""The networks of this process whose threads run; only the exit hook below reads it."""


def _close_all() -> None:
    for network in list(_open_networks):
        if network.pid == os.getpid():
            network.close()


# The interpreter joins executor threads at exit, so they must end first. Saves that still run at exit register later
# and therefore end earlier.
before_exit(_close_all)
