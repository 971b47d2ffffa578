"""Shortcuts for many tensors give the same results as handling each tensor separately."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import bytecheckpoint as bcp
from bytecheckpoint.errors import BytecheckpointError, NameCollisionError, StateError, UnsupportedTensorError
from bytecheckpoint.frameworks import optimizer_state, tree_capture, tree_target
from bytecheckpoint.frameworks.base import Context
from bytecheckpoint.frameworks.layout import ParamLayout
from bytecheckpoint.frameworks.optimizer_params import NamedParam
from bytecheckpoint.frameworks.optimizer_state import capture_states
from bytecheckpoint.frameworks.optimizer_wrappers import StateHolder
from bytecheckpoint.frameworks.sections import _are_plain, check_name
from bytecheckpoint.frameworks.tensors import dense_view, tensor_kind, tensor_shards
from bytecheckpoint.frameworks.tree_capture import Capture, SameMemory
from bytecheckpoint.frameworks.tree_target import TreeBuilder
from bytecheckpoint.tensors.geometry import Box
from bytecheckpoint.tensors.shards import SectionSource, SectionTarget, Shard, StoredSection

names = st.lists(st.text("a.@1[]:,\0_é\ud800 ", max_size=6) | st.just("__metadata__"), max_size=3)


@given(names)
@settings(deadline=None)
@example(["a@1"])
@example(["a[0:1]"])
@example(["x" * 5000])
def test_names_accepted_together_are_accepted_one_by_one(names: list[str]) -> None:
    if _are_plain(names):
        for name in names:
            check_name(f"model.{name}", name)


def test_a_reserved_name_among_plain_ones_is_found() -> None:
    for name in ("a@1", "w[0:2,1:3]", "__metadata__", "a\0b", "x" * 5000, "\ud800"):
        assert not _are_plain(["plain", name])
        with pytest.raises(BytecheckpointError):
            check_name(f"model.{name}", name)
    assert _are_plain([])


def test_tensors_of_one_shape_share_only_their_description() -> None:
    first, second = torch.zeros(2, 3), torch.ones(2, 3)
    (metas, [one]), (others, [two]) = tensor_shards("a", first), tensor_shards("b", second)
    meta = metas["a"]
    assert meta == others["b"]
    assert one.box == two.box == Box.whole((2, 3))
    assert (one.fqn, two.fqn) == ("a", "b")
    assert one.tensor.data_ptr() == first.data_ptr()
    assert two.tensor.data_ptr() == second.data_ptr()
    checked = Shard("a", meta, one.box, one.tensor)
    assert (checked.fqn, checked.meta, checked.box) == (one.fqn, one.meta, one.box)


def test_a_plain_type_without_dense_memory_is_refused() -> None:
    odd = torch.zeros(2, 2).to_sparse()
    assert type(odd) is torch.Tensor
    with pytest.raises(UnsupportedTensorError, match=r"^odd: "):
        dense_view("odd", odd)


def test_only_the_same_view_is_a_tie() -> None:
    memory = SameMemory()
    base = torch.arange(6.0)
    views = {
        "first": base,
        "shorter": base[:3],
        "folded": base.view(2, 3),
        "bits": base.view(torch.int32),
        "later": base[1:],
    }
    assert [memory.first_name(name, view, tensor_kind(view)) for name, view in views.items()] == [None] * len(views)
    again = {"first": base.detach(), "shorter": base[:3], "folded": base.view(2, 3), "later": base[1:]}
    assert {name: memory.first_name(f"{name} again", view, tensor_kind(view)) for name, view in again.items()} == {
        n: n for n in again
    }
    for nothing in (torch.empty(0), torch.empty(2, device="meta"), torch.zeros(2, 2).to_sparse()):
        assert memory.first_name("one", nothing, tensor_kind(nothing)) is None
        assert memory.first_name("two", nothing, tensor_kind(nothing)) is None


def _context(world_size: int = 1) -> Context:
    return Context(section="s", state={}, rank=0, world_size=world_size)


def _mapping(count: int) -> dict[str, torch.Tensor]:
    return {f"layer.{index}.w": torch.full((2, index % 3 + 1), float(index)) for index in range(count)}


def _tied() -> dict[str, torch.Tensor]:
    tensors = _mapping(20)
    return {**tensors, "tied": tensors["layer.3.w"], "part": tensors["layer.4.w"][:1]}


_MAPPINGS: dict[str, Callable[[], dict[Any, Any]]] = {
    "plain": lambda: _mapping(20),
    "parameters": lambda: {name: torch.nn.Parameter(tensor) for name, tensor in _mapping(20).items()},
    "numbers": lambda: dict(enumerate(_mapping(20).values())),
    "tied": _tied,
    "empty": lambda: {**_mapping(20), "none": torch.empty(0, 3)},
    "mixed": lambda: {**_mapping(20), "step": 3, "more": {"deep": torch.ones(2)}},
    "nested": lambda: {"model": _mapping(20), "ema": _mapping(20), "list": [_mapping(20), _mapping(3)]},
    "tied to another": lambda: (lambda one: {"model": one, "ema": dict(one)})(_mapping(20)),
    "transposed": lambda: {**_mapping(20), "t": torch.arange(6.0).view(2, 3).t()},
    "with own values": lambda: {"own": bcp.PerRank(_mapping(20)), "all": _mapping(20)},
}


@pytest.mark.parametrize("name", _MAPPINGS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_mapping_is_described_as_its_tensors_are_one_by_one(
    name: str, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = _MAPPINGS[name]()

    def described() -> tuple[object, ...]:
        capture = Capture(_context(world_size))
        capture.visit(tree)
        source = capture.finish()
        shards = [(shard.fqn, shard.meta, shard.box, shard.tensor.data_ptr()) for shard in source.shards]
        values = {path: repr(value) for path, value in source.values.items()}
        return list(source.metas.items()), shards, values, source.aliases, source.digests, source.per_rank

    together = described()
    monkeypatch.setattr(tree_capture, "describe_plain", lambda *_: None)
    assert together == described()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(2, 2).to_sparse(),
        lambda: torch.empty(2, device="meta"),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),
    ],
    ids=["sparse", "meta", "nested", "quantized"],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_one_odd_tensor_among_many_is_named(make: Callable[[], torch.Tensor]) -> None:
    capture = Capture(_context())
    capture.visit({**_mapping(20), "odd": make()})
    with pytest.raises(UnsupportedTensorError, match=r"^(s\.)?odd"):
        capture.finish()


def test_equal_names_among_many_are_refused() -> None:
    capture = Capture(_context())
    with pytest.raises(NameCollisionError, match=r"'7'"):
        capture.visit({**dict(enumerate(_mapping(20).values())), "7": torch.ones(1)})


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("name", _MAPPINGS)
def test_a_mapping_is_filled_as_its_tensors_are_one_by_one(
    name: str, skip: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = _MAPPINGS[name]()
    capture = Capture(_context())
    capture.visit(tree)
    source = capture.finish()
    metas = {**source.metas, **{alias: source.metas[first] for alias, first in source.aliases.items()}}
    stored = StoredSection(metas, source.values, source.aliases)

    def described() -> tuple[object, ...]:
        target = SectionTarget()
        TreeBuilder(_context(), stored, target).visit(tree, skip=skip)
        shards = [(shard.fqn, shard.meta, shard.box, shard.tensor.data_ptr()) for shard in target.shards]
        return list(target.metas.items()), shards, target.aliases, target.optional, target.requested_values

    together = described()
    monkeypatch.setattr(tree_target, "describe_plain", lambda *_: None)
    assert together == described()


def test_a_tied_tensor_is_filled_from_its_first_stored_name() -> None:
    tensor = torch.zeros(2)
    target = SectionTarget()
    stored = StoredSection({"b": tensor_shards("b", tensor)[0]["b"]}, {}, {})
    assert TreeBuilder(_context(), stored, target).visit({"a": tensor, "b": tensor, "c": tensor}) is None
    assert [shard.fqn for shard in target.shards] == list(target.metas) == ["b"]
    assert target.aliases == {"a": "b", "c": "b"}


def _shared_step(state: dict[Any, dict[str, Any]]) -> None:
    step = torch.tensor(3.0)
    for entries in state.values():
        entries["step"] = step


def _plain_value_in_one(state: dict[Any, dict[str, Any]]) -> None:
    [*state.values()][5] |= {"count": 3, "more": {"deep": torch.ones(2)}, "none": None}


def _odd_tensors_in_some(state: dict[Any, dict[str, Any]]) -> None:
    entries = [*state.values()]
    entries[2]["exp_avg"] = torch.nn.Parameter(entries[2]["exp_avg"])
    entries[4] |= {"t": torch.arange(6.0).view(2, 3).t(), "empty": torch.empty(0)}
    entries[6].clear()


def _keys_that_are_equal_as_texts(state: dict[Any, dict[str, Any]]) -> None:
    [*state.values()][3] |= {"0.w": torch.ones(2), "0": {"w": torch.ones(2)}}


def _names_of_two_parameters_that_are_equal(state: dict[Any, dict[str, Any]]) -> None:
    entries = [*state.values()]
    entries[1]["x.y"] = torch.ones(2)
    entries[9]["y"] = torch.ones(2)


def _key_that_is_no_text(state: dict[Any, dict[Any, Any]]) -> None:
    [*state.values()][3][7] = torch.ones(2)


_CHANGES: dict[str, Callable[[dict[Any, dict[str, Any]]], object]] = {
    "plain": lambda state: None,
    "no state": lambda state: state.clear(),
    "shared step": _shared_step,
    "plain value in one": _plain_value_in_one,
    "odd tensors in some": _odd_tensors_in_some,
    "keys that are equal as texts": _keys_that_are_equal_as_texts,
    "names of two parameters that are equal": _names_of_two_parameters_that_are_equal,
    "key that is no text": _key_that_is_no_text,
}


@pytest.mark.parametrize("compare", [False, True])
@pytest.mark.parametrize("name", _CHANGES)
def test_states_are_described_as_each_of_them_is(name: str, compare: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = [torch.nn.Parameter(tensor) for tensor in _mapping(10).values()]
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    _CHANGES[name](optimizer.state)
    holder = StateHolder(optimizer, optimizer.state, optimizer.param_groups)
    ranks = {index: None if index % 3 else (0, index) for index in range(len(parameters))}
    fqns = [*(f"layer.{index}" for index in range(9)), "layer.1.x"]
    params = [
        NamedParam(one, ParamLayout.whole(fqn, tuple(one.shape), replica_ranks=ranks[index]), holder, {}, one)
        for index, (fqn, one) in enumerate(zip(fqns, parameters, strict=True))
    ]
    params[5].master = torch.ones_like(parameters[5])

    def described() -> object:
        source = SectionSource()
        try:
            capture_states(params, source, compare=compare)
        except StateError as error:
            return str(error)
        shards = [(shard.fqn, shard.meta, shard.box, shard.tensor.data_ptr()) for shard in source.shards]
        marks = source.unproven, source.replicated, source.digests
        return list(source.metas.items()), shards, repr(source.values), marks

    together = described()
    monkeypatch.setattr(optimizer_state, "describe_plain", lambda *_: None)
    assert together == described()
