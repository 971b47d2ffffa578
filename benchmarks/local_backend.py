"""Compare the local storage backend with the floors, with and without the page cache.

``python -m benchmarks.local_backend --folder DIR``: one file is written in pieces by a few threads and made durable,
then read back into ordinary memory, cold and warm. The floors and both ways alternate; medians are shown.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from benchmarks.floors import Floors
from benchmarks.page_cache import evict, warm
from benchmarks.workloads import Memory
from bytecheckpoint.storage_backends.local.backend import LocalBackend

__all__ = ["main"]

_PIECE = 8 << 20
_HEAD = 4096  # tensors follow a header
_MISALIGNED = 64  # a typical offset of a tensor in a page


class Ways:
    """Writes and reads ``nbytes`` through a backend with ``threads`` threads."""

    def __init__(self, nbytes: int, threads: int) -> None:
        self._nbytes = nbytes
        self._staged = Memory(nbytes, huge=True)
        self._target = Memory(nbytes + _MISALIGNED)
        self._threads = ThreadPoolExecutor(threads)
        self._staged.touch()
        self._target.touch()
        noise = np.random.default_rng(0).integers(0, 256, _PIECE, dtype=np.uint8)
        for at in range(0, nbytes, _PIECE):
            self._staged.view[at : min(at + _PIECE, nbytes)] = memoryview(noise)[: nbytes - at]  # type: ignore[arg-type]

    def write(self, backend: LocalBackend) -> None:
        """Write one durable file."""
        with backend.create("file", self._nbytes) as writer:
            self._pieces(lambda at, end: writer.write(at, self._staged.view[at:end]), 0)
            writer.complete()

    def read(self, backend: LocalBackend) -> None:
        """Read everything except the head, to memory that is not page-aligned."""
        into = self._target.view[_MISALIGNED:]
        self._pieces(lambda at, end: backend.read_into("file", at, into[at:end]), _HEAD)

    def check(self) -> None:
        """Raise unless the bytes read are those written; then overwrite them."""
        read = self._target.tensor[_MISALIGNED + _HEAD : _MISALIGNED + self._nbytes]
        if not torch.equal(read, self._staged.tensor[_HEAD : self._nbytes]):
            raise AssertionError("other bytes came back than were written")
        self._target.tensor.zero_()

    def _pieces(self, move: Callable[[int, int], None], begin: int) -> None:
        for _ in self._threads.map(
            lambda at: move(at, min(at + _PIECE, self._nbytes)), range(begin, self._nbytes, _PIECE)
        ):
            pass


def measure(folder: str, nbytes: int, threads: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every round by operation."""
    ways, floors = Ways(nbytes, threads), Floors(nbytes)
    seconds: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, value in floors.measure(os.path.join(folder, "floors")).items():
            if value is not None:
                seconds.setdefault(f"floor: {name}", []).append(value)
        for direct in (True, False):
            root = os.path.join(folder, f"direct-{direct}")
            backend = LocalBackend(root, direct_io=direct)
            steps: dict[str, tuple[Callable[[str], float], Callable[[LocalBackend], None]]] = {
                "durable write": (evict, ways.write),
                "cold read": (evict, ways.read),
                "warm read": (warm, ways.read),
            }
            for name, (prepare, step) in steps.items():
                prepare(root)
                begin = time.perf_counter()
                step(backend)
                seconds.setdefault(f"{name}, {'direct' if direct else 'buffered'}", []).append(
                    time.perf_counter() - begin
                )
                if step == ways.read:
                    ways.check()
            shutil.rmtree(root)
    floors.close()
    return seconds


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", required=True, help="on the disk that is meant; made, and emptied again")
    parser.add_argument("--bytes", type=int, default=1_500_000_000)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    seconds = measure(options.folder, options.bytes, options.threads, options.rounds)
    for name, values in seconds.items():
        median = statistics.median(values)
        spread = f"[{min(values):.3f}, {max(values):.3f}]"
        print(f"{name:28} {median:7.3f} s  {spread}  {options.bytes / median / 1e9:6.2f} GB/s")


if __name__ == "__main__":
    main()
