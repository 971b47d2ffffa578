"""Connect the ranks of a job: once per communicator, through a store that they already share.

1. Each rank registers in the shared store under its rank, with a random token; a leader once its group has.
2. A rank with children listens, and answers to each child's token with its endpoint and the key of the communicator.
   Leaders pass the key on. A value that an earlier group left in the store is thus never mistaken for an answer.
   Any process that reaches the store (MASTER_PORT) can read this key, unless ``BYTECHECKPOINT_KEY`` has it: then it
   never enters the store.
3. Each rank connects to its parent; a leader once its group has connected.
4. The ranks exchange what they need to know of each other in an ordinary operation.

A rank that cannot connect publishes why in the store, and all others that are connecting at that time raise the same.
Only a change of what is published counts: what was there when a rank began is of an earlier group. A rank that begins
later waits for its deadline.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgpack
from torch._C._distributed_c10d import PrefixStore

from ..errors import ControlError, DeadlineError, RankFailedError, UsageError
from ..runtime.messages import format_ranks
from ..version import VERSION
from .addresses import ADDRESS_VARIABLE, LOOPBACK, own_addresses
from .connections import Endpoint, new_key
from .network import Network
from .operation import SocketOperation
from .peers import PeerIdentity, PeerWatch
from .router import Router
from .timings import (
    FLUSH_S,
    LONGEST_NOTE_INTERVAL_S,
    NOTES_PER_DEADLINE,
    REGISTRATION_POLL_PER_RANK_S,
    REGISTRATION_POLL_S,
)
from .tree import Tree

KEY_VARIABLE = "BYTECHECKPOINT_KEY"
"""A secret of the job, of at least 16 characters and equal on all ranks."""

_PREFIX = "bytecheckpoint/control"
_SHORTEST_SECRET = 16
_LEAST_S = 0.01
_HEAD_START_S = 0.5
_PART_FOR_CONNECTING = 0.75  # of the time that is left, so that the others learn why before their deadline passes


def connect_ranks(store: Any, here: PeerIdentity, tree: Tree, deadline_s: float) -> tuple[Router, Network]:
    """Connect to the other ranks. Every rank calls it at about the same time.

    Raises ``DeadlineError`` naming the missing ranks, ``ControlError`` where a rank cannot be reached.
    """
    with contextlib.suppress(AttributeError, NotImplementedError, RuntimeError):
        # A connection of our own: a wait of the main thread may block the shared one. Older torch cannot clone.
        store = store.clone()
    try:
        return _Arrival(PrefixStore(_PREFIX, store), here, tree, deadline_s).connect()
    except RuntimeError as error:
        raise ControlError(
            f"rank {here.rank} on {here.host} cannot connect to the other ranks: the store of the process group "
            f"failed: {error}"
        ) from error


class _OtherFailedError(Exception):
    """Another rank has published a failure."""


class _Arrival:
    """One rank that connects to the others."""

    def __init__(self, shared: Any, here: PeerIdentity, tree: Tree, deadline_s: float) -> None:
        self._shared, self._here, self._tree = shared, here, tree
        self._children, self._parent = tree.children(here.rank), tree.parent(here.rank)
        self._tokens: dict[int, str] = {}
        self._earlier = b""
        self._is_local = True  # all ranks of this branch share the loopback interface
        self._deadline_s, self._deadline = deadline_s, time.monotonic() + deadline_s
        self._longest_pause_s = max(REGISTRATION_POLL_S, tree.world_size * REGISTRATION_POLL_PER_RANK_S)

    def connect(self) -> tuple[Router, Network]:
        """Raises what the module says, or what another rank has published."""
        self._earlier = self._published()
        with contextlib.ExitStack() as undo:
            try:
                return self._connect(undo)
            except DeadlineError:
                raise  # all ranks have the same deadline, and each names the ranks that it waited for
            except _OtherFailedError:
                raise ControlError(self._failure()) from None
            except RankFailedError as error:
                # This rank may learn that it has lost another one before that one has published why.
                give_up = time.monotonic() + FLUSH_S
                while not self._failure() and time.monotonic() < give_up:
                    time.sleep(REGISTRATION_POLL_S)
                if failure := self._failure():
                    raise ControlError(failure) from error
                raise
            except Exception as error:
                time.sleep(_HEAD_START_S)  # for ranks that are about to begin
                text = f"rank {self._here.rank} on {self._here.host}: {error}"
                published = f"{secrets.token_hex(8)}{text}"
                with contextlib.suppress(RuntimeError):  # the store has failed
                    self._shared.compare_set("failure", self._earlier.decode(), published)
                    text = self._failure() or text
                if type(error) is ControlError:
                    raise ControlError(text) from error
                raise

    def _published(self) -> bytes:
        return bytes(self._shared.get("failure")) if self._shared.check(["failure"]) else b""

    def _failure(self) -> str:
        """Return the failure that another rank has published since this one began; empty if there is none."""
        found = self._published()
        return found[16:].decode() if found != self._earlier else ""

    def _connect(self, undo: contextlib.ExitStack) -> tuple[Router, Network]:
        rank, parent = self._here.rank, self._parent
        self._poll(lambda: self._unregistered(self._children), f"register with rank {rank}")
        at_parent, is_local = self._register() if rank else (None, self._is_local)
        key = _configured_key()
        if at_parent is not None and bool(key) == bool(at_parent.key):
            raise ControlError(
                f"{KEY_VARIABLE} is set on rank {parent if key == b'' else rank} and not on rank "
                f"{rank if key == b'' else parent}; set it to the same value on every rank"
            )
        in_store = b"" if key else at_parent.key if at_parent else new_key()
        key = key or in_store
        facing = at_parent.addresses if at_parent else filter(None, [os.environ.get("MASTER_ADDR")])
        network = Network(rank, key)
        undo.callback(network.close)
        router = Router(self._here, self._tree, network)
        undo.callback(router.announce_closing)  # or others would wait for the end of this process
        network.attach(router)
        addresses = [LOOPBACK] if is_local else own_addresses(facing)
        endpoint = Endpoint(addresses, network.listen(LOOPBACK if is_local else ""), key)
        if self._children:
            self._await_children(network, msgpack.packb([endpoint._replace(key=in_store), is_local]))
        if at_parent is not None:
            # Rank 0 may know itself by a useless name only, while this rank has reached the store on its host.
            more = [os.environ["MASTER_ADDR"]] if parent == 0 and os.environ.get("MASTER_ADDR") else []
            addresses = list(dict.fromkeys([*at_parent.addresses, *more]))
            network.set_endpoints({parent: Endpoint(addresses, at_parent.port, key)})
            self._connect_to_parent(network)
        self._exchange_endpoints(router, network, endpoint)
        undo.pop_all()
        return router, network

    def _register(self) -> tuple[Endpoint, bool]:
        """Register with the parent; return where it listens, and whether all ranks share a loopback interface."""
        token = secrets.token_hex(8)
        value = msgpack.packb([VERSION, token, self._here.pack(), self._is_local])
        self._shared.set(f"registered/{self._here.rank}", value)
        answer = f"answer/{token}"
        self._poll(lambda: [] if self._shared.check([answer]) else [self._parent], "answer its children")
        endpoint, is_local = msgpack.unpackb(bytes(self._shared.get(answer)))
        self._delete(answer)
        return Endpoint(*endpoint), is_local

    def _unregistered(self, children: Iterable[int]) -> list[int]:
        self._read_registrations(rank for rank in children if rank not in self._tokens)
        return [rank for rank in children if rank not in self._tokens]

    def _read_registrations(self, children: Iterable[int]) -> list[int]:
        """Read new registrations; return the children whose token has changed."""
        changed = []
        for rank in children:
            if self._shared.check([f"registered/{rank}"]):
                version, *registered = msgpack.unpackb(bytes(self._shared.get(f"registered/{rank}")))
                if version != VERSION:
                    raise ControlError(
                        f"bytecheckpoint {VERSION} is installed here, and {version} where rank {rank} runs; install "
                        "one version for all ranks"
                    )
                token, packed, is_local = registered
                if self._tokens.get(rank) != token:
                    self._tokens[rank] = token
                    self._is_local &= is_local and self._here.shares_loopback(PeerIdentity.unpack(packed))
                    changed.append(rank)
        return changed

    def _await_children(self, network: Network, answer: bytes) -> None:
        """Answer the children and wait until all have connected."""
        for token in self._tokens.values():
            self._shared.set(f"answer/{token}", answer)

        def unconnected() -> list[int]:
            connected = network.connected_peers()
            ranks = [rank for rank in self._children if rank not in connected]
            # The registration that was answered may be one of an earlier group.
            for rank in self._read_registrations(ranks):
                self._shared.set(f"answer/{self._tokens[rank]}", answer)
            return ranks

        hint = "" if self._here.rank else f" {_hint()}"
        self._poll(unconnected, f"connect to rank {self._here.rank}", hint)
        for rank in self._children:
            # Only the parent may delete it: a read of a missing key blocks.
            self._delete(f"registered/{rank}")
        if self._here.rank:
            self._delete(f"missing/{self._here.rank}")

    def _connect_to_parent(self, network: Network) -> None:
        try:
            network.connect(self._parent, _PART_FOR_CONNECTING * self._left_s())
        except OSError as error:
            hint = "" if self._parent else f" {_hint()}"
            hint += f" {KEY_VARIABLE} must be the same on all ranks." if os.environ.get(KEY_VARIABLE) else ""
            raise ControlError(f"cannot connect to rank {self._parent}: {error}.{hint}") from error

    def _exchange_endpoints(self, router: Router, network: Network, endpoint: Endpoint) -> None:
        """Give every rank the endpoints of all, and the identities of the processes on its host."""
        with SocketOperation(router, network, "connect/0", self._left_s()) as operation:
            place = [endpoint.addresses, endpoint.port]
            gathered = operation.gather("endpoints", msgpack.packb([self._here.pack(), place]))
            directory, neighbours = (None, None) if gathered is None else _compile(gathered)
            directory = operation.broadcast("endpoints", directory)
            peers = msgpack.unpackb(operation.scatter("neighbours", neighbours))
        router.watch = PeerWatch(self._here, map(PeerIdentity.unpack, peers))
        hosts, places = msgpack.unpackb(directory)
        endpoints = {}
        for rank, (host, port) in enumerate(places):
            name, network_scope, addresses = hosts[host]
            router.hosts[rank] = name
            is_local = network_scope == self._here.network_scope != ""
            endpoints[rank] = Endpoint([LOOPBACK] if is_local else addresses, port, endpoint.key)
        network.set_endpoints(endpoints)

    def _poll(self, missing: Callable[[], list[int]], action: str, hint: str = "") -> None:
        """Poll until no rank is missing. A leader publishes which ranks of its group are."""
        note_interval_s = min(LONGEST_NOTE_INTERVAL_S, self._deadline_s / NOTES_PER_DEADLINE)
        next_note, pause_s = time.monotonic() + note_interval_s, REGISTRATION_POLL_S
        while ranks := missing():
            if self._failure():
                raise _OtherFailedError
            now = time.monotonic()
            if now > self._deadline:
                raise DeadlineError(
                    f"the ranks did not connect within {self._deadline_s:g} s: waited for rank(s) "
                    f"{format_ranks(self._late_ranks(ranks))} to {action}. Every rank of the default process group "
                    "must take part in a save or load." + hint
                )
            if now > next_note and min(ranks) > self._here.rank > 0:
                next_note = now + note_interval_s
                self._shared.set(f"missing/{self._here.rank}", msgpack.packb(ranks))
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, self._longest_pause_s)

    def _late_ranks(self, ranks: Iterable[int]) -> list[int]:
        """For each leader that waits for ranks of its group, those ranks."""
        late: list[int] = []
        for rank in ranks:
            key = f"missing/{rank}"
            is_known = rank > self._here.rank and self._shared.check([key])
            late += msgpack.unpackb(bytes(self._shared.get(key))) if is_known else [rank]
        return late

    def _left_s(self) -> float:
        return max(self._deadline - time.monotonic(), _LEAST_S)

    def _delete(self, key: str) -> None:
        # Some stores cannot delete. What stays is small and never mistaken for an answer.
        with contextlib.suppress(NotImplementedError, RuntimeError):
            self._shared.delete_key(key)


def _compile(gathered: Sequence[bytes]) -> tuple[bytes, list[bytes]]:
    """Make the directory of all ranks, and for each rank the identities of the processes on its host."""
    hosts: dict[tuple[str, str, tuple[str, ...]], int] = {}
    places, scopes = [], []
    processes: dict[str, list[bytes]] = {}
    for packed in gathered:
        identity, (addresses, port) = msgpack.unpackb(packed)
        peer = PeerIdentity.unpack(identity)
        host = (peer.host, peer.network_scope, tuple(addresses))
        places.append([hosts.setdefault(host, len(hosts)), port])
        scopes.append(peer.pid_scope)
        processes.setdefault(peer.pid_scope, []).append(identity)
    neighbours = {scope: msgpack.packb(found if scope else []) for scope, found in processes.items()}
    return msgpack.packb([list(hosts), places]), [neighbours[scope] for scope in scopes]


def _configured_key() -> bytes:
    """Return the key from the environment; empty if there is none."""
    secret = os.fsencode(os.environ.get(KEY_VARIABLE, ""))
    if 0 < len(secret) < _SHORTEST_SECRET:
        raise UsageError(
            f"{KEY_VARIABLE} must have at least {_SHORTEST_SECRET} characters, such as openssl rand -hex 16"
        )
    return hashlib.blake2b(secret, digest_size=32).digest() if secret else b""


def _hint() -> str:
    return f"Set {ADDRESS_VARIABLE} on rank 0 to an address or network interface that every host can reach."
