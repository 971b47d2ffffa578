"""Saves behind a gate: every way in which the state could change before its copy is done waits, was copied before, or
fails the save."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import bytecheckpoint as bcp
from bytecheckpoint.engine.staging import staging as staging_module
from bytecheckpoint.errors import StateError, UsageError
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool

WAIT_S = time_limit(60)

_copy_piece = staging_module.copy_piece
_wait_changeable = staging_module.Staging.wait_changeable


class Model(nn.Module):
    """Parameters that are stepped, one that is not, and buffers that change in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8))
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


@contextmanager
def _held() -> Iterator[threading.Event]:
    """The background copies nothing until this is set; who waits at the gate sets it (or the end of the test)."""
    go_on = threading.Event()

    def copy_piece(*arguments: Any) -> None:
        if threading.current_thread().name.startswith("bcp-help"):
            assert go_on.wait(WAIT_S)
        _copy_piece(*arguments)

    def wait_changeable(staging: staging_module.Staging, timeout_s: float | None) -> None:
        if not staging.is_copied():
            go_on.set()
        _wait_changeable(staging, timeout_s)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging_module, "copy_piece", copy_piece)
        patch.setattr(staging_module.Staging, "wait_changeable", wait_changeable)
        yield go_on
        go_on.set()


@pytest.fixture
def copying() -> Iterator[threading.Event]:
    with _held() as go_on:
        yield go_on


