"""Staging memory: reuse of blocks, budget, forks, and deadlines."""

from __future__ import annotations

import errno
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from bytecheckpoint.engine import blocks
from bytecheckpoint.engine.blocks import PAGE, Block
from bytecheckpoint.engine.staging.arena import BLOCK, Arena
from bytecheckpoint.errors import DeadlineError, StateError, UsageError


def test_blocks_are_reused() -> None:
    arena = Arena()
    assert arena.make_room(2)
    first, second = arena.acquire(), arena.acquire()
    assert first is not second
    assert first.address % (2 << 20) == 0
    assert (first.nbytes, len(first.view), len(first.tensor)) == (BLOCK, BLOCK, BLOCK)
    arena.release(first)
    arena.release(second)
    assert {arena.acquire(), arena.acquire()} == {first, second}
    assert arena.nbytes == 2 * BLOCK


def test_room_for_two_saves_and_one_reserved_block() -> None:
    arena = Arena()
    arena.make_room(2)
    lent = [arena.acquire(0) for _ in range(4)]
    with pytest.raises(DeadlineError, match="earlier saves are still being written"):
        arena.acquire(0)
    lent.append(arena.acquire(0, last=True))
    with pytest.raises(DeadlineError):
        arena.acquire(0.01, last=True)
    assert arena.would_wait(1)
    assert not arena.would_wait(5), "a larger save makes room for two of its size"
    for block in lent:
        arena.release(block)
    assert not arena.would_wait(4)
    arena.trim()
    assert arena.nbytes == 0


@pytest.mark.parametrize("slots", [1, 3])
def test_room_for_the_requested_number_of_saves(slots: int) -> None:
    arena = Arena(slots=slots)
    arena.make_room(1)
    for _ in range(slots):
        assert not arena.would_wait(1)
        arena.acquire(0)
    assert arena.would_wait(1)


def test_the_budget_limits_all_blocks() -> None:
    arena = Arena(budget=10 * PAGE)
    assert arena.block_size == 5 * PAGE
    assert arena.make_room(1)
    assert not arena.make_room(2)
    held = arena.acquire(0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(arena.acquire, 60.0)
        arena.release(held)
        assert waiting.result() is held
    arena.acquire(0, last=True)
    assert arena.nbytes <= 10 * PAGE
    assert Arena(budget=1 << 30).block_size == BLOCK


def test_a_save_that_may_allocate_few_blocks_waits_for_others() -> None:
    arena = Arena()
    arena.make_room(4)
    lent = [arena.acquire(0, fresh=2) for _ in range(2)]
    with pytest.raises(DeadlineError):
        arena.acquire(0, fresh=2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(arena.acquire, 60.0, fresh=2)
        arena.release(lent.pop())
        lent.append(waiting.result())
        waiting = pool.submit(arena.acquire, 60.0, fresh=2)
        assert arena.add(3)
        lent.append(waiting.result())
    assert lent[-1]._warm == BLOCK, "an added block is faulted in before it is lent"
    assert arena.blocks == 3


def test_blocks_are_added_up_to_the_goal_and_the_capacity() -> None:
    arena = Arena()
    arena.make_room(2)
    prepared: list[Block] = []
    assert arena.goal(2) == 2
    held = arena.acquire(0)
    assert arena.goal(2) == 3
    with ThreadPoolExecutor(4) as pool:
        added = list(pool.map(lambda _: arena.add(3, prepared.append), range(4)))
    assert sorted(added) == [False, False, True, True]
    assert arena.blocks == 3
    assert all(block._warm == BLOCK for block in prepared)
    assert {arena.acquire(0) for _ in range(2)} == set(prepared)
    assert arena.goal(2) == 4, "the reserved block is not part of a save"
    assert [arena.add(100) for _ in range(3)] == [True, True, False]
    arena.release(held)
    assert arena.nbytes == 5 * BLOCK


def test_a_block_that_cannot_be_prepared_is_kept() -> None:
    def refuse(block: Block) -> None:
        raise StateError("it cannot be pinned")

    arena = Arena()
    arena.make_room(1)
    with pytest.raises(StateError, match="pinned"):
        arena.add(1, refuse)
    assert arena.blocks == 1
    arena.acquire(0)


@pytest.mark.parametrize("budget", [-1, 0, PAGE, 2 * PAGE - 1])
def test_a_budget_that_is_too_small(budget: int) -> None:
    with pytest.raises(UsageError, match="memory budget"):
        Arena(budget)


def test_no_slots() -> None:
    with pytest.raises(UsageError, match="slots"):
        Arena(slots=0)


def test_a_block_is_faulted_in_step_by_step() -> None:
    block = Block(BLOCK)
    block.fault_in(1)
    block.tensor[0] = 7
    block.fault_in(BLOCK)
    assert block.view[0] == 7
    assert block.tensor[1:].eq(0).all()


def test_a_kernel_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(mmap.mmap):
        def madvise(self, *arguments: int) -> None:
            raise OSError(errno.EINVAL, "no such advice")

    monkeypatch.setattr(blocks.mmap, "mmap", Plain)
    monkeypatch.setattr(blocks, "_madvise", lambda address, nbytes, advice: -1)
    block = Block(3 * PAGE)
    block.fault_in(PAGE)
    block.tensor[0] = 7
    block.fault_in(3 * PAGE)
    assert block.view[0] == 7
    assert block.tensor[1:].eq(0).all()


def test_faulting_in_releases_the_gil(monkeypatch: pytest.MonkeyPatch) -> None:
    """``mmap.madvise`` would hold it for the whole call."""
    advice: list[int] = []

    class Recording(mmap.mmap):
        def madvise(self, option: int, *arguments: int) -> None:
            advice.append(option)
            super().madvise(option, *arguments)

    monkeypatch.setattr(blocks.mmap, "mmap", Recording)
    block = Block(BLOCK)
    block.fault_in(BLOCK)
    assert blocks._POPULATE_WRITE not in advice
    assert not blocks._madvise._flags_ & 4  # FUNCFLAG_PYTHONAPI: called with the GIL held


def test_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(mmap.mmap):
        def __new__(cls, *arguments: object, **options: object) -> Full:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

    arena = Arena()
    arena.make_room(1)
    with monkeypatch.context() as patched:
        patched.setattr(blocks.mmap, "mmap", Full)
        with pytest.raises(StateError, match="cannot allocate staging memory"):
            arena.acquire(0)
    assert arena.nbytes == 0
    assert arena.acquire(0)


def test_a_forked_child_sees_zeros() -> None:
    """Otherwise the parent would pay for copies of the pages that the child keeps."""
    block = Block(BLOCK)
    block.fault_in(BLOCK)
    block.tensor.fill_(7)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, bytes([block.view[0], block.view[BLOCK - 1]]))
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 2) == b"\0\0"
    os.close(read)
    os.close(write)
    assert block.view[0] == 7
