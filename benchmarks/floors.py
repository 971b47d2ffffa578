"""Measure the floors: the machine's best times for a number of bytes. All results are multiples of them.

memcpy, memcpy_2         from ordinary to huge pages, all warm, 1 and 2 threads
direct_write             aligned memory on huge pages, O_DIRECT, preallocated, 4 threads, fdatasync, directory synced
buffered_write           1 thread, fdatasync, directory synced
direct_read              cold, O_DIRECT, 4 threads, into warm aligned memory on huge pages
buffered_read            cold, 1 stream (the kernel reads ahead), into warm memory
cached_read, cached_read_2   from the page cache into warm memory, 1 and 2 threads

Buffered reads fill ordinary pages, like those of a trainer's tensors. A direct read into ordinary pages takes two to
three times as long as into huge pages, so its floor is what a buffer of huge pages can reach.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import TypeVar

from benchmarks.page_cache import evict, warm
from benchmarks.workloads import Memory

__all__ = ["FLOORS", "Floors"]

FLOORS = (
    "memcpy",
    "memcpy_2",
    "direct_write",
    "buffered_write",
    "direct_read",
    "buffered_read",
    "cached_read",
    "cached_read_2",
)

_T = TypeVar("_T")
_R = TypeVar("_R")

_PIECE = 8 << 20
_THREADS = 4
_BLOCK = 4096


class Floors:
    """Measures all floors for ``nbytes``."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._ordinary = Memory(nbytes)
        self._huge = Memory(nbytes, huge=True)
        self._threads = ThreadPoolExecutor(_THREADS)

    def measure(self, folder: str) -> dict[str, float | None]:
        """Return seconds by floor; None if the file system does not support it, or the file stays cached."""
        os.makedirs(folder, exist_ok=True)
        self._ordinary.touch()
        self._huge.touch()
        wait([self._threads.submit(time.sleep, 0.001) for _ in range(_THREADS)])  # start all threads
        direct, buffered = os.path.join(folder, "direct"), os.path.join(folder, "buffered")
        seconds: dict[str, float | None] = {}
        try:
            seconds["memcpy"] = _seconds(partial(self._copy, 1))
            seconds["memcpy_2"] = _seconds(partial(self._copy, 2))
            seconds["direct_write"] = _if_supported(partial(self._direct_write, direct))
            seconds["buffered_write"] = _seconds(partial(self._buffered_write, buffered))
            seconds["direct_read"] = _if_supported(partial(self._direct_read, direct)) if _cold(direct) else None
            seconds["buffered_read"] = _seconds(partial(self._read, buffered, 1)) if _cold(buffered) else None
            warm(buffered)
            seconds["cached_read"] = _seconds(partial(self._read, buffered, 1))
            seconds["cached_read_2"] = _seconds(partial(self._read, buffered, 2))
        finally:
            for path in (direct, buffered):
                if os.path.exists(path):
                    os.unlink(path)
            self._ordinary.release()
            self._huge.release()
        return seconds

    def close(self) -> None:
        """Stop the threads."""
        self._threads.shutdown()

    def _copy(self, threads: int) -> None:
        source, target = self._ordinary.tensor, self._huge.tensor
        share = -(-self.nbytes // threads)
        spans = [slice(at, min(at + share, self.nbytes)) for at in range(0, self.nbytes, share)]
        if threads == 1:
            target[spans[0]].copy_(source[spans[0]])
        else:
            self._all(lambda span: target[span].copy_(source[span]), spans)

    def _direct_write(self, path: str) -> None:
        padded = -(-self.nbytes // _BLOCK) * _BLOCK
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
        try:
            os.posix_fallocate(fd, 0, padded)
            pieces = self._all(lambda at: os.pwrite(fd, self._staged(at, padded), at), _pieces(padded))
            _expect(sum(pieces), padded)
            os.ftruncate(fd, self.nbytes)
            os.fdatasync(fd)
        finally:
            os.close(fd)
        _sync_folder(path)

    def _buffered_write(self, path: str) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            _expect(sum(os.pwrite(fd, self._staged(at, self.nbytes), at) for at in _pieces(self.nbytes)), self.nbytes)
            os.fdatasync(fd)
        finally:
            os.close(fd)
        _sync_folder(path)

    def _direct_read(self, path: str) -> None:
        padded = -(-self.nbytes // _BLOCK) * _BLOCK
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            pieces = self._all(lambda at: os.preadv(fd, [self._staged(at, padded)], at), _pieces(padded))
            _expect(sum(pieces), self.nbytes)
        finally:
            os.close(fd)

    def _read(self, path: str, threads: int) -> None:
        fd = os.open(path, os.O_RDONLY)

        def read(first: int) -> int:
            pieces = _pieces(self.nbytes)[first::threads]
            return sum(os.preadv(fd, [self._tensors(at, self.nbytes)], at) for at in pieces)

        try:
            _expect(read(0) if threads == 1 else sum(self._all(read, range(threads))), self.nbytes)
        finally:
            os.close(fd)

    def _tensors(self, at: int, end: int) -> memoryview:
        return self._ordinary.view[at : min(at + _PIECE, end)]

    def _staged(self, at: int, end: int) -> memoryview:
        return self._huge.view[at : min(at + _PIECE, end)]

    def _all(self, call: Callable[[_T], _R], items: Iterable[_T]) -> list[_R]:
        return list(self._threads.map(call, items))


def _expect(moved: int, nbytes: int) -> None:
    # A call that moves fewer bytes than requested would make the floor look better than it is.
    if moved != nbytes:
        raise OSError(f"moved {moved} bytes of {nbytes}")


def _pieces(nbytes: int) -> range:
    return range(0, nbytes, _PIECE)


def _cold(path: str) -> bool:
    return os.path.exists(path) and evict(path) == 0.0


def _sync_folder(path: str) -> None:
    fd = os.open(os.path.dirname(path), os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _if_supported(call: Callable[[], object]) -> float | None:
    try:
        return _seconds(call)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return None
        raise
