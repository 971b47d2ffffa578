"""``state_of(accelerator)``: a loop with Accelerate is killed, resumes, and equals an uninterrupted one."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import bytecheckpoint as bcp
from bytecheckpoint.testing.ranks import RankPool, RanksFailed

pytest.importorskip("peft")

from accelerate import Accelerator
from accelerate_training import BATCHES, train
from trainer_training import free_port

pytestmark = [pytest.mark.huggingface, pytest.mark.filterwarnings("ignore"), pytest.mark.sampled(3, of=__name__)]

_USED = ("_models", "_optimizers", "_schedulers", "_custom_objects", "scaler", "step")
"""The attributes of ``Accelerator`` that the library uses."""


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


def _run(pool: RankPool, world_size: int, root: Path, every: int, kill_at: int | None = None, accumulation: int = 1):
    arguments: tuple[Any, ...] = (free_port(), str(root), every, kill_at, accumulation)
    death = {world_size - 1: signal.SIGKILL} if kill_at else {}
    return pool.run(train, *arguments, world_size=world_size, backend=None, expect_death=death)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_killed_loop_resumes_bit_equal(pool: RankPool, tmp_path: Path, accumulation: int) -> None:
    [whole] = _run(pool, 1, tmp_path / "whole", 8, accumulation=accumulation)
    _run(pool, 1, tmp_path / "killed", 8, kill_at=14, accumulation=accumulation)
    found = bcp.latest(tmp_path / "killed")
    assert found.step == 8
    assert {one.name for one in found.manifest.sections} == {
        "accelerator",
        "custom",
        "lr_scheduler",
        "model",
        "optimizer",
        "rng",
    }
    [resumed] = _run(pool, 1, tmp_path / "killed", 8, accumulation=accumulation)
    assert min(resumed["losses"]) == 9
    assert resumed["sum"] == whole["sum"]
    for name in ("losses", "rates"):
        assert resumed[name] == {batch: one for batch, one in whole[name].items() if batch > 8}


def test_two_ranks_resume_and_one_continues_with_the_right_rate(pool: RankPool, tmp_path: Path) -> None:
    whole = _run(pool, 2, tmp_path / "whole", 8)
    with pytest.raises(RanksFailed, match="rank 1"):
        pool.run(train, free_port(), str(tmp_path / "killed"), 8, 6, 1, world_size=2, backend=None)
    resumed = _run(pool, 2, tmp_path / "killed", 8)
    assert [one["sum"] for one in resumed] == [one["sum"] for one in whole]
    [alone] = _run(pool, 1, tmp_path / "killed", 100)
    assert alone["losses"] == {}, "everything was consumed"
    for step in (8, 16):
        one = bcp.open(tmp_path / "killed" / f"step-{step}")
        assert one.tree("lr_scheduler")["last_epoch"] == step, "it counts the batches of all ranks"
        assert one.tree("lr_scheduler")["_last_lr"] == [pytest.approx(1e-2 * (1 - step / BATCHES))]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_folder_of_save_state(pool: RankPool, tmp_path: Path, world_size: int) -> None:
    native = tmp_path / "native"

    def run(root: str) -> list[dict[str, Any]]:
        arguments = (free_port(), str(tmp_path / root), 4, None, 2, str(native))
        return pool.run(train, *arguments, world_size=world_size, backend=None)

    whole, resumed = run("whole"), run("resumed")
    for before, after in zip(whole, resumed):
        assert min(after["losses"]) == 5 * world_size
        assert after["sum"] == before["sum"]
        for name in ("losses", "rates"):
            assert after[name] == {batch: one for batch, one in before[name].items() if batch > 4 * world_size}
    found = bcp.open(native)
    assert found.manifest.world_size == world_size
    assert {*found.sections} == {"accelerator", "custom", "lr_scheduler", "model", "optimizer", "rng"}


def test_the_accelerator_has_what_is_used() -> None:
    accelerator = Accelerator(cpu=True)
    assert [name for name in _USED if not hasattr(accelerator, name)] == []
