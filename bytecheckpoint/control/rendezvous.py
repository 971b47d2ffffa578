"""How the ranks find the library's own store: once per communicator, through a store they already share.

Every rank says hello under its rank with a word of its own; rank 0 serves a store and answers to that word. A value
that an earlier group left in a shared store is thus never taken for an answer, and no rank counts anything.

1. rank r: ``hello/<r>`` = its word and identity, into the shared store
2. rank 0: when all are there, serve a store (on 127.0.0.1 alone when all share the host), ``reply/<word>`` = address
3. rank r: connect, ``joined/<r>`` = identity, into the library's store
4. rank 0: when all have joined, one list of identities per host; ``ready``
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
from torch._C._distributed_c10d import PrefixStore

from ..errors import ControlError, DeadlineError
from .agreement import format_ranks
from .line import Line, LineLost, serve_store
from .peers import PeerIdentity

__all__ = ["LOOPBACK", "Meeting", "addresses_facing", "meet", "root_addresses"]

_PREFIX = "bytecheckpoint/control"
_PAUSE_S = 0.005
LOOPBACK = "127.0.0.1"
_ADDRESS_VARIABLE = "BYTECHECKPOINT_CONTROL_ADDRESS"
_ELSEWHERE = "192.0.2.1"  # some address that is not ours


@dataclass
class Meeting:
    """What a rank knows when all have met: who, where, and a first line. ``server`` is the store itself, on rank 0.

    ``local``: all ranks reach each other over the loopback interface.
    """

    here: PeerIdentity
    root: PeerIdentity
    neighbours: list[PeerIdentity]
    addresses: list[str]
    port: int
    line: Line
    local: bool
    server: Any = field(default=None, repr=False)


def meet(store: Any, here: PeerIdentity, world_size: int, deadline_s: float) -> Meeting:
    """Find the others. Called by every rank at about the same time; raises ``DeadlineError`` naming who is missing."""
    with contextlib.suppress(AttributeError, NotImplementedError, RuntimeError):
        # A connection of its own: the shared one may be blocked by a wait of the main thread. Older torch has none.
        store = store.clone()
    shared = PrefixStore(_PREFIX, store)
    deadline = time.monotonic() + deadline_s
    word = secrets.token_hex(8)
    try:
        shared.set(f"hello/{here.rank}", msgpack.packb([word, here.pack()]))
        if here.rank == 0:
            return _host(shared, here, world_size, deadline, deadline_s)
        return _join(shared, here, word, deadline, deadline_s)
    except LineLost as error:
        raise ControlError(
            f"rank {here.rank} on {here.host} cannot reach rank 0's store: {error}. {_hint()}"
        ) from error
    except RuntimeError as error:
        raise ControlError(
            f"rank {here.rank} on {here.host} cannot meet the other ranks: the store of the process group failed: "
            f"{error}"
        ) from error


def _host(shared: Any, here: PeerIdentity, world_size: int, deadline: float, deadline_s: float) -> Meeting:
    others = range(1, world_size)
    words: dict[int, str] = {}
    identities: dict[int, PeerIdentity] = {}

    def hear(ranks: Sequence[int]) -> list[int]:
        """Take new hellos; the ranks whose word changed."""
        changed = []
        for rank in ranks:
            if shared.check([f"hello/{rank}"]):
                word, packed = msgpack.unpackb(bytes(shared.get(f"hello/{rank}")))
                if words.get(rank) != word:
                    words[rank], identities[rank] = word, PeerIdentity.unpack(packed)
                    changed.append(rank)
        return changed

    def missing_hellos() -> list[int]:
        hear([rank for rank in others if rank not in words])
        return [rank for rank in others if rank not in words]

    _until_none(missing_hellos, deadline, deadline_s, "say hello to rank 0")
    local = all(here.shares_network(identity) for identity in identities.values())
    server, port = serve_store(LOOPBACK if local else "")
    addresses = [LOOPBACK] if local else root_addresses()
    line = Line(server)
    answer = msgpack.packb([addresses, port, local, here.pack()])
    for rank in others:
        shared.set(f"reply/{words[rank]}", answer)

    def missing_joins() -> list[int]:
        missing = [rank for rank in others if not line.has(f"joined/{rank}")]
        for rank in hear(missing):
            shared.set(f"reply/{words[rank]}", answer)
        return missing

    _until_none(missing_joins, deadline, deadline_s, "connect to rank 0's store", " " + _hint())
    everyone = [here, *(PeerIdentity.unpack(line.take(f"joined/{rank}")) for rank in others)]
    groups: dict[str, list[PeerIdentity]] = {}
    for peer in everyone:
        groups.setdefault(peer.neighbourhood, []).append(peer)
    for neighbourhood, peers in groups.items():
        line.put(f"peers/{neighbourhood}", msgpack.packb([peer.pack() for peer in peers]))
    line.put("ready", b"")
    for rank in range(world_size):
        _forget(shared, f"hello/{rank}")
    return Meeting(here, here, groups[here.neighbourhood], [LOOPBACK], port, line, local, server)


def _join(shared: Any, here: PeerIdentity, word: str, deadline: float, deadline_s: float) -> Meeting:
    reply = f"reply/{word}"
    _until_none(lambda: [] if shared.check([reply]) else [0], deadline, deadline_s, "serve the ranks' own store")
    addresses, port, local, packed = msgpack.unpackb(bytes(shared.get(reply)))
    _forget(shared, reply)
    line = Line.connect(addresses, port)
    line.put(f"joined/{here.rank}", here.pack())
    _until_none(lambda: [] if line.has("ready") else [0], deadline, deadline_s, "hear from all ranks")
    peers, _keys = line.read(f"peers/{here.neighbourhood}")
    neighbours = [PeerIdentity.unpack(peer) for peer in msgpack.unpackb(peers)]
    return Meeting(here, PeerIdentity.unpack(packed), neighbours, addresses, port, line, local)


def _until_none(
    missing: Callable[[], list[int]], deadline: float, deadline_s: float, what: str, hint: str = ""
) -> None:
    while True:
        ranks = missing()
        if not ranks:
            return
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"the ranks did not meet within {deadline_s:g} s: waited for rank(s) {format_ranks(ranks)} to {what}. "
                "Every rank of the default process group has to take part in a save or load." + hint
            )
        time.sleep(_PAUSE_S)


def root_addresses() -> list[str]:
    """Where other hosts may reach rank 0, when asked there; most likely first."""
    told = os.environ.get(_ADDRESS_VARIABLE)
    return [told] if told else addresses_facing([os.environ.get("MASTER_ADDR", _ELSEWHERE)])


def addresses_facing(hosts: Sequence[str]) -> list[str]:
    """Where ``hosts``, and others like them, may reach this one; most likely first."""
    found: list[str] = []
    for host in hosts:
        with contextlib.suppress(OSError):
            # Nothing is sent: this asks the routing table which of our addresses faces that host.
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((host, 9))
                found.append(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        found += [str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None)]
    found.append(socket.getfqdn())
    local = ("127.", "::1", "fe80:")
    return [address for address in dict.fromkeys(found) if not address.startswith(local)] or [LOOPBACK]


def _hint() -> str:
    return f"Set {_ADDRESS_VARIABLE} on rank 0 to an address that every host can reach."


def _forget(shared: Any, key: str) -> None:
    # Not every store can delete; what stays is small and never mistaken for an answer.
    with contextlib.suppress(NotImplementedError, RuntimeError):
        shared.delete_key(key)
