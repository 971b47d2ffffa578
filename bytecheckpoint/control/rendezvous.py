"""How the ranks find the library's own stores: once per communicator, through a store they already share.

Every rank says hello under its rank with a word of its own; its parent (``tree.py``) serves a store and answers to that
word. A value that an earlier group left in a shared store is thus never taken for an answer, and no rank counts
anything. In a flat job every parent is rank 0, and there are no leaders.

1. rank r: ``hello/<r>`` = its word and identity, into the shared store; a leader when all of its group have
2. rank 0: when all its children have, serve a store (on 127.0.0.1 alone when all share the host), ``reply/<word>`` =
   address; a leader that has got this, serve one for its group, and reply to it likewise
3. rank r: connect to its parent, ``joined/<r>`` = identity, into the parent's store; a leader when all of its group
   have, with their identities and its store's address
4. rank 0: when all have joined, one list of identities per host; ``ready`` = where all stores are; leaders pass it on
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
from torch._C._distributed_c10d import PrefixStore

from ..errors import ControlError, DeadlineError
from .agreement import format_ranks
from .connecting import serve_store
from .line import Line, LineLost
from .lines import Lines, StoreAddress
from .meeting import ADDRESS_VARIABLE, LOOPBACK, Meeting, addresses_facing, root_addresses
from .peers import PeerIdentity
from .tree import Tree

__all__ = ["meet"]

_PREFIX = "bytecheckpoint/control"
_PAUSE_S = 0.005
_PAUSE_PER_RANK_S = 25e-6  # in large jobs the longest pause grows with the ranks that look
_NOTE_EVERY_S = 1.0
_NOTES_PER_DEADLINE = 8


def meet(store: Any, here: PeerIdentity, world_size: int, deadline_s: float, tree: Tree | None = None) -> Meeting:
    """Find the others. Called by every rank at about the same time; raises ``DeadlineError`` naming who is missing."""
    with contextlib.suppress(AttributeError, NotImplementedError, RuntimeError):
        # A connection of its own: the shared one may be blocked by a wait of the main thread. Older torch has none.
        store = store.clone()
    tree = tree if tree is not None else Tree.of(world_size)
    one = _Arrival(PrefixStore(_PREFIX, store), here, tree, deadline_s)
    try:
        if here.rank == 0:
            return _host(one, _Reception(one))
        return _join(one, _Reception(one) if tree.children(here.rank) else None)
    except LineLost as error:
        hint = f" {_hint()}" if error.server == 0 else ""
        raise ControlError(
            f"rank {here.rank} on {here.host} cannot reach rank {error.server}'s store: {error}.{hint}"
        ) from error
    except RuntimeError as error:
        raise ControlError(
            f"rank {here.rank} on {here.host} cannot meet the other ranks: the store of the process group failed: "
            f"{error}"
        ) from error


class _Arrival:
    """One rank on its way to the others, and its clock."""

    def __init__(self, shared: Any, here: PeerIdentity, tree: Tree, deadline_s: float) -> None:
        self.shared, self.here, self.tree = shared, here, tree
        self.word = secrets.token_hex(8)
        self._deadline_s = deadline_s
        self._deadline = time.monotonic() + deadline_s
        self._longest_pause_s = max(_PAUSE_S, tree.world_size * _PAUSE_PER_RANK_S)

    def say_hello(self, is_local: bool) -> None:
        """``is_local``: all of its branch share the host's network."""
        self.shared.set(f"hello/{self.here.rank}", msgpack.packb([self.word, self.here.pack(), is_local]))

    def left_s(self) -> float:
        return max(self._deadline - time.monotonic(), 0.01)

    def until_none(self, missing: Callable[[], list[int]], what: str, hint: str = "") -> None:
        """Look for who is missing until nobody is. Who waits for its children leaves word for whom, for its parent."""
        note_every_s = min(_NOTE_EVERY_S, self._deadline_s / _NOTES_PER_DEADLINE)
        next_note, pause = time.monotonic() + note_every_s, _PAUSE_S
        while True:
            ranks = missing()
            if not ranks:
                return
            now = time.monotonic()
            if now > self._deadline:
                raise DeadlineError(
                    f"the ranks did not meet within {self._deadline_s:g} s: waited for rank(s) "
                    f"{format_ranks(self._culprits(ranks))} to {what}. Every rank of the default process group has to "
                    "take part in a save or load." + hint
                )
            if now > next_note and min(ranks) > self.here.rank > 0:
                next_note = now + note_every_s
                self.shared.set(f"missing/{self.here.rank}", msgpack.packb(ranks))
            time.sleep(pause)
            pause = min(pause * 1.5, self._longest_pause_s)

    def forget(self, key: str) -> None:
        # Not every store can delete; what stays is small and never mistaken for an answer.
        with contextlib.suppress(NotImplementedError, RuntimeError):
            self.shared.delete_key(key)

    def _culprits(self, ranks: Iterable[int]) -> list[int]:
        """Those for whom a leader that is late waits itself."""
        found: list[int] = []
        for rank in ranks:
            key = f"missing/{rank}"
            is_known = rank > self.here.rank and self.shared.check([key])
            found += msgpack.unpackb(bytes(self.shared.get(key))) if is_known else [rank]
        return found


