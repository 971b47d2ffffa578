"""Identify the processes of the ranks and notice when one on this host has ended."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import msgpack

from .timings import PROCESS_CHECK_S

_ENDED_STATES = ("Z", "X", "x")


@dataclass(frozen=True)
class PeerIdentity:
    """One rank's process. An empty ``boot_id`` or namespace is unknown and matches nothing."""

    rank: int
    host: str
    pid: int
    start_ticks: int
    boot_id: str
    pid_namespace: str
    net_namespace: str

    @classmethod
    def of_this_process(cls, rank: int) -> PeerIdentity:
        """Identify the calling process."""
        found: tuple[str, int] | None = None
        with contextlib.suppress(OSError):
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
        """Encode for another rank."""
        return bytes(msgpack.packb(asdict(self)))

    @classmethod
    def unpack(cls, data: bytes) -> PeerIdentity:
        """Decode what ``pack`` returned."""
        return cls(**msgpack.unpackb(data))

    @property
    def pid_scope(self) -> str:
        """A key that is equal for processes that can see each other's pid; empty if unknown."""
        return f"{self.boot_id}.{self.pid_namespace}" if self.boot_id and self.pid_namespace else ""

    @property
    def network_scope(self) -> str:
        """A key that is equal for processes with the same loopback interface; empty if unknown."""
        return f"{self.boot_id}.{self.net_namespace}" if self.boot_id and self.net_namespace else ""

    def can_observe(self, other: PeerIdentity) -> bool:
        """Whether the other's pid is valid in this process's ``/proc``."""
        return self.pid_scope == other.pid_scope != ""

    def shares_loopback(self, other: PeerIdentity) -> bool:
        """Whether 127.0.0.1 is the same interface for both."""
        return self.network_scope == other.network_scope != ""

    def has_ended(self) -> bool:
        """Whether this process is gone or a zombie, or its pid is reused. Valid only where ``can_observe`` holds.

        False if that cannot be found out, for example because too many files are open.
        """
        try:
            found = _state_and_start(self.pid)
        except OSError:
            return False
        return found is None or found[0] in _ENDED_STATES or found[1] != self.start_ticks


class PeerWatch:
    """Check which processes of this host have ended, at most 20 times a second. Thread-safe."""

    def __init__(self, here: PeerIdentity, peers: Iterable[PeerIdentity]) -> None:
        self._alive = {peer.rank: peer for peer in peers if peer.rank != here.rank and here.can_observe(peer)}
        self._ended: dict[int, PeerIdentity] = {}
        self._next_check = 0.0
        self._lock = threading.Lock()

    def identity(self, rank: int) -> PeerIdentity | None:
        """Return the process of a rank on this host."""
        with self._lock:
            return self._alive.get(rank) or self._ended.get(rank)

    def ended(self) -> set[int]:
        """Return the ranks on this host whose process has ended."""
        with self._lock:
            now = time.monotonic()
            if now >= self._next_check:
                self._next_check = now + PROCESS_CHECK_S
                for rank in [rank for rank, peer in self._alive.items() if peer.has_ended()]:
                    self._ended[rank] = self._alive.pop(rank)
            return set(self._ended)


def _state_and_start(pid: int) -> tuple[str, int] | None:
    """Return the state of a process and when it began; None if it does not exist. Raises ``OSError``."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command name, in parentheses, may contain anything, so fields are counted from its end.
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return (fields[0].decode(), int(fields[19])) if len(fields) > 19 else None


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
