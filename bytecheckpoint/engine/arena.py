"""Staging memory: page-aligned, faulted in once, reused from save to save.

A fresh buffer copies at a fifth of a warm one's speed because every page is faulted in on first touch, so slots are
kept and handed out again. A slot holds the images of a rank's files as they will be on storage: staging is the one
copy between the tensor and the disk.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from types import TracebackType

import torch

from ..errors import DeadlineError, StateError

__all__ = ["PAGE", "Arena", "Slot", "page_round"]

PAGE = 4096
_POPULATE_WRITE = 23  # madvise(2), Linux 5.14: fault all pages in with one call


def page_round(nbytes: int) -> int:
    """``nbytes`` up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


class Slot:
    """A block of staging memory lent out by an ``Arena``. ``release`` gives it back; safe to call twice."""

    def __init__(self, arena: Arena, memory: mmap.mmap) -> None:
        self._arena = arena
        self.memory = memory
        self.view = memoryview(memory)
        self.tensor = torch.frombuffer(memory, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        return len(self.memory)

    def release(self) -> None:
        self._arena._take_back(self)

    def __enter__(self) -> Slot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Arena:
    """Lends slots of at least the size asked for; keeps them for the next save. Thread-safe.

    ``budget`` bounds the bytes held in all slots together; None leaves that to the caller's state.
    """

    def __init__(self, budget: int | None = None) -> None:
        self.budget = budget
        self._lock = threading.Condition()
        self._idle: list[Slot] = []
        self._lent: set[Slot] = set()

    @property
    def nbytes(self) -> int:
        """Bytes held now, lent and idle."""
        with self._lock:
            return sum(slot.nbytes for slot in (*self._idle, *self._lent))

    def acquire(self, nbytes: int, timeout_s: float | None = None) -> Slot:
        """A slot of at least ``nbytes``; waits for one to come back where the budget is spent.

        Raises ``StateError`` if the budget could never hold it, ``DeadlineError`` when none came back in time.
        """
        need = max(page_round(nbytes), PAGE)
        if self.budget is not None and need > self.budget:
            raise StateError(
                f"staging needs {need} bytes but the arena's budget is {self.budget}; "
                f"raise the budget or save fewer bytes per rank"
            )
        with self._lock:
            if not self._lock.wait_for(lambda: self._can_lend(need), timeout_s):
                raise DeadlineError(
                    f"no staging memory came back within {timeout_s} s: earlier saves are still being written; "
                    f"save less often, or raise the memory budget ({self.budget} bytes) or deadline_s"
                )
            slot = self._pick(need)
            self._lent.add(slot)
            return slot

    def trim(self) -> None:
        """Give all idle slots back to the system."""
        with self._lock:
            self._idle.clear()

    def _can_lend(self, need: int) -> bool:
        if self.budget is None or any(slot.nbytes >= need for slot in self._idle):
            return True
        return sum(slot.nbytes for slot in self._lent) + need <= self.budget

    def _pick(self, need: int) -> Slot:
        fitting = [slot for slot in self._idle if slot.nbytes >= need]
        if fitting:
            slot = min(fitting, key=lambda s: s.nbytes)
            self._idle.remove(slot)
            return slot
        # A slot that is too small now would be too small next time as well: states do not shrink.
        if self._idle:
            self._idle.remove(max(self._idle, key=lambda s: s.nbytes))
        held = sum(slot.nbytes for slot in self._lent)
        while self.budget is not None and self._idle and held + need + sum(s.nbytes for s in self._idle) > self.budget:
            self._idle.pop()
        return Slot(self, _faulted_in(need))

    def _take_back(self, slot: Slot) -> None:
        with self._lock:
            if slot in self._lent:
                self._lent.remove(slot)
                self._idle.append(slot)
                self._lock.notify_all()


def _faulted_in(nbytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without transparent huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    try:
        memory.madvise(_POPULATE_WRITE)
    except OSError:  # older kernel
        torch.frombuffer(memory, dtype=torch.uint8).zero_()
    return memory
