"""Save, open and load tensors of every dtype, memory layout and kind."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import bytecheckpoint as bcp
from bytecheckpoint import errors
from bytecheckpoint.tensors.dtypes import DTYPES
from bytecheckpoint.testing.ranks import RankPool

# torch warns about every complex32 tensor.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")

KNOWN = [name for name in DTYPES if isinstance(getattr(torch, name, None), torch.dtype)]


def filled(name: str, *shape: int) -> torch.Tensor:
    """A tensor of any type, from bytes."""
    dtype = getattr(torch, name)
    raw = torch.arange(torch.Size(shape).numel() * dtype.itemsize, dtype=torch.int64) * 31 % 251
    raw = raw % 2 if dtype == torch.bool else raw
    return raw.to(torch.uint8).view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Type, shape and the bytes in row-major order; for types that torch cannot even copy, too."""
    same_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
    plain = tensor.detach().resolve_conj().resolve_neg() if tensor.is_complex() else tensor.detach()
    flat = plain.view(same_size[tensor.dtype.itemsize]).contiguous().reshape(-1)
    return tensor.dtype, tuple(tensor.shape), flat.view(torch.uint8).tolist() if flat.numel() else []


def test_every_dtype_of_torch_is_supported() -> None:
    types = {str(v).removeprefix("torch.") for v in vars(torch).values() if isinstance(v, torch.dtype)}
    quantised = {"qint8", "quint8", "qint32", "quint4x2", "quint2x4"}
    assert types - quantised <= set(DTYPES)


@pytest.mark.parametrize("name", KNOWN)
def test_every_type(name: str, tmp_path: Path) -> None:
    whole = filled(name, 4, 6)
    tree = {"whole": whole, "turned": whole.t(), "part": whole[1:3, ::2], "element": whole[2, 3], "none": whole[:0]}
    reference = {key: bits(tensor) for key, tensor in tree.items()}
    bcp.save(tmp_path / "checkpoint", {"extra_state": tree}, options=bcp.SaveOptions(chunk_size=64))

    checkpoint = bcp.open(tmp_path / "checkpoint")
    assert {key: bits(checkpoint[f"extra_state.{key}"].load()) for key in tree} == reference
    assert bits(checkpoint["extra_state.whole"][1:3, 2:5]) == bits(whole[1:3, 2:5])

    fresh: dict[str, Any] = {}
    bcp.load(tmp_path / "checkpoint", {"extra_state": fresh})
    assert {key: bits(tensor) for key, tensor in fresh.items()} == reference

    # In place, into memory with other strides.
    room = filled("uint8", 6, 8 * whole.dtype.itemsize).zero_().view(whole.dtype)
    targets = {
        "whole": room[:4, 1:7],
        "turned": filled(name, 6, 4),
        "part": filled(name, 3, 2).t(),
        "element": filled(name, 1)[0],
        "none": filled(name, 0, 6),
    }
    report = bcp.load(tmp_path / "checkpoint", {"extra_state": (given := dict(targets))})
    assert not report.cast
    assert all(given[key] is targets[key] for key in targets)
    assert {key: bits(tensor) for key, tensor in targets.items()} == reference


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "permuted": lambda t: t.permute(2, 0, 3, 1),
    "channels last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "strided": lambda t: t[::2, 1:, ::3],
    "expanded": lambda t: t[:, :1].expand(2, 3, 4, 5),
    "expanded scalar": lambda t: t[0, 0, 0, 0].expand(3, 2),
    "overlapping": lambda t: t.reshape(-1).as_strided((4, 3), (1, 1)),
}


