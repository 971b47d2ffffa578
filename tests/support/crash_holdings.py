"""What a process holds of the system: threads, descriptors, children; and what processes left behind."""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from collections import Counter
from dataclasses import dataclass

_POOLS = {"bcp-io": 8, "bcp-save": 1, "bcp-merge": 2, "bcp-copy": 1}
"""Threads that a process keeps from save to save, each made when it is first needed."""

_SETTLE_S = 5.0
_SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True)
class Holdings:
    """Counts by kind."""

    threads: Counter[str]
    descriptors: Counter[str]
    children: Counter[str]

    @classmethod
    def now(cls) -> Holdings:
        gc.collect()
        named = Counter(_kind_of_thread(thread.name) for thread in threading.enumerate())
        for pool, limit in _POOLS.items():
            named[pool] = max(0, named[pool] - limit)
        named["not Python's"] = len(os.listdir("/proc/self/task")) - threading.active_count()
        return cls(named, _descriptors(), Counter(_children()))

    def beyond(self, before: Holdings) -> list[str]:
        """What there is more of than ``before``."""
        pairs = [
            ("thread", self.threads, before.threads),
            ("descriptor", self.descriptors, before.descriptors),
            ("child", self.children, before.children),
        ]
        return [f"{count} more {what}: {kind}" for what, mine, old in pairs for kind, count in (mine - old).items()]


def left_since(before: Holdings) -> list[str]:
    """What this process holds beyond ``before``, given a moment: the other end of a connection closes by itself."""
    give_up = time.monotonic() + _SETTLE_S
    while (left := Holdings.now().beyond(before)) and time.monotonic() < give_up:
        time.sleep(0.02)
    return left


def processes_of_sessions(sessions: set[int]) -> list[int]:
    """Living processes of these sessions: a rank leads a session, and whatever it starts is in that."""
    return [pid for pid, fields in _processes() if fields[0] not in ("Z", "X") and int(fields[3]) in sessions]


def shared_memory_of(pids: set[int]) -> set[str]:
    """Segments with a name of this library's, or of one of these processes: torch and Python put the pid there."""
    mine = re.compile(rf"bcp|bytecheckpoint|(?<!\d)({'|'.join(map(str, pids)) or '-'})(?!\d)")
    return {name for name in os.listdir(_SHARED_MEMORY) if mine.search(name)}


def state_of(pid: int) -> str:
    """The letter that ``/proc`` has for it: T is stopped."""
    return next((fields[0] for found, fields in _processes([pid]) if found == pid), "")


def _kind_of_thread(name: str) -> str:
    return re.sub(r"[-_]?\d+( \(.*\))?$", "", name)


def _descriptors() -> Counter[str]:
    kinds: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue  # of the listing itself
        kinds[re.sub(r"(?<=:)\[\d+\]", "", target)] += 1
    return kinds


def _children() -> list[str]:
    me = os.getpid()
    return ["process" for _, fields in _processes() if int(fields[1]) == me]


def _processes(pids: list[int] | None = None) -> list[tuple[int, list[str]]]:
    found = []
    for pid in pids if pids is not None else [int(name) for name in os.listdir("/proc") if name.isdecimal()]:
        try:
            with open(f"/proc/{pid}/stat") as file:
                # State, parent, process group, session.
                found.append((pid, file.read().rpartition(")")[2].split()[:4]))
        except OSError:
            continue
    return found
