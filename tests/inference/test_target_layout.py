"""A layout noted from a loader does what the loader does."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_replay import replay, replay_from_parts
from sampling import examples
from torch import nn

from benchmarks.layout_files import digest, pack, unpack
from benchmarks.target_layout import TargetLayout
from bytecheckpoint.errors import StateError
from bytecheckpoint.inference.layouts.parts import StridedView
from bytecheckpoint.inference.layouts.recording import Recorder
from bytecheckpoint.tensors.dtypes import DTYPES

HIDDEN, VOCABULARY, EXPERTS = 8, 10, 3


class Engine(nn.Module):
    """One tensor-parallel rank, with the ways of an inference engine's loaders."""

    def __init__(self, tp: int, rank: int, device: str = "cpu") -> None:
        super().__init__()
        self.rank, self.part, self.rows = rank, HIDDEN // tp, 12 // tp
        sizes = {
            "embedding": (self.rows, HIDDEN),
            "qkv": (self.part + 2 * 4, HIDDEN),
            "out": (HIDDEN, self.part),
            "experts": (EXPERTS, 2 * self.part, HIDDEN),
            "norm": (HIDDEN,),
        }
        for name, size in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.full(size, -1.0, device=device)))
        self.register_buffer("bias", torch.full((HIDDEN,), -1.0, device=device))
        self.register_buffer("cache", torch.full((HIDDEN,), -1.0, device=device))

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        begin, part, first = self.rank * self.part, self.part, self.rank * self.rows
        here = weights["embedding"][first : min(first + self.rows, VOCABULARY)]
        self.embedding.data[: here.shape[0]].copy_(here)
        self.qkv.data[:part].copy_(weights["q"].narrow(0, begin, part))
        for index, name in enumerate(("k", "v")):  # replicated
            self.qkv.data.narrow(0, part + 4 * index, 4).copy_(weights[name])
        self.out.data.copy_(weights["out"].narrow(1, begin, part))
        for expert in range(EXPERTS):
            self.experts.data[expert, :part].copy_(weights[f"expert.{expert}.gate"][begin : begin + part])
            self.experts.data[expert, part:].copy_(weights[f"expert.{expert}.up"].t()[begin : begin + part])
        self.norm.data.copy_(weights["norm"])
        self.bias.copy_(weights["bias"])

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach() for name, tensor in [*self.named_parameters(), *self.named_buffers()]}


def _weights() -> dict[str, torch.Tensor]:
    shapes = {"embedding": (VOCABULARY, HIDDEN), "q": (HIDDEN, HIDDEN), "k": (4, HIDDEN), "v": (4, HIDDEN)}
    shapes |= {"out": (HIDDEN, HIDDEN), "norm": (HIDDEN,), "bias": (HIDDEN,), "of another stage": (5,)}
    for expert in range(EXPERTS):
        shapes |= {f"expert.{expert}.gate": (HIDDEN, HIDDEN), f"expert.{expert}.up": (HIDDEN, HIDDEN)}
    return {name: _real(shape) + 1000 * number for number, (name, shape) in enumerate(shapes.items())}


def _real(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(math.prod(shape)).reshape(shape).to(dtype)


def _metas(weights: dict[str, torch.Tensor]) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    return [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in weights.items()]


def _learned(model: Any, weights: dict[str, torch.Tensor], load: Any = None) -> TargetLayout:
    recorder = Recorder(lambda name, view: torch.zeros(view.shape))
    (load or model.load_weights)(dict(recorder.tensors(_metas(weights))))
    return TargetLayout.from_recording(recorder, _metas(weights), model)


def _module(**tensors: torch.Tensor) -> nn.Module:
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    return module


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("tp", "rank"), [(1, 0), (2, 0), (2, 1), (4, 0), (4, 3)])
def test_a_replayed_layout_does_what_the_loader_does(tp: int, rank: int, device: str) -> None:
    weights = _weights()
    layout = _learned(Engine(tp, rank, device), weights)
    expected = Engine(tp, rank)
    expected.load_weights(weights)
    for carry_out in (replay, replay_from_parts):
        found = Engine(tp, rank)
        carry_out(layout, weights, found.tensors())
        for name, tensor in expected.tensors().items():
            assert torch.equal(found.tensors()[name], tensor), name