def _state(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Model()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    state = {
        "model": model,
        "optimizer": optimizer,
        "extra_state": {"step": 1, "table": torch.arange(6.0), "rng": bcp.RNGState()},
    }
    _train(state)
    return state


def _backward(state: dict[str, Any]) -> None:
    state["model"](torch.randn(4, 8)).square().sum().backward()


def _train(state: dict[str, Any]) -> None:
    _backward(state)
    state["optimizer"].step()


def _memory(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    found = {f"model.{name}": value for name, value in state["model"].state_dict().items()}
    names = {id(param): name for name, param in state["model"].named_parameters()}
    for param, entries in state["optimizer"].state.items():
        found |= {f"optimizer.state.{names[id(param)]}.{key}": value for key, value in entries.items()}
    found["extra_state.table"] = state["extra_state"]["table"]
    return {name: value.detach().clone() for name, value in found.items()}


def _check(path: Path, expected: dict[str, torch.Tensor]) -> None:
    """What is stored is the state at the call."""
    checkpoint = bcp.open(path)
    assert checkpoint.verify().ok
    for name, value in expected.items():
        assert torch.equal(checkpoint[name].load(), value), name


def _hooks(state: dict[str, Any]) -> int:
    modules = sum(len(module._load_state_dict_pre_hooks) for module in state["model"].modules())
    optimizer = state["optimizer"]
    return modules + len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_load_state_dict_pre_hooks)


def _step(state: dict[str, Any]) -> None:
    state["optimizer"].step()


def _forward(state: dict[str, Any]) -> None:
    for _ in range(3):
        state["model"](torch.randn(4, 8))
    _train(state)


def _load_model(state: dict[str, Any]) -> None:
    state["model"].load_state_dict(_state(5)["model"].state_dict())


def _load_part(state: dict[str, Any]) -> None:
    state["model"].layers[0].load_state_dict(_state(5)["model"].layers[0].state_dict())


def _load_optimizer(state: dict[str, Any]) -> None:
    state["optimizer"].load_state_dict(_state(5)["optimizer"].state_dict())
    state["optimizer"].step()


def _zero_grad(state: dict[str, Any]) -> None:
    state["optimizer"].zero_grad(set_to_none=True)
    _train(state)


def _to_half(state: dict[str, Any]) -> None:
    """The parameters get other memory; theirs is copied as it was."""
    state["model"].half()
    with torch.no_grad():
        for parameter in state["model"].parameters():
            parameter.data = torch.zeros_like(parameter)


def _spoil_the_rest(state: dict[str, Any]) -> None:
    with torch.no_grad():
        state["model"].frozen.fill_(-1)
        for buffer in state["model"].buffers():
            buffer.fill_(7)
    state["extra_state"]["table"].zero_()
    state["extra_state"]["step"] = -1
    state["optimizer"].param_groups[0]["lr"] = 1000.0
    torch.rand(100)


def _after_a_copy(state: dict[str, Any]) -> None:
    """A copy of the model has hooks that do nothing."""
    other = copy.deepcopy(state["model"])
    other.load_state_dict(_state(5)["model"].state_dict())
    pickle.loads(pickle.dumps(state["model"]))
    _train(state)


_HARMLESS = [
    _step,
    _forward,
    _load_model,
    _load_part,
    _load_optimizer,
    _zero_grad,
    _to_half,
    _spoil_the_rest,
    _after_a_copy,
]


@pytest.mark.parametrize("change", _HARMLESS, ids=[change.__name__.strip("_") for change in _HARMLESS])
def test_what_changes_the_state_waits_or_comes_too_late(
    tmp_path: Path, copying: threading.Event, change: Callable[[dict[str, Any]], None]
) -> None:
    state = _state()
    expected = _memory(state)
    _backward(state)
    expected |= {name: value for name, value in _memory(state).items() if "running" in name or "tracked" in name}
    handle = bcp.save(tmp_path, state, async_save=True, options=bcp.SaveOptions(gate=True))
    assert not handle.staged()
    assert not handle.done()
    change(state)
    copying.set()
    handle.result(WAIT_S)
    assert handle.staged()
    _check(tmp_path, expected)
    assert bcp.open(tmp_path).section_values("extra_state")[("step",)] == 1


def test_a_load_waits(tmp_path: Path, copying: threading.Event) -> None:
    """Of whichever checkpointer."""
    other, state = _state(5), _state()
    expected = _memory(state)
    with bcp.Checkpointer() as loader:
        bcp.save(tmp_path / "other", other)
        handle = bcp.save(tmp_path / "gated", state, async_save=True, options=bcp.SaveOptions(gate=True))
        loader.load(tmp_path / "other", state)
    assert handle.staged()
    handle.result(WAIT_S)
    _check(tmp_path / "gated", expected)
    for name, value in _memory(other).items():
        assert torch.equal(_memory(state)[name], value), name


def test_a_save_through_another_checkpointer_leaves_the_gate_alone(tmp_path: Path, copying: threading.Event) -> None:
    """It may run on another thread, in the middle of a training step, where no hook may be removed."""
    state = _state()
    expected = _memory(state)
    with bcp.Checkpointer() as other:
        handle = bcp.save(tmp_path / "gated", state, async_save=True, options=bcp.SaveOptions(gate=True))
        hooks = _hooks(state)
        other.save(tmp_path / "other", {"extra_state": {"metrics": torch.arange(3.0)}})
        assert not handle.staged()
        assert _hooks(state) == hooks > 0
    assert _hooks(state) == hooks, "closing the other Checkpointer leaves it alone too"
    _train(state)
    handle.result(WAIT_S)
    _check(tmp_path / "gated", expected)


@pytest.mark.parametrize("both", [True, False])
def test_two_optimizers_wait(tmp_path: Path, copying: threading.Event, both: bool) -> None:
    """What is stepped by one that is not in the state was copied before."""
    state = _state()
    expected = {n: v for n, v in _memory(state).items() if n.startswith("model.layers.0") or n == "model.layers.2.bias"}
    layers = state["model"].layers
    one = torch.optim.SGD(layers[0].parameters(), lr=0.1)
    two = torch.optim.SGD([*layers[1].parameters(), *layers[2].parameters()], lr=0.1)
    _backward(state)
    state["optimizer"] = [one, two] if both else one
    handle = bcp.save(tmp_path, state, async_save=True, options=bcp.SaveOptions(gate=True))
    two.step()
    assert handle.staged() == both
    one.step()
    assert handle.staged()
    handle.result(WAIT_S)
    _check(tmp_path, expected)


def test_the_step_of_an_unknown_optimizer_fails_the_save(tmp_path: Path, copying: threading.Event) -> None:
    state = _state()
    stranger = torch.optim.SGD(state["model"].layers[0].parameters(), lr=0.1)
    _backward(state)
    handle = bcp.save(tmp_path, state, async_save=True, options=bcp.SaveOptions(gate=True))
    stranger.step()
    copying.set()
    with pytest.raises(StateError, match=r"model\.layers\.0\.\w+.*: changed after save"):
        handle.result(WAIT_S)


def _add(state: dict[str, Any]) -> None:
    with torch.no_grad():
        state["model"].layers[0].weight.add_(1)


def _write_element(state: dict[str, Any]) -> None:
    state["model"].layers[2].bias.detach()[3] = 1.0


def _change_moment(state: dict[str, Any]) -> None:
    next(iter(state["optimizer"].state.values()))["exp_avg"].zero_()


@pytest.mark.parametrize("change", [_add, _write_element, _change_moment])
@pytest.mark.parametrize("then_step", [False, True])
def test_a_change_that_passes_by_the_gate_fails_the_save(
    tmp_path: Path, copying: threading.Event, change: Callable[[dict[str, Any]], None], then_step: bool
) -> None:
    state = _state()
    bcp.save(tmp_path, state, step=1)
    _backward(state)
    handle = bcp.save(tmp_path, state, step=2, async_save=True, options=bcp.SaveOptions(gate=True))
    change(state)
    if then_step:
        state["optimizer"].step()  # waits, and does not raise the failure
        assert handle.staged()
    copying.set()
    with pytest.raises(StateError, match=r"changed after save\(gate=True\) was called"):
        handle.result(WAIT_S)
    assert bcp.open(tmp_path).step == 1
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1
    bcp.save(tmp_path, state, step=3, async_save=True, options=bcp.SaveOptions(gate=True)).result(WAIT_S)
    assert bcp.open(tmp_path).step == 3


def test_after_staged_everything_may_change(tmp_path: Path) -> None:
    state = _state()
    expected = _memory(state)
    handle = bcp.save(tmp_path, state, async_save=True, options=bcp.SaveOptions(gate=True))
    assert handle.wait_staged(WAIT_S)
    assert handle.staged()
    with torch.no_grad():
        for parameter in state["model"].parameters():
            parameter.fill_(3)
    handle.result(WAIT_S)
    _check(tmp_path, expected)


@pytest.mark.parametrize("in_hook", [False, True])
def test_a_failure_of_the_copy_opens_the_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_hook: bool) -> None:
    early_done, failed = threading.Event(), threading.Event()

    def fail(*arguments: Any) -> None:
        if threading.current_thread().name.startswith("bcp-help"):
            failed.set()
            raise MemoryError("injected")
        if early_done.is_set():
            assert failed.wait(WAIT_S)
            if in_hook:
                raise MemoryError("injected")
        _copy_piece(*arguments)

    monkeypatch.setattr(staging_module, "copy_piece", fail)
    state = _state()
    _backward(state)
    handle = bcp.save(tmp_path, state, async_save=True, options=bcp.SaveOptions(gate=True))
    early_done.set()
    before = state["model"].layers[0].weight.clone()
    state["optimizer"].step()
    assert not torch.equal(before, state["model"].layers[0].weight), "the step was lost"
    with pytest.raises(MemoryError, match="injected"):
        handle.result(WAIT_S)
    assert handle.staged()
    assert not list(tmp_path.rglob("*.*"))
    monkeypatch.undo()
    bcp.save(tmp_path, state, async_save=True, options=bcp.SaveOptions(gate=True)).result(WAIT_S)
    assert bcp.open(tmp_path).verify().ok


