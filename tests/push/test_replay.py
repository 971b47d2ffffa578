"""Layers that are filled by a replay, compared with what the loader itself makes of the same tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples
from torch import nn

from bytecheckpoint.inference.push.engine_model import ChunkedTensors, EngineModel, LoadRecord, record_load
from bytecheckpoint.inference.push.layout import Holding, Layout
from bytecheckpoint.inference.push.messages import Table
from bytecheckpoint.inference.push.plan import plan_push
from bytecheckpoint.inference.push.transports.shared_memory import ArenaChunks
from bytecheckpoint.tensors.geometry import Box
from bytecheckpoint.tensors.shards import basic_meta

Load = Callable[[nn.Module, str, torch.Tensor], None]


class _Layer(nn.Module):
    def __init__(self, dtype: torch.dtype, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False))


class _Model(nn.Module):
    """Rank ``rank`` of ``tp`` of a model whose layers load in many ways."""

    def __init__(self, dtype: torch.dtype, hidden: int, experts: int, tp: int, rank: int) -> None:
        super().__init__()
        self.part, self.rank, self.hidden, self.experts = hidden // tp, rank, hidden, experts
        part = self.part
        self.qkv = _Layer(dtype, weight=(3 * part, hidden), bias=(3 * part,))
        self.out = _Layer(dtype, weight=(hidden, part))
        self.moe = _Layer(dtype, w13=(experts, 2 * part, hidden), w2=(experts, hidden, part))
        self.turned = _Layer(dtype, weight=(hidden, hidden))
        self.norm = _Layer(dtype, weight=(hidden,), scale=())
        self.padded = _Layer(dtype, weight=(hidden + 3, hidden))
        self.read = _Layer(dtype, scale=(1,))
        self.swapped, self.doubled = _Layer(dtype, weight=(hidden,)), _Layer(dtype, weight=(hidden,))
        self.one, self.other = _Layer(dtype, weight=(hidden,)), _Layer(dtype, weight=(hidden + 1,))

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        begin, part = self.rank * self.part, self.part
        for name, tensor in weights:
            kind, _, number = name.partition(".")
            if kind in ("q", "k", "v"):
                held = self.qkv.weight if number == "weight" else self.qkv.bias
                held.data.narrow(0, "qkv".index(kind) * part, part).copy_(tensor.narrow(0, begin, part))
            elif kind == "out":
                self.out.weight.data.copy_(tensor.narrow(1, begin, part))
            elif kind in ("gate", "up"):
                rows = self.moe.w13.data[int(number)].narrow(0, part if kind == "up" else 0, part)
                rows.copy_(tensor[begin : begin + part])
            elif kind == "down":
                self.moe.w2.data[int(number)].copy_(tensor.narrow(1, begin, part))
            elif kind == "turned":
                self.turned.weight.data.copy_(tensor.t())
            elif kind == "norm":
                (self.norm.weight if number == "weight" else self.norm.scale).data.copy_(tensor)
            elif kind == "padded":
                self.padded.weight.data[: self.hidden].copy_(tensor)
                self.padded.weight.data[self.hidden :].fill_(7)
            elif kind == "read":
                self.read.scale.data.fill_(tensor.item())
            elif kind == "swapped":
                self.swapped.weight.data = torch.empty_like(self.swapped.weight.data)
                self.swapped.weight.data.copy_(tensor)
            elif kind == "doubled":
                self.doubled.weight.data.copy_(tensor)
                torch.mul(self.doubled.weight.data, 2, out=self.doubled.weight.data)
            else:  # of two layers, of which the second is padded
                self.one.weight.data.copy_(tensor)
                self.other.weight.data[:-1].copy_(tensor)
                self.other.weight.data[-1:].fill_(7)

    def stored(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Tensors of consecutive numbers, rounded to the dtype."""
        hidden = self.hidden
        shapes: dict[str, tuple[int, ...]] = {}
        for expert in range(self.experts):
            shapes |= {f"{kind}.{expert}": (hidden, hidden) for kind in ("gate", "up", "down")}
        shapes |= {f"{kind}.weight": (hidden, hidden) for kind in ("q", "k", "v", "out", "turned", "padded")}
        shapes |= {f"{kind}.bias": (hidden,) for kind in "qkv"}
        shapes |= {"norm.weight": (hidden,), "norm.scale": (), "read": (1,), "both": (hidden,)}
        shapes |= {"swapped": (hidden,), "doubled": (hidden,)}
        count = sum(torch.Size(shape).numel() for shape in shapes.values())
        values = torch.arange(1, count + 1, dtype=torch.float64).to(dtype)
        found, at = {}, 0
        for name, shape in shapes.items():
            size = torch.Size(shape).numel()
            found[name] = values[at : at + size].view(shape)
            at += size
        return found