def test_each_rank_requests_its_share() -> None:
    weights = _weights()
    layouts = [_learned(Engine(2, rank, "meta"), weights) for rank in range(2)]
    replicated = sum(weights[name].nbytes for name in ("k", "v", "norm", "bias"))
    sharded = sum(tensor.nbytes for tensor in weights.values()) - replicated - weights["of another stage"].nbytes
    figures = [layout.sizes() for layout in layouts]
    assert sum(one.requested for one in figures) == sharded + 2 * replicated
    assert all(one.share == 1 and one.stored == sum(t.nbytes for t in weights.values()) for one in figures)
    assert {part.name for part in layouts[0].parts()} == set(weights) - {"of another stage"}
    (out,) = [part for part in layouts[1].parts() if part.name == "out"]
    assert str(out.box) == "[0:8,4:8]"
    # A buffer counts where it is copied to.
    assert [tensor.name for tensor in layouts[0].parameters][-1] == "bias"


def test_duplicate_requests_are_merged() -> None:
    weights = {"w": _real((4, 6)), "n": _real((4,))}
    model = _module(a=torch.zeros(2, 6), b=torch.zeros(2, 6), c=torch.zeros(4), d=torch.zeros(2))

    def load(given: dict[str, torch.Tensor]) -> None:
        model.a.data.copy_(given["w"][:2])
        model.b.data.copy_(given["w"][:2])
        model.c.data.copy_(given["n"])
        model.d.data.copy_(given["n"][1:3])

    layout = _learned(model, weights, load)
    assert [(part.name, str(part.box)) for part in layout.parts()] == [("w", "[0:2,0:6]"), ("n", "[0:4]")]
    assert layout.sizes().share == 1


def test_a_view_that_is_no_box_and_values_that_are_seen_want_the_whole() -> None:
    weights = {"w": _real((4, 6)), "n": _real((4,)).to(torch.bfloat16), "m": _real((4,))}
    model = _module(a=torch.zeros(2, 6), c=torch.zeros(4), d=torch.zeros(4), e=torch.zeros(4, dtype=torch.bfloat16))

    def load(given: dict[str, torch.Tensor]) -> None:
        model.a.data.copy_(given["w"][::2])
        model.c.data.copy_(given["n"] * 2)
        model.e.data.copy_(given["n"])
        model.d.data.copy_(given["m"])

    layout = _learned(model, weights, load)
    parts = [(part.name, str(part.box), part.dtype.name) for part in layout.parts()]
    assert parts == [("w", "[0:4,0:6]", "float32"), ("n", "[0:4]", "bfloat16"), ("m", "[0:4]", "float32")]
    assert [layout.stored[number].name for number in layout.seen] == ["n"]
    figures = layout.sizes()
    assert (figures.requested, figures.fast) == (96 + 8 + 16, 16)
    found = {parameter.name: torch.zeros(parameter.shape) for parameter in layout.parameters}
    replay_from_parts(layout, weights, found)
    assert torch.equal(found["a"], weights["w"][::2])
    assert torch.equal(found["d"], weights["m"])
    assert torch.equal(found["e"], weights["n"].float())
    assert not found["c"].any()  # only the loader can compute this


def test_parts_come_in_the_type_of_the_parameter() -> None:
    weights = {"w": _real((4, 6))}
    model = _module(a=torch.zeros(2, 6, dtype=torch.bfloat16))
    (part,) = _learned(model, weights, lambda given: model.a.data.copy_(given["w"][:2])).parts()
    assert (part.dtype, part.nbytes, part.shape) == (DTYPES["bfloat16"], 24, (4, 6))


def test_parameters_that_share_memory_are_distinguished() -> None:
    arena = torch.zeros(20, device="meta")
    model = _module(a=arena[:8].view(2, 4), b=arena[8:].view(3, 4))
    layout = _learned(model, {"w": _real((2, 4))}, lambda given: model.b.data[1:].copy_(given["w"]))
    (placement,) = layout.placements
    assert layout.parameters[placement.parameter].name == "b"
    assert placement.target == StridedView(4, (2, 4), (4, 1))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (lambda model: torch.zeros(2, 4), "w into a tensor of shape .* not part"),
        (lambda model: model.a.data.view(torch.int32), "int32 that is not part"),
        (lambda model: model.turned.data, "parameter turned is not contiguous"),
    ],
)
def test_a_copy_to_elsewhere_is_refused(target: Any, message: str) -> None:
    model = _module(a=torch.zeros(2, 4), turned=torch.zeros(4, 2).t())
    with pytest.raises(StateError, match=message):
        _learned(model, {"w": _real((2, 4))}, lambda given: target(model).copy_(given["w"]))


