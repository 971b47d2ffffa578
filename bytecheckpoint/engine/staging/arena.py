"""Staging memory: a pool of blocks that are faulted in once and reused from save to save.

All blocks have one size, so memory never fragments, whatever the saves of a process hold and in whatever order they
end. A released block is reused before a new one is allocated, because a fresh block copies much slower than a warm one:
memory that a virtual machine has never touched is faulted in at 0.3 GB/s. Therefore background threads add blocks
(``add``) while the save that needs them makes do with a few.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ...errors import DeadlineError, StateError, UsageError
from ..blocks import PAGE, Block

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
        self._unready = 0  # blocks that are being faulted in; idle after that
        self.turn = threading.Lock()
        """Held by the only save that may fill memory: two saves that held half of it each would deadlock."""

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return self.blocks * self.block_size

    @property
    def blocks(self) -> int:
        """Number of blocks: acquired, idle, and being faulted in."""
        with self._changed:
            return self._count()

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

    def goal(self, blocks: int) -> int:
        """Return how many blocks the pool needs for a save of this many besides those that earlier saves hold."""
        with self._changed:
            return min(self._acquired + blocks, self._capacity_for(blocks) - 1)

    def acquire(self, timeout_s: float | None = None, *, last: bool = False, fresh: int | None = None) -> Block:
        """Return a block; wait for a released one if the pool is exhausted. The caller faults it in.

        With ``fresh``, allocate a block only while fewer than this number exist; otherwise wait for a block that is
        released or added.

        Raises:
            DeadlineError: No block was released in time.
            StateError: The system has no memory.
        """

        def is_possible() -> bool:
            limit = self._capacity if fresh is None else min(fresh, self._capacity)
            has_block = bool(self._idle) or self._count() < limit
            return has_block and self._acquired < self._capacity - (not last)

        with self._changed:
            if not self._changed.wait_for(is_possible, timeout_s):
                raise DeadlineError(
                    f"no staging memory was released within {timeout_s} s: earlier saves are still being written. "
                    f"Save less often, or raise deadline_s or the memory budget (now {self.budget or 'none'}, "
                    f"{self._capacity * self.block_size} bytes in use)"
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

    def add(self, goal: int, prepare: Callable[[Block], None] | None = None) -> bool:
        """Add an idle block that is faulted in and passed to ``prepare``; False if ``goal`` blocks exist already.

        Raises:
            StateError: The system has no memory.
        """
        with self._changed:
            if self._count() >= min(goal, self._capacity):
                return False
            self._unready += 1
        block = None
        try:
            block = self._make()
            block.fault_in(block.nbytes)
            if prepare is not None:
                prepare(block)
        finally:
            with self._changed:
                self._unready -= 1
                if block is not None:
                    self._idle.append(block)
                self._changed.notify_all()
        return True

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

    def _count(self) -> int:
        return self._acquired + len(self._idle) + self._unready

    def _make(self) -> Block:
        try:
            return Block(self.block_size)
        except (OSError, MemoryError) as error:
            raise StateError(f"cannot allocate staging memory: {error}; set a lower memory budget") from error

    def _capacity_for(self, blocks: int) -> int:
        return self._capacity if self.budget is not None else max(self._capacity, self._slots * blocks + 1)
