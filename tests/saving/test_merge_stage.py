"""The merge stage over real ranks: whole tensors bit by bit, bounded memory, and failures in the middle of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layouts import LAYOUTS, build, differences
from leak_watch import held_now, left_since
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import bytecheckpoint as bcp
from bytecheckpoint import telemetry
from bytecheckpoint.errors import BytecheckpointError, DisagreementError, UsageError
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool

pytestmark = pytest.mark.sampled(6, of=__name__)

MIB = 1 << 20
SAVED = [
    "plain-1",
    "ddp-2",
    "fsdp1-full-orig-2",
    "fsdp1-full-flat-4",
    "fsdp1-full-flat-root-3",
    "fsdp1-hybrid-orig-4",
    "fsdp2-3",
    "hsdp-4",
    "tp-4",
    "fsdp2-tp-4",
    "pp-2",
]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as ranks:
        yield ranks


def stored_bits(path: str) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    checkpoint = bcp.open(path)
    assert checkpoint.verify().ok, checkpoint.verify().problems
    tensors = {name: checkpoint[name].load() for name in checkpoint}
    return {n: (t.dtype, tuple(t.shape), t.reshape(-1).view(torch.uint8).numpy().tobytes()) for n, t in tensors.items()}


def parts_of(path: str) -> dict[str, int]:
    checkpoint = bcp.open(path)
    return {name: len(checkpoint[name].shards) for name in checkpoint}


def _save_all(rank: int, world_size: int, name: str, paths: dict[str, str], use_async: bool) -> None:
    state = build(name, seed=1, steps=2).state
    for layout, path in paths.items():
        bcp.save(
            path, state, step=2, async_save=use_async, options=bcp.SaveOptions(layout=layout, deadline_s=time_limit(60))
        ).result(time_limit(60))  # type: ignore[arg-type]


def _load(rank: int, world_size: int, name: str, path: str) -> list[str]:
    built = build(name, seed=2, steps=1)
    bcp.load(path, built.state, options=bcp.LoadOptions(deadline_s=time_limit(60)))
    return differences(built, build(name, seed=1, steps=2))


@pytest.mark.parametrize("use_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", SAVED)
@pytest.mark.sampled(3)
def test_whole_tensors_are_the_gathered_ones(pool: RankPool, tmp_path: Path, name: str, use_async: bool) -> None:
    """Bit by bit, model and optimizer, 0-d, empty and odd dtypes among them; and they load into other layouts."""
    paths = {layout: str(tmp_path / layout) for layout in ("shards", "merged", "whole")}
    pool.run(_save_all, name, paths, use_async, world_size=LAYOUTS[name].world_size, timeout_s=120)
    expected = stored_bits(paths["shards"])
    before, merged, whole = (parts_of(path) for path in paths.values())
    assert set(whole.values()) == {1}
    for tensor, parts in merged.items():
        assert parts in (1, before[tensor]), "merged or as it was"
    if name.startswith("fsdp1-full"):
        assert any(merged[tensor] < parts for tensor, parts in before.items()), "nothing was irregular"
    if name.startswith(("fsdp2", "tp", "hsdp")):
        assert merged == before, "regular shards stay"
    for layout in ("merged", "whole"):
        assert stored_bits(paths[layout]) == expected
        for target in (name, "fsdp2-2", "tp-2"):
            assert (
                pool.run(_load, target, paths[layout], world_size=LAYOUTS[target].world_size)
                == [[]] * LAYOUTS[target].world_size
            )


def _large(rank: int, world_size: int, seed: int) -> dict[str, Any]:
    """Tensors of several pieces, cut along rows and columns, unevenly, and doubly."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    line = init_device_mesh("cpu", (4,))
    generator = torch.Generator().manual_seed(seed)

    def full(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return {
        "columns": distribute_tensor(full(3001, 1503), line, [Shard(1)]),
        "half": distribute_tensor(full(5000, 999, dtype=torch.bfloat16), line, [Shard(1)]),
        "middle": distribute_tensor(full(30, 500, 301), line, [Shard(1)]),
        "both": distribute_tensor(full(2003, 1501), grid, [Shard(0), Shard(1)]),
        "rows": distribute_tensor(full(4001, 700), grid, [Replicate(), Shard(0)]),
        "one": distribute_tensor(full(9 * MIB // 4), line, [Shard(0)]),
        "whole": full(100, 100),
    }


def _save_large(
    rank: int, world_size: int, paths: dict[str, str], budget: int | None, use_async: bool, gate: bool
) -> list[Any]:
    state = {"model": _large(rank, world_size, 1)}
    with bcp.Checkpointer(memory_budget=budget, merge_memory=32 * MIB) as saver:
        held, pipelined = [], []
        for layout, path in paths.items():
            handle = saver.save(
                path,
                state,
                async_save=use_async,
                options=bcp.SaveOptions(layout=layout, gate=gate, deadline_s=time_limit(60)),
            )  # type: ignore[arg-type]
            # What is stored is what was there at the call.
            assert handle.wait_staged(time_limit(60))
            before = {n: t._local_tensor if isinstance(t, DTensor) else t for n, t in state["model"].items()}
            for tensor in before.values():
                tensor.add_(1)
            handle.result(time_limit(60))
            for tensor in before.values():
                tensor.sub_(1)
            held.append(saver._session.engine.merge_arena.nbytes)
            pipelined.append(handle.timings.pipelined)
            state = {"model": _large(rank, world_size, 1)}
        return [held, pipelined, saver._session.engine.arena.nbytes]


@pytest.mark.parametrize(
    ("use_async", "budget", "gate"),
    [(False, None, False), (True, None, False), (True, 24 * MIB, False), (True, None, True)],
    ids=["sync", "async", "small budget", "gate"],
)
@pytest.mark.sampled(2)
def test_tensors_of_many_pieces_in_bounded_memory(
    pool: RankPool, tmp_path: Path, use_async: bool, budget: int | None, gate: bool
) -> None:
    paths = {layout: str(tmp_path / layout) for layout in ("shards", "whole")}
    results = pool.run(_save_large, paths, budget, use_async, gate, timeout_s=120)
    assert stored_bits(paths["whole"]) == stored_bits(paths["shards"])
    assert set(parts_of(paths["whole"]).values()) == {1}
    for held, pipelined, arena in results:
        assert held[0] == 0, "the ring is not touched without need"
        assert held[1] <= 32 * MIB
        assert pipelined == [budget is not None] * 2
        assert budget is None or arena <= budget


def _save_often(rank: int, world_size: int, path: str) -> tuple[list[str], list[tuple[int, int]]]:
    state = {"model": _large(rank, world_size, 1)}
    seen = []
    with bcp.Checkpointer(merge_memory=32 * MIB) as saver:
        saver.warmup(state)  # threads are started as they are needed
        for number in range(20):
            saver.save(
                path,
                state,
                step=number,
                async_save=bool(number % 2),
                options=bcp.SaveOptions(layout="whole", deadline_s=time_limit(60)),
            ).result(time_limit(60))
            seen.append((saver._session.engine.arena.nbytes, saver._session.engine.merge_arena.nbytes))
            if number == 4:
                before = held_now()
        return left_since(before, turns=15), seen


def test_twenty_saves_are_flat(pool: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    for added, seen in pool.run(_save_often, path, timeout_s=240):
        assert added == []
        assert max(staged for staged, _ in seen[4:]) == seen[4][0], seen
        assert max(merged for _, merged in seen) <= 32 * MIB, seen
    assert len(os.listdir(path)) == 2, "the manifest and one attempt"
    assert bcp.open(path).step == 19


def _second_save(rank: int, world_size: int, paths: list[str]) -> list[dict[str, float]]:
    state = {"model": _large(rank, world_size, 1)}
    saved = []
    for layout, path in zip(("whole", "whole", "shards", "whole"), paths):
        saved.append(
            dict(
                bcp.save(path, state, options=bcp.SaveOptions(layout=layout, deadline_s=time_limit(60))).timings.nbytes
            )
        )  # type: ignore[arg-type]
    return saved


def test_plans_are_kept_by_layout(pool: RankPool, tmp_path: Path) -> None:
    paths = [str(tmp_path / str(number)) for number in range(4)]
    for one in pool.run(_second_save, paths, timeout_s=120):
        assert [("merge" in nbytes) for nbytes in one] == [True, True, False, True]
    assert [max(parts_of(path).values()) for path in paths] == [1, 1, 4, 1]
    assert stored_bits(paths[0]) == stored_bits(paths[1]) == stored_bits(paths[2]) == stored_bits(paths[3])


def _disagree(rank: int, world_size: int, path: str) -> str:
    with pytest.raises(DisagreementError) as caught:
        bcp.save(
            path,
            {"model": _large(rank, world_size, 1)},
            options=bcp.SaveOptions(layout="whole" if rank else "merged", deadline_s=time_limit(30)),
        )
    return str(caught.value)


def test_ranks_must_ask_for_the_same_layout(pool: RankPool, tmp_path: Path) -> None:
    for text in pool.run(_disagree, str(tmp_path)):
        assert "layout: 'whole' on ranks 1-3; 'merged' on rank 0" in text


def test_an_unknown_layout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="layout must be one of shards, merged, whole, not 'flat'"):
        bcp.save(tmp_path, {"model": {"a": torch.zeros(1)}}, options=bcp.SaveOptions(layout="flat"))  # type: ignore[arg-type]


def test_too_little_merge_memory_is_refused() -> None:
    with pytest.raises(UsageError, match="merge_memory"):
        bcp.Checkpointer(merge_memory=8 * MIB)


# -- failures --------------------------------------------------------------------------------------------------------

POINTS = ["save.merge", "save.merge.send", "save.merge.file", "save.merge.complete"]


def _die_in(rank: int, world_size: int, path: str, point: str, victim: int, use_async: bool) -> str:
    def kill(name: str, event: str) -> None:
        if rank == victim and name == point and event in ("enter", "point"):
            os.kill(os.getpid(), signal.SIGKILL)

    state = {"model": _large(rank, world_size, 2)}
    bcp.save(
        path,
        {"model": _large(rank, world_size, 1)},
        step=1,
        options=bcp.SaveOptions(layout="whole", deadline_s=time_limit(30)),
    )
    dist.barrier()
    telemetry.observe(kill)
    try:
        bcp.save(
            path,
            state,
            step=2,
            async_save=use_async,
            options=bcp.SaveOptions(layout="whole", deadline_s=time_limit(30)),
        ).result(time_limit(60))
    except BytecheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


@pytest.mark.parametrize("victim", [0, 3], ids=["first", "last"])
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.sampled(3)
def test_a_rank_that_is_killed_in_the_stage_is_named(pool: RankPool, tmp_path: Path, point: str, victim: int) -> None:
    path = str(tmp_path / "checkpoint")
    results = pool.run(
        _die_in, path, point, victim, point != "save.merge.file", expect_death={victim: signal.SIGKILL}, timeout_s=120
    )
    for rank, text in enumerate(results):
        if rank != victim:
            assert text.startswith("RankFailedError"), text
            assert f"rank {victim}" in text
    checkpoint = bcp.open(path)
    assert checkpoint.step == 1
    assert checkpoint.verify().ok


def _fail_in(rank: int, world_size: int, path: str, point: str, victim: int, use_async: bool) -> list[str]:
    def fail(name: str, event: str) -> None:
        if rank == victim and name == point and event in ("enter", "point"):
            raise OSError(f"injected at {name}")

    state = {"model": _large(rank, world_size, 2)}
    stop = telemetry.observe(fail)
    try:
        bcp.save(
            path,
            state,
            step=2,
            async_save=use_async,
            options=bcp.SaveOptions(layout="whole", deadline_s=time_limit(30)),
        ).result(time_limit(60))
        results = "saved"
    except BytecheckpointError as error:
        results = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    finally:
        stop()
    dist.barrier()
    left = sorted(os.listdir(path)) if os.path.isdir(path) else []
    dist.barrier()
    bcp.save(path, state, step=3, options=bcp.SaveOptions(layout="whole", deadline_s=time_limit(30)))
    return [results, *left]


@pytest.mark.parametrize("use_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.sampled(3)
def test_a_failure_in_the_stage_is_everyones_and_leaves_nothing(
    pool: RankPool, tmp_path: Path, point: str, victim: int, use_async: bool
) -> None:
    path = str(tmp_path / "checkpoint")
    os.mkdir(path)
    results = pool.run(_fail_in, path, point, victim, use_async, timeout_s=120)
    causes = {one[0] for one in results}
    assert len(causes) == 1, causes
    cause = causes.pop()
    assert f"rank {victim}" in cause
    assert "injected at" in cause
    assert [one[1:] for one in results] == [[]] * 4, "the failed attempt left something"
    checkpoint = bcp.open(path)
    assert checkpoint.step == 3
    assert checkpoint.verify().ok
