"""Streams over TCP connections of our own: one for each channel, sender and receiver, made by the first ``send``.

A rank listens from its first use of the streams on, and says where in the ranks' own store. No thread of ours runs:
whoever waits for a connection accepts for all who wait. A thread that waits looks for failures of others.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import msgpack

from ..errors import ControlError
from .agreement import format_ranks
from .failure import FailureRecord
from .introduction import PartialIntroduction, introduce
from .keys import address_key
from .line import Line, LineLost
from .outcome import LATE_S, LONGEST_PAUSE_S, OperationContext
from .peers import PeerIdentity
from .reports import Reports
from .streams import Buffer, Streams

__all__ = ["SocketStreams"]

_log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.1
_SEND_BYTES = 8 << 20
_CONNECT_S = 5.0  # for one of a peer's addresses
_INTRODUCTION_S = 10.0
_MOST_STRANGERS = 1024  # connections that have not introduced themselves yet; the oldest goes first


class SocketStreams(Streams):
    """The streams of one operation on one rank. They use the operation's own lines: to connect to the store once more
    would be a long wait where its rank is about to end."""

    def __init__(self, context: OperationContext) -> None:
        communicator, prefix = context.communicator, context.prefix
        self._communicator, self._kind, self._prefix = communicator, context.kind, prefix
        self._deadline_s = context.deadline_s
        self._lookout = _Lookout(context)
        self._lock = threading.Lock()
        self._outgoing: dict[tuple[int, str], socket.socket] = {}
        self._sent = self._received = 0
        self._closed = False
        key = secrets.token_bytes(32)
        self._door = _Door(communicator.listen(), key, prefix, communicator.world_size)
        try:
            where = [communicator.own_addresses(), self._door.port, key, communicator.here.pack()]
            self._lookout.publish(msgpack.packb(where))
        except BaseException:
            self._door.close()
            raise

    @property
    def bytes_sent(self) -> int:
        return self._sent

    @property
    def bytes_received(self) -> int:
        return self._received

    def send(self, to: int, channel: str, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        wait = self._wait(to, f"stream {channel!r} to rank {to}")
        at = 0
        with wait.names_the_loss():
            connection = self._connection_to(to, channel, wait) if len(view) else None
            while connection is not None and at < len(view):
                try:
                    at += connection.send(view[at : at + _SEND_BYTES])
                    wait.progress()
                except BlockingIOError:
                    wait.until_ready(connection, select.POLLOUT)
        with self._lock:
            self._sent += len(view)

    def receive(self, source: int, channel: str, into: Buffer) -> None:
        view = memoryview(into).cast("B")
        wait = self._wait(source, f"stream {channel!r} from rank {source}")
        at = 0
        with wait.names_the_loss():
            connection = self._door.connection(source, channel, wait.look) if len(view) else None
            while connection is not None and at < len(view):
                try:
                    count = connection.recv_into(view[at:])
                except BlockingIOError:
                    wait.until_ready(connection, select.POLLIN)
                    continue
                if not count:
                    raise ConnectionError(f"it ended {len(view) - at} bytes too early")
                at += count
                wait.progress()
        with self._lock:
            self._received += len(view)

    def close(self) -> list[str]:
        """Close every connection; the keys that were made in the store. Never raises."""
        with self._lock:
            self._closed = True
            outgoing = list(self._outgoing.values())
            self._outgoing.clear()
        for connection in outgoing:
            # What the system has taken is still delivered.
            connection.close()
        self._door.close()
        return self._lookout.close()

    def _wait(self, peer: int, what: str) -> _Wait:
        if self._closed:
            raise ControlError(f"this {self._kind} is closed; {what} cannot be used")
        if peer == self._communicator.rank or not 0 <= peer < self._communicator.world_size:
            raise ValueError(f"{what}: this is rank {self._communicator.rank} of {self._communicator.world_size}")
        return _Wait(self._lookout, peer, what, self._deadline_s)

    def _connection_to(self, to: int, channel: str, wait: _Wait) -> socket.socket:
        with self._lock:
            known = self._outgoing.get((to, channel))
        if known is not None:
            return known
        addresses, port, key, identity = msgpack.unpackb(self._address_of(to, wait))
        if self._communicator.here.shares_network(PeerIdentity.unpack(identity)):
            addresses = ["127.0.0.1"]
        made = _connect(addresses, port, wait)
        words = introduce(key, self._prefix, self._communicator.rank, channel)
        if made.send(words) != len(words):
            # The first bytes of a connection always fit in the system's buffer.
            made.close()
            raise ConnectionError("it took no introduction")
        with self._lock:
            if not self._closed:
                return self._outgoing.setdefault((to, channel), made)
        made.close()
        raise ControlError(f"this {self._kind} was closed while {wait.what} was used")

    def _address_of(self, to: int, wait: _Wait) -> bytes:
        pause = 0.0005
        while (found := self._lookout.address(to, wait.what)) is None:
            wait.look()
            time.sleep(pause)
            pause = min(pause * 1.5, LONGEST_PAUSE_S)
        wait.progress()
        return found


class _Lookout:
    """What all threads that use the streams ask of the stores. An address is in the store of the rank's parent."""

    def __init__(self, context: OperationContext) -> None:
        self._context, self._communicator = context, context.communicator
        self._kind, self._prefix = context.kind, context.prefix
        self._reports = Reports(context)
        self._lock = threading.Lock()
        self._next_look = 0.0
        self._keys: list[str] = []

    def publish(self, address: bytes) -> None:
        with self._asking("streams"):
            self._keys += self._context.above().put(address_key(self._prefix, self._communicator.rank), address)

    def address(self, peer: int, what: str) -> bytes | None:
        with self._asking(what):
            line, key = self._context.line_to(self._communicator.tree.parent(peer)), address_key(self._prefix, peer)
            return line.read(key)[0] if line.has(key) else None

    def look(self, peer: int, what: str, left_s: float) -> None:
        """Raise what has been reported, or that ``peer``, which is waited for, has ended. ``left_s``: until the wait's
        deadline."""
        if self._context.outcome.error is not None:
            raise self._context.outcome.error
        with self._asking(what):
            now = time.monotonic()
            if now >= self._next_look:
                self._next_look = now + _LOOK_EVERY_S
                self._context.above().be_patient(max(left_s, LATE_S))
                self._reports.raise_failure()
            self._reports.raise_death(what, lambda: [peer])

    def raise_lost(self, peer: int, what: str, error: OSError) -> NoReturn:
        here = self._communicator.rank
        known = PeerIdentity(peer, "its host", 0, 0, "", "", "")
        with contextlib.suppress(LineLost):
            # Whoever served its address may be gone as well.
            line, key = self._line_of(peer), address_key(self._prefix, peer)
            if line.has(key):
                known = PeerIdentity.unpack(msgpack.unpackb(line.read(key)[0])[3])
        how = f"its connection to rank {here} was lost in the middle of this {self._kind} ({error})"
        with self._asking(what):
            self._reports.raise_peer_lost(what, known, how)

    def raise_late(self, peer: int, what: str, deadline_s: float) -> NoReturn:
        here = self._communicator.here
        message = (
            f"{self._kind}: rank {here.rank} on {here.host} waited {deadline_s:g} s in {what} for rank(s) "
            f"{format_ranks([peer])} of {self._communicator.world_size}. Look at what they were doing then, or give a "
            "longer deadline."
        )
        with self._asking(what):
            self._reports.raise_reported(FailureRecord.of_deadline(message, what, here), is_late=True)

    def _line_of(self, peer: int) -> Line:
        with self._lock:
            return self._context.line_to(self._communicator.tree.parent(peer))

    def close(self) -> list[str]:
        with self._lock:
            return self._keys + self._reports.keys

    @contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except LineLost as error:
                self._reports.raise_store_lost(what, error)


