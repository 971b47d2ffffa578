"""Memory that a load would write twice is found, and refused before anything changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bytecheckpoint as bcp
from bytecheckpoint.errors import MismatchError
from bytecheckpoint.loading.overlaps import overlapping_shards
from bytecheckpoint.tensors.shards import Shard, whole_tensor


def shards_of(**tensors: torch.Tensor) -> list[Shard]:
    return [Shard(name, *whole_tensor(tensor.dtype, tensor.shape), tensor) for name, tensor in tensors.items()]


def addresses(tensor: torch.Tensor) -> list[int]:
    """The address of every byte that a write to the tensor changes, expanded dimensions counted once."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor = tensor.narrow(dim, 0, min(1, tensor.shape[dim]))
    elements = [tensor.data_ptr()] if tensor.numel() else []
    for stride, size in zip(tensor.stride(), tensor.shape):
        elements = [start + i * stride * tensor.element_size() for start in elements for i in range(size)]
    return [start + i for start in elements for i in range(tensor.element_size())]


BASE = torch.zeros(128, dtype=torch.int16)  # longer than any view below reaches
VIEWS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 7)), max_size=3).flatmap(
    lambda steps: st.builds(
        lambda offset, wide: (
            BASE.as_strided([n for n, _ in steps], [s for _, s in steps], offset)
            if wide
            else BASE.view(torch.int8).as_strided([n for n, _ in steps], [s for _, s in steps], offset)
        ),
        st.integers(0, 20),
        st.booleans(),
    )
)


@given(VIEWS, VIEWS)
def test_overlaps_are_those_of_brute_force(one: torch.Tensor, other: torch.Tensor) -> None:
    bytes_of = {"one": addresses(one), "other": addresses(other)}
    itself = {name for name, found in bytes_of.items() if len(set(found)) < len(found)}
    expected: set[frozenset[str]] = {frozenset({name}) for name in itself}
    a, b = sorted(bytes_of["one"]), sorted(bytes_of["other"])
    ranges = all(found == list(range(found[0], found[-1] + 1)) for found in (a, b) if found)
    if not itself and set(a) & set(b) and not (ranges and a == b):
        expected.add(frozenset({"one", "other"}))
    assert {frozenset(pair) for pair in overlapping_shards(shards_of(one=one, other=other))} == expected


def test_parts_of_one_memory_that_do_not_overlap() -> None:
    whole = torch.zeros(6, 6)
    parts = {f"rows{i}": part for i, part in enumerate(whole[:2].chunk(2))}
    parts |= {f"columns{i}": part for i, part in enumerate(whole[2:].chunk(3, dim=1))}
    pair = torch.zeros(4, dtype=torch.complex64)
    parts |= {"real": pair.real, "imaginary": pair.imag, "shape": whole[0].view(2, 3)}
    assert list(overlapping_shards(shards_of(**parts))) == []


def test_loads_into_overlapping_memory_are_refused(tmp_path: Path) -> None:
    bcp.save(tmp_path / "c", {"s": {"a": torch.ones(4, 3), "b": torch.ones(6)}, "t": {"c": torch.ones(6)}})
    base = torch.zeros(12)
    cases: dict[str, dict[str, Any]] = {
        "s.a: its own elements": {"a": base.as_strided((4, 3), (1, 1)), "b": torch.zeros(6)},
        "shares memory with (a|b)": {"a": base.view(4, 3), "b": base[3:9]},
    }
    for message, targets in cases.items():
        with pytest.raises(MismatchError, match=rf"(?s)overlap: 1 .*exclude=.*{message}") as caught:
            bcp.load(tmp_path / "c", {"s": targets, "t": {"c": base[:6]}})
        assert [fault[0] for fault in caught.value.faults] == ["overlap"]
        assert base.sum() == 0
    bcp.load(tmp_path / "c", {"s": cases["shares memory with (a|b)"]}, exclude=["s.b"])
    assert base.sum() == 12
