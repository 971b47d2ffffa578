"""``on_exception``: the last save of a training loop that an exception ends."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sorted_arguments import managing
from torch import nn
from torch.distributed.fsdp import fully_shard

import bytecheckpoint as bcp
from bytecheckpoint import telemetry
from bytecheckpoint.errors import MismatchError, NoValidCheckpointError, RankFailedError, UsageError
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool

DEADLINE_S = time_limit(20)
MARK = "bytecheckpoint.exception"


def _state(value: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((4,), value)}, "extra": {"value": value}}


def _train(root: Path, error: BaseException, **options: Any) -> None:
    """Save nothing but on the exception, in step 7."""
    state = _state(0.0)
    with bcp.CheckpointManager(root, on_exception=bcp.ExceptionSave(state=state, **options)) as manager:
        manager.resume(state)
        for step in range(1, 8):
            state["model"]["w"].fill_(float(step))
            state["extra"]["value"] = float(step)
            if step == 7:
                raise error
            manager.save(step, state)


def _save_and_fail(root: Path, step: int, error: Exception, last_save: Any, **options: Any) -> None:
    with bcp.CheckpointManager(root, on_exception=last_save, **managing(**options)) as manager:
        manager.save(step, _state(0.0))
        raise error


def _folders(root: Path) -> list[str]:
    return sorted(path.parent.name for path in root.glob("*/manifest.msgpack"))


def test_the_state_at_the_exception_is_saved_and_marked(tmp_path: Path) -> None:
    with pytest.raises(ArithmeticError, match="not a number"):
        _train(tmp_path, ArithmeticError("the loss is not a number"))
    assert _folders(tmp_path) == ["step-6-exception"]
    found = bcp.open(tmp_path / "step-6-exception")
    message = {"type": "ArithmeticError", "message": "the loss is not a number", "rank": 0, "steps": [6, 6]}
    assert (found.step, found.metadata) == (6, {MARK: message})
    found.verify()
    state = _state(0.0)
    bcp.load(tmp_path / "step-6-exception", state)
    assert state["extra"]["value"] == 7.0
    assert torch.equal(state["model"]["w"], torch.full((4,), 7.0))


def test_only_its_path_leads_to_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="bad data"):
        _save_and_fail(tmp_path, 6, ValueError("bad data"), _state(0.0), metadata={"loss": 0.0})
    assert bcp.latest(tmp_path) is None
    assert "step-6-exception is ignored" in caplog.text
    (tmp_path / "step-6-exception").rename(tmp_path / "step-9")  # the mark counts, and not the name
    with bcp.CheckpointManager(tmp_path, cadence=1, keep=1) as manager:
        assert manager.resume(_state(0.0)) is None
        manager.save(1, _state(1.0), metrics={"loss": 1.0})
        manager.save(2, _state(2.0), metrics={"loss": 2.0})
    with bcp.CheckpointManager(tmp_path) as manager:
        assert [found.step for found in (manager.latest(), manager.best("loss")) if found is not None] == [2, 2]
    assert [one.step for one in bcp.watch(tmp_path, poll_s=0.01, timeout_s=0.02, include_existing=True)] == [2]
    assert _folders(tmp_path) == ["step-2", "step-9"]


def test_invalid_checkpoints_are_still_reported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="bad data"):
        _train(tmp_path, ValueError("bad data"))
    bcp.save(tmp_path / "step-3", _state(3.0))
    next((tmp_path / "step-3").glob("attempt-*/model-*")).unlink()
    with pytest.raises(NoValidCheckpointError):
        bcp.latest(tmp_path)


def test_the_last_ones_are_kept_and_regular_checkpoints_too(tmp_path: Path) -> None:
    with bcp.CheckpointManager(tmp_path, cadence=1) as manager:
        manager.save(1, _state(1.0))
    for name, keep in (("a", 2), ("b", 2), ("c", 2), ("d", 1)):
        with pytest.raises(ValueError, match=name):
            _save_and_fail(tmp_path, ord(name), ValueError(name), bcp.ExceptionSave(state=_state(0.0), keep=keep))
        assert bcp.latest(tmp_path, allow_fresh=True).step == 1  # type: ignore[union-attr]
        if name == "c":
            assert _folders(tmp_path) == ["step-1", "step-98-exception", "step-99-exception"]
    assert _folders(tmp_path) == ["step-1", "step-100-exception"]


@pytest.mark.parametrize(("error", "options", "saves"), [
    (KeyboardInterrupt(), {}, False),
    (KeyboardInterrupt(), {"on_interrupt": True}, True),
    (SystemExit(3), {"on_interrupt": True}, False),
    (GeneratorExit(), {}, False),
])  # fmt: skip
def test_other_exceptions(tmp_path: Path, error: BaseException, options: dict[str, Any], saves: bool) -> None:
    with pytest.raises(type(error)):
        _train(tmp_path, error, **options)
    assert _folders(tmp_path) == (["step-6-exception"] if saves else [])


@pytest.mark.parametrize("when", ["before the first step", "in resume"])
def test_a_state_without_a_step_is_not_saved(tmp_path: Path, when: str, caplog: pytest.LogCaptureFixture) -> None:
    bcp.save(tmp_path / "step-5", _state(5.0))

    def fail() -> None:
        state = _state(0.0)
        with bcp.CheckpointManager(tmp_path, on_exception=state) as manager:
            if when == "in resume":
                manager.save(1, state)
                manager.resume({**state, "more": {"x": 1}})
            raise ValueError

    with pytest.raises((ValueError, MismatchError)):
        fail()
    assert _folders(tmp_path) == ["step-5"]
    assert "the last save, on the " in caplog.text
    assert "rank 0 has not completed a step" in caplog.text


def _no_state() -> dict[str, Any]:
    raise OSError("the state is gone")


@pytest.mark.parametrize("how", ["state", "disk", "interrupt"])
def test_the_original_exception_is_raised_if_the_save_fails(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(name: str, event: str) -> None:
        if name == "save.write" and event == "enter":
            raise OSError("a broken disk") if how == "disk" else KeyboardInterrupt("impatient")

    stop = telemetry.observe(fail) if how != "state" else lambda: None
    try:
        with pytest.raises(ZeroDivisionError):
            _save_and_fail(tmp_path, 1, ZeroDivisionError(), _no_state if how == "state" else _state(1.0))
    finally:
        stop()
    assert _folders(tmp_path) == []
    reason = {"state": "the state is gone", "disk": "a broken disk", "interrupt": "impatient"}[how]
    assert f"the last save, on the ZeroDivisionError, failed: {reason}" in caplog.text
    with bcp.CheckpointManager(tmp_path):  # the root is free
        pass


def test_a_failure_at_the_end_counts(tmp_path: Path) -> None:
    def fail(name: str, event: str) -> None:
        if name == "save.write" and event == "enter":
            stop()
            raise OSError("a broken disk")

    stop = telemetry.observe(fail)
    state = _state(1.0)
    with (
        pytest.raises(OSError, match="a broken disk"),
        bcp.CheckpointManager(tmp_path, cadence=1, on_exception=state) as manager,
    ):
        manager.save(1, state)
    assert _folders(tmp_path) == ["step-1-exception"]


def test_invalid_options(tmp_path: Path) -> None:
    for bad in (
        {"state": 3},
        {"state": {}, "keep": 0},
        {"state": {}, "deadline_s": 0},
        {"state": {}, "on_interrupt": 1},
    ):
        with pytest.raises(UsageError):
            bcp.ExceptionSave(**bad)
    with pytest.raises(UsageError, match=r"ExceptionSave\.state"):
        bcp.CheckpointManager(tmp_path, on_exception=True)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="reserved"):
        bcp.CheckpointManager(tmp_path, job=bcp.JobOptions(metadata={MARK: 1}))


def _leave(rank: int, world_size: int, root: str, how: str, victim: int) -> tuple[str, list[str]]:
    """What this rank raised, and what it logged about the last save."""
    messages: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("bytecheckpoint.manager").addHandler(handler)
    model = fully_shard(nn.Linear(5, 7))
    state = {"model": model, "extra": {"rank": bcp.PerRank(rank)}}
    patience_s = 1.0 if how == "stays" else DEADLINE_S
    options = bcp.ExceptionSave(state=state, deadline_s=patience_s)
    stop = _break_disk() if how == "disk" and rank == victim else lambda: None
    raised = "nothing"
    try:
        with bcp.CheckpointManager(
            root,
            cadence=1000,
            on_exception=options,
            job=bcp.JobOptions(deadline_s=DEADLINE_S, coordinate_every_s=0.001),
        ) as manager:
            for step in range(1, 100):
                nn.init.constant_(model.weight, float(step))
                if step == 4 and (how in ("all", "disk") or rank == victim):
                    if how == "killed":
                        os.kill(os.getpid(), signal.SIGKILL)
                    raise KeyboardInterrupt if how == "interrupt" else ArithmeticError(f"of rank {rank}")
                if step == 4 and how == "stays":
                    dist.barrier()  # until the victim has left
                manager.save(step, state, force=step == 4)
    except (ArithmeticError, KeyboardInterrupt, RankFailedError) as error:
        raised = f"{type(error).__name__}: {error}".partition("\n")[0]
    if how == "stays" and rank == victim:
        dist.barrier()
    stop()
    logging.getLogger("bytecheckpoint.manager").removeHandler(handler)
    return raised, messages


def _break_disk() -> Any:
    def fail(name: str, event: str) -> None:
        if name == "save.write" and event == "enter":
            raise OSError("a broken disk")

    return telemetry.observe(fail)


def test_all_ranks_fail(rank_pool: RankPool, tmp_path: Path) -> None:
    outcomes = rank_pool.run(_leave, str(tmp_path), "all", -1, world_size=2)
    assert outcomes == [(f"ArithmeticError: of rank {rank}", []) for rank in range(2)]
    found = bcp.open(tmp_path / "step-3-exception")
    assert found.metadata[MARK] == {"type": "ArithmeticError", "message": "of rank 0", "rank": 0, "steps": [3, 3]}
    assert found.world_size == 2
    assert torch.equal(found["model.weight"][:], torch.full((7, 5), 4.0))


@pytest.mark.parametrize("victim", [0, 1])
def test_one_rank_fails_and_the_other_joins(rank_pool: RankPool, tmp_path: Path, victim: int) -> None:
    outcomes = rank_pool.run(_leave, str(tmp_path), "one", victim, world_size=2)
    assert outcomes[victim] == (f"ArithmeticError: of rank {victim}", [])
    raised, messages = outcomes[1 - victim]
    assert raised.startswith(f"RankFailedError: rank {victim} on ")
    assert messages == []
    found = bcp.open(tmp_path / "step-3-exception")
    message = f"of rank {victim}"
    assert found.metadata[MARK] == {"type": "ArithmeticError", "message": message, "rank": victim, "steps": [3, 4]}
    found.verify()


@pytest.mark.parametrize("how", ["interrupt", "disk", "stays"])
@pytest.mark.parametrize("victim", [0, 1])
def test_without_all_ranks_nothing_is_saved(rank_pool: RankPool, tmp_path: Path, how: str, victim: int) -> None:
    outcomes = rank_pool.run(_leave, str(tmp_path), how, victim, world_size=2)
    raised, messages = outcomes[victim]
    assert raised == ("KeyboardInterrupt: " if how == "interrupt" else f"ArithmeticError: of rank {victim}")
    assert len(messages) == (how != "interrupt")
    raised, (message,) = outcomes[1 - victim]
    assert raised.startswith("ArithmeticError" if how == "disk" else "RankFailedError")
    assert "the last save, on the " in message
    assert {"interrupt": "KeyboardInterrupt", "disk": "a broken disk", "stays": f"rank(s) {1 - victim}"}[how] in message
    assert not list(tmp_path.glob("*/manifest.msgpack"))
    assert rank_pool.run(_leave, str(tmp_path), "all", -1, world_size=2)[0] == (
        "ArithmeticError: of rank 0",
        [],
    )  # the next job saves
    assert _folders(tmp_path) == ["step-3-exception"]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank(tmp_path: Path, victim: int) -> None:
    with RankPool(2) as pool:
        outcomes = pool.run(_leave, str(tmp_path), "killed", victim, expect_death={victim: signal.SIGKILL})
    raised, (message,) = outcomes[1 - victim]
    assert raised.startswith(f"RankFailedError: rank {victim} on ")
    assert "the last save, on the RankFailedError, failed: rank" in message
    assert not list(tmp_path.glob("*/manifest.msgpack"))
