"""Save tensors on a CUDA device: internal streams copy them, and the host does not wait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bytecheckpoint as bcp
from bytecheckpoint.errors import StateError
from bytecheckpoint.frameworks import Adapter, Context, SectionSource, SectionTarget, Shard, StoredSection, whole_tensor
from bytecheckpoint.tensors.derived import DerivedTensor
from bytecheckpoint.testing import time_limit

pytestmark = pytest.mark.gpu

WAIT_S = time_limit(60)


def _tensors(device: torch.device) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    large = torch.randn(3000, 4111, generator=generator)
    found = {
        "large": large,
        "transposed": large.to(device).t()[5:],
        "columns": large.to(device)[:, 100:107],
        "half": torch.randn(513, 77, generator=generator).to(torch.bfloat16),
        "complex": torch.view_as_complex(torch.randn(1000, 2, generator=generator)),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
    }
    found |= {f"small.{i}": torch.randn(i % 50 + 1, generator=generator) for i in range(500)}
    return {name: tensor.to(device) for name, tensor in found.items()} | {"host": torch.arange(1000)}


def _check(path: Path, expected: dict[str, torch.Tensor]) -> None:
    checkpoint = bcp.open(path)
    assert checkpoint.verify().ok
    for name, value in expected.items():
        assert torch.equal(checkpoint[name].load(), value), name


def _keep(stream: torch.cuda.Stream) -> None:
    """Give the stream some tenths of a second of work."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("use_async", [False, True])
@pytest.mark.parametrize("budget", [None, 8 << 20])
def test_bit_for_bit_and_kernels_may_follow_at_once(
    tmp_path: Path, device: torch.device, use_async: bool, budget: int | None
) -> None:
    state = {"extra_state": _tensors(device)}
    expected = {f"extra_state.{name}": tensor.cpu().clone() for name, tensor in state["extra_state"].items()}
    with bcp.Checkpointer(memory_budget=budget) as saver:
        for turn in range(3):
            handle = saver.save(tmp_path / str(turn), state, async_save=use_async)
            for tensor in state["extra_state"].values():
                tensor.zero_()
            handle.result(WAIT_S)
            assert handle.staged()
            _check(tmp_path / str(turn), expected)
            for name, tensor in state["extra_state"].items():
                tensor.copy_(expected[f"extra_state.{name}"])


def test_the_host_does_not_wait(tmp_path: Path) -> None:
    """Not even for the kernels that are still to compute what is saved."""
    weight = torch.zeros(1 << 20, device="cuda")
    with bcp.Checkpointer() as saver:
        saver.warmup({"model": {"weight": weight}})
        torch.cuda.synchronize()
        _keep(torch.cuda.current_stream())
        weight.fill_(1)
        handle = saver.save(tmp_path, {"model": {"weight": weight}}, async_save=True)
        assert not handle.staged()
        assert not torch.cuda.current_stream().query()
        weight.fill_(2)
        assert handle.wait_staged(WAIT_S)
        handle.result(WAIT_S)
    assert bcp.open(tmp_path)["model.weight"].load().eq(1).all()
    assert weight.eq(2).all()


def test_released_memory_is_not_reused_too_early(tmp_path: Path) -> None:
    weight = torch.ones(1 << 24, device="cuda")
    _keep(torch.cuda.current_stream())
    handle = bcp.save(tmp_path, {"model": {"weight": weight}}, async_save=True)
    del weight
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        others = [torch.full((1 << 24,), -1.0, device="cuda") for _ in range(4)]
    handle.result(WAIT_S)
    assert bcp.open(tmp_path)["model.weight"].load().eq(1).all()
    assert len(others) == 4


def test_memory_is_pinned_once_and_given_back(tmp_path: Path) -> None:
    state = {"model": {"weight": torch.ones(1 << 22, device="cuda")}}
    for _ in range(3):
        with bcp.Checkpointer() as saver:
            saver.warmup(state)
            blocks = saver._session.engine.arena._idle
            assert blocks
            assert all(block.tensor.is_pinned() for block in blocks)
            saver.save(tmp_path, state, async_save=True).result(WAIT_S)
            tensors = [block.tensor for block in saver._session.engine.arena._idle]
        assert not any(tensor.is_pinned() for tensor in tensors)


