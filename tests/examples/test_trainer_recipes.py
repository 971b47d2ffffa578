"""The examples for verl and prime-rl, with stand-ins for what they use of both."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from small_training import memory, plain_model, stepped
from torch.distributed.fsdp import fully_shard
from toy_engine import ToyTrainee, expected_digests, toy_engine
from trainer_stand_ins import EngineRegistry, install_prime_rl, install_verl

import bytecheckpoint as bcp
from bytecheckpoint.testing.ranks import RankPool

_EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def _verl_engine(value: float, steps: int, contents: list[str]) -> Any:
    install_verl()
    runpy.run_path(str(_EXAMPLES / "verl_checkpoints.py"))
    model = fully_shard(plain_model(value))
    optimizer = stepped(model, steps)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    schedule.last_epoch = steps
    config = {"save_contents": contents, "load_contents": contents}
    engine = EngineRegistry.engines["language_model", "fsdp2", "cuda", "bcp"](model, optimizer, schedule, None, config)
    engine.initialize()
    return engine.checkpoint_manager


def _held(manager: Any) -> dict[str, Any]:
    tree = {"epoch": manager.lr_scheduler.last_epoch}
    return memory({"model": manager.model, "optimizer": manager.optimizer, "extra_state": tree})


def _save_with_verl(rank: int, world_size: int, path: str, contents: list[str]) -> Any:
    manager = _verl_engine(1.0, 2, contents)
    manager.save_checkpoint(path, global_step=7, max_ckpt_to_keep=3)
    return _held(manager), manager.registered


def _load_with_verl(rank: int, world_size: int, path: str, contents: list[str]) -> Any:
    manager = _verl_engine(50.0, 1, contents)
    manager.load_checkpoint(None)
    manager.load_checkpoint(path)
    return _held(manager)


@pytest.mark.parametrize("contents", [["model", "optimizer", "extra"], ["model"]], ids=["all", "model"])
def test_verl_resumes_on_another_number_of_ranks(tmp_path: Path, rank_pool: RankPool, contents: list[str]) -> None:
    path = str(tmp_path / "global_step_7" / "actor")
    (saved, registered), (_, of_other) = rank_pool.run(_save_with_verl, path, contents, world_size=2)
    assert (registered, of_other) == ([(3,), (path, 3)], [])
    assert bcp.open(path).step == 7
    (found,) = rank_pool.run(_load_with_verl, path, contents, world_size=1)
    equal = {
        name
        for name, value in saved.items()
        if (torch.equal(found[name], value) if torch.is_tensor(value) else found[name] == value)
    }
    if "optimizer" in contents:
        assert equal == saved.keys()
    else:
        assert {name for name in saved if name.startswith("model.")} <= equal
        assert "extra_state.epoch" not in equal


def _train_prime_rl(rank: int, world_size: int, url: str, output: Path) -> list[bool]:
    ready = []

    def train(setup_weight_broadcast: Any) -> None:
        broadcast = setup_weight_broadcast(output, None, None)
        runs = broadcast.multi_run_manager
        for step in (1, 2):
            runs.progress[0].step, runs.ready_to_update[0] = step, True
            runs.ready_to_update_idxs = [0]
            broadcast.broadcast_weights(fully_shard(ToyTrainee(step)), step=step)
            ready.append(runs.ready_to_update[0])

    install_prime_rl(train)
    runpy.run_path(str(_EXAMPLES / "prime_rl_push.py"))["trainer"]([url])
    return ready


def test_prime_rl_pushes_from_all_ranks(tmp_path: Path, rank_pool: RankPool) -> None:
    with toy_engine(2) as engine:
        assert rank_pool.run(_train_prime_rl, engine.url, tmp_path, world_size=2) == [[False, False]] * 2
        assert engine.look()["digests"] == expected_digests(2, 2)
        assert not engine.paused
    assert sorted(tmp_path.rglob("STABLE")) == [tmp_path / f"run_0/broadcasts/step_{step}/STABLE" for step in (1, 2)]


def test_prime_rl_workers_answer_its_requests() -> None:
    worker = runpy.run_path(str(_EXAMPLES / "prime_rl_push.py"))["Worker"]()
    assert worker.init_broadcaster("host", 29500, 0, 1, 60) is None
    assert worker.update_weights_from_path("broadcasts/step_1") is None
    assert hasattr(worker, "bcp_push")
