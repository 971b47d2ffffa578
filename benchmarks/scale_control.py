"""What agreement costs in a job of up to 16,384 ranks: all at rank 0's store, or in a tree of groups.

    python -m benchmarks.scale_control [--ranks 1024 16384] [--processes 2 4 8 16 32] [--json FILE]

*Simulated*: every rank's own operation code in one process, rank after rank in an order in which nobody waits, over
stores in memory that count what they are asked. The exchanges are those of a first and of a later save, with payloads
of the size that ``scale_planning`` finds for a dense model of 1T parameters. For the busiest store: messages (each
request with its answer is one), bytes (keys and values, both ways) and connections; for its rank: the time it takes to
hand on what others wait for, which is Python's alone, as nothing is sent. Looks for something that has not come yet do
not occur here: in real jobs they depend on how long ranks wait.

*Real*: the time of one meeting (a gather of 20 bytes and a broadcast) among processes of this machine, median and 90th
percentile on rank 0. With more processes than cores it is mostly the sum of what all of them do.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from torch._C._distributed_c10d import FileStore

from benchmarks.tables import Grid, show
from bytecheckpoint.control import StoreCommunicator
from bytecheckpoint.control.line import Line
from bytecheckpoint.control.lines import Lines, StoreAddress
from bytecheckpoint.control.meeting import Meeting
from bytecheckpoint.control.peers import PeerIdentity
from bytecheckpoint.control.relay import Relay
from bytecheckpoint.control.store_operation import StoreOperation
from bytecheckpoint.control.tree import Tree
from bytecheckpoint.testing.ranks import RankPool

__all__ = ["SAVES", "measure_processes", "simulate"]

_MEETINGS = 200

# Each exchange's name, its kind, and the bytes of one rank's payload.
Exchange = tuple[str, str, int]
_END: list[Exchange] = [("written", "gather", 120), ("committed", "broadcast", 0)]
_AGREE: list[Exchange] = [("agree", "gather", 17), ("verdict", "broadcast", 17)]
_PLAN: list[Exchange] = [
    ("tell", "gather", 340),
    ("plan", "scatter", 6),
    ("more", "gather", 4),
    ("plan", "scatter", 285),
]
SAVES: dict[str, list[Exchange]] = {
    "first save": [*_AGREE, *_PLAN, *_END],
    "later save": [*_AGREE, *_END],
}


class CountingStore:
    """What a store does, in memory, with the number of requests and the bytes of keys and values."""

    def __init__(self) -> None:
        self.messages = self.nbytes = self.connections = 0
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self._count(key, value)
        self._values[key] = value

    def get(self, key: str) -> bytes:
        self._count(key, self._values[key])
        return self._values[key]

    def check(self, keys: Sequence[str]) -> bool:
        self._count(*keys)
        return all(key in self._values for key in keys)

    def add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = b"%d" % total
        self._count(key, self._values[key])
        return total

    def compare_set(self, key: str, _expected: str, value: bytes) -> bytes:
        self._count(key, value)
        return self._values.setdefault(key, value)

    def delete_key(self, key: str) -> bool:
        self._count(key)
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._values)

    def _count(self, *parts: str | bytes) -> None:
        self.messages += 1
        self.nbytes += sum(map(len, parts))


class _MemoryLines(Lines):
    """Lines to stores of this process."""

    def __init__(self, stores: dict[int, CountingStore], directory: dict[int, StoreAddress], here: int) -> None:
        super().__init__(directory, [])
        self._stores, self._here = stores, here
        self._made: dict[int, Line] = {}

    def borrow(self, server: int, patience_s: float) -> Line:
        if server not in self._made:
            self._made[server] = self.connect(server, patience_s)
        return self._made[server]

    def connect(self, server: int, patience_s: float) -> Line:
        self._stores[server].connections += server != self._here
        return Line(self._stores[server], server)


class _SteppedRelay(Relay):
    """Looks when it is told to."""

    def _start(self) -> None:
        """No thread."""


class _SimulatedRank(StoreCommunicator):
    relay_type = _SteppedRelay

    def look(self) -> None:
        """The relay's work, where this rank has one."""
        if self._relay is not None:
            self._relay.look()


class _World:
    """All ranks of a job in one process."""

    def __init__(self, tree: Tree) -> None:
        self.tree, size = tree, tree.world_size
        servers = [0, *tree.servers()]
        self.stores = {server: CountingStore() for server in servers}
        identities = [PeerIdentity(rank, f"host-{rank // 8}", rank, 0, "", "", "") for rank in range(size)]
        directory = {server: StoreAddress(identities[server], [], 0) for server in servers}
        self.ranks = [
            _SimulatedRank(Meeting(identity, tree, [], _MemoryLines(self.stores, directory, identity.rank), True), size)
            for identity in identities
        ]
        # Those furthest from rank 0 first: none of them waits for anybody.
        self.upwards = sorted(range(size), key=lambda rank: -tree.depth(rank))
        self.seconds = dict.fromkeys(servers, 0.0)

    def save(self, exchanges: Iterable[Exchange]) -> None:
        """One save of all ranks, with an operation of its own."""
        operations = [rank.operation("save", deadline_s=60) for rank in self.ranks]
        for name, kind, nbytes in exchanges:
            payload = bytes(nbytes)
            for rank in self.upwards if kind == "gather" else reversed(self.upwards):
                self._timed(rank, _CALLS[kind], operations[rank], name, payload)
        for rank in self.upwards:
            self._timed(rank, operations[rank].close)
        for rank in self.upwards:
            self._timed(rank, self.ranks[rank].look)
        if any(store.num_keys() for store in self.stores.values()):
            raise AssertionError("the operation has left keys behind")

    def _timed(self, rank: int, call: Callable[..., object], *arguments: object) -> None:
        began = time.perf_counter()
        call(*arguments)
        if rank in self.seconds:
            self.seconds[rank] += time.perf_counter() - began


