"""Staging memory: a pool of blocks that are faulted in once and reused from save to save.

All blocks have one size, so memory never fragments, whatever the saves of a process hold and in whatever order they
end. A released block is reused before a new one is allocated, because a fresh block copies much slower than a warm one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor

from ...errors import DeadlineError, StateError, UsageError
from ..blocks import PAGE, Block

__all__ = ["BLOCK", "Arena"]

BLOCK = 8 << 20
"""Bytes of a block and of one write: large enough for the device's full rate, small enough for several threads."""


class Arena:
    """A pool of blocks. Thread-safe.

    ``budget`` limits the bytes of all blocks. Without a budget there is room for ``slots`` saves of the largest size
    passed to ``make_room``. A small budget makes the blocks smaller. One block is reserved for saves that need only one
    at a time (``acquire(last=True)``), so that these always make progress.
    """

    def __init__(self, budget: int | None = None, slots: int = 2) -> None:
        """Create an empty pool.

        Raises:
            UsageError: The budget is less than two pages, or there is no slot.
        """
        if budget is not None and budget < 2 * PAGE:
            raise UsageError(f"a memory budget must be at least {2 * PAGE} bytes, not {budget!r}")
        if slots < 1:
            raise UsageError(
                f"slots (the saves for which staging memory is allocated) must be at least 1, not {slots!r}"
            )
        self.budget = budget
        self.block_size = BLOCK if budget is None else min(BLOCK, budget // 2 // PAGE * PAGE)
        self._slots = slots
        self._capacity = 0 if budget is None else budget // self.block_size
        self._changed = threading.Condition()
        self._idle: list[Block] = []
        self._acquired = 0
        self.turn = threading.Lock()
        """Held by the only save that may fill memory: two saves that held half of it each would deadlock."""

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks, acquired and idle."""
        with self._changed:
            return (len(self._idle) + self._acquired) * self.block_size

    def blocks_for(self, nbytes: int) -> int:
        """Return the number of blocks that ``nbytes`` take."""
        return -(-nbytes // self.block_size)

    def make_room(self, blocks: int) -> bool:
        """Return whether a save of this many blocks fits once earlier saves have ended. True without a budget."""
        with self._changed:
            self._capacity = self._capacity_for(blocks)
            self._changed.notify_all()
            return blocks < self._capacity

    def would_wait(self, blocks: int) -> bool:
        """Return whether a save of this many blocks would have to wait for memory that earlier saves hold."""
        with self._changed:
            room = self._capacity_for(blocks) - 1
            return self._acquired > 0 and self._acquired + min(blocks, room) > room

    def acquire(self, timeout_s: float | None = None, *, last: bool = False) -> Block:
        """Return a block; wait for a released one if the pool is exhausted. The caller faults it in.

        Raises:
            DeadlineError: No block was released in time.
            StateError: The system has no memory.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._acquired < self._capacity - (not last), timeout_s):
                raise DeadlineError(
                    f"no staging memory was released within {timeout_s} s: earlier saves are still being written. "
                    f"Save less often, raise deadline_s or the memory budget (now {self.budget or 'none'}, "
                    f"{self._capacity * self.block_size} bytes in use), or skip with when_busy='skip'"
                )
            self._acquired += 1
            if self._idle:
                return self._idle.pop()
        try:
            return self._make()
        except BaseException:
            with self._changed:
                self._acquired -= 1
                self._changed.notify_all()
            raise

    def prefault(self, blocks: int, executor: Executor, prepare: Callable[[Block], None] | None = None) -> None:
        """Fault in ``blocks`` blocks, within the capacity, and call ``prepare`` with each that is idle."""
        with self._changed:
            count = max(0, min(blocks, self._capacity) - self._acquired)
            idle_blocks = [self._idle.pop() for _ in range(min(count, len(self._idle)))]
            self._acquired += count
        try:
            idle_blocks += [self._make() for _ in range(count - len(idle_blocks))]

            def fault_in(block: Block) -> None:
                block.fault_in(block.nbytes)
                if prepare is not None:
                    prepare(block)

            for _ in executor.map(fault_in, idle_blocks):
                pass
        finally:
            with self._changed:
                self._acquired -= count
                self._idle += idle_blocks
                self._changed.notify_all()

    def release(self, block: Block) -> None:
        """Return a block to the pool, once for each ``acquire``."""
        with self._changed:
            self._acquired -= 1
            self._idle.append(block)
            self._changed.notify_all()

    def trim(self) -> None:
        """Return all idle blocks to the operating system."""
        with self._changed:
            idle, self._idle = self._idle, []
        for block in idle:
            block.unpin()

    def _make(self) -> Block:
        try:
            return Block(self.block_size)
        except (OSError, MemoryError) as error:
            raise StateError(f"cannot allocate staging memory: {error}; set a lower memory budget") from error

    def _capacity_for(self, blocks: int) -> int:
        return self._capacity if self.budget is not None else max(self._capacity, self._slots * blocks + 1)
