"""``CheckpointManager`` on several ranks: all save the same step or none, and all raise the same failure."""

from __future__ import annotations

import os
import re
import signal
import threading
import warnings
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
from bytecheckpoint.errors import BytecheckpointError, RankFailedError, SaveFailedWarning
from bytecheckpoint.manager.coordinator import Decision, SaveCoordinator
from bytecheckpoint.storage_backends.local.backend import LocalBackend
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool

WORLD = 3
DEADLINE_S = time_limit(20)


@pytest.fixture(scope="module")
def pool():
    with RankPool(WORLD) as ranks:
        yield ranks


def _state(value: float) -> dict[str, Any]:
    model = nn.Linear(5, 7)
    nn.init.constant_(model.weight, value)
    nn.init.constant_(model.bias, value)
    return {"model": fully_shard(model), "extra_state": {"value": value}}


def _manager(root: str, **options: Any) -> bcp.CheckpointManager:
    return bcp.CheckpointManager(root, **managing(deadline_s=DEADLINE_S, coordinate_every_s=0.05, **options))


def _names(root: Path) -> list[str]:
    """The committed checkpoints."""
    names = [path.parent.name for path in root.glob("step-*/manifest.msgpack")]
    return sorted(names, key=lambda name: int(name[5:]))


def _train(manager: bcp.CheckpointManager, steps: int, **saving: Any) -> list[int]:
    """Turns of a training loop in which every rank waits for every other; the steps that were saved."""
    saved = []
    for step in range(1, steps + 1):
        dist.all_reduce(torch.ones(1))
        if manager.save(step, lambda step=step: _state(float(step)), **saving) is not None:
            saved.append(step)
    return saved


def _resumed(rank: int, world_size: int, root: str) -> float:
    state = _state(-1.0)
    with _manager(root) as manager:
        assert manager.resume(state) is not None
    values = {*state["model"].weight.to_local().flatten().tolist(), state["extra_state"]["value"]}
    assert len(values) == 1, f"a mixture of {values}"
    return float(values.pop())


def _save_some(rank: int, world_size: int, root: str) -> list[int]:
    with _manager(root, cadence=4, keep=2) as manager:
        return _train(manager, 13)


