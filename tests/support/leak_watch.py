"""Find what code leaves behind in this process: threads, descriptors, children, shared memory and memory.

The rest of the process is at work as well: pools start their threads when they are needed, connections end a moment
after their use, and servers of other tests answer. So a test never compares all that the process holds. It counts what
has been added since a moment before, of the library's own threads, and allows a little time for what is ending. A test
that repeats something passes ``turns``: what every turn leaks has been added at least that often.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import statistics
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from bytecheckpoint.testing import time_limit

_POOLS = {"bcp-io": 8, "bcp-save": 1, "bcp-help": 3, "bcp-upload": 1, "bcp-http": 8}
"""Limits of the thread pools that a process keeps between saves; threads start on demand."""

_ENDING_S = time_limit(10)
"""How long a thread or a connection may take to end."""


@dataclass(frozen=True)
class Held:
    """What a process holds, by name. ``threads`` are the library's; all others count as "native"."""

    threads: Counter[str]
    descriptors: Counter[str]
    children: Counter[str]
    shared_memory: Counter[str]

    def beyond(self, before: Held, turns: int = 1) -> list[str]:
        """Return what has been added since ``before``, of each kind only if it is ``turns`` or more."""
        added: defaultdict[str, list[str]] = defaultdict(list)
        for name in (self.threads - before.threads).elements():
            added[f"thread {name}"].append(name)
        for name in (self.descriptors - before.descriptors).elements():
            added["open file" if name.startswith("/") else f"descriptor of {name.partition(':')[0]}"].append(name)
        for name in (self.children - before.children).elements():
            added["child"].append(name)
        for name in (self.shared_memory - before.shared_memory).elements():
            added["shared memory"].append(name)
        return [f"{len(names)} more {kind}: {set(names)}" for kind, names in added.items() if len(names) >= turns]


def held_now() -> Held:
    gc.collect()
    children = psutil.Process().children(recursive=True)
    return Held(_threads(), open_descriptors(), Counter(map(_name_of, children)), _shared_memory())


def left_since(before: Held, turns: int = 1) -> list[str]:
    """Return what has been added since ``before`` and does not end in a short time; empty if nothing was."""
    return until_empty(lambda: held_now().beyond(before, turns))


def files_left_below(*folders: Path | str) -> list[str]:
    """Return the files below these folders that this process has open and does not close in a short time."""
    inside = tuple(f"{os.path.realpath(folder)}/" for folder in folders)
    return until_empty(lambda: [name for name in open_descriptors().elements() if name.startswith(inside)])


def threads_left(prefix: str, before: set[threading.Thread]) -> list[str]:
    """Return the threads with this prefix that are not in ``before`` and do not end in a short time."""
    return until_empty(lambda: [one.name for one in {*threading.enumerate()} - before if one.name.startswith(prefix)])


def until_empty(find: Callable[[], list[str]]) -> list[str]:
    """Return what ``find`` still finds after a short time, in which it may disappear."""
    end = time.monotonic() + _ENDING_S
    while (found := find()) and time.monotonic() < end:
        time.sleep(0.02)
    return found


def memory_now() -> int:
    """Return the bytes of this process's private anonymous memory, after freed memory was returned to the system."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no Anonymous in smaps_rollup")


def median(samples: Sequence[int]) -> int:
    return int(statistics.median(samples))


def open_descriptors() -> Counter[str]:
    """Return the targets of this process's descriptors, without the numbers of sockets and pipes, which vary."""
    found: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of the listing itself
            found[re.sub(r"(?<=:)\[\d+\]", "", os.readlink(f"/proc/self/fd/{number}"))] += 1
    return found


def shared_memory_of(pids: set[int]) -> set[str]:
    """Return the segments that these processes have named. torch calls them ``torch_PID_...``; the library's own have
    no name."""
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    return {name for name in names if (found := re.match(r"torch_(\d+)_", name)) and int(found[1]) in pids}


def _threads() -> Counter[str]:
    named = Counter(
        re.sub(r"[-_]?\d+$", "", thread.name)
        for thread in threading.enumerate()
        if thread.name.startswith(("bcp", "bytecheckpoint"))
    )
    for pool, limit in _POOLS.items():
        named[pool] = max(0, named[pool] - limit)
    named["native"] = len(os.listdir("/proc/self/task")) - threading.active_count()
    return named


def _name_of(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):
        return str(process.name())
    return "ended"


def _shared_memory() -> Counter[str]:
    """Return the segments that this process has mapped, and those that it has named."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = [line.split(maxsplit=5)[5] for line in maps if "/dev/shm/" in line or "/memfd:" in line]
    return Counter([*mapped, *shared_memory_of({os.getpid()})])
