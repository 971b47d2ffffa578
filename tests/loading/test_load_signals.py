"""Signals that arrive during a load."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import bytecheckpoint as bcp
from bytecheckpoint import telemetry
from bytecheckpoint.checkpoint import location
from bytecheckpoint.errors import RankFailedError
from bytecheckpoint.storage_backends import open_backend
from bytecheckpoint.testing import FaultRule, FaultyBackend, time_limit
from bytecheckpoint.testing.faults import Call
from bytecheckpoint.testing.ranks import RankPool

DEADLINE_S = time_limit(30)
_LOST_SIGNAL_S = 0.2


def _state(rank: int, value: float, steps: int) -> dict[str, Any]:
    model = torch.nn.Linear(3, 4)
    torch.nn.init.constant_(model.weight, value)
    torch.nn.init.constant_(model.bias, value)
    optimizer = torch.optim.Adam(model.parameters(), lr=value)
    for _ in range(steps):
        model.weight.grad, model.bias.grad = torch.ones(4, 3), torch.ones(4)
        optimizer.step()
    extra = {"value": value, "list": [value], "own": torch.full((1 << 16,), value), "rank": bcp.PerRank(rank)}
    return {"model": model, "optimizer": optimizer, "extra": extra}


def _plain(state: dict[str, Any]) -> tuple[Any, ...]:
    """Everything of the state but its tensors, which a failed load may leave half-way."""
    optimizer, extra = state["optimizer"], state["extra"]
    keys = [sorted(entry) for entry in optimizer.state.values()]
    return extra["value"], extra["list"], [group["lr"] for group in optimizer.param_groups], keys


def _interrupt_at(point: str) -> Callable[[], None]:
    def observe(name: str, event: str) -> None:
        if (name, event) == (f"load.{point}", "enter"):
            os.kill(os.getpid(), signal.SIGINT)

    return telemetry.observe(observe)


def _interrupt_while_reading(interrupted: threading.Event) -> Any:
    """Interrupt the main thread, which waits for a thread that reads a data file."""

    def hook(call: Call) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        # A signal that comes just before a thread begins to wait for a lock does not end that wait.
        while not interrupted.wait(_LOST_SIGNAL_S):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    rule = FaultRule("*", "*/extra-*.safetensors", hook=hook)
    faulty = lambda url, **options: FaultyBackend(open_backend(url, **options), [rule])  # noqa: E731
    return mock.patch.object(location, "open_backend", faulty)


def _load_and_interrupt(rank: int, world_size: int, path: str, where: str, victim: int) -> tuple[str, bool, float]:
    bcp.save(path, _state(rank, 2.0, steps=2), options=bcp.SaveOptions(deadline_s=DEADLINE_S))
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background
    state = _state(rank, 1.0, steps=0)
    before, interrupted = _plain(state), threading.Event()
    stop: Callable[[], None] = lambda: None  # noqa: E731
    patch: Any = mock.MagicMock()
    if rank == victim:
        if where == "while reading":
            patch = _interrupt_while_reading(interrupted)
        else:
            stop = _interrupt_at(where)
    outcome = "loaded"
    try:
        with patch:
            bcp.load(path, state, options=bcp.LoadOptions(deadline_s=DEADLINE_S, share_reads="never"))
    except KeyboardInterrupt:
        outcome = "KeyboardInterrupt"
    except RankFailedError as error:
        outcome = f"rank {error.rank}: {error.error_type}"
    finally:
        interrupted.set()
        stop()
        signal.signal(signal.SIGINT, handler)
    is_unchanged = _plain(state) == before
    if world_size > 1:
        dist.barrier()
    bcp.load(path, state, strict="exact", options=bcp.LoadOptions(deadline_s=DEADLINE_S))
    weights = {*state["model"].weight.flatten().tolist(), *state["model"].bias.flatten().tolist()}
    return outcome, is_unchanged, len(weights) == 1 and state["extra"]["value"]


@pytest.mark.parametrize("where", ["check", "open", "describe", "plan", "read", "while reading"])
@pytest.mark.parametrize("victim", [0, 1])
def test_an_interrupted_load_changes_no_values(rank_pool: RankPool, tmp_path: Path, where: str, victim: int) -> None:
    results = rank_pool.run(_load_and_interrupt, str(tmp_path), where, victim, world_size=2)
    assert results[victim] == ("KeyboardInterrupt", True, 2.0)
    assert results[1 - victim] == (f"rank {victim}: KeyboardInterrupt", True, 2.0)


@pytest.mark.parametrize("where", ["apply", "report"])
def test_ranks_agree_that_a_load_was_interrupted_at_its_end(rank_pool: RankPool, tmp_path: Path, where: str) -> None:
    results = rank_pool.run(_load_and_interrupt, str(tmp_path), where, 1, world_size=2)
    assert results[0][0] == "rank 1: KeyboardInterrupt"
    assert results[1][0] == "KeyboardInterrupt"
    assert [value for _, _, value in results] == [2.0, 2.0]


def _resume_and_terminate(rank: int, world_size: int, root: str, victim: int) -> tuple[float, str]:
    def observe(name: str, event: str) -> None:
        if rank == victim and (name, event) == ("load.read", "enter"):
            os.kill(os.getpid(), signal.SIGTERM)

    bcp.save(f"{root}/step-4", _state(rank, 4.0, steps=1), step=4, options=bcp.SaveOptions(deadline_s=DEADLINE_S))
    state = _state(rank, 1.0, steps=0)
    resumed, left = 0.0, "returned"
    stop = telemetry.observe(observe)
    try:
        with bcp.CheckpointManager(root, job=bcp.JobOptions(deadline_s=DEADLINE_S)) as manager:
            manager.resume(state)
            resumed = state["extra"]["value"]
            for step in range(5, 100):
                manager.save(step, state)
    except SystemExit as error:
        left = f"exit {error.code} in step {step}"
    finally:
        stop()
    return resumed, left


@pytest.mark.parametrize("victim", [0, 1])
def test_sigterm_during_resume_takes_effect_after_it(rank_pool: RankPool, tmp_path: Path, victim: int) -> None:
    code = 128 + signal.SIGTERM
    results = rank_pool.run(_resume_and_terminate, str(tmp_path), victim, world_size=2)
    assert results == [(4.0, f"exit {code} in step 5")] * 2
    assert bcp.open(tmp_path / "step-5").verify().ok