class _Wait:
    """One thread's wait for one peer: a deadline that starts again with each progress."""

    def __init__(self, lookout: _Lookout, peer: int, what: str, deadline_s: float) -> None:
        self.what = what
        self._lookout, self._peer, self._deadline_s = lookout, peer, deadline_s
        self.progress()

    def progress(self) -> None:
        self._deadline = time.monotonic() + self._deadline_s

    def look(self) -> None:
        now = time.monotonic()
        self._lookout.look(self._peer, self.what, self._deadline - now)
        if now > self._deadline:
            self._lookout.raise_late(self._peer, self.what, self._deadline_s)

    def until_ready(self, connection: socket.socket, event: int, timeout_s: float = float("inf")) -> bool:
        """Wait for the connection, at most ``timeout_s``; whether it is ready."""
        poll, give_up = select.poll(), time.monotonic() + timeout_s
        poll.register(connection, event)
        while not poll.poll(_LOOK_EVERY_S * 1000):
            self.look()
            if time.monotonic() > give_up:
                return False
        return True

    @contextmanager
    def names_the_loss(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._lookout.raise_lost(self._peer, self.what, error)


class _Door:
    """Where the others' connections come in. Thread-safe."""

    def __init__(self, listener: socket.socket, key: bytes, operation: str, world_size: int) -> None:
        self.port: int = listener.getsockname()[1]
        self._listener, self._key, self._operation, self._world_size = listener, key, operation, world_size
        listener.setblocking(False)
        self._strangers: dict[int, tuple[socket.socket, PartialIntroduction, float]] = {}
        self._connections: dict[tuple[int, str], socket.socket] = {}
        self._changed = threading.Condition()
        self._is_attended = False

    def connection(self, source: int, channel: str, look: Callable[[], None]) -> socket.socket:
        """That sender's connection, once it has come. ``look`` raises when it never will."""
        while True:
            with self._changed:
                found = self._connections.get((source, channel))
                if found is not None:
                    return found
                if self._is_closed():
                    raise ControlError(f"{self._operation} was closed while rank {source} was waited for")
                attend = not self._is_attended
                if attend:
                    self._is_attended = True
                else:
                    self._changed.wait(_LOOK_EVERY_S)
            if attend:
                try:
                    self._attend()
                finally:
                    with self._changed:
                        self._is_attended = False
                        self._changed.notify_all()
            look()

    def close(self) -> None:
        with self._changed:
            self._listener.close()
            for stranger, _words, _until in self._strangers.values():
                stranger.close()
            for connection in self._connections.values():
                connection.close()
            self._strangers.clear()
            self._connections.clear()

    def _is_closed(self) -> bool:
        return self._listener.fileno() < 0

    def _attend(self) -> None:
        """Wait a moment for whoever comes or speaks. By one thread at a time."""
        poll = select.poll()
        with self._changed:
            if self._is_closed():
                return
            poll.register(self._listener, select.POLLIN)
            for number in self._strangers:
                poll.register(number, select.POLLIN)
        ready = [number for number, _event in poll.poll(_LOOK_EVERY_S * 1000)]
        with self._changed:
            if self._is_closed():
                return
            for number in ready:
                if number in self._strangers:
                    self._hear(number)
            if self._listener.fileno() in ready:
                self._accept()
            now = time.monotonic()
            for number in [number for number, (_, _, until) in self._strangers.items() if until < now]:
                self._turn_away(number, "it said nothing")

    def _accept(self) -> None:
        # A connection that broke before it was accepted is no reason to fail.
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while True:
                made, _address = self._listener.accept()
                made.setblocking(False)
                if len(self._strangers) >= _MOST_STRANGERS:
                    self._turn_away(next(iter(self._strangers)), "too many others came")
                until = time.monotonic() + _INTRODUCTION_S
                self._strangers[made.fileno()] = (made, PartialIntroduction(self._key, self._operation), until)
                # A rank's words are there with its connection, or a moment later.
                self._hear(made.fileno())

    def _hear(self, number: int) -> None:
        stranger, words, _until = self._strangers[number]
        try:
            known = None
            while known is None:
                data = stranger.recv(words.wanted)
                if not data:
                    raise ValueError("it hung up")
                known = words.take(data)
            if not 0 <= known.sender < self._world_size or tuple(known) in self._connections:
                raise ValueError(f"rank {known.sender} has opened {known.channel!r} already, or is none")
        except BlockingIOError:
            return
        except (OSError, ValueError) as error:
            self._turn_away(number, str(error))
            return
        del self._strangers[number]
        self._connections[known.sender, known.channel] = stranger

    def _turn_away(self, number: int, why: str) -> None:
        _log.debug("%s: a connection was refused: %s", self._operation, why)
        self._strangers.pop(number)[0].close()


def _connect(addresses: list[str], port: int, wait: _Wait) -> socket.socket:
    """To the first address that answers."""
    refused = []
    for address in addresses:
        try:
            for family, kind, protocol, _name, where in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM):
                made = socket.socket(family, kind, protocol)
                try:
                    made.setblocking(False)
                    _finish_connecting(made, where, wait)
                    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                except BaseException:
                    made.close()
                    raise
                wait.progress()
                return made
        except OSError as error:
            refused.append(f"{address}: {error}")
    raise ConnectionError(f"cannot connect to port {port} of " + "; ".join(refused))


def _finish_connecting(made: socket.socket, where: tuple[object, ...], wait: _Wait) -> None:
    with contextlib.suppress(BlockingIOError):
        made.connect(where)
    if not wait.until_ready(made, select.POLLOUT, _CONNECT_S):
        raise TimeoutError(f"no answer in {_CONNECT_S:g} s")
    error = made.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error:
        raise OSError(error, "refused")
