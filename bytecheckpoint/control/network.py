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
from .messages import Introduction, Message
from .timings import END_CHECK_S, END_CONFIRMATION_S, FLUSH_S, HANDSHAKE_S, REPLACE_S

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

    def replace_peer(self, peer: int) -> None:
        """Note that a peer has another connection for messages, and that some of the earlier one may be lost."""

    def lose_peer(self, peer: int, reason: str) -> None:
        """Note that the connection for messages with a peer is lost, or could not be made again."""

    def may_see_end_of(self, peer: int) -> bool:
        """Whether the peer runs on this host and has not ended."""


class Network:
    """Thread-safe. One thread runs from construction until ``close``."""

    def __init__(self, rank: int, key: bytes) -> None:
        self.pid = os.getpid()
        self._rank, self._key = rank, key
        self._endpoints: dict[int, Endpoint] = {}
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._outboxes: dict[int, list[bytes]] = {}  # messages to peers that do not have a connection yet
        self._arrivals: dict[int, asyncio.Event] = {}
        self._answers_of: dict[int, asyncio.Event] = {}  # set by each message of a peer
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
            raise TimeoutError(
                f"no answer in {timeout_s:.4g} s from {self._place(peer)}; a firewall may discard the packets"
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

    def restore(self, peer: int) -> None:
        """Connect again with a peer whose connection was lost, without waiting; ``lose_peer`` reports a failure."""
        self._thread.call(self._begin_connecting, peer, HANDSHAKE_S)

    def disconnect(self, peer: int) -> None:
        """End the connection for messages with a peer that does not answer."""
        self._thread.call(self._disconnect, peer)

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
        elif found.purpose == "again":
            connection.close()
            self._start(self._reconnect(found.sender))
        else:
            self._start(self._add_peer(found.sender, connection))

    def _place(self, peer: int) -> str:
        addresses, port, _ = self._endpoints[peer]
        return f"port {port} of {', '.join(addresses)}"

    async def _connect(self, peer: int) -> None:
        await self._add_peer(peer, await self._dial(peer, Introduction(self._rank, "messages")))

    async def _dial(self, peer: int, introduction: Introduction) -> socket.socket:
        """The last address has no limit: the peer may be stopped for a while."""
        return await dial(self._endpoints[peer], msgpack.packb(introduction))

    async def _add_peer(self, peer: int, connection: socket.socket) -> None:
        if peer in self._writers:
            if await self._answers(peer):
                # Otherwise a process that has the key could take the place of a living rank.
                _log.warning("refused a second connection that says it is rank %d, which is connected", peer)
                connection.close()
                return
            if (earlier := self._writers.pop(peer, None)) is not None:
                earlier.transport.abort()
                self._handler.replace_peer(peer)
        reader, writer = await asyncio.open_connection(sock=connection)
        self._writers[peer] = writer
        self._lost.discard(peer)
        for data in self._outboxes.pop(peer, []):
            writer.write(data)
        if peer in self._arrivals:
            self._arrivals[peer].set()
        self._handler.add_peer(peer)
        self._start(self._read(peer, reader, writer))

    async def _answers(self, peer: int) -> bool:
        """Whether a message arrives from a connected peer, which is asked for one."""
        answered = self._answers_of.setdefault(peer, asyncio.Event())
        self._write(peer, Message("probe", "").pack())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(answered.wait(), REPLACE_S)
        self._answers_of.pop(peer, None)
        return answered.is_set()

    def _disconnect(self, peer: int) -> None:
        writer = self._writers.pop(peer, None)
        if writer is not None:
            writer.transport.abort()
            self._lose(peer, "it did not answer")

    def _lose(self, peer: int, reason: str) -> None:
        self._lost.add(peer)
        self._handler.lose_peer(peer, reason)

    async def _reconnect(self, peer: int) -> None:
        """Connect again with a peer that has no connection with this rank, whatever this rank has."""
        if peer in self._writers and not await self._answers(peer):
            self._disconnect(peer)
        self._begin_connecting(peer, HANDSHAKE_S)

    async def _read(self, peer: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on messages until the connection ends."""
        reason = "it was closed"
        try:
            while True:
                (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                self._handler.receive(peer, await reader.readexactly(size))
                if peer in self._answers_of:
                    self._answers_of.pop(peer).set()
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
        if peer not in self._endpoints and peer not in self._writers:
            self._handler.lose_peer(peer, "its address is not known yet")  # so that no one waits for its answer
        elif peer in self._writers:
            self._writers[peer].write(data)
        elif peer not in self._lost:
            self._begin_connecting(peer)
            if peer in self._outboxes:
                self._outboxes[peer].append(data)

    def _begin_connecting(self, peer: int, limit_s: float | None = None) -> None:
        is_known = peer in self._writers or peer in self._outboxes or peer not in self._endpoints
        if not is_known and not self._is_closing:
            self._lost.discard(peer)
            self._outboxes[peer] = []
            self._start(self._connect_and_send(peer, limit_s))

    async def _connect_and_send(self, peer: int, limit_s: float | None) -> None:
        arrived = self._arrivals[peer] = asyncio.Event()
        try:
            async with asyncio.timeout(limit_s):
                if peer < self._rank:
                    await self._connect(peer)
                else:
                    (await self._dial(peer, Introduction(self._rank, "again"))).close()
                    await arrived.wait()
        except TimeoutError:
            self._lose(peer, f"{self._place(peer)} gave no answer in {limit_s:g} s to a new connection")
        except OSError as error:
            self._lose(peer, str(error))
        self._outboxes.pop(peer, None)
        del self._arrivals[peer]


_open_networks: weakref.WeakSet[Network] = weakref.WeakSet()
"""The networks of this process whose threads run; only the exit hook below reads it."""


def _close_all() -> None:
    for network in list(_open_networks):
        if network.pid == os.getpid():
            network.close()


# The interpreter joins executor threads at exit, so they must end first. Saves that still run at exit register later
# and therefore end earlier.
before_exit(_close_all)
