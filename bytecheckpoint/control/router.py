"""Route messages along the tree, and keep what arrives for each operation until this rank reads it.

Payloads go one step, from child to parent or back. Failures are reported towards rank 0, which decides: the first one
becomes the failure of the operation, and every rank passes it on to its children. The network's thread does this, so
a failure also travels through a rank whose own threads are busy. The state of an operation is kept until this rank and
all ranks below it have left, so a rank that is late still learns of a failure.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgpack

from ..runtime.messages import format_ranks
from ..runtime.waiting import Waiters
from .failure import FailureRecord
from .messages import Introduction, Message, WaitStep
from .peers import PeerIdentity, PeerWatch
from .timings import UNREAD_MESSAGES_S, WAIT_CHECK_S
from .tree import Tree

_MOST_STATES = 256  # operations that some rank below has not left, or that this rank has not begun
_MOST_CLOSED = 1024
_MOST_VERDICTS = 16


class MessageSender(Protocol):
    """The part of ``Network`` that a router uses."""

    def send(self, peer: int, message: bytes) -> None:
        """Send a message without waiting, in order."""

    def flush(self) -> None:
        """Wait, for a moment at most, until the operating system has the messages sent so far."""

    def restore(self, peer: int) -> None:
        """Connect again with a peer whose connection was lost, without waiting."""

    def disconnect(self, peer: int) -> None:
        """End the connection with a peer that does not answer."""


@dataclass(eq=False)
class OperationState:
    """What this rank holds of one operation. Guarded by the router's lock, except for ``phase`` and ``description``."""

    prefix: str
    remaining: set[int]
    """The children that have not left; of a child that is lost, the ranks below it."""
    phase: str = "the beginning"
    description: str = ""
    failure: FailureRecord | None = None
    payloads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    notes: dict[int, tuple[float, list[WaitStep]]] = field(default_factory=dict)
    streams: dict[tuple[int, str], socket.socket] = field(default_factory=dict)
    senders: set[int] = field(default_factory=set)
    """The peers that have sent a message of it."""
    lost: dict[int, str] = field(default_factory=dict)
    """Why peers were lost in the middle of it, whether or not they have connected again."""
    has_begun: bool = False
    has_left: bool = False

    @property
    def kind(self) -> str:
        """The kind of the operation, such as ``save``."""
        return self.prefix.rpartition(">")[2].partition("/")[0]

    def close_streams(self) -> None:
        """Close the incoming connections."""
        for connection in self.streams.values():
            connection.close()
        self.streams.clear()


