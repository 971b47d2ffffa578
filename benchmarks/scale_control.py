"""What the exchanges of a save cost in a job of up to 16,384 ranks: with a flat tree, or in groups.

    python -m benchmarks.scale_control [--ranks 1024 16384] [--processes 2 4 8 16 32] [--json FILE]

*Simulated*: the operations of all ranks in one process, with routers that hand each message to the receiver at once.
Ranks run one after another in an order in which none waits. The exchanges are those of a first and of a later save;
their payloads have the sizes that ``scale_planning`` finds for a dense model of 1 T parameters. For the busiest rank:
messages sent and received, their bytes, connections, and the time of its own code without any network.

*Real*: the time of a round trip (a gather of 20 bytes and a broadcast) between processes of this machine, median and
90th percentile on rank 0. With more processes than cores it is mostly the sum of what all of them compute.
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
from bytecheckpoint.control.communicator import SocketCommunicator
from bytecheckpoint.control.operation import SocketOperation
from bytecheckpoint.control.peers import PeerIdentity
from bytecheckpoint.control.router import Router
from bytecheckpoint.control.tree import Tree
from bytecheckpoint.testing.ranks import RankPool

__all__ = ["SAVES", "measure_processes", "simulate"]

_ROUND_TRIPS = 200

# Each exchange's name, its kind, and the bytes of one rank's payload.
Exchange = tuple[str, str, int]
_END: list[Exchange] = [("written", "gather", 120), ("committed", "broadcast", 0)]
_AGREE: list[Exchange] = [("agree", "gather", 17), ("verdict", "broadcast", 17)]
_PLAN: list[Exchange] = [
    ("summary", "gather", 340),
    ("plan", "scatter", 6),
    ("more", "gather", 4),
    ("plan", "scatter", 285),
]
SAVES: dict[str, list[Exchange]] = {
    "first save": [*_AGREE, *_PLAN, *_END],
    "later save": [*_AGREE, *_END],
}


class _Link:
    """The messages of one rank; a ``MessageSender`` that delivers at once."""

    def __init__(self, world: _World, rank: int) -> None:
        self._world, self._rank = world, rank
        self.messages = self.nbytes = 0
        self.peers: set[int] = set()

    def send(self, peer: int, message: bytes) -> None:
        self._count(peer, message)
        self._world.links[peer]._count(self._rank, message)
        self._world.receive(self._rank, peer, message)

    def flush(self) -> None:
        """Do nothing: every message is delivered at once."""

    def restore(self, peer: int) -> None:
        """Do nothing: no connection is lost."""

    def disconnect(self, peer: int) -> None:
        """Do nothing: every rank answers."""

    def _count(self, peer: int, message: bytes) -> None:
        self.messages += 1
        self.nbytes += len(message)
        self.peers.add(peer)


class _World:
    """All ranks of a job in one process."""

    def __init__(self, tree: Tree) -> None:
        self.tree, size = tree, tree.world_size
        self.links = [_Link(self, rank) for rank in range(size)]
        identities = [PeerIdentity(rank, f"host-{rank // 8}", rank, 0, "", "", "") for rank in range(size)]
        self.routers = [Router(identity, tree, self.links[identity.rank]) for identity in identities]
        # The ranks furthest from rank 0 first: none of them waits for another.
        self.upwards = sorted(range(size), key=lambda rank: -tree.depth(rank))
        self.seconds = dict.fromkeys((rank for rank in range(size) if tree.children(rank)), 0.0)
        self._saves = 0

    def save(self, exchanges: Iterable[Exchange]) -> None:
        """One save of all ranks."""
        prefix, self._saves = f"save/{self._saves}", self._saves + 1
        operations = [SocketOperation(router, _NO_NETWORK, prefix, 60.0) for router in self.routers]
        for name, kind, nbytes in exchanges:
            payload = bytes(nbytes)
            for rank in self.upwards if kind == "gather" else reversed(self.upwards):
                self._timed(rank, _CALLS[kind], operations[rank], name, payload)
        for rank in self.upwards:
            self._timed(rank, operations[rank].close)
        if any(router.unfinished_operations() for router in self.routers):
            raise AssertionError("the operation has left state behind")

    def receive(self, sender: int, receiver: int, message: bytes) -> None:
        """Deliver a message; its handling is time of the receiver and not of the sender."""
        began = time.perf_counter()
        self.routers[receiver].receive(sender, message)
        self._add(receiver, time.perf_counter() - began)
        self._add(sender, began - time.perf_counter())

    def _timed(self, rank: int, call: Callable[..., object], *arguments: object) -> None:
        began = time.perf_counter()
        call(*arguments)
        self._add(rank, time.perf_counter() - began)

    def _add(self, rank: int, seconds: float) -> None:
        if rank in self.seconds:
            self.seconds[rank] += seconds


_NO_NETWORK: Any = None  # only streams use it


def _scatter(operation: SocketOperation, name: str, payload: bytes) -> None:
    operation.scatter(name, [payload] * operation.world_size if operation.rank == 0 else None)


_CALLS: dict[str, Callable[[SocketOperation, str, bytes], object]] = {
    "gather": lambda operation, name, payload: operation.gather(name, payload),
    "broadcast": lambda operation, name, payload: operation.broadcast(name, payload if operation.rank == 0 else None),
    "scatter": _scatter,
}


def simulate(ranks: int, group_size: int | None) -> list[dict[str, Any]]:
    """Return one row for each kind of save. ``group_size`` is that of ``Tree.of``."""
    rows = []
    for save, exchanges in SAVES.items():
        world = _World(Tree.of(ranks, group_size))
        world.save(exchanges)
        busiest = max(world.links, key=lambda link: link.messages)
        leaders = (rank for rank in world.seconds if rank)
        rows.append(
            {
                "ranks": ranks,
                "group_size": world.tree.group_size,
                "inner_ranks": len(world.seconds),
                "save": save,
                "exchanges": len(exchanges),
                "messages": busiest.messages,
                "messages_of_a_leader": max((world.links[rank].messages for rank in leaders), default=0),
                "bytes": busiest.nbytes,
                "connections": max(len(link.peers) for link in world.links),
                "busiest_rank_s": round(max(world.seconds.values()), 4),
            }
        )
    return rows


def _time_round_trips(rank: int, world_size: int, folder: str, group_size: int, round_trips: int) -> list[float]:
    store = FileStore(f"{folder}/store", world_size)
    communicator = SocketCommunicator.connect(store, rank, world_size, group_size=group_size, deadline_s=120)
    seconds = []
    with communicator.operation("round trip", deadline_s=120) as operation:
        for _ in range(round_trips):
            began = time.perf_counter()
            operation.gather("agree", bytes(20))
            operation.broadcast("verdict", bytes(20) if rank == 0 else None)
            seconds.append(time.perf_counter() - began)
    communicator.close()
    return seconds


def measure_processes(counts: Sequence[int], round_trips: int = _ROUND_TRIPS) -> list[dict[str, Any]]:
    """Return the time of a round trip for each number of processes, flat and in groups of about the square root."""
    rows = []
    with RankPool(max(counts)) as pool:
        for count in counts:
            for group_size in sorted({count, math.ceil(math.sqrt(count))}, reverse=True):
                with tempfile.TemporaryDirectory() as folder:
                    arguments = (folder, group_size, round_trips)
                    seconds = sorted(
                        pool.run(_time_round_trips, *arguments, world_size=count, backend=None, timeout_s=300)[0]
                    )
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
    """Format the figures as tables."""
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
    columns = ("", "", "messages", "bytes", "connections", "time of its code")
    remark = f"{found['cores']} cores"
    return [
        Grid("The busiest rank", columns, simulated),
        Grid("A round trip", ("", "", "median", "90th percentile"), real, (remark,)),
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
