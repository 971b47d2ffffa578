"""Shortcuts for many tensors give the same results as handling each tensor separately."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bytecheckpoint.errors import BytecheckpointError, UnsupportedTensorError
from bytecheckpoint.frameworks.sections import _are_plain, check_name
from bytecheckpoint.frameworks.tensors import dense_view, tensor_kind, tensor_shards
from bytecheckpoint.frameworks.tree_capture import SameMemory
from bytecheckpoint.tensors.geometry import Box
from bytecheckpoint.tensors.shards import Shard

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
    (meta, [one]), (other, [two]) = tensor_shards("a", first), tensor_shards("b", second)
    assert meta == other
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