def _training() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.BatchNorm1d(512), nn.Linear(512, 256)).cuda()
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}
    _backward(state)
    state["optimizer"].step()
    return state


def _backward(state: dict[str, Any]) -> None:
    state["model"](torch.randn(64, 256, device="cuda")).square().sum().backward()


def _expected(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    found = {f"model.{name}": value.cpu().clone() for name, value in state["model"].state_dict().items()}
    names = {id(param): name for name, param in state["model"].named_parameters()}
    for param, entries in state["optimizer"].state.items():
        found |= {f"optimizer.state.{names[id(param)]}.{key}": value.cpu().clone() for key, value in entries.items()}
    return found


def test_a_gate(tmp_path: Path) -> None:
    """Forward changes buffers, the step changes the rest: the device waits, the host does not."""
    state = _training()
    with bcp.Checkpointer() as saver:
        saver.warmup(state)
        for turn in range(3):
            expected = _expected(state)
            _keep(torch.cuda.current_stream())
            handle = saver.save(tmp_path / str(turn), state, async_save=True, options=bcp.SaveOptions(gate=True))
            _backward(state)
            state["optimizer"].step()
            assert not handle.staged(), "the host has waited"
            handle.result(WAIT_S)
            _check(tmp_path / str(turn), expected)


def test_a_change_that_passes_by_the_gate_fails_the_save(tmp_path: Path) -> None:
    state = _training()
    _keep(torch.cuda.current_stream())
    handle = bcp.save(tmp_path, state, async_save=True, options=bcp.SaveOptions(gate=True))
    with torch.no_grad():
        state["model"][0].weight.add_(1)
    with pytest.raises(StateError, match=r"changed after save\(gate=True\) was called"):
        handle.result(WAIT_S)


class _Doubled:
    """Hands out copies of twice its values, which take long to compute."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values


class _DoubledAdapter(Adapter):
    name = "test-doubled"

    def recognizes(self, obj: object) -> bool:
        return isinstance(obj, _Doubled)

    def capture(self, obj: _Doubled, context: Context) -> SectionSource:
        def read() -> torch.Tensor:
            torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
            return obj.values * 2

        meta, box = whole_tensor(torch.float32, obj.values.shape)
        tensor = DerivedTensor.of(
            obj.values.shape, torch.float32, read=read, write=obj.values.copy_, device=obj.values.device
        )
        return SectionSource({"values": meta}, [Shard("values", meta, box, tensor)])

    def target(self, obj: _Doubled, context: Context, stored: StoredSection) -> SectionTarget:
        source = self.capture(obj, context)
        return SectionTarget(source.metas, source.shards)


@pytest.fixture(scope="module")
def doubled_adapter() -> None:
    bcp.register_adapter(_DoubledAdapter())


@pytest.mark.usefixtures("doubled_adapter")
@pytest.mark.parametrize("use_async", [False, True])
@pytest.mark.parametrize("on_side_stream", [False, True])
def test_derived_values_are_computed_before_they_are_copied(
    tmp_path: Path, use_async: bool, on_side_stream: bool
) -> None:
    stream = torch.cuda.Stream() if on_side_stream else torch.cuda.current_stream()  # type: ignore[no-untyped-call]
    source = _Doubled(torch.zeros(5_000_000, device="cuda"))
    expected = torch.arange(5_000_000.0)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)  # type: ignore[no-untyped-call]
        source.values.copy_(torch.arange(5_000_000.0, device="cuda") / 2)
        handle = bcp.save(tmp_path / "c", {"doubled": source}, async_save=use_async)
        handle.wait_staged(WAIT_S)
        source.values.zero_()
    handle.result(WAIT_S)
    assert torch.equal(bcp.open(tmp_path / "c")["doubled.values"].load(), expected)
    bcp.load(tmp_path / "c", {"doubled": source})
    assert torch.equal(source.values.cpu(), expected)