def test_two_gated_saves_in_a_row(tmp_path: Path, copying: threading.Event) -> None:
    state = _state()
    expected = _memory(state)
    first = bcp.save(tmp_path / "0", state, async_save=True, options=bcp.SaveOptions(gate=True))
    second = bcp.save(tmp_path / "1", state, async_save=True, options=bcp.SaveOptions(gate=True))
    assert first.staged(), "the second is to help, and wait"
    _backward(state)
    state["optimizer"].step()
    assert second.staged()
    copying.set()
    first.result(WAIT_S)
    second.result(WAIT_S)
    for name in "01":
        _check(tmp_path / name, expected)


def test_hooks_do_not_pile_up(tmp_path: Path) -> None:
    state = _state()
    with bcp.Checkpointer() as saver:
        for step in range(5):
            _backward(state)
            expected = _memory(state)
            handle = saver.save(tmp_path, state, step=step, async_save=True, options=bcp.SaveOptions(gate=True))
            hooks = _hooks(state)
            assert hooks == 2 + 4  # the optimizer's, and one for each module with parameters
            state["optimizer"].step()
            handle.result(WAIT_S)
            _check(tmp_path, expected)
    assert _hooks(state) == 0


def test_a_gate_keeps_no_state_alive(tmp_path: Path) -> None:
    state = _state()
    model, weight = weakref.ref(state["model"]), weakref.ref(state["model"].layers[0].weight)
    with bcp.Checkpointer() as saver:
        saver.save(tmp_path, state, async_save=True, options=bcp.SaveOptions(gate=True)).result(WAIT_S)
        state.clear()
        gc.collect()
        assert model() is None
        assert weight() is None


