"""Byte streams over TCP: one connection per channel, sender and receiver, opened by the first ``send``.

The caller's threads move the bytes; the network's thread only makes the connections.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import NoReturn

from ..errors import ControlError
from .base import Streams
from .connections import Buffer, close_when_connected, receive_into, send
from .failure import FailureRecord
from .network import Network
from .outcome import Outcome
from .timings import END_CONFIRMATION_S, STREAM_POLL_S


class SocketStreams(Streams):
    """The streams of one operation on one rank."""

    def __init__(self, network: Network, outcome: Outcome) -> None:
        self._network, self._outcome = network, outcome
        self._router, self._state = outcome.router, outcome.state
        self._lock = threading.Lock()
        self._outgoing: dict[tuple[int, str], socket.socket] = {}
        self._is_closed = False

    def send(self, to: int, channel: str, data: Buffer) -> None:
        wait = self._wait_for(to, f"stream {channel!r} to rank {to}")
        with wait.reporting_loss():
            if len(data):
                send(self._connection_to(to, channel, wait), data, wait.until_ready)

    def receive(self, source: int, channel: str, into: Buffer) -> None:
        wait = self._wait_for(source, f"stream {channel!r} from rank {source}")
        with wait.reporting_loss():
            if len(into):
                receive_into(self._connection_from(source, channel, wait), into, wait.until_ready)

    def close(self) -> None:
        """Close the outgoing connections; what the operating system has accepted is still delivered. Never raises."""
        with self._lock:
            self._is_closed = True
            outgoing = list(self._outgoing.values())
            self._outgoing.clear()
        for connection in outgoing:
            connection.close()

    def _wait_for(self, peer: int, action: str) -> _PeerWait:
        if self._is_closed:
            raise ControlError(f"this {self._state.kind} is closed; {action} cannot be used")
        if peer == self._router.rank or not 0 <= peer < self._router.tree.world_size:
            raise ValueError(f"{action}: this is rank {self._router.rank} of {self._router.tree.world_size}")
        return _PeerWait(self._outcome, peer, action)

    def _connection_to(self, to: int, channel: str, wait: _PeerWait) -> socket.socket:
        with self._lock:
            known = self._outgoing.get((to, channel))
        if known is not None:
            return known
        made = wait.result(self._network.open_stream(to, self._state.prefix, channel))
        with self._lock:
            if not self._is_closed:
                return self._outgoing.setdefault((to, channel), made)
        made.close()
        raise ControlError(f"this {self._state.kind} was closed while {wait.action} was used")

    def _connection_from(self, source: int, channel: str, wait: _PeerWait) -> socket.socket:
        router, state = self._router, self._state
        while (found := router.stream(state, source, channel)) is None:
            if self._is_closed:
                raise ControlError(f"this {state.kind} was closed while {wait.action} was used")
            router.wait_until(lambda: (source, channel) in state.streams or state.failure is not None, STREAM_POLL_S)
            wait.check()
        return found


class _PeerWait:
    """One thread's wait for one peer, with a deadline that restarts with each progress."""

    def __init__(self, outcome: Outcome, peer: int, action: str) -> None:
        self.action = action
        self._outcome, self._peer = outcome, peer
        self._router, self._state = outcome.router, outcome.state
        self._deadline = time.monotonic() + outcome.deadline_s

    def check(self) -> None:
        """Raise a failure that has arrived, the loss of the peer, or that the deadline has passed."""
        self._outcome.raise_failure()
        self._router.check_processes([self._peer])
        if self._router.is_lost(self._state, self._peer):
            self._outcome.raise_record(self._router.loss_record(self._state, self._peer, self.action))
        if time.monotonic() > self._deadline:
            self._outcome.raise_deadline(self.action, [self._peer])

    def until_ready(self, connection: socket.socket, event: int) -> None:
        """Wait until the connection is ready. Bytes have moved since the last wait, so the deadline begins again."""
        self._deadline = time.monotonic() + self._outcome.deadline_s
        poll = select.poll()
        poll.register(connection, event)
        while not poll.poll(STREAM_POLL_S * 1000):
            self.check()

    def result(self, future: Future[socket.socket]) -> socket.socket:
        """Wait until a connection is made."""
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    return future.result(STREAM_POLL_S)
                self.check()
        except BaseException:
            if not future.cancel():
                close_when_connected(future)
            raise

    @contextmanager
    def reporting_loss(self) -> Iterator[None]:
        """Report a broken connection as the failure of the peer."""
        try:
            yield
        except ControlError:  # a DeadlineError is an OSError
            raise
        except OSError as error:
            self._raise_loss(error)

    def _raise_loss(self, error: OSError) -> NoReturn:
        """The connection broke. Find the cause in the peer's report or in the end of its process."""
        router, state = self._router, self._state
        give_up = time.monotonic() + END_CONFIRMATION_S
        identity = router.identity(self._peer)
        while time.monotonic() < give_up:
            # A rank reports a failure before its process ends.
            has_ended = self._peer in router.watch.ended() or router.is_lost(state, self._peer)
            self._outcome.raise_failure()
            if has_ended:
                self._outcome.raise_record(router.loss_record(state, self._peer, self.action))
            router.wait_until(lambda: state.failure is not None, STREAM_POLL_S)
        self._outcome.raise_record(FailureRecord.from_disconnection(identity, self.action, router.here, str(error)))