@pytest.mark.parametrize("kind", VIEWS)
def test_views_are_stored_by_their_values(kind: str, tmp_path: Path) -> None:
    view = VIEWS[kind](torch.arange(120, dtype=torch.float32).reshape(2, 3, 4, 5))
    bcp.save(tmp_path / "checkpoint", {"extra_state": {"view": view}})
    assert bits(bcp.open(tmp_path / "checkpoint")["extra_state.view"].load()) == bits(view)
    if kind == "overlapping":
        return
    target = VIEWS[kind](torch.zeros(2, 3, 4, 5))
    strides = target.stride()
    bcp.load(tmp_path / "checkpoint", {"extra_state": {"view": target}})
    assert bits(target) == bits(view)
    assert target.stride() == strides


def test_an_expanded_target_accepts_only_equal_values(tmp_path: Path) -> None:
    bcp.save(tmp_path / "checkpoint", {"extra_state": {"view": torch.tensor([1.0, 2.0])}})
    target = torch.tensor([7.0]).expand(2)
    with pytest.raises(errors.StateError, match=r"view: .*expanded.*contiguous"):
        bcp.load(tmp_path / "checkpoint", {"extra_state": {"view": target}})
    assert target.tolist() == [7.0, 7.0]
    bcp.save(tmp_path / "checkpoint", {"extra_state": {"view": torch.tensor([torch.nan, torch.nan])}})
    bcp.load(tmp_path / "checkpoint", {"extra_state": {"view": target}})
    assert target.isnan().all()


@pytest.mark.parametrize("lazy", [lambda t: t.conj(), lambda t: t.conj().imag], ids=["conjugated", "negated"])
@pytest.mark.parametrize("async_save", [False, True])
def test_lazy_views_are_stored_and_filled_by_their_values(
    lazy: Callable[..., torch.Tensor], async_save: bool, tmp_path: Path
) -> None:
    base = torch.tensor([1 + 2j, 3 - 4j])
    view = lazy(base)
    tree = {"view": view, "base": base, "same": base}
    bcp.save(tmp_path / "checkpoint", {"extra_state": tree}, async_save=async_save).result()
    fresh: dict[str, Any] = {}
    bcp.load(tmp_path / "checkpoint", {"extra_state": fresh})
    assert torch.equal(fresh["view"], view)
    assert torch.equal(fresh["base"], base)
    memory = torch.zeros(2, dtype=base.dtype)
    bcp.load(tmp_path / "checkpoint", {"extra_state": {"view": lazy(memory)}}, include=["extra_state.view"])
    assert torch.equal(lazy(memory), view)


class Tied(nn.Module):
    def __init__(self, tie: bool = True, value: float = 1.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        nn.init.constant_(self.head.weight, value + 1)
        nn.init.constant_(self.embedding.weight, value)
        if tie:
            self.head.weight = self.embedding.weight


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    bcp.save(tmp_path / "tied", {"model": Tied(value=3.0)})
    checkpoint = bcp.open(tmp_path / "tied")
    assert checkpoint.manifest.tensors.names == ["model.embedding.weight"]
    assert checkpoint["model.head.weight"][0].tolist() == checkpoint["model.embedding.weight"][0].tolist() == [3.0] * 3

    tied = Tied()
    bcp.load(tmp_path / "tied", {"model": tied})
    assert tied.head.weight is tied.embedding.weight
    assert tied.head.weight.unique().tolist() == [3.0]

    untied = Tied(tie=False)
    bcp.load(tmp_path / "tied", {"model": untied})
    assert [p.unique().tolist() for p in untied.parameters()] == [[3.0], [3.0]]
    assert untied.head.weight.data_ptr() != untied.embedding.weight.data_ptr()


def test_weights_that_were_separate_into_a_tied_target(tmp_path: Path) -> None:
    bcp.save(tmp_path / "untied", {"model": Tied(tie=False, value=5.0)})
    target = Tied()
    report = bcp.load(tmp_path / "untied", {"model": target})
    assert target.head.weight is target.embedding.weight
    assert target.embedding.weight.unique().tolist() == [5.0]
    assert any("stored separately" in note for note in report.notes)


class Buffers(nn.Module):
    def __init__(self, value: float, kept: bool = True) -> None:
        super().__init__()
        self.register_buffer("kept", torch.full((2,), value))
        self.register_buffer("scratch", torch.full((2,), value), persistent=not kept)
        self.register_buffer("absent", None)
        self.scalar = nn.Parameter(torch.tensor(value))
        self.nothing = nn.Parameter(torch.zeros(0, 4))


def test_buffers_scalars_and_empty_parameters(tmp_path: Path) -> None:
    bcp.save(tmp_path / "checkpoint", {"model": Buffers(2.0)})
    assert set(bcp.open(tmp_path / "checkpoint")) == {"model.kept", "model.scalar", "model.nothing"}
    target = Buffers(1.0)
    bcp.load(tmp_path / "checkpoint", {"model": target})
    assert (target.kept.tolist(), target.scalar.item()) == ([2.0, 2.0], 2.0)
    assert target.scratch.tolist() == [1.0, 1.0]
    with pytest.raises(errors.MismatchError, match=r"model\.scratch"):
        bcp.load(tmp_path / "checkpoint", {"model": Buffers(1.0, kept=False)})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 5)
        self.down = nn.Linear(5, 3)
        self.register_buffer("count", torch.tensor(4.0))