@st.composite
def _loaders(draw: Any) -> list[tuple[tuple[int, ...], list[tuple[str, Any]], list[int], bool]]:
    """For each parameter: the shape of a stored tensor, cuts and turns of it, a margin around the target in each
    dimension, and whether the target is turned."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
        at, steps = torch.empty(shape, device="meta"), []
        for _ in range(draw(st.integers(0, 4))):
            dim = draw(st.integers(0, at.dim() - 1)) if at.dim() else 0
            kind = draw(st.sampled_from(["narrow", "select", "transpose", "unsqueeze", "every other"]))
            if not at.dim() and kind != "unsqueeze":
                continue
            arguments: tuple[int, ...] = (dim,)
            if kind == "narrow":
                start = draw(st.integers(0, at.shape[dim] - 1))
                arguments = (dim, start, draw(st.integers(1, at.shape[dim] - start)))
            elif kind == "select":
                arguments = (dim, draw(st.integers(0, at.shape[dim] - 1)))
            elif kind == "transpose":
                arguments = (dim, draw(st.integers(0, at.dim() - 1)))
            steps.append((kind, arguments))
            at = _take(at, kind, arguments)
        margins = draw(st.lists(st.integers(0, 2), min_size=at.dim(), max_size=at.dim()))
        found.append((shape, steps, margins, draw(st.booleans())))
    return found


def _take(tensor: torch.Tensor, kind: str, arguments: tuple[int, ...]) -> torch.Tensor:
    return tensor[::2] if kind == "every other" else getattr(tensor, kind)(*arguments)


@settings(max_examples=examples(200), deadline=None)
@given(_loaders())
def test_any_loader_is_learned(loaders: list[Any]) -> None:
    weights = {f"stored.{number}": _real(shape) + 1000 * number for number, (shape, *_) in enumerate(loaders)}

    def load(given: dict[str, torch.Tensor], into: dict[str, torch.Tensor]) -> None:
        for number, (_, steps, margins, turned) in enumerate(loaders):
            value = given[f"stored.{number}"]
            for kind, arguments in steps:
                value = _take(value, kind, arguments)
            target = into[f"p{number}"]
            target = target.permute(tuple(reversed(range(target.dim())))) if turned else target
            for dim, (margin, size) in enumerate(zip(margins, value.shape, strict=True)):
                target = target.narrow(dim, margin, size)
            target.copy_(value)

    def parameters(device: str) -> dict[str, torch.Tensor]:
        found = {}
        for number, (shape, steps, margins, turned) in enumerate(loaders):
            at = torch.empty(shape, device="meta")
            for kind, arguments in steps:
                at = _take(at, kind, arguments)
            sizes = [size + 2 * margin for size, margin in zip(at.shape, margins, strict=True)]
            found[f"p{number}"] = torch.full(sizes[::-1] if turned else sizes, -1.0, device=device)
        return found

    model = _module(**parameters("meta"))
    layout = _learned(model, weights, lambda given: load(given, {n: p.data for n, p in model.named_parameters()}))
    assert unpack(pack(layout)) == layout
    expected = parameters("cpu")
    load(weights, expected)
    for carry_out in (replay, replay_from_parts):
        found = parameters("cpu")
        carry_out(layout, weights, found)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_the_digest_of_a_golden_layout_is_of_everything() -> None:
    layout = _learned(Engine(2, 1, "meta"), _weights())
    first = layout.placements[0]
    others = [
        TargetLayout(layout.stored[:-1], layout.parameters, layout.placements),
        TargetLayout(layout.stored, layout.parameters, layout.placements[::-1]),
        TargetLayout(layout.stored, layout.parameters, (first._replace(parameter=1), *layout.placements[1:])),
        TargetLayout(layout.stored, layout.parameters, layout.placements, (0,)),
        _learned(Engine(2, 0, "meta"), _weights()),
    ]
    assert len({digest(one) for one in [layout, *others]}) == 6
    assert _learned(Engine(2, 1), _weights()) == layout
