"""Measure the memory, descriptors, threads, children and shared memory of this process."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import statistics
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from operator import and_
from pathlib import Path

import psutil

from bytecheckpoint.storage_backends.keys import TEMPORARY_PREFIX
from bytecheckpoint.testing import time_limit

_LOOKS = 5
_PATIENCE_S = time_limit(10)


@dataclass(frozen=True)
class Held:
    """All resources except memory, which must be exactly the same later."""

    descriptors: list[str]
    threads: list[str]
    native_threads: int
    children: list[str]
    shared_memory: list[str]


def held_now() -> Held:
    gc.collect()
    process = psutil.Process()
    return Held(
        sorted(_descriptors().elements()),
        sorted(thread.name for thread in threading.enumerate()),
        process.num_threads(),
        sorted(child.name() for child in process.children(recursive=True)),
        _shared_memory(),
    )


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


def _descriptors() -> Counter[str]:
    """Return the targets of descriptors that stay open.

    Others are open only briefly: a lease, for example, is rewritten from time to time.
    """
    found, end = reduce(and_, (_open_now() for _ in range(_LOOKS))), time.monotonic() + _PATIENCE_S
    while any(TEMPORARY_PREFIX in name for name in found) and time.monotonic() < end:
        time.sleep(0.01)
        found &= _open_now()
    return found


def _open_now() -> Counter[str]:
    """Return the targets without the numbers of sockets and pipes, which vary."""
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the descriptor of the listing itself
            found[os.readlink(f"/proc/self/fd/{name}").split(":[")[0]] += 1
    return found


def _shared_memory() -> list[str]:
    """Return the segments that this process has mapped, and those that it has named."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = [line.split(maxsplit=5)[5] for line in maps if "/dev/shm/" in line or "/memfd:" in line]
    return sorted([*mapped, *shared_memory_of({os.getpid()})])


def shared_memory_names() -> list[str]:
    return sorted(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else []


def shared_memory_of(pids: set[int]) -> set[str]:
    """Return the segments that these processes have named.

    torch names a segment ``torch_PID_...``; the library's own segments have no name. A pid may also be part of a longer
    number in the name of a segment of another process.
    """
    found = {str(pid) for pid in pids}
    return {name for name in shared_memory_names() if not found.isdisjoint(re.split(r"\W|_", name))}