def _onto_meta(rank: int, world_size: int, path: str) -> None:
    def build() -> nn.Module:
        return fully_shard(Net()) if dist.is_initialized() else Net()

    source = build()
    optimizer = torch.optim.AdamW(source.parameters(), lr=0.1)
    for parameter in source.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    bcp.save(path, {"model": source, "optimizer": optimizer})

    with torch.device("meta"):
        target = build()
        stepper = torch.optim.AdamW(target.parameters(), lr=0.2)
    report = bcp.load(path, {"model": target, "optimizer": stepper})
    assert not report.missing
    theirs, ours = ({n: _local(t) for n, t in model.state_dict().items()} for model in (source, target))
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)
    # The optimizer steps the model's current parameters with the loaded state.
    stepped = {id(p) for group in stepper.param_groups for p in group["params"]}
    assert stepped == {id(p) for p in target.parameters()}
    for one, model in ((optimizer, source), (stepper, target)):
        for parameter in model.parameters():
            assert parameter in one.state
            parameter.grad = torch.full_like(parameter, 0.5)
        one.step()
    for first, second in zip(source.parameters(), target.parameters()):
        assert torch.equal(_local(first), _local(second))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def test_meta_targets_get_memory(tmp_path: Path) -> None:
    _onto_meta(0, 1, str(tmp_path / "checkpoint"))


def test_sharded_meta_targets_get_memory(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(_onto_meta, str(tmp_path / "checkpoint"), world_size=2)


def _sharded_types(rank: int, world_size: int, path: str) -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
    mesh = init_device_mesh("cpu", (world_size,))

    def build(zero: bool) -> dict[str, Any]:
        tree = {}
        for name in KNOWN:
            # Three rows over two ranks.
            local = filled(name, 3, 4)[2 * rank : 2 * rank + 2]
            if zero:
                local = torch.zeros(local.shape[0], 4 * local.dtype.itemsize, dtype=torch.uint8).view(local.dtype)
            tree[name] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=(3, 4), stride=(4, 1))
        return tree

    bcp.save(path, {"extra_state": build(zero=False)})
    target = build(zero=True)
    bcp.load(path, {"extra_state": target})
    expected = build(zero=False)
    return [name for name in KNOWN if bits(target[name].to_local()) != bits(expected[name].to_local())]


def test_every_type_sharded(rank_pool: RankPool, tmp_path: Path) -> None:
    assert rank_pool.run(_sharded_types, str(tmp_path / "checkpoint"), world_size=2) == [[], []]
    checkpoint = bcp.open(tmp_path / "checkpoint")
    for name in KNOWN:
        assert bits(checkpoint[f"extra_state.{name}"].load()) == bits(filled(name, 3, 4)), name
