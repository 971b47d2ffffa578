"""Memory that bytes pass through between a store and their tensors: faulted in once, reused from load to load."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable, Iterator

import torch

from ..tensor_bytes import copy_memory

__all__ = ["BOUNCE_LIMIT", "Bounce", "BounceRing"]

BOUNCE_LIMIT = 64 << 20
"""Bytes of all bounce buffers of a process's engine together, where nothing else is asked for."""

_HUGE = 2 << 20
_PAGE = 4096
_WIPE_ON_FORK = 18  # madvise(2), Linux 4.14
_POPULATE_WRITE = 23  # madvise(2), Linux 5.14


class Bounce:
    """One buffer of ``nbytes``, page-aligned, on huge pages as far as they go whole. For one thread at a time.

    ``busy`` are the waits for transfers out of it that go on by themselves; ``pin_tried`` is left to who starts them.
    """

    def __init__(self, nbytes: int) -> None:
        self.busy: list[Callable[[], object]] = []
        self.pin_tried = False
        self._mapping = mmap.mmap(-1, nbytes + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole = torch.frombuffer(self._mapping, dtype=torch.uint8)
        start = -whole.data_ptr() % _HUGE
        self.nbytes = nbytes
        self.tensor = whole[start : start + nbytes]
        self.view = memoryview(self._mapping)[start : start + nbytes]
        self.address = self.tensor.data_ptr()
        with contextlib.suppress(OSError):
            # A child that is forked in the middle of a transfer gets zeros, and no claim to the pages.
            self._mapping.madvise(_WIPE_ON_FORK)
        if nbytes >= _HUGE:
            with contextlib.suppress(OSError):  # a kernel without transparent huge pages
                self._mapping.madvise(mmap.MADV_HUGEPAGE, start, nbytes // _HUGE * _HUGE)
        try:
            self._mapping.madvise(_POPULATE_WRITE, start, -(-nbytes // _PAGE) * _PAGE)
        except OSError:  # older kernel
            self.tensor.zero_()

    def settle(self) -> None:
        """Wait until nothing is copied out of it any more."""
        for wait in self.busy:
            wait()
        self.busy.clear()

    def copy_out(self, start: int, nbytes: int, address: int) -> None:
        """Copy ``nbytes`` from byte ``start`` on to memory that the caller keeps alive."""
        if start < 0 or nbytes < 0 or start + nbytes > self.nbytes:
            raise IndexError(f"bytes [{start}, {start + nbytes}) of a bounce buffer of {self.nbytes}")
        copy_memory(address, self.address + start, nbytes)


class BounceRing:
    """Lends buffers of ``limit`` bytes together at most, and keeps them for the next load. Thread-safe."""

    def __init__(self, limit: int = BOUNCE_LIMIT) -> None:
        self.limit = limit
        self._changed = threading.Condition()
        self._idle: list[Bounce] = []
        self._lent = 0

    @property
    def nbytes(self) -> int:
        """Bytes held now, lent and idle."""
        with self._changed:
            return self._lent + sum(bounce.nbytes for bounce in self._idle)

    @contextlib.contextmanager
    def lend(self, nbytes: int) -> Iterator[Bounce]:
        """A buffer of at least ``nbytes``, the one that was used last if it can be. Waits for one to come back where
        the limit is reached; a buffer that is longer than the limit is lent when no other is. Whoever holds one must
        not ask for another."""
        bounce = self._take(nbytes)
        try:
            yield bounce
        finally:
            try:
                bounce.settle()
            finally:
                self._take_back(bounce)

    def trim(self) -> None:
        """Give all idle buffers back to the system."""
        with self._changed:
            self._idle.clear()

    def _take(self, nbytes: int) -> Bounce:
        need = -(-nbytes // _PAGE) * _PAGE
        with self._changed:
            self._changed.wait_for(lambda: not self._lent or self._lent + need <= self.limit)
            fitting = [bounce for bounce in self._idle if bounce.nbytes >= need]
            found = fitting[-1] if fitting and self._lent + fitting[-1].nbytes <= max(self.limit, need) else None
            if found is not None:
                self._idle.remove(found)
            else:
                while self._idle and self._lent + need + sum(b.nbytes for b in self._idle) > self.limit:
                    self._idle.pop(0)
                found = Bounce(need)
            self._lent += found.nbytes
            return found

    def _take_back(self, bounce: Bounce) -> None:
        with self._changed:
            self._lent -= bounce.nbytes
            if self._lent + bounce.nbytes + sum(b.nbytes for b in self._idle) <= self.limit:
                self._idle.append(bounce)
            self._changed.notify_all()
