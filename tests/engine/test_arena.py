"""Staging memory: reused, within its budget, and with an end to every wait."""

from __future__ import annotations

import errno
import mmap
from concurrent.futures import ThreadPoolExecutor

import pytest

from bytecheckpoint.engine import arena as arena_module
from bytecheckpoint.engine.arena import PAGE, Arena
from bytecheckpoint.errors import DeadlineError, StateError


def test_a_slot_is_lent_again() -> None:
    arena = Arena()
    with arena.acquire(10 * PAGE) as first:
        assert first.nbytes >= 10 * PAGE
        assert first.tensor.data_ptr() % PAGE == 0
    first.release()  # twice is fine
    with arena.acquire(9 * PAGE) as second:
        assert second is first
    assert arena.nbytes == 10 * PAGE


def test_a_slot_that_became_too_small_is_replaced() -> None:
    arena = Arena()
    arena.acquire(2 * PAGE).release()
    arena.acquire(8 * PAGE).release()
    assert arena.nbytes == 8 * PAGE
    arena.trim()
    assert arena.nbytes == 0


def test_the_budget_is_kept() -> None:
    arena = Arena(budget=10 * PAGE)
    with pytest.raises(StateError, match="raise the budget"):
        arena.acquire(11 * PAGE)
    held = arena.acquire(6 * PAGE)
    with pytest.raises(DeadlineError, match="earlier saves are still being written"):
        arena.acquire(5 * PAGE, timeout_s=0.01)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(arena.acquire, 5 * PAGE, 60.0)
        held.release()
        assert waiting.result().nbytes >= 5 * PAGE
    assert arena.nbytes <= 10 * PAGE


def test_a_kernel_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(mmap.mmap):
        def madvise(self, *arguments: int) -> None:
            raise OSError(errno.EINVAL, "no such advice")

    monkeypatch.setattr(arena_module.mmap, "mmap", Plain)
    with Arena().acquire(3 * PAGE) as slot:
        assert slot.tensor.eq(0).all()