def test_saves_and_resumes(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(_save_some, str(tmp_path)) == [[4, 8, 12]] * WORLD
    assert _names(tmp_path) == ["step-8", "step-12"]
    assert pool.run(_resumed, str(tmp_path), world_size=2) == [12.0] * 2


def _save_own_metrics(rank: int, world_size: int, root: str) -> None:
    with _manager(root, cadence=1) as manager:
        manager.save(1, _state(1.0), metrics={"loss": 0.5 + rank})


def test_the_metrics_of_rank_0_are_stored(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_save_own_metrics, str(tmp_path))
    assert bcp.open(tmp_path / "step-1").metadata == {"metrics": {"loss": 0.5}}


def _by_clock(rank: int, world_size: int, root: str, cadence: dict[str, Any]) -> list[int]:
    with _manager(root, cadence=bcp.Cadence(**cadence)) as manager:
        saved: list[int] = []
        step = 0
        # Clocks differ from rank to rank, so the ranks must end the loop together.
        going = torch.ones(1)
        while going.item():
            step += 1
            if manager.save(step, _state(float(step))) is not None:
                saved.append(step)
            going.fill_(float(len(saved) < 3))
            dist.broadcast(going, 0)
    return saved


@pytest.mark.parametrize("cadence", [{"every_minutes": 0.2 / 60}, {"continuous": True}], ids=["clock", "continuous"])
def test_whenever_a_save_is_due_all_save_the_same_steps(
    pool: RankPool, tmp_path: Path, cadence: dict[str, Any]
) -> None:
    saved = pool.run(_by_clock, str(tmp_path), cadence)
    assert saved == [saved[0]] * WORLD
    assert _names(tmp_path) == [f"step-{step}" for step in saved[0]]


def _leave(rank: int, world_size: int, root: str, victim: int, mode: str) -> tuple[object, int]:
    os.environ["RANK"] = str(rank)
    manager = _manager(
        root,
        cadence=bcp.Cadence(every_steps=1000, signals=[signal.SIGUSR2]),
        preemption=bcp.Preemption(grace_s=time_limit(20), action=mode),
    )
    step = 0
    try:
        with manager:
            while not manager.preempted:
                step += 1
                dist.all_reduce(torch.ones(1))
                if rank == victim and step == 7:
                    os.kill(os.getpid(), signal.SIGTERM)
                manager.save(step, _state(float(step)))
        left: object = "returned"
    except SystemExit as error:
        left = error.code
    return left, step


@pytest.mark.parametrize("mode", ["exit", "return"])
@pytest.mark.parametrize("victim", [0, WORLD - 1], ids=["first", "last"])
def test_after_a_signal_on_one_rank_all_save_the_same_step(
    pool: RankPool, tmp_path: Path, victim: int, mode: str
) -> None:
    left = pool.run(_leave, str(tmp_path), victim, mode)
    code = 128 + signal.SIGTERM if mode == "exit" else "returned"
    assert [one[0] for one in left] == [code] * WORLD
    (step,) = {one[1] for one in left}
    assert _names(tmp_path) == [f"step-{step}"]
    assert pool.run(_resumed, str(tmp_path)) == [float(step)] * WORLD


def _request(rank: int, world_size: int, root: str) -> list[int]:
    with _manager(root) as manager:
        if rank == 1:
            threading.Thread(target=manager.request_save).start()
        saved: list[int] = []
        step = 0
        while not saved:
            step += 1
            dist.all_reduce(torch.ones(1))
            if manager.save(step, _state(float(step))) is not None:
                saved.append(step)
    return saved


def test_any_rank_may_request_a_save(pool: RankPool, tmp_path: Path) -> None:
    saved = pool.run(_request, str(tmp_path))
    assert saved == [saved[0]] * WORLD


def _fail_in_background(rank: int, world_size: int, root: str, victim: int, ends: bool) -> list[str]:
    """Let a save fail without asking for its outcome; then end, or save again. Returns errors and warnings."""

    def fail(name: str, event: str) -> None:
        if rank == victim and name == "save.write" and event == "enter":
            # A failure that is reported earlier is raised by save() on the ranks that are still in it.
            assert all_have_begun.wait(DEADLINE_S)
            raise OSError("a broken disk")

    all_have_begun, ended = threading.Event(), threading.Event()
    found = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            with _manager(root, cadence=1) as manager:
                stop = telemetry.observe(fail)
                handle = manager.save(2, _state(2.0))
                handle.add_done_callback(lambda _: ended.set())
                dist.barrier()
                all_have_begun.set()
                if rank == victim:
                    # The other ranks may begin their next save before they receive the failure.
                    assert ended.wait(DEADLINE_S)
                stop()
                for step in () if ends else (3, 4):
                    manager.save(step, _state(float(step)))
        except RankFailedError as error:
            found.append(str(error).splitlines()[0])
    return found + [str(one.message).splitlines()[0] for one in warned if one.category is SaveFailedWarning]


@pytest.mark.parametrize("ends", [True, False], ids=["close", "next save"])
@pytest.mark.parametrize("victim", [0, WORLD - 1], ids=["first", "last"])
def test_a_failure_in_the_background_is_not_missed(pool: RankPool, tmp_path: Path, victim: int, ends: bool) -> None:
    """All ranks raise it if the job ends, and warn of it once if it goes on."""
    found = pool.run(_fail_in_background, str(tmp_path), victim, ends)
    for (one,) in found:
        assert "failed in write: OSError: a broken disk" in one
        assert one.startswith(f"rank {victim} on ") == ends
        assert ("step-2 failed" in one) != ends
    assert _names(tmp_path) == ([] if ends else ["step-3", "step-4"])


def _fail_alone(rank: int, world_size: int, root: str, victim: int, how: str) -> str:
    """One rank leaves the loop with an error while the others continue."""
    try:
        with _manager(root, cadence=1) as manager:
            manager.save(1, _state(1.0))
            if rank == victim:
                if how == "raise":
                    raise ArithmeticError("the loss is not a number")
                if how == "metrics":
                    manager.save(2, _state(2.0), metrics={"loss": "high"})  # type: ignore[dict-item]
                if how == "state":
                    manager.save(2, lambda: {}["no such thing"])
                if how == "step":
                    manager.save(3, _state(2.0))
            manager.save(2, _state(2.0))
            manager.wait()
    except (BytecheckpointError, ArithmeticError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return "continued"


@pytest.mark.parametrize("how", ["raise", "metrics", "state", "step"])
@pytest.mark.parametrize("victim", [0, WORLD - 1], ids=["first", "last"])
def test_a_failure_of_one_rank(pool: RankPool, tmp_path: Path, victim: int, how: str) -> None:
    messages = pool.run(_fail_alone, str(tmp_path), victim, how)
    others = [one for rank, one in enumerate(messages) if rank != victim]
    expected = {
        "raise": f"rank {victim} on .* failed in training: ArithmeticError: the loss is not a number",
        "metrics": "UsageError: the metric 'loss' is not a number: 'high'",
        "state": f"rank {victim} on .* failed in state: KeyError: 'no such thing'\n  in: save of .*/step-2\n",
        "step": "(?s)DisagreementError: the ranks do not agree in CheckpointManager.save.* step: ",
    }[how]
    for one in others:
        assert re.search(expected, one), one
    assert _names(tmp_path) == ["step-1"]


def _fail_at_the_end_of_a_load(rank: int, world_size: int, root: str, victim: int) -> list[str]:
    def fail(name: str, event: str) -> None:
        if name == "load.report" and event == "exit":
            dist.barrier()
            if rank == victim:
                raise OSError("no room for a report")

    with _manager(root) as manager:
        manager.save(1, _state(1.0), force=True)
        manager.wait()
        outcomes = []
        for is_broken in (True, False):
            # The load succeeds on all ranks but one.
            stop = telemetry.observe(fail) if is_broken else bool
            try:
                manager.resume(_state(-1.0))
            except RankFailedError as error:
                outcomes.append(str(error).splitlines()[0])
            else:
                outcomes.append("resumed")
            stop()
    return outcomes


@pytest.mark.parametrize("victim", [0, WORLD - 1], ids=["first", "last"])
def test_a_load_that_fails_on_one_rank_only(pool: RankPool, tmp_path: Path, victim: int) -> None:
    for failed, then in pool.run(_fail_at_the_end_of_a_load, str(tmp_path), victim):
        assert re.search(rf"rank {victim} on .* failed in report: OSError: no room for a report", failed)
        assert then == "resumed"


def _resume_with_empty_listings(rank: int, world_size: int, root: str) -> float:
    """Ranks on a network file system may see different states: only rank 0 searches."""
    if rank != 0:
        LocalBackend.list_children = lambda self, prefix="": []  # type: ignore[method-assign]
    return _resumed(rank, world_size, root)


def test_only_rank_0_searches(tmp_path: Path) -> None:
    with RankPool(2) as pool:
        pool.run(_save_some, str(tmp_path))
        assert pool.run(_resume_with_empty_listings, str(tmp_path)) == [12.0] * 2


def test_damage_that_one_rank_detects_makes_all_fall_back(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_save_some, str(tmp_path))
    last = sorted((tmp_path / "step-12").glob("attempt-*/model-*"))[-1]
    with last.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff")
    assert pool.run(_resumed, str(tmp_path)) == [8.0] * WORLD


def _second_job(rank: int, world_size: int, root: str) -> str:
    try:
        with _manager(root):
            pass
    except BytecheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return "acquired"


def test_every_rank_raises_that_the_root_is_in_use(pool: RankPool, tmp_path: Path) -> None:
    with bcp.CheckpointManager(tmp_path, job=bcp.JobOptions(lease_s=6.0)):
        messages = pool.run(_second_job, str(tmp_path))
    assert messages == [messages[0]] * WORLD
    assert messages[0].startswith("RootInUseError: ")
    assert pool.run(_second_job, str(tmp_path)) == ["acquired"] * WORLD


def _die(rank: int, world_size: int, root: str, victim: int) -> str:
    try:
        with _manager(root, cadence=2) as manager:
            for step in range(1, 100):
                if step == 6:
                    manager.wait()
                    if rank == victim:
                        os.kill(os.getpid(), signal.SIGKILL)
                manager.save(step, _state(float(step)))
    except RankFailedError as error:
        return str(error)
    return "continued"


@pytest.mark.parametrize("victim", [0, WORLD - 1], ids=["first", "last"])
def test_the_next_job_resumes_where_a_killed_one_stopped(pool: RankPool, tmp_path: Path, victim: int) -> None:
    messages = pool.run(_die, str(tmp_path), victim, expect_death={victim: signal.SIGKILL})
    for rank, one in enumerate(messages):
        assert rank == victim or f"rank {victim} on " in one
    # The lease of a process of this host that has ended is taken over at once.
    assert pool.run(_resumed, str(tmp_path)) == [4.0] * WORLD


def _rounds(rank: int, world_size: int, root: str) -> int:
    """Return the number of coordination rounds in a loop of quick turns."""
    rounds = 0
    decide = SaveCoordinator.decide

    def counted(self: SaveCoordinator, *arguments: Any, **options: Any) -> Decision:
        nonlocal rounds
        rounds += 1
        return decide(self, *arguments, **options)

    SaveCoordinator.decide = counted  # type: ignore[method-assign]
    with bcp.CheckpointManager(root) as manager:
        for step in range(1, 1001):
            manager.save(step, _state(1.0))
    return rounds


def test_most_turns_exchange_nothing(tmp_path: Path) -> None:
    with RankPool(2) as pool:
        rounds = pool.run(_rounds, str(tmp_path))
    assert rounds[0] == rounds[1]
    assert 2 <= rounds[0] < 100
