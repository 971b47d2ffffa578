"""Tensor subclasses that consist of other tensors: as parameters, optimizer state, and local tensors of DTensors."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import bytecheckpoint as bcp
from bytecheckpoint.errors import MismatchError, NameCollisionError, UnsupportedTensorError
from bytecheckpoint.frameworks.wrapper_tensors import HeldPart
from bytecheckpoint.tensors.geometry import Box

pytestmark = pytest.mark.sampled(4, of=__name__)


class Quantized(torch.Tensor):
    """8-bit codes with a scale for every block of ``rows`` x ``columns`` elements, like torchao's weights."""

    @staticmethod
    def __new__(cls, codes, scale, block):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes, scale, block):
        self.codes, self.scale, self.block = codes, scale, block

    def __tensor_flatten__(self):
        return ["codes", "scale"], {"block": self.block}

    @classmethod
    def __tensor_unflatten__(cls, inner, attributes, size=None, stride=None):
        return cls(inner["codes"], inner["scale"], attributes["block"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        assert func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.view.default), func
        return cls(args[0].codes, args[0].scale, args[0].block)


class Other(Quantized):
    pass


def quantized(shape, block, seed, cls=Quantized):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 127, shape, generator=generator, dtype=torch.int8)
    return cls(codes, torch.rand([n // b for n, b in zip(shape, block)], generator=generator), list(block))


def module(**tensors):
    made = nn.Module()
    for name, tensor in tensors.items():
        made.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    return made


def equal(a, b):
    return torch.equal(a.codes, b.codes) and torch.equal(a.scale, b.scale)


# ---------------------------------------------------------------------------------------------------------- geometry


@st.composite
def part_of_a_tensor(draw):
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=3)))
    bounds = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    bounds = [(a, b) if b > a else (0, n) for (a, b), n in zip(bounds, shape)]
    return shape, Box(tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds))


