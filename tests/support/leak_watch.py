"""What this process holds: memory, descriptors, threads, children, shared memory."""

from __future__ import annotations

import ctypes
import gc
import os
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

from bytecheckpoint.storage_backends.keys import TEMPORARY

_LOOKS = 5
_PATIENCE_S = 10.0


@dataclass(frozen=True)
class Held:
    """All but memory: what must be exactly the same later."""

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
    """Bytes of memory that are this process's own (neither files nor shared), once what is free is given back."""
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
    """What each descriptor is of that stays open: a lease, say, is written from time to time, and closed again, which
    takes as long as the disk does."""
    found, end = reduce(and_, (_open_now() for _ in range(_LOOKS))), time.monotonic() + _PATIENCE_S
    while any(TEMPORARY in name for name in found) and time.monotonic() < end:
        time.sleep(0.01)
        found &= _open_now()
    return found


def _open_now() -> Counter[str]:
    """Without the numbers of sockets and pipes, which differ from time to time."""
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that listed them
            found[os.readlink(f"/proc/self/fd/{name}").split(":[")[0]] += 1
    return found


def _shared_memory() -> list[str]:
    """Segments that this process has mapped or open, and those that bear its number."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = [line.split(maxsplit=5)[5] for line in maps if "/dev/shm/" in line or "/memfd:" in line]
    named = [name for name in shared_memory_names() if str(os.getpid()) in name]
    return sorted(mapped + named)


def shared_memory_names() -> list[str]:
    return sorted(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else []