@dataclass
class _Reception:
    """A rank that serves a store, and those of its children that have come."""

    arrival: _Arrival
    words: dict[int, str] = field(default_factory=dict)
    identities: dict[int, PeerIdentity] = field(default_factory=dict)
    is_local: bool = True
    server: Any = None
    line: Line | None = None

    def await_hellos(self) -> None:
        children = self.arrival.tree.children(self.arrival.here.rank)

        def missing() -> list[int]:
            self._hear([rank for rank in children if rank not in self.words])
            return [rank for rank in children if rank not in self.words]

        self.arrival.until_none(missing, f"say hello to rank {self.arrival.here.rank}")

    def serve(self, addresses: list[str], local: bool) -> tuple[StoreAddress, Line]:
        """Open the store, and tell all who said hello; where it is for others."""
        here = self.arrival.here
        self.server, port = serve_store(LOOPBACK if local else "")
        self.line = Line(self.server, here.rank)
        place = StoreAddress(here, [LOOPBACK] if local else addresses, port)
        self._answer = msgpack.packb([place.pack(), local])
        for word in self.words.values():
            self.arrival.shared.set(f"reply/{word}", self._answer)
        return place, self.line

    def await_joins(self, hint: str) -> list[tuple[list[bytes], list[bytes]]]:
        """What each child brings: where the stores in its branch are, and who is in it."""
        arrival, line = self.arrival, self.line
        assert line is not None
        children = arrival.tree.children(arrival.here.rank)

        def missing() -> list[int]:
            ranks = [rank for rank in children if not line.has(f"joined/{rank}")]
            for rank in self._hear(ranks):
                arrival.shared.set(f"reply/{self.words[rank]}", self._answer)
            return ranks

        arrival.until_none(missing, f"connect to rank {arrival.here.rank}'s store", hint)
        for rank in children:
            # Only their parent may: who asks for a key that is gone waits for it.
            arrival.forget(f"hello/{rank}")
        return [msgpack.unpackb(line.take(f"joined/{rank}")) for rank in children]

    def _hear(self, ranks: Sequence[int]) -> list[int]:
        """Take new hellos; the ranks whose word changed."""
        changed, shared = [], self.arrival.shared
        for rank in ranks:
            if shared.check([f"hello/{rank}"]):
                word, packed, is_local = msgpack.unpackb(bytes(shared.get(f"hello/{rank}")))
                if self.words.get(rank) != word:
                    self.words[rank], self.identities[rank] = word, PeerIdentity.unpack(packed)
                    self.is_local &= is_local and self.arrival.here.shares_network(self.identities[rank])
                    changed.append(rank)
        return changed


def _host(one: _Arrival, reception: _Reception) -> Meeting:
    reception.await_hellos()
    local = reception.is_local
    place, line = reception.serve(root_addresses() if not local else [], local)
    brought = reception.await_joins(f" {_hint()}")
    everyone = [one.here, *(PeerIdentity.unpack(peer) for _, branch in brought for peer in branch)]
    hosts: dict[str, list[PeerIdentity]] = {}
    for peer in everyone:
        hosts.setdefault(peer.neighbourhood, []).append(peer)
    for neighbourhood, peers in hosts.items():
        line.put(f"peers/{neighbourhood}", msgpack.packb([peer.pack() for peer in peers]))
    places = [place.pack(), *(served for stores, _ in brought for served in stores)]
    line.put("ready", msgpack.packb(places))
    lines = Lines(_directory(places, one.here), [line])
    return Meeting(one.here, one.tree, hosts[one.here.neighbourhood], lines, local, reception.server)


def _join(one: _Arrival, reception: _Reception | None) -> Meeting:
    """``reception`` is a leader's: it meets its group on the way."""
    here, parent = one.here, one.tree.parent(one.here.rank)
    if reception is not None:
        reception.await_hellos()
    one.say_hello(reception is None or reception.is_local)
    reply = f"reply/{one.word}"
    one.until_none(lambda: [] if one.shared.check([reply]) else [parent], "serve the ranks' own store")
    packed, local = msgpack.unpackb(bytes(one.shared.get(reply)))
    one.forget(reply)
    place = StoreAddress.unpack(packed)
    stores: list[bytes] = []
    branch = [here.pack()]
    lines: list[Line] = []
    if reception is not None:
        own, below = reception.serve([] if local else addresses_facing(place.addresses), local)
        stores.append(own.pack())
        branch += [peer for _, peers in reception.await_joins("") for peer in peers]
        lines.append(below)
    line = Line.connect(place.addresses, place.port, parent, patience_s=one.left_s())
    lines.append(line)
    line.put(f"joined/{here.rank}", msgpack.packb([stores, branch]))
    one.until_none(lambda: [] if line.has("ready") else [parent], "hear from all ranks")
    ready, _keys = line.read("ready")
    neighbours = _neighbours(line, here.neighbourhood)
    if reception is not None:
        one.forget(f"missing/{here.rank}")
        for neighbourhood in {PeerIdentity.unpack(peer).neighbourhood for peer in branch}:
            below.put(f"peers/{neighbourhood}", line.read(f"peers/{neighbourhood}")[0])
        below.put("ready", ready)
    server = None if reception is None else reception.server
    return Meeting(here, one.tree, neighbours, Lines(_directory(msgpack.unpackb(ready), here), lines), local, server)


def _neighbours(line: Line, neighbourhood: str) -> list[PeerIdentity]:
    return [PeerIdentity.unpack(peer) for peer in msgpack.unpackb(line.read(f"peers/{neighbourhood}")[0])]


def _directory(places: Iterable[bytes], here: PeerIdentity) -> dict[int, StoreAddress]:
    found = {place.server.rank: place for place in map(StoreAddress.unpack, places)}
    if here.rank in found:
        found[here.rank] = StoreAddress(here, [LOOPBACK], found[here.rank].port)
    return found


def _hint() -> str:
    return f"Set {ADDRESS_VARIABLE} on rank 0 to an address that every host can reach."
