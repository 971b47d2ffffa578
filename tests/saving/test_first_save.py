"""The first save of a process: no memory is faulted in yet, so it stages through the few blocks of a synchronous save,
while background threads fault in the rest."""

from __future__ import annotations

import errno
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bytecheckpoint as bcp
from bytecheckpoint import telemetry
from bytecheckpoint.engine import blocks
from bytecheckpoint.errors import DeadlineError
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool

WAIT_S = time_limit(60)
BLOCK = 64 << 10
BLOCKS = 40  # of the state, including the file's head
FEW = 10  # of a synchronous save: eight threads that write, and two ahead


def _state(value: float = 1.0, blocks: int = BLOCKS) -> dict[str, Any]:
    return {"extra_state": {"weight": torch.full(((blocks - 1) * BLOCK // 4,), value)}}


def _stored(path: Path) -> set[float]:
    return set(bcp.open(path)["extra_state.weight"].load().unique().tolist())


@contextmanager
def _saver(**options: Any) -> Iterator[bcp.Checkpointer]:
    with bcp.Checkpointer(**options) as saver:
        saver._session.engine.arena.block_size = BLOCK
        yield saver


@contextmanager
def _no_growth(saver: bcp.Checkpointer) -> Iterator[None]:
    """Background threads fault nothing in before the end of the block; at the end they have faulted in everything."""
    go_on = threading.Event()
    arena = saver._session.engine.arena
    add = arena.add

    def add_later(*args: Any) -> bool:
        assert go_on.wait(WAIT_S)
        return add(*args)

    arena.add = add_later  # type: ignore[method-assign]
    try:
        yield
    finally:
        arena.add = add  # type: ignore[method-assign]
        go_on.set()
        _finish_growth(saver)


def _finish_growth(saver: bcp.Checkpointer) -> None:
    # Every thread takes part in the barrier, so none of them is still busy with an earlier task.
    engine = saver._session.engine
    all_threads = threading.Barrier(engine.io_threads)
    for task in [engine.io.submit(all_threads.wait, WAIT_S) for _ in range(engine.io_threads)]:
        task.result()


@contextmanager
def _held_at(point: str) -> Iterator[None]:
    go_on = threading.Event()
    stop = telemetry.observe(
        lambda name, event: go_on.wait(WAIT_S) and None if (name, event) == (point, "enter") else None
    )
    try:
        yield
    finally:
        go_on.set()
        stop()


def test_the_first_save_uses_as_few_blocks_as_a_synchronous_one(tmp_path: Path) -> None:
    state = _state(1.0)
    with _saver() as saver:
        saver.save(tmp_path / "sync", state)
        assert saver._session.engine.arena.blocks <= FEW
    with _saver() as saver:
        with _no_growth(saver):
            handle = saver.save(tmp_path / "first", state, async_save=True)
            assert handle.staged()
            state["extra_state"]["weight"].fill_(2.0)
            handle.result(WAIT_S)
            assert handle.timings.pipelined
            assert saver._session.engine.arena.blocks <= FEW
        assert saver._session.engine.arena.blocks == BLOCKS, "as many as the state needs, and no more"
        assert all(block._warm == BLOCK for block in saver._session.engine.arena._idle)
        with _held_at("save.write"):
            handle = saver.save(tmp_path / "second", state, async_save=True)
            assert handle.staged()
            assert not handle.timings.pipelined
        handle.result(WAIT_S)
        for number in range(10):
            saver.save(tmp_path / "more", state, step=number, async_save=True).result(WAIT_S)
        assert saver._session.engine.arena.blocks == BLOCKS
    assert _stored(tmp_path / "first") == {1.0}
    assert _stored(tmp_path / "second") == {2.0}


def test_memory_that_is_faulted_in_is_used_before_anything_is_written(tmp_path: Path) -> None:
    """With slow storage the call takes as long as faulting in, and not as long as writing."""
    with _saver() as saver, _held_at("save.write"):
        first = saver.save(tmp_path / "0", _state(1.0), async_save=True)
        second = saver.save(tmp_path / "1", _state(2.0), async_save=True)
        assert first.timings.pipelined
        assert second.timings.pipelined, "the blocks of the first save are not available to the second"
        assert not first.done()
        assert saver._session.engine.arena.blocks == 2 * BLOCKS
    assert (_stored(tmp_path / "0"), _stored(tmp_path / "1")) == ({1.0}, {2.0})


def test_a_state_of_a_few_blocks_is_copied_at_once(tmp_path: Path) -> None:
    with _saver() as saver, _no_growth(saver), _held_at("save.write"):
        handle = saver.save(tmp_path, _state(blocks=FEW), async_save=True)
        assert handle.staged()
        assert not handle.timings.pipelined


def test_a_budget_limits_what_is_faulted_in(tmp_path: Path) -> None:
    with _saver(memory_budget=20 * BLOCK) as saver:
        saver._session.engine.arena._capacity = 20
        for number in range(3):
            saver.save(tmp_path / str(number), _state(number), async_save=True).result(WAIT_S)
        _finish_growth(saver)
        assert saver._session.engine.arena.blocks <= 20
    assert _stored(tmp_path / "2") == {2.0}


def test_close_ends_the_faulting(tmp_path: Path) -> None:
    prepared = threading.Event()
    with bcp.Checkpointer() as saver:
        saver._session.engine.arena.block_size = BLOCK
        saver._session.engine.arena.make_room(10_000)
        saver._session.engine.grow_arena(10_000, lambda block: prepared.wait(WAIT_S) and None)
        closing = threading.Thread(target=saver.close)
        closing.start()
        while not saver._session.engine._closed:
            closing.join(0.001)
        prepared.set()
        closing.join(WAIT_S)
        assert saver._session.engine.arena.nbytes == 0
        with pytest.raises(bcp.errors.UsageError):
            saver.save(tmp_path, _state(), async_save=True)
    assert not any(thread.is_alive() for thread in saver._session.engine.io._threads)


def test_the_system_has_memory_for_a_few_blocks_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left = [FEW]

    class Scarce(mmap.mmap):
        def __new__(cls, *arguments: Any, **options: Any) -> Scarce:
            if not left[0]:
                raise OSError(errno.ENOMEM, "Cannot allocate memory")
            left[0] -= 1
            return super().__new__(cls, *arguments, **options)

    with _saver() as saver:
        with monkeypatch.context() as patched:
            patched.setattr(blocks.mmap, "mmap", Scarce)
            saver.save(tmp_path, _state(3.0), async_save=True).result(WAIT_S)
            _finish_growth(saver)
        assert saver._session.engine.arena.blocks == FEW
    assert "cannot allocate staging memory" in caplog.text
    assert _stored(tmp_path) == {3.0}


def test_a_wait_for_memory_ends_before_the_writing_begins(tmp_path: Path) -> None:
    """The save waits in the queue behind another one, which holds the few blocks."""
    with _saver() as saver:
        with _no_growth(saver), _held_at("save.write"):
            first = saver.save(tmp_path / "0", _state(1.0, blocks=FEW), async_save=True)
            with pytest.raises(DeadlineError, match="no staging memory"):
                saver.save(tmp_path / "1", _state(2.0), async_save=True, options=bcp.SaveOptions(deadline_s=0.01))
        first.result(WAIT_S)
        saver.save(tmp_path / "2", _state(3.0), async_save=True).result(WAIT_S)
        assert saver._session.engine.arena._acquired == 0
    assert not (tmp_path / "1").exists()
    assert _stored(tmp_path / "2") == {3.0}


def test_a_first_save_in_a_done_callback(tmp_path: Path) -> None:
    """It must not wait for the thread that it runs on, so it faults in its memory itself."""
    saved: list[bcp.SaveHandle] = []
    with _saver() as saver:
        with _no_growth(saver):
            small = saver.save(tmp_path / "small", _state(blocks=2), async_save=True)
            small.add_done_callback(
                lambda handle: saved.append(saver.save(tmp_path / "large", _state(4.0), async_save=True))
            )
            small.result(WAIT_S)
        saver.save(tmp_path / "after", _state(blocks=2))
        assert not saved[0].timings.pipelined
    assert _stored(tmp_path / "large") == {4.0}


def test_a_first_save_behind_a_gate(tmp_path: Path) -> None:
    """A gate would keep the optimizer waiting for the memory; the call returns when everything is copied."""
    model = nn.Linear(BLOCKS * BLOCK // 4 // 64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    state = {"model": model, "optimizer": optimizer}
    with _saver() as saver:
        for name in ("first", "second"):
            with _no_growth(saver):
                stored = model.weight.detach().clone()
                handle = saver.save(tmp_path / name, state, async_save=True, options=bcp.SaveOptions(gate=True))
                assert handle.timings.pipelined == (name == "first")
                model.weight.grad = torch.ones_like(model.weight)
                optimizer.step()
                handle.result(WAIT_S)
            assert torch.equal(bcp.open(tmp_path / name)["model.weight"].load(), stored)


def test_memory_is_faulted_in_after_a_resume(tmp_path: Path) -> None:
    bcp.save(tmp_path / "step-1", _state(1.0), step=1)
    state = _state(2.0)
    with _saver() as saver, bcp.CheckpointManager(tmp_path, checkpointer=saver, preemption=None) as manager:
        assert manager.resume(state) is not None
        _finish_growth(saver)
        assert saver._session.engine.arena.blocks == BLOCKS
        handle = manager.save(2, state, force=True)
        assert handle is not None
        assert not handle.timings.pipelined
        manager.wait()
        assert saver._session.engine.arena.blocks == BLOCKS


def test_no_memory_is_faulted_in_for_synchronous_saves(tmp_path: Path) -> None:
    bcp.save(tmp_path / "step-1", _state(1.0), step=1)
    with _saver() as saver:
        with bcp.CheckpointManager(tmp_path, checkpointer=saver, preemption=None, async_save=False) as manager:
            manager.resume(_state(2.0))
        bcp.load(tmp_path / "step-1", _state(2.0))
        _finish_growth(saver)
        assert saver._session.engine.arena.blocks == 0


def test_a_state_that_cannot_be_saved_can_be_resumed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bcp.save(tmp_path / "step-1", {"extra_state": {"value": 1}}, step=1)
    state = {"extra_state": {"value": 0}, "other": {"f": print}}
    with bcp.CheckpointManager(tmp_path, preemption=None) as manager:
        assert manager.resume(state, strict=False) is not None
    assert state["extra_state"] == {"value": 1}
    assert "can be resumed but not saved" in caplog.text


def test_a_warm_up_in_the_background(tmp_path: Path) -> None:
    with _saver() as saver:
        with _no_growth(saver):
            saver.warmup(_state(1.0), wait=False)
            assert saver._session.engine.arena.blocks == 0
        assert saver._session.engine.arena.blocks == 2 * BLOCKS
        handle = saver.save(tmp_path, _state(3.0), async_save=True)
        assert not handle.timings.pipelined
        handle.result(WAIT_S)
    assert _stored(tmp_path) == {3.0}


def _save_whole(rank: int, world_size: int, path: str) -> list[bool]:
    """Only rank 0 has memory at the first save."""
    from torch.distributed import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    values = torch.arange(world_size * BLOCKS * BLOCK // 4, dtype=torch.float32).view(-1, 64)
    state = {"model": {"weight": distribute_tensor(values, mesh, [Shard(1)])}}
    pipelined = []
    with _saver() as saver:
        saver.warmup(state, slots=1 - rank, options=bcp.SaveOptions(layout="whole", deadline_s=WAIT_S))
        for name in ("first", "second"):
            handle = saver.save(
                f"{path}/{name}", state, async_save=True, options=bcp.SaveOptions(layout="whole", deadline_s=WAIT_S)
            )
            state["model"]["weight"].to_local().add_(1)
            handle.result(WAIT_S)
            _finish_growth(saver)
            pipelined.append(handle.timings.pipelined)
    return pipelined


def test_ranks_with_and_without_memory_merge_their_tensors(tmp_path: Path) -> None:
    with RankPool(2) as pool:
        assert pool.run(_save_whole, str(tmp_path), timeout_s=120) == [[False, False], [True, False]]
    values = torch.arange(2 * BLOCKS * BLOCK // 4, dtype=torch.float32).view(-1, 64)
    for number, name in enumerate(("first", "second")):
        assert torch.equal(bcp.open(tmp_path / name)["model.weight"].load(), values + number)