class _Engine(EngineModel):
    def __init__(self, *arguments: Any) -> None:
        self._arguments = arguments

    def make(self) -> _Model:
        with torch.device("meta"):
            return _Model(*self._arguments)

    def run_loader(self, model: nn.Module, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        model.load_weights(weights)  # type: ignore[operator]

    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        raise AssertionError

    def can_replay(self, name: str, layer: nn.Module) -> bool:
        return isinstance(layer, _Layer)


def _planned(stored: dict[str, torch.Tensor], record: LoadRecord, chunk_bytes: int) -> tuple[Layout, torch.Tensor]:
    """A layout of these tensors, each held in two halves, and memory that senders have filled."""
    held = {}
    for name, tensor in stored.items():
        whole = Box.whole(tuple(tensor.shape))
        middle = tensor.shape[0] // 2 if tensor.ndim else 0
        halves = [Box((0, *whole.offsets[1:]), (middle, *whole.lengths[1:]))] if middle else []
        halves += [Box((middle, *whole.offsets[1:]), (tensor.shape[0] - middle, *whole.lengths[1:]))] if middle else []
        held[name] = [Holding(box, (0,)) for box in halves or [whole]]
    (layout,) = plan_push([record.parts], held, 1, chunk_bytes=chunk_bytes).layouts
    memory = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for number, (part, box) in enumerate(layout.chunks):
        requested = layout.parts[part]
        dtype = getattr(torch, requested.dtype.name)
        elements = stored[requested.name][box.slices()].to(dtype).contiguous()
        memory[layout.span(number)] = elements.view(-1).view(torch.uint8)
    return layout, memory


@settings(max_examples=examples(40), deadline=None)
@given(
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    st.sampled_from([2, 4, 12]),
    st.integers(1, 5),
    st.sampled_from([1, 2]),
    st.sampled_from([16, 100, 1 << 20]),
)
def test_replay_gives_the_bytes_of_the_loader(
    dtype: torch.dtype, stored_dtype: torch.dtype, hidden: int, experts: int, tp: int, chunk_bytes: int
) -> None:
    for rank in range(tp):
        arguments = dtype, hidden, experts, tp, rank
        stored = _Model(*arguments).stored(stored_dtype)
        table = Table(tuple((name, basic_meta(tensor.dtype, tensor.shape)) for name, tensor in stored.items()))
        record = record_load(_Engine(*arguments), table)
        # Not of what is filled, read, replaced or computed, or shares a tensor with such a layer.
        assert set(record.fills) == {"qkv", "out", "moe", "turned", "norm"}
        assert record.others == {"padded.weight", "read", "both", "swapped", "doubled"}
        layout, memory = _planned(stored, record, chunk_bytes)
        replay = record.replay(layout)
        assert replay is not None
        expected, found = _Model(*arguments), _Model(*arguments)
        expected.load_weights(iter(stored.items()))
        for name in replay:
            replay.fill(name, dict(found.get_submodule(name).named_parameters()), memory)
        weights = ChunkedTensors(table, layout, ArenaChunks(layout, memory)).tensors()
        found.load_weights((name, tensor) for name, tensor in weights if name in replay.others)
        for (name, one), (_, other) in zip(found.named_parameters(), expected.named_parameters(), strict=True):
            assert torch.equal(one, other), name


def test_many_small_tensors_become_few_copies() -> None:
    arguments = torch.float32, 4, 50, 1, 0
    stored = _Model(*arguments).stored(torch.float32)
    table = Table(tuple((name, basic_meta(tensor.dtype, tensor.shape)) for name, tensor in stored.items()))
    record = record_load(_Engine(*arguments), table)
    layout, _ = _planned(stored, record, 1 << 20)
    replay = record.replay(layout)
    assert replay is not None
    assert {name: [len(copies) for copies in replay.copies[name].values()] for name in ("qkv", "moe")} == {
        "qkv": [1, 1],
        "moe": [1, 1],
    }
