"""Who the ranks are, and whether those on this host still live."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import msgpack

__all__ = ["PeerIdentity", "PeerWatch"]

_LOOK_INTERVAL_S = 0.05
_ENDED_STATES = ("Z", "X", "x")


@dataclass(frozen=True)
class PeerIdentity:
    """One rank's process. Empty ``boot_id`` or namespaces mean unknown and match nothing."""

    rank: int
    host: str
    pid: int
    start_ticks: int
    boot_id: str
    pid_namespace: str
    net_namespace: str

    @classmethod
    def of_this_process(cls, rank: int) -> PeerIdentity:
        found = _state_and_start(os.getpid())
        return cls(
            rank=rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            start_ticks=found[1] if found else 0,
            boot_id=_read("/proc/sys/kernel/random/boot_id"),
            pid_namespace=_link("/proc/self/ns/pid") if found else "",
            net_namespace=_link("/proc/self/ns/net"),
        )

    def pack(self) -> bytes:
        return bytes(msgpack.packb(asdict(self)))

    @classmethod
    def unpack(cls, data: bytes) -> PeerIdentity:
        return cls(**msgpack.unpackb(data))

    def sees(self, other: PeerIdentity) -> bool:
        """Whether the other's pid means something in this process's ``/proc``."""
        return self.neighbourhood == other.neighbourhood != ""

    def shares_network(self, other: PeerIdentity) -> bool:
        """Whether 127.0.0.1 is the same place for both."""
        mine, others = (self.boot_id, self.net_namespace), (other.boot_id, other.net_namespace)
        return all(mine) and mine == others

    @property
    def neighbourhood(self) -> str:
        """One word for all processes that can see each other; empty when unknown."""
        return f"{self.boot_id}.{self.pid_namespace}" if self.boot_id and self.pid_namespace else ""

    def has_ended(self) -> bool:
        """Whether this process is gone, a zombie, or its pid someone else's. Ask only where ``sees`` holds."""
        found = _state_and_start(self.pid)
        return found is None or found[0] in _ENDED_STATES or found[1] != self.start_ticks


class PeerWatch:
    """Looks at processes on this host at most 20 times a second, whoever asks how often. Thread-safe."""

    def __init__(self, here: PeerIdentity, peers: Iterable[PeerIdentity]) -> None:
        self._alive = {peer.rank: peer for peer in peers if peer.rank != here.rank and here.sees(peer)}
        self._ended: dict[int, PeerIdentity] = {}
        self._next_look = 0.0
        self._lock = threading.Lock()

    def ended(self) -> list[PeerIdentity]:
        """The peers on this host that do not live any more, by rank."""
        with self._lock:
            now = time.monotonic()
            if now >= self._next_look:
                self._next_look = now + _LOOK_INTERVAL_S
                for rank in [rank for rank, peer in self._alive.items() if peer.has_ended()]:
                    self._ended[rank] = self._alive.pop(rank)
            return [self._ended[rank] for rank in sorted(self._ended)]


def _state_and_start(pid: int) -> tuple[str, int] | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command's name, in parentheses, may hold anything; fields are counted from behind it.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return (fields[0].decode(), int(fields[19])) if len(fields) > 19 else None


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
