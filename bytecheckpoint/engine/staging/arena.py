"""Staging memory: a pool of blocks, page-aligned on huge pages, faulted in once and reused from save to save.

A fresh buffer copies at a fifth of a warm one's speed because every page is faulted in on first touch, so a block that
came back is lent again before a new one is made. Blocks have one size: whatever the saves of a process hold and in
whatever order they end, no memory is lost between them.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress

import torch

from ...errors import DeadlineError, StateError

__all__ = ["BLOCK", "PAGE", "Arena", "Block", "page_round"]

PAGE = 4096

BLOCK = 8 << 20
"""Bytes of a block, and of one write: large enough to reach the device's rate, small enough to share among threads."""

_HUGE_PAGE = 2 << 20
_POPULATE_WRITE = 23  # madvise(2), Linux 5.14: fault all pages in with one call
_WIPE_ON_FORK = 18  # madvise(2), Linux 4.14: a child gets zeros, so that the parent never pays for copies of pages


def page_round(nbytes: int) -> int:
    """``nbytes`` up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


class Block:
    """``nbytes`` of memory lent out by an ``Arena``. Its content is whatever the last user left.

    ``view`` is for who writes or hashes it, ``tensor`` (uint8) and ``address`` for who fills it. Who registers the
    memory with a device leaves in ``unpin`` how to undo that.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.unpin: Callable[[], object] | None = None
        slack = _HUGE_PAGE if nbytes % _HUGE_PAGE == 0 else 0
        self._memory = mmap.mmap(-1, nbytes + slack, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._start = -whole.data_ptr() % _HUGE_PAGE if slack else 0
        for advice in (mmap.MADV_HUGEPAGE, _WIPE_ON_FORK):
            with suppress(OSError):  # a kernel without it
                self._memory.madvise(advice)
        self._warm = 0
        self._lock = threading.Lock()
        self.tensor = whole[self._start : self._start + nbytes]
        self.view = memoryview(self._memory)[self._start : self._start + nbytes]
        self.address = self.tensor.data_ptr()

    def fault_in(self, nbytes: int) -> None:
        """Have the first ``nbytes`` in memory, before anybody writes there. Costs nothing the second time."""
        with self._lock:
            if nbytes <= self._warm:
                return
            start, stop = self._warm, min(-(-nbytes // _HUGE_PAGE) * _HUGE_PAGE, self.nbytes)
            try:
                self._memory.madvise(_POPULATE_WRITE, self._start + start, stop - start)
            except OSError:  # older kernel
                self.tensor[start:stop].zero_()
            self._warm = stop


class Arena:
    """Lends blocks and keeps them for the next save. Thread-safe.

    ``budget`` bounds the bytes held in all blocks together; with None there is room for ``slots`` saves of the largest
    size that ``make_room`` was asked for. Where the budget is small, so are the blocks. The last block is kept for
    saves that need one at a time (``acquire(last=True)``), so that these always get on.
    """

    def __init__(self, budget: int | None = None, slots: int = 2) -> None:
        """Raises ``StateError`` for a budget of less than two pages, or no slot."""
        if budget is not None and budget < 2 * PAGE:
            raise StateError(f"a memory budget is a number of bytes from {2 * PAGE} on, not {budget!r}")
        if slots < 1:
            raise StateError(
                f"slots is the number of saves that staging memory has room for, at least 1, not {slots!r}"
            )
        self.budget = budget
        self.block_size = BLOCK if budget is None else min(BLOCK, budget // 2 // PAGE * PAGE)
        self._slots = slots
        self._capacity = 0 if budget is None else budget // self.block_size
        self._changed = threading.Condition()
        self._idle: list[Block] = []
        self._lent = 0
        self.turn = threading.Lock()
        """Held by the one save that is being filled: two that each had half of the memory would wait for ever."""

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks there are, lent and idle."""
        with self._changed:
            return (len(self._idle) + self._lent) * self.block_size

    def blocks_for(self, nbytes: int) -> int:
        """How many blocks ``nbytes`` take."""
        return -(-nbytes // self.block_size)

    def make_room(self, blocks: int) -> bool:
        """Whether a save of so many blocks fits when all earlier ones are over. Without a budget it always will."""
        with self._changed:
            self._capacity = self._capacity_for(blocks)
            self._changed.notify_all()
            return blocks < self._capacity

    def would_wait(self, blocks: int) -> bool:
        """Whether a save of so many blocks would have to wait for memory that earlier ones hold."""
        with self._changed:
            room = self._capacity_for(blocks) - 1
            return self._lent > 0 and self._lent + min(blocks, room) > room

    def acquire(self, timeout_s: float | None = None, *, last: bool = False) -> Block:
        """A block; waits for one to come back where there may be no more. The caller faults it in.

        Raises ``DeadlineError`` when none came back in time, ``StateError`` where the system has no memory.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._lent < self._capacity - (not last), timeout_s):
                raise DeadlineError(
                    f"no staging memory came back within {timeout_s} s: earlier saves are still being written; "
                    f"save less often, raise deadline_s or the memory budget (now {self.budget or 'none'}, "
                    f"{self._capacity * self.block_size} bytes in use), or skip with when_busy='skip'"
                )
            self._lent += 1
            if self._idle:
                return self._idle.pop()
        try:
            return self._make()
        except BaseException:
            with self._changed:
                self._lent -= 1
                self._changed.notify_all()
            raise

    def prefault(self, blocks: int, executor: Executor, prepare: Callable[[Block], None] | None = None) -> None:
        """Have at least so many blocks, as far as may be, in memory; call ``prepare`` with those that nobody uses."""
        with self._changed:
            count = max(0, min(blocks, self._capacity) - self._lent)
            taken = [self._idle.pop() for _ in range(min(count, len(self._idle)))]
            self._lent += count
        try:
            taken += [self._make() for _ in range(count - len(taken))]

            def fault_in(block: Block) -> None:
                block.fault_in(block.nbytes)
                if prepare is not None:
                    prepare(block)

            for _ in executor.map(fault_in, taken):
                pass
        finally:
            with self._changed:
                self._lent -= count
                self._idle += taken
                self._changed.notify_all()

    def give_back(self, block: Block) -> None:
        """Take a block back, once for each ``acquire``."""
        with self._changed:
            self._lent -= 1
            self._idle.append(block)
            self._changed.notify_all()

    def trim(self) -> None:
        """Give all idle blocks back to the system."""
        with self._changed:
            idle, self._idle = self._idle, []
        for block in idle:
            if block.unpin is not None:
                block.unpin()

    def _make(self) -> Block:
        try:
            return Block(self.block_size)
        except (OSError, MemoryError) as error:
            raise StateError(f"no memory for staging: {error}; give a memory budget below what is free") from error

    def _capacity_for(self, blocks: int) -> int:
        return self._capacity if self.budget is not None else max(self._capacity, self._slots * blocks + 1)