def _scatter(operation: StoreOperation, name: str, payload: bytes) -> None:
    operation.scatter(name, [payload] * operation.world_size if operation.rank == 0 else None)


_CALLS: dict[str, Callable[[StoreOperation, str, bytes], object]] = {
    "gather": lambda operation, name, payload: operation.gather(name, payload),
    "broadcast": lambda operation, name, payload: operation.broadcast(name, payload if operation.rank == 0 else None),
    "scatter": _scatter,
}


def simulate(ranks: int, group_size: int | None) -> list[dict[str, Any]]:
    """One row for each kind of save; ``group_size`` as ``Tree.of`` takes it."""
    rows = []
    for save, exchanges in SAVES.items():
        world = _World(Tree.of(ranks, group_size))
        world.save(exchanges)
        busiest = max(world.stores.values(), key=lambda store: store.messages)
        rows.append(
            {
                "ranks": ranks,
                "group_size": world.tree.group_size,
                "stores": len(world.stores),
                "save": save,
                "exchanges": len(exchanges),
                "messages": busiest.messages,
                "messages_of_a_leader": max((s.messages for at, s in world.stores.items() if at), default=0),
                "bytes": busiest.nbytes,
                "connections": max(store.connections for store in world.stores.values()),
                "busiest_rank_s": round(max(world.seconds.values()), 4),
            }
        )
    return rows


def _meet(rank: int, world_size: int, folder: str, group_size: int, meetings: int) -> list[float]:
    store = FileStore(f"{folder}/store", world_size)
    communicator = StoreCommunicator.connect(store, rank, world_size, group_size=group_size, deadline_s=120)
    seconds = []
    with communicator.operation("meet", deadline_s=120) as operation:
        for _ in range(meetings):
            began = time.perf_counter()
            operation.gather("agree", bytes(20))
            operation.broadcast("verdict", bytes(20) if rank == 0 else None)
            seconds.append(time.perf_counter() - began)
    communicator.close()
    return seconds


def measure_processes(counts: Sequence[int], meetings: int = _MEETINGS) -> list[dict[str, Any]]:
    """The time of a meeting with so many processes, flat and in groups of about the square root."""
    rows = []
    with RankPool(max(counts)) as pool:
        for count in counts:
            for group_size in sorted({count, math.ceil(math.sqrt(count))}, reverse=True):
                with tempfile.TemporaryDirectory() as folder:
                    arguments = (folder, group_size, meetings)
                    seconds = sorted(pool.run(_meet, *arguments, world_size=count, backend=None, timeout_s=300)[0])
                rows.append(
                    {
                        "processes": count,
                        "group_size": group_size,
                        "median_ms": round(1e3 * statistics.median(seconds), 3),
                        "p90_ms": round(1e3 * seconds[len(seconds) * 9 // 10], 3),
                    }
                )
    return rows


def grids(found: dict[str, Any]) -> list[Grid]:
    """The figures as tables."""
    simulated: list[tuple[str, ...]] = [
        (
            f"{row['ranks']:,} ranks, {row['save']}",
            _groups(row["group_size"], row["ranks"]),
            f"{row['messages']:,}",
            f"{row['bytes'] / 1e6:.2f} MB",
            f"{row['connections']:,}",
            f"{1e3 * row['busiest_rank_s']:.1f} ms",
        )
        for row in found["simulated"]
    ]
    real: list[tuple[str, ...]] = [
        (
            f"{row['processes']} processes",
            _groups(row["group_size"], row["processes"]),
            f"{row['median_ms']:.2f} ms",
            f"{row['p90_ms']:.2f} ms",
        )
        for row in found["real"]
    ]
    columns = ("", "", "messages", "bytes", "connections", "its rank's time")
    remark = f"{found['cores']} cores"
    return [
        Grid("The busiest store", columns, simulated),
        Grid("A meeting", ("", "", "median", "90th percentile"), real, (remark,)),
    ]


def _groups(size: int, ranks: int) -> str:
    return "flat" if size >= ranks else f"groups of {size}"


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1024, 16384])
    parser.add_argument("--processes", type=int, nargs="*", default=[2, 4, 8, 16, 32])
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    simulated = [row for ranks in args.ranks for size in (ranks, None) for row in simulate(ranks, size)]
    real = measure_processes(args.processes) if args.processes else []
    found = {"cores": os.cpu_count(), "simulated": simulated, "real": real}
    for grid in grids(found):
        show(grid, Console())
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