@given(part_of_a_tensor(), st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16]))
@settings(deadline=None, max_examples=examples(500))
def test_items_stand_for_the_same_elements_in_the_part_and_in_the_whole(part, size):
    shape, box = part
    if box.numel % size or prod(shape) % size:
        return
    blocks = torch.arange(prod(shape)).reshape(shape)[box.slices()].reshape(-1, size)
    exact = bool(((blocks - blocks[:, :1]) == torch.arange(size)).all() and (blocks[:, 0] % size == 0).all())
    try:
        global_shape, found = HeldPart(torch.empty(0), shape, box).items("w", size)
    except UnsupportedTensorError:
        # One row of items cannot express blocks that are apart in the flattened tensor.
        apart = bool((blocks[1:, 0] - blocks[:-1, 0] != size).any())
        assert not exact or apart
        return
    assert exact
    numbers = torch.arange(prod(shape) // size).reshape(global_shape)
    assert numbers[found.slices()].reshape(-1).tolist() == (blocks[:, 0] // size).tolist()


def test_global_shape_of_items_does_not_depend_on_the_part():
    for shape, size in product([(8, 6), (4, 2, 8), (16,)], [1, 2, 4]):
        whole, _ = HeldPart(torch.empty(0), shape, Box.whole(shape)).items("w", size)
        half = Box((0,) * len(shape), (shape[0] // 2, *shape[1:]))
        assert HeldPart(torch.empty(0), shape, half).items("w", size)[0] == whole
        assert prod(whole) * size == prod(shape)


@given(part_of_a_tensor(), st.data())
@settings(deadline=None, max_examples=examples(200))
def test_blocks_of_a_grid_stand_for_the_same_elements(part, data):
    shape, box = part
    extents = [data.draw(st.sampled_from([e for e in range(1, n + 1) if n % e == 0])) for n in box.lengths]
    blocks = tuple(n // e for n, e in zip(box.lengths, extents))
    local = torch.empty(box.lengths)
    try:
        global_shape, found = HeldPart(local, shape, box).grid("w", blocks)
    except UnsupportedTensorError:
        assert any(o % e or n % e for o, n, e in zip(box.offsets, shape, extents))
        return
    for index in product(*map(range, blocks)):
        first = [o + i * e for o, i, e in zip(box.offsets, index, extents)]
        assert first == [(o + i) * e for o, i, e in zip(found.offsets, index, extents)]
    assert global_shape == tuple(n // e for n, e in zip(shape, extents))


# ----------------------------------------------------------------------------------------------------------- parameters


def test_a_parameter_is_stored_as_its_parts_and_filled_in_place(tmp_path):
    weight = quantized((4, 6), (1, 3), 0)
    model = module(weight=weight, bias=torch.ones(3))
    model.register_parameter("tied", model.weight)
    bcp.save(tmp_path / "a", {"model": model}).result()
    stored = bcp.open(tmp_path / "a")
    assert torch.equal(stored["model.weight.codes"][:], weight.codes)
    assert torch.equal(stored["model.tied.scale"][:], weight.scale)
    target = module(weight=quantized((4, 6), (1, 3), 1), bias=torch.zeros(3))
    target.register_parameter("tied", target.weight)
    before = target.weight.codes.data_ptr()
    report = bcp.load(tmp_path / "a", {"model": target}, strict="exact")
    assert not report.missing
    assert not report.unexpected
    assert equal(target.weight, weight)
    assert target.weight.codes.data_ptr() == before


def test_another_class_or_block_is_refused_by_name(tmp_path):
    bcp.save(tmp_path / "a", {"model": module(weight=quantized((4, 6), (1, 3), 0))}).result()
    for target, text in [
        (quantized((4, 6), (1, 3), 1, Other), r"weight: stored with class .*\.Quantized, here .*\.Other"),
        (quantized((4, 6), (2, 3), 1), r"weight: stored with block = \[1, 3\], here \[2, 3\]"),
    ]:
        kept = target.codes.clone()
        with pytest.raises(MismatchError, match=text):
            bcp.load(tmp_path / "a", {"model": module(weight=target)})
        assert torch.equal(target.codes, kept)
    with pytest.raises(MismatchError, match=r"model\.weight"):
        bcp.load(tmp_path / "a", {"model": module(weight=torch.zeros(4, 6))})
    bcp.save(tmp_path / "b", {"model": module(weight=torch.zeros(4, 6))}).result()
    with pytest.raises(MismatchError, match=r"model\.weight\.codes"):
        bcp.load(tmp_path / "b", {"model": module(weight=quantized((4, 6), (1, 3), 0))})


def test_parts_with_the_name_of_another_parameter_are_refused(tmp_path):
    model = module(weight=quantized((4, 6), (1, 3), 0))
    inner = nn.Module()
    inner.register_parameter("codes", nn.Parameter(torch.zeros(1)))
    model._modules["weight"] = inner  # register_module would refuse the name
    with pytest.raises(NameCollisionError, match=r"weight\.codes"):
        bcp.save(tmp_path / "a", {"model": model})


# ------------------------------------------------------------------------------------------ local tensors of DTensors


def sharded(whole, mesh, dim):
    """The wrapper as a DTensor; its parts are cut like its elements. ``dim`` None replicates."""
    if dim is None:
        return DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
    rank, size = mesh.get_local_rank(), mesh.size()
    parts = [t.tensor_split(size, dim)[rank].clone() for t in (whole.codes, whole.scale)]
    local = type(whole)(*parts, whole.block)
    return DTensor.from_local(local, mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride())


def save_and_load_sharded(rank, world_size, root):
    mesh = init_device_mesh("cpu", (world_size,))
    whole, blank = quantized((8, 12), (2, 3), 0), quantized((8, 12), (2, 3), 1)
    for name, dim in [("rows", 0), ("columns", 1), ("copies", None)]:
        bcp.save(f"{root}/{name}", {"model": module(w=sharded(whole, mesh, dim))}).result()
    dist.barrier()
    for name, dim in product(["rows", "columns", "copies", "one"], [0, 1, None]):
        target = sharded(blank, mesh, dim)
        bcp.load(f"{root}/{name}", {"model": module(w=target)})
        assert equal(target._local_tensor, sharded(whole, mesh, dim)._local_tensor), (name, dim)


def test_dtensors_of_wrappers_load_into_other_shardings(rank_pool, tmp_path):
    whole = quantized((8, 12), (2, 3), 0)
    bcp.save(tmp_path / "one", {"model": module(w=whole)}).result()
    for world_size in (2, 4):
        rank_pool.run(save_and_load_sharded, str(tmp_path), world_size=world_size)
        for name in ("rows", "columns", "copies"):
            target = quantized((8, 12), (2, 3), 1)
            bcp.load(tmp_path / name, {"model": module(w=target)})
            assert equal(target, whole)


def refused(rank, world_size, root):
    mesh = init_device_mesh("cpu", (world_size,))
    # One scale for what each rank holds: complete on two ranks, and a shape that no other layout has.
    own = Quantized(torch.full((4, 6), rank, dtype=torch.int8), torch.full((1, 1), float(rank)), "rank")
    bcp.save(f"{root}/own", {"model": module(w=DTensor.from_local(own, mesh, [Shard(0)]))}).result()
    dist.barrier()
    again = Quantized(torch.zeros(4, 6, dtype=torch.int8), torch.zeros(1, 1), "rank")
    bcp.load(f"{root}/own", {"model": module(w=DTensor.from_local(again, mesh, [Shard(0)]))})
    assert equal(again, own)
    columns = Quantized(torch.zeros(8, 3, dtype=torch.int8), torch.zeros(1, 1), "rank")
    other = module(w=DTensor.from_local(columns, mesh, [Shard(1)]))
    with pytest.raises(MismatchError, match=r"w\.scale.*\[2, 1\].*\[1, 2\]"):
        bcp.load(f"{root}/own", {"model": other})
    lost = Quantized(torch.zeros(4, 6, dtype=torch.int8), torch.zeros(5), "?")
    with pytest.raises(UnsupportedTensorError, match=r"w\.scale: .*Quantized .*does not divide the local shape"):
        bcp.save(f"{root}/lost", {"model": module(w=DTensor.from_local(lost, mesh, [Shard(0)]))})


def test_parts_that_fit_no_grid_are_refused_by_name(rank_pool, tmp_path):
    rank_pool.run(refused, str(tmp_path), world_size=2)


# ------------------------------------------------------------------------------------------------------ optimizer state


class Keeper(torch.optim.Optimizer):
    """An optimizer whose state is what ``make`` returns for a parameter."""

    def __init__(self, params, make, lr=0.1):
        super().__init__(params, {"lr": lr})
        self.make = make

    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param] = self.make(param)


def test_state_of_wrappers_is_filled_in_place_but_not_created(tmp_path):
    state = {"avg": quantized((4, 6), (1, 3), 0), "step": 3}
    model = module(w=torch.zeros(4, 6))
    saved = Keeper(model.parameters(), lambda p: state)
    saved.step()
    bcp.save(tmp_path / "a", {"model": model, "optimizer": saved}).result()
    assert "optimizer.state.w.avg.codes" in bcp.open(tmp_path / "a")
    target = Keeper(model.parameters(), lambda p: {"avg": quantized((4, 6), (1, 3), 1), "step": 0})
    with pytest.raises(MismatchError, match=r"state\.w\.avg: .*cannot create.*one optimizer step"):
        bcp.load(tmp_path / "a", {"model": model, "optimizer": target})
    target.step()
    avg = target.state[model.w]["avg"]
    bcp.load(tmp_path / "a", {"model": model, "optimizer": target})
    assert target.state[model.w]["avg"] is avg
    assert equal(avg, state["avg"])
    assert target.state[model.w]["step"] == 3
    target.make = lambda p: {"avg": quantized((4, 6), (2, 3), 1), "step": 0}
    target.step()
    with pytest.raises(MismatchError, match=r"state\.w\.avg: stored with block = \[1, 3\], here \[2, 3\]"):
        bcp.load(tmp_path / "a", {"model": model, "optimizer": target})


def codes_and_absmax(param):
    """Plain tensors as bitsandbytes keeps them: codes of the (local) shape, and one maximum for 16 of them."""
    local = param.to_local() if isinstance(param, DTensor) else param
    generator = torch.Generator().manual_seed(local.numel())
    codes = torch.randint(0, 256, local.shape, generator=generator, dtype=torch.uint8)
    absmax = torch.rand(-(-local.numel() // 16), generator=generator)
    return {"step": 2, "state1": codes, "absmax1": absmax, "qmap1": torch.linspace(-1, 1, 256)}


def load_bitsandbytes_sharded(rank, world_size, root):
    model = fully_shard(nn.Linear(8, 8, bias=False), mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = Keeper(model.parameters(), codes_and_absmax)
    with pytest.raises(MismatchError, match=r"state\.weight\.(absmax1|qmap1): .*8-bit codes.*sharded"):
        bcp.load(f"{root}/a", {"model": model, "optimizer": optimizer})
    optimizer.step()
    with pytest.raises(UnsupportedTensorError, match=r"state\.weight\.(absmax1|qmap1): .*state tensor of shape"):
        bcp.save(f"{root}/b", {"model": model, "optimizer": optimizer})


def test_plain_codes_and_absmax_are_stored_whole_and_refused_sharded(rank_pool, tmp_path):
    model = nn.Linear(8, 8, bias=False)
    saved = Keeper(model.parameters(), codes_and_absmax)
    saved.step()
    bcp.save(tmp_path / "a", {"model": model, "optimizer": saved}).result()
    target = Keeper(model.parameters(), codes_and_absmax)
    bcp.load(tmp_path / "a", {"model": model, "optimizer": target})
    for key, value in saved.state[model.weight].items():
        assert torch.equal(torch.as_tensor(target.state[model.weight][key]), torch.as_tensor(value)), key
    rank_pool.run(load_bitsandbytes_sharded, str(tmp_path), world_size=2)


@pytest.mark.parametrize("stepped", [False, True])
def test_a_state_dict_of_bitsandbytes_nests_its_entries(tmp_path, stepped):
    """``optimizer.pt`` as bitsandbytes 0.50 writes it: all but the step is in a dict that FSDP leaves alone."""
    model = nn.Linear(8, 8, bias=False)
    entries = codes_and_absmax(model.weight)
    nested = {"step": entries["step"], "__bnb_optimizer_quant_state__": {k: entries[k] for k in entries if k != "step"}}
    groups = [{"lr": 0.5, "params": [0]}]
    torch.save(
        {"model": model.state_dict(), "optimizer": {"state": {0: nested}, "param_groups": groups}}, tmp_path / "a.pt"
    )
    target = Keeper(model.parameters(), lambda p: {k: v * 0 for k, v in codes_and_absmax(p).items()})
    if stepped:
        target.step()
    report = bcp.load(tmp_path / "a.pt", {"model": model, "optimizer": target})
    assert (report.missing, report.unexpected) == ([], [])
    found = target.state[model.weight]
    assert found.keys() == entries.keys()
    assert all(torch.equal(torch.as_tensor(found[key]), torch.as_tensor(entries[key])) for key in entries)
    assert target.param_groups[0]["lr"] == 0.5
    with pytest.raises(MismatchError, match="exp_avg"):
        bcp.load(tmp_path / "a.pt", {"model": model, "optimizer": torch.optim.AdamW(model.parameters())})
