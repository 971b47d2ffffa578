"""What a weight loader does with tensors that have no bytes is what it would do with real ones."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples

from bytecheckpoint.inference.layouts.parts import StridedView, box_of
from bytecheckpoint.inference.layouts.recording import Copy, Recorder


def _real(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(math.prod(shape)).reshape(shape).to(dtype)


class _Stored:
    """Real tensors, recorded ones, and the elements that were really read."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.tensors = tensors
        self.recorder = Recorder(lambda name, view: _part(self.tensors[name], view).clone())

    def recorded(self) -> dict[str, torch.Tensor]:
        return dict(self.recorder.tensors((name, tuple(t.shape), t.dtype) for name, t in self.tensors.items()))

    def carry_out(self) -> None:
        for copy in self.recorder.copies:
            self._carry_out(copy)

    def _carry_out(self, copy: Copy) -> None:
        stored = self.tensors[copy.name]
        found = box_of(stored.shape, copy.view)
        if found is None:
            copy.target.copy_(_part(stored, copy.view))
        else:
            # As a reader does it: the box's bytes, in the box's own order.
            part = stored[found.box.slices()].clone()
            turned = copy.target.permute(found.order)
            turned.copy_(part.reshape(turned.shape))


def _part(stored: torch.Tensor, view: StridedView) -> torch.Tensor:
    return stored.contiguous().as_strided(view.shape, view.strides, view.offset)


