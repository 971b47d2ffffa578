"""Count the threads, descriptors and children of a process, and find what other processes left behind."""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from collections import Counter
from dataclasses import dataclass

from bytecheckpoint.testing import time_limit

_POOLS = {"bcp-io": 8, "bcp-save": 1, "bcp-help": 3}
"""Limits of the thread pools that a process keeps between saves; threads start on demand."""

_SETTLE_S = time_limit(5)


@dataclass(frozen=True)
class Resources:
    """The resources of a process, counted by kind."""

    threads: Counter[str]
    descriptors: Counter[str]
    children: Counter[str]

    @classmethod
    def now(cls) -> Resources:
        gc.collect()
        named = Counter(_kind_of_thread(thread.name) for thread in threading.enumerate())
        for pool, limit in _POOLS.items():
            named[pool] = max(0, named[pool] - limit)
        named["not Python's"] = len(os.listdir("/proc/self/task")) - threading.active_count()
        return cls(named, _descriptors(), Counter(_children()))

    def beyond(self, before: Resources) -> list[str]:
        """Return the resources that have been added since ``before``."""
        pairs = [
            ("thread", self.threads, before.threads),
            ("descriptor", self.descriptors, before.descriptors),
            ("child", self.children, before.children),
        ]
        return [f"{count} more {what}: {kind}" for what, now, old in pairs for kind, count in (now - old).items()]


def left_since(before: Resources) -> list[str]:
    """Return the resources added since ``before``, after a short wait: closed connections disappear with a delay."""
    deadline = time.monotonic() + _SETTLE_S
    while (left := Resources.now().beyond(before)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def processes_of_sessions(sessions: set[int]) -> list[int]:
    """Return the living processes of these sessions: each rank is a session leader, and its children belong to it."""
    return [pid for pid, fields in _processes() if fields[0] not in ("Z", "X") and int(fields[3]) in sessions]


def state_of(pid: int) -> str:
    """Return the state letter from ``/proc``; T means stopped."""
    return next((fields[0] for found, fields in _processes([pid]) if found == pid), "")


def _kind_of_thread(name: str) -> str:
    return re.sub(r"[-_]?\d+( \(.*\))?$", "", name)


def _descriptors() -> Counter[str]:
    kinds: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue  # the descriptor of the listing itself
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