def test_a_gate_and_too_little_memory(tmp_path: Path) -> None:
    """Then the state is copied before the call returns."""
    state = _state()
    expected = _memory(state)
    with bcp.Checkpointer(memory_budget=16 << 10) as saver:
        handle = saver.save(tmp_path, state, async_save=True, options=bcp.SaveOptions(gate=True))
        assert handle.staged()
        assert _hooks(state) == 0
        _add(state)
        handle.result(WAIT_S)
        assert handle.timings.pipelined
    _check(tmp_path, expected)


def test_a_gate_is_for_asynchronous_saves(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="gate=True needs async_save=True"):
        bcp.save(tmp_path, _state(), options=bcp.SaveOptions(gate=True))


def test_a_forked_child_does_not_wait(tmp_path: Path, copying: threading.Event) -> None:
    state = _state()
    _backward(state)
    handle = bcp.save(tmp_path, state, async_save=True, options=bcp.SaveOptions(gate=True))
    child = os.fork()
    if child == 0:
        state["optimizer"].step()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert not handle.staged()
    copying.set()
    handle.result(WAIT_S)


# -- sharded -----------------------------------------------------------------------------------------------------


def _train_sharded(rank: int, world_size: int, path: str, kind: str, change: str) -> list[str]:
    """Forward and backward under the gate, then a step; what is stored is the state at the call."""
    torch.manual_seed(3)
    model: nn.Module = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 6))
    if kind.startswith("fsdp1"):
        model = FullyShardedDataParallel(model, use_orig_params=kind == "fsdp1", device_id=torch.device("cpu"))
    else:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}

    def backward() -> None:
        model(torch.randn(4, 6)).square().sum().backward()

    backward()
    optimizer.step()
    optimizer.zero_grad()
    bcp.save(f"{path}/plain", state, options=bcp.SaveOptions(deadline_s=time_limit(30)))
    with _held() as go_on:
        handle = bcp.save(
            f"{path}/gated", state, async_save=True, options=bcp.SaveOptions(gate=True, deadline_s=time_limit(30))
        )
        assert not handle.staged()
        backward()
        assert not handle.staged(), "forward and backward do not wait"
        if change == "step":
            optimizer.step()
            assert handle.staged()
        elif change == "add" and rank == 1:
            with torch.no_grad():
                next(iter(model.parameters())).add_(1)
        go_on.set()
        error = handle.exception(60)
    backward()
    optimizer.step()
    dist.barrier()
    return [] if error is None else [type(error).__name__, str(error)]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1", "fsdp1-flat"])
def test_forward_and_backward_of_sharded_models(pool: RankPool, tmp_path: Path, kind: str) -> None:
    assert pool.run(_train_sharded, str(tmp_path), kind, "step") == [[], []]
    plain, gated = bcp.open(tmp_path / "plain"), bcp.open(tmp_path / "gated")
    assert sorted(plain) == sorted(gated)
    for name in plain:
        assert torch.equal(plain[name].load(), gated[name].load()), name


def test_a_change_on_one_rank_fails_the_save_on_all(pool: RankPool, tmp_path: Path) -> None:
    results = pool.run(_train_sharded, str(tmp_path), "fsdp2", "add")
    assert results[0] == results[1]
    assert "changed after save" in results[0][1]
    assert not (tmp_path / "gated" / "manifest.msgpack").exists()