def _parameters(tp: int) -> dict[str, torch.Tensor]:
    return {
        "qkv": torch.full((18 // tp, 6), -1.0), "embedding": torch.full((10, 4), -1.0),
        "experts": torch.full((3, 8, 5), -1.0), "scale": torch.full((1,), -1.0),
        "turned": torch.full((5, 7), -1.0), "norm": torch.full((4,), -1.0),
    }  # fmt: skip


def _load(parameters: dict[str, torch.Tensor], weights: dict[str, torch.Tensor], tp: int, rank: int) -> None:
    """The ways of the loaders of an inference engine, by hand."""
    with torch.no_grad():
        head = 6 // tp
        for index, name in enumerate(("q", "k", "v")):
            part = weights[name].narrow(0, rank * head, head)
            target = parameters["qkv"].data.narrow(0, index * head, head)
            assert target.shape == part.shape
            target.copy_(part)
        vocabulary = parameters["embedding"]
        vocabulary[: weights["embedding"].shape[0]].data.copy_(weights["embedding"])
        vocabulary[weights["embedding"].shape[0] :].data.fill_(0)
        for expert in range(3):
            gate, up = weights["gate_up"][expert].chunk(2, dim=0)
            parameters["experts"].data[expert][:4].copy_(gate.to(torch.float32))
            parameters["experts"].data[expert][4:].copy_(up)
        parameters["turned"].data.copy_(weights["turned"].t())
        parameters["norm"].data.copy_(weights["norm"].reshape(2, 2).transpose(0, 1).reshape(-1))
        parameters["scale"].data.fill_(weights["scale"].item())


def _weights() -> dict[str, torch.Tensor]:
    return {
        "q": _real((6, 6)), "k": _real((6, 6)) + 100, "v": _real((6, 6)) + 200, "embedding": _real((8, 4)),
        "gate_up": _real((3, 8, 5), torch.bfloat16), "turned": _real((7, 5)), "norm": _real((4,)),
        "scale": torch.tensor([2.5]),
    }  # fmt: skip


@pytest.mark.parametrize(("tp", "rank"), [(1, 0), (2, 0), (2, 1), (3, 2)])
def test_loaders_do_the_same_with_recorded_tensors(tp: int, rank: int) -> None:
    expected, found = _parameters(tp), _parameters(tp)
    _load(expected, _weights(), tp, rank)
    stored = _Stored(**_weights())
    _load(found, stored.recorded(), tp, rank)
    stored.carry_out()
    for name, parameter in expected.items():
        assert torch.equal(found[name], parameter), name
    # Only where values were computed with, or elements brought into another order, anything was read at once.
    assert {name for name, _ in stored.recorder.seen} == {"scale", "norm"}


def test_a_parameter_is_given_exactly_its_part() -> None:
    stored = _Stored(w=_real((8, 6)))
    parameter = torch.zeros(2, 3)
    parameter.copy_(stored.recorded()["w"][4:6].narrow(1, 3, 3))
    (copy,) = stored.recorder.copies
    found = box_of((8, 6), copy.view)
    assert found is not None
    assert str(found.box) == "[4:6,3:6]"
    assert copy.target.data_ptr() == parameter.data_ptr()


def test_a_narrowing_cast_on_the_way_is_not_forgotten() -> None:
    stored = _Stored(w=torch.tensor([1.00390625, 2.0]))
    parameter = torch.zeros(2)
    parameter.copy_(stored.recorded()["w"].to(torch.bfloat16))
    stored.carry_out()
    assert parameter.tolist() == [1.0, 2.0]


def test_arithmetic_gets_values() -> None:
    stored = _Stored(w=_real((2, 3)), other=_real((2, 3)))
    weights = stored.recorded()
    assert torch.equal(weights["w"][1:] * 2 + weights["other"][:1], torch.tensor([[6.0, 9.0, 12.0]]))
    assert [view.shape for _, view in stored.recorder.seen] == [(1, 3), (1, 3)]
    assert torch.equal(torch.cat([weights["w"], weights["w"]]), torch.cat([_real((2, 3))] * 2))
    assert weights["w"].tolist() == _real((2, 3)).tolist()


def test_a_copy_that_broadcasts() -> None:
    stored = _Stored(w=_real((3,)))
    parameter = torch.zeros(2, 3)
    parameter.copy_(stored.recorded()["w"])
    stored.carry_out()
    assert parameter.tolist() == [[0, 1, 2], [0, 1, 2]]


@st.composite
def _turns(draw: Any) -> tuple[tuple[int, ...], list[tuple[str, Any]]]:
    """A shape, and a few cuts and turns that are possible one after the other."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    at = torch.empty(shape, device="meta")
    steps: list[tuple[str, Any]] = []
    for _ in range(draw(st.integers(0, 6))):
        kind = draw(st.sampled_from(["narrow", "select", "transpose", "flatten", "unsqueeze", "split", "every other"]))
        dims = at.dim()
        dim = draw(st.integers(0, dims - 1)) if dims else 0
        arguments: Any = dim
        if kind != "unsqueeze" and not dims:
            continue
        if kind == "narrow":
            start = draw(st.integers(0, at.shape[dim] - 1))
            arguments = (dim, start, draw(st.integers(1, at.shape[dim] - start)))
        elif kind == "transpose":
            arguments = (dim, draw(st.integers(0, dims - 1)))
        elif kind == "split":
            arguments = draw(st.sampled_from([n for n in range(1, at.shape[0] + 1) if at.shape[0] % n == 0]))
        elif kind == "select":
            arguments = (dim, draw(st.integers(0, at.shape[dim] - 1)))
        step = (kind, arguments)
        at = _take(at, *step)
        steps.append(step)
    return shape, steps


def _take(tensor: torch.Tensor, kind: str, arguments: Any) -> torch.Tensor:
    if kind == "narrow":
        return tensor.narrow(*arguments)
    if kind == "select":
        return tensor.select(*arguments)
    if kind == "transpose":
        return tensor.transpose(*arguments)
    if kind == "flatten":
        return tensor.reshape(-1)
    if kind == "unsqueeze":
        return tensor.unsqueeze(arguments)
    if kind == "split":
        return tensor.reshape(arguments, tensor.shape[0] // arguments, *tensor.shape[1:])
    return tensor[::2]


@settings(max_examples=examples(400), deadline=None)
@given(_turns())
def test_whatever_is_cut_and_turned(turns: tuple[tuple[int, ...], list[tuple[str, Any]]]) -> None:
    shape, steps = turns
    expected = _real(shape)
    stored = _Stored(w=expected.clone())
    found: torch.Tensor = stored.recorded()["w"]
    for step in steps:
        expected, found = _take(expected, *step), _take(found, *step)
    target = torch.full(expected.shape, -1.0)
    target.copy_(found)
    stored.carry_out()
    assert torch.equal(target, expected)


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.integers(1, 5), min_size=0, max_size=4).flatmap(
    lambda shape: st.tuples(
        st.just(tuple(shape)),
        st.tuples(*(st.tuples(st.integers(0, n - 1), st.integers(1, n)) for n in shape)),
        st.permutations(range(len(shape))),
    )
))  # fmt: skip
def test_every_box_is_found(case: tuple[tuple[int, ...], tuple[tuple[int, int], ...], list[int]]) -> None:
    """Any box of any tensor, its dimensions in any order."""
    shape, ranges, order = case
    slices = tuple(slice(start, min(start + length, n)) for (start, length), n in zip(ranges, shape, strict=True))
    view = _real(shape)[slices].permute(order)
    found = box_of(shape, StridedView(view.storage_offset(), tuple(view.shape), tuple(view.stride())))
    assert found is not None
    assert torch.equal(_real(shape)[found.box.slices()].reshape(-1), view.permute(found.order).reshape(-1))