class Router:
    """The messages of one rank. Thread-safe; only ``wait_until`` blocks."""

    def __init__(self, here: PeerIdentity, tree: Tree, network: MessageSender) -> None:
        self.here, self.tree, self.rank = here, tree, here.rank
        self.parent, self.children = tree.parent(here.rank), tree.children(here.rank)
        self.watch = PeerWatch(here, [])
        self.hosts: dict[int, str] = {}
        self._network = network
        self._lock = threading.Lock()
        self._waiters = Waiters()
        self._states: dict[str, OperationState] = {}
        self._closed: dict[str, None] = {}
        self._verdicts: dict[str, FailureRecord] = {}
        self._lost: dict[int, str] = {}
        self._first_seen_ended: dict[int, float] = {}
        self._closing: set[int] = set()
        self._silent: dict[int, float] = {}  # when the first probe was sent that a peer has not answered

    # For the ranks' operations.

    def begin(self, prefix: str) -> OperationState:
        """Enter an operation."""
        with self._lock:
            self._closed.pop(prefix, None)
            state = self._states.get(prefix) or self._add_state(prefix)
            state.has_begun = True
            return state

    def leave(self, state: OperationState) -> None:
        """Leave an operation; this rank sends nothing in it any more."""
        with self._lock:
            state.has_left = True
            state.payloads.clear()
            state.close_streams()
            self._forget_if_over(state)
            self._waiters.wake()

    def has_operations(self) -> bool:
        """Whether this rank or one below is in an operation that this rank has begun."""
        with self._lock:
            return any(state.has_begun for state in self._states.values())

    def unfinished_operations(self) -> int:
        """Count the operations that this rank has left and some rank below has not."""
        return sum(state.has_left for state in list(self._states.values()))

    def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until a condition holds, which is checked under the lock after each message; return whether it does."""

        def holds() -> bool:
            with self._lock:
                return condition()

        return self._waiters.wait_until(holds, timeout_s)

    def wait_until_finished(self, timeout_s: float) -> None:
        """Wait until all ranks below have left the operations that this rank has left."""
        self._wait_checking(lambda: not self.unfinished_operations(), timeout_s)

    def wait_for_others(self, state: OperationState, timeout_s: float) -> None:
        """Wait until all ranks below have left this operation."""
        self._wait_checking(lambda: not state.remaining, timeout_s)

    def send_payload(self, peer: int, state: OperationState, phase: str, payload: bytes) -> None:
        """Send one payload of an exchange to the parent or a child."""
        self._network.send(peer, Message("payload", state.prefix, phase, payload).pack())

    def flush(self) -> None:
        """Wait until the operating system has the payloads, so that the death of this process cannot lose them."""
        self._network.flush()

    def take_payload(self, state: OperationState, phase: str, sender: int) -> bytes:
        """Remove a payload that has arrived."""
        with self._lock:
            received = state.payloads[phase]
            payload = received.pop(sender)
            if not received:
                del state.payloads[phase]
            return payload

    def missing(self, state: OperationState, phase: str, senders: Iterable[int]) -> list[int]:
        """Return the senders whose payload has not arrived. Call it from a ``wait_until`` condition or any thread."""
        received = state.payloads.get(phase, {})
        return [sender for sender in senders if sender not in received]

    def send_note(self, state: OperationState, phase: str, steps: list[WaitStep], *, to_parent: bool) -> None:
        """Inform the children, and perhaps the parent, which ranks this rank waits for."""
        message = Message("waiting", state.prefix, phase, msgpack.packb(steps)).pack()
        for peer in [*self.children, *([self.parent] if to_parent and self.rank else [])]:
            self._network.send(peer, message)

    def note(self, state: OperationState, sender: int, lifetime_s: float) -> list[WaitStep]:
        """Return the latest note of a peer; empty if it is old or the peer has sent something else since."""
        with self._lock:
            arrived, steps = state.notes.get(sender, (0.0, []))
        return steps if time.monotonic() - arrived < lifetime_s else []

    def stream(self, state: OperationState, sender: int, channel: str) -> socket.socket | None:
        """Return the incoming connection of a stream."""
        with self._lock:
            return state.streams.get((sender, channel))

    # Failures.

    def report(self, state: OperationState, record: FailureRecord, *, to_root: bool = False) -> None:
        """Send a failure to rank 0, through the parent unless ``to_root``; on rank 0, decide."""
        if self.rank == 0:
            self.decide(state, record)
            return
        peer = 0 if to_root else self._peer_above()
        self._network.send(peer, Message("report", state.prefix, body=record.pack()).pack())

    def decide(self, state: OperationState, record: FailureRecord) -> FailureRecord:
        """Make this the operation's failure here and below unless there is one already; return the one that holds."""
        with self._lock:
            return self._decide(state, record)

    def is_lost(self, state: OperationState, peer: int) -> bool:
        """Whether a peer's process has ended, or its connection was lost, in the middle of an operation or before."""
        return peer in state.lost or peer in self._lost

    def probe(self, peer: int) -> None:
        """Ask a peer for an answer, which its network thread gives; until a message arrives, it is silent."""
        with self._lock:
            self._silent.setdefault(peer, time.monotonic())
        self._network.send(peer, Message("probe", "").pack())

    def is_silent(self, peer: int) -> bool:
        """Whether no message of a peer has arrived since this rank last probed it."""
        return peer in self._silent

    def describe_silence(self, peers: Iterable[int]) -> str:
        """Describe those of these peers that have not answered a probe; empty if all have.

        The connections with those on other hosts end: if the network has forgotten or delays them, new ones work.
        """
        silent = [peer for peer in peers if self.is_silent(peer)]
        remote = [peer for peer in silent if self.watch.identity(peer) is None]
        if not remote:
            return ", whose process does not answer at all" if silent else ""
        for peer in remote:
            self._network.disconnect(peer)
        hosts = ", ".join(dict.fromkeys(self.identity(peer).host for peer in remote))
        return (
            f". Nothing arrives on {self.here.host} from rank(s) {format_ranks(remote)} on {hosts}: the network between"
            " these hosts loses packets, in one direction at least, or the processes do not run"
        )

    def silent_s(self, peer: int) -> float:
        """Return how long a peer has not answered a probe; 0 if it has answered, or was not probed."""
        begun = self._silent.get(peer)
        return 0.0 if begun is None else time.monotonic() - begun

    def check_processes(self, peers: Iterable[int]) -> None:
        """Notice which of these peers have ended on this host, once their last messages have been read."""
        ended = self.watch.ended().intersection(peers) - self._lost.keys()
        now = time.monotonic()
        for peer in ended:
            if now - self._first_seen_ended.setdefault(peer, now) > UNREAD_MESSAGES_S:
                self.lose_peer(peer, "its process has ended")

    def loss_record(self, state: OperationState, peer: int, phase: str) -> FailureRecord:
        """Describe the loss of a peer as the failure of an operation."""
        identity = self.identity(peer)
        if peer in self.watch.ended():
            how = (
                f"its process {identity.pid} ended in the middle of (or without) this {state.kind}: it was killed, ran "
                "out of memory, or exited"
            )
        elif peer in self._closing:
            how = f"it closed its communicator before this {state.kind} was over"
        else:
            return FailureRecord.from_disconnection(
                identity, phase, self.here, state.lost.get(peer) or self._lost.get(peer, "")
            )
        return FailureRecord.from_death(identity, phase, how)

    def identity(self, peer: int) -> PeerIdentity:
        """Return what is known of a rank's process."""
        known = self.watch.identity(peer)
        return known or PeerIdentity(peer, self.hosts.get(peer, "an unknown host"), 0, 0, "", "", "")

    def announce_closing(self) -> None:
        """Inform the parent and the children that this rank closes its communicator."""
        for peer in {self.parent, *self.children} - {self.rank}:
            self._network.send(peer, Message("closing", "").pack())

    # For the network.

    def receive(self, sender: int, data: bytes) -> None:
        """Handle a message."""
        message = Message.unpack(data)
        with self._lock:
            self._silent.pop(sender, None)
            if message.kind == "closing":
                self._closing.add(sender)
                return
            if message.kind == "probe":
                self._network.send(sender, Message("alive", "").pack())
                return
            if message.kind == "alive":
                self._waiters.wake()
                return
            state = self._state(message.operation)
            if message.kind == "report":
                self._receive_report(sender, state, message)
            elif state is not None:
                state.senders.add(sender)
                self._receive(sender, state, message)
            self._waiters.wake()

    def add_peer(self, peer: int) -> None:
        """Note that a peer has connected, and wake the threads that wait for it."""
        with self._lock:
            self._lost.pop(peer, None)
            self._silent.pop(peer, None)
            self._waiters.wake()

    def replace_peer(self, peer: int) -> None:
        """Note that a peer has another connection: of the operations that it takes part in, messages may be lost."""
        with self._lock:
            self._silent.pop(peer, None)
            for state in list(self._states.values()):
                if peer in state.senders:
                    self._lose_peer_of(state, peer, "it has connected again")
            self._waiters.wake()

    def add_stream(self, introduction: Introduction, connection: socket.socket) -> None:
        """Keep the connection of a stream for its operation; refuse one that is over, and a second of the same name."""
        sender, channel = introduction.sender, introduction.channel
        with self._lock:
            state = self._state(introduction.operation)
            if state is None or state.has_left or (sender, channel) in state.streams:
                connection.close()
                return
            state.streams[sender, channel] = connection
            self._waiters.wake()

    def lose_peer(self, peer: int, reason: str) -> None:
        """Note that a peer has ended or cannot be reached."""
        with self._lock:
            if peer in self._lost:
                return
            self._lost[peer] = reason
            for state in list(self._states.values()):
                self._lose_peer_of(state, peer, reason)
            self._waiters.wake()

    def may_see_end_of(self, peer: int) -> bool:
        """Whether the peer runs on this host and has not ended."""
        if peer in self._closing or peer in self.watch.ended():
            return False
        return self.watch.identity(peer) is not None

    # With the lock held.

    def _receive_report(self, sender: int, state: OperationState | None, message: Message) -> None:
        if self.rank and 0 not in self._lost:
            self._network.send(self._peer_above(), message.pack())
            return
        record = FailureRecord.unpack(message.body)
        # Without a state, the sender has lost its leader, and every other rank has left since.
        record = self._decide(state, record) if state else self._verdicts.get(message.operation, record)
        if sender not in self.children:
            self._network.send(sender, Message("failure", message.operation, body=record.pack()).pack())

    def _receive(self, sender: int, state: OperationState, message: Message) -> None:
        if message.kind == "payload":
            state.notes.pop(sender, None)
            if not state.has_left:
                state.payloads.setdefault(message.phase, {})[sender] = message.body
        elif message.kind == "waiting":
            steps = [WaitStep(*step) for step in msgpack.unpackb(message.body)]
            state.notes[sender] = time.monotonic(), steps
        elif message.kind == "failure":
            self._decide(state, FailureRecord.unpack(message.body))
        elif message.kind == "left":
            state.remaining.discard(sender)
            self._forget_if_over(state)

    def _state(self, prefix: str) -> OperationState | None:
        """The state of an operation, made by the first message of it; None if the operation is over."""
        state = self._states.get(prefix)
        return self._add_state(prefix) if state is None and prefix not in self._closed else state

    def _add_state(self, prefix: str) -> OperationState:
        """Add the state of a new operation. Peers on other hosts whose connection was lost get a new one."""
        for peer in [peer for peer in self._lost if self._may_return(peer)]:
            del self._lost[peer]
            self._silent.pop(peer, None)
            self._network.restore(peer)
        state = self._states[prefix] = OperationState(prefix, set(self.children))
        for peer, reason in self._lost.items():
            self._lose_peer_of(state, peer, reason)
        waiting = [other for other in self._states.values() if other.has_left or not other.has_begun]
        for other in waiting[:-_MOST_STATES]:
            self._forget(other)
        return state

    def _decide(self, state: OperationState, record: FailureRecord) -> FailureRecord:
        if state.failure is None:
            state.failure = record
            message = Message("failure", state.prefix, body=record.pack()).pack()
            for child in self.children:
                if child in state.remaining:
                    self._network.send(child, message)
            self._waiters.wake()
        return state.failure

    def _may_return(self, peer: int) -> bool:
        """Whether a lost peer may still run: it is on another host, and has not announced its end."""
        return peer in (0, self.parent, *self.children) and peer not in self._closing and not self.watch.identity(peer)

    def _lose_peer_of(self, state: OperationState, peer: int, reason: str) -> None:
        state.lost[peer] = reason
        if peer in state.remaining:
            state.remaining.remove(peer)
            if peer in self.children:
                state.remaining.update(set(self.tree.branch(peer)) - self._lost.keys())
            self._forget_if_over(state)
        if peer == 0 and not state.has_left:
            # The ranks below see this loss only if this rank passes it on.
            self._decide(state, self.loss_record(state, 0, state.phase))

    def _forget_if_over(self, state: OperationState) -> None:
        if not state.has_left or state.remaining or state.prefix not in self._states:
            return
        self._forget(state)
        if self.rank:
            self._network.send(self._peer_above(), Message("left", state.prefix).pack())
        elif state.failure is not None:
            self._verdicts[state.prefix] = state.failure
            _keep_newest(self._verdicts, _MOST_VERDICTS)

    def _forget(self, state: OperationState) -> None:
        self._states.pop(state.prefix, None)
        state.close_streams()
        self._closed[state.prefix] = None
        _keep_newest(self._closed, _MOST_CLOSED)

    def _peer_above(self) -> int:
        """The parent; rank 0 if the parent is lost."""
        return 0 if self.parent in self._lost else self.parent

    def _wait_checking(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """``wait_until``, and notice ranks below whose processes end."""
        give_up = time.monotonic() + timeout_s
        while not self.wait_until(condition, min(WAIT_CHECK_S, max(give_up - time.monotonic(), 0.0))):
            if time.monotonic() > give_up:
                return
            with self._lock:
                remaining = {rank for state in self._states.values() for rank in state.remaining}
            self.check_processes(remaining)


def _keep_newest(entries: dict[str, Any], count: int) -> None:
    while len(entries) > count:
        del entries[next(iter(entries))]
