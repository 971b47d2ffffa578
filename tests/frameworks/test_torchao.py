"""torchao's quantized optimizer states and weights: saved by one layout, loaded by another, bit for bit."""

from __future__ import annotations

import logging
import warnings
from itertools import product
from unittest import mock

import pytest
import torch
from sampling import sample
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import bytecheckpoint as bcp
from bytecheckpoint.errors import BytecheckpointError, MismatchError

logging.getLogger("torchao").setLevel(logging.CRITICAL)  # it warns of every kernel that this machine cannot load
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    optim = pytest.importorskip("torchao.optim")
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

LAYOUTS = {"one": 1, "fsdp-2": 2, "hsdp-4": 4, "fsdp-4": 4}
CLASSES = ["AdamW8bit", "AdamW4bit", "AdamWFp8"]


def build(layout, name, seed, lr=1e-2):
    """A model with parameters that torchao quantizes in every layout, in some, and in none."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 130), nn.Linear(130, 2), nn.Linear(2, 4096))
    if layout.startswith("fsdp"):
        fully_shard(model, mesh=init_device_mesh("cpu", (LAYOUTS[layout],)))
    elif layout == "hsdp-4":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    return model, getattr(optim, name)(model.parameters(), lr=lr)


def train(model, optimizer, steps, seed=0):
    losses = []
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        loss = model(torch.randn(4, 64, generator=generator)).square().mean()
        loss.backward()
        with mock.patch("torch.compile", lambda function, **options: function):  # minutes of C++ otherwise
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def gathered(model, optimizer):
    """Every state tensor of the whole model, dequantized, by name and key; gathered without full_tensor()."""
    found = {}
    for name, param in model.named_parameters():
        for key, value in optimizer.state[param].items():
            local = value._local_tensor if isinstance(value, DTensor) else value
            local = local.dequantize() if hasattr(local, "codes") else local
            if isinstance(value, DTensor):
                group = value.device_mesh.get_group(value.device_mesh.ndim - 1)
                parts = [None] * group.size()
                torch.distributed.all_gather_object(parts, local, group=group)
                local = torch.cat(parts)
            found[name, key] = local.clone()
    return found


def save(rank, world_size, layout, name, path):
    model, optimizer = build(layout, name, 0)
    train(model, optimizer, 2)
    bcp.save(path, {"model": model, "optimizer": optimizer}).result()
    return gathered(model, optimizer), train(model, optimizer, 3, seed=5)


def load(rank, world_size, layout, name, path, steps):
    model, optimizer = build(layout, name, 1, lr=1e-3)
    train(model, optimizer, steps)
    report = bcp.load(path, {"model": model, "optimizer": optimizer})
    assert not report.missing
    assert not report.unexpected
    return gathered(model, optimizer), train(model, optimizer, 3, seed=5)


@pytest.mark.parametrize(
    ("name", "source", "target"), sample(list(product(CLASSES, LAYOUTS, LAYOUTS)), 5), ids=lambda value: value
)
@pytest.mark.sampled(2)
def test_optimizer_state_loads_bit_equal_into_another_layout(rank_pool, tmp_path, name, source, target):
    path = str(tmp_path / "saved")
    (expected, losses), *_ = rank_pool.run(save, source, name, path, world_size=LAYOUTS[source])
    for steps in (0, 1):
        for found, further in rank_pool.run(load, target, name, path, steps, world_size=LAYOUTS[target]):
            assert found.keys() == expected.keys()
            assert not [key for key in found if not torch.equal(found[key], expected[key])]
            assert further == pytest.approx(losses, rel=1e-5)


def one_parameter(shape, dim, name, block_size, seed=0):
    """One parameter of ``shape`` sharded over ``dim``, and its optimizer after a step."""
    torch.manual_seed(seed)
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(shape))
    fully_shard(
        model,
        mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)),
        shard_placement_fn=lambda param: Shard(dim),
    )
    optimizer = getattr(optim, name)(model.parameters(), lr=1e-2, block_size=block_size)
    step_once(model, optimizer)
    return model, optimizer


def step_once(model, optimizer):
    model.weight.grad = model.weight.detach() * 0.5 + 0.25
    with mock.patch("torch.compile", lambda function, **options: function):
        optimizer.step()


def edges(rank, world_size, root):
    def state(*args, **kwargs):
        return dict(zip(("model", "optimizer"), one_parameter(*args, **kwargs)))

    # Columns of two blocks for each rank, and none for some ranks.
    for number, (shape, dim) in enumerate([((16, 1024), 1), ((2, 8192), 0)]):
        saved = state(shape, dim, "AdamW8bit", 256)
        bcp.save(f"{root}/{number}", saved).result()
        loaded = state(shape, dim, "AdamW8bit", 256, seed=1)
        bcp.load(f"{root}/{number}", loaded)
        one, two = (each["optimizer"].state[each["model"].weight]["exp_avg"]._local_tensor for each in (saved, loaded))
        assert type(one) is type(two)
        assert torch.equal(getattr(one, "codes", one), getattr(two, "codes", two))
        assert torch.equal(getattr(one, "scale", one), getattr(two, "scale", two))
    # Rows that are shorter than a block, cut in the middle.
    crossing = state((256, 256), 1, "AdamW8bit", 256)
    with pytest.raises(BytecheckpointError, match=r"state\.weight\.exp_avg\.scale: .*blocks of 256 elements cross"):
        bcp.save(f"{root}/crossing", crossing).result()
    # torchao quantizes only some parts: the last rank holds less than 4096 elements, or the others no whole blocks.
    for shape, text in [((10, 2048), "do not tile"), ((225, 128), "blocks of 256 elements cross")]:
        mixed = state(shape, 0, "AdamW8bit", 256)
        with pytest.raises(BytecheckpointError, match=text) as raised:
            bcp.save(f"{root}/mixed", mixed).result()
        assert "state.weight.exp_avg" in str(raised.value)
    bcp.save(f"{root}/small", state((16, 1024), 0, "AdamW8bit", 128)).result()
    other = state((16, 1024), 0, "AdamW8bit", 256)
    with pytest.raises(MismatchError, match=r"exp_avg: stored with block_size = 128, here 256"):
        bcp.load(f"{root}/small", other)


def test_edges_of_blocks(rank_pool, tmp_path):
    rank_pool.run(edges, str(tmp_path), world_size=4)


def load_columns(rank, world_size, path):
    model, optimizer = one_parameter((16, 1024), 0, "AdamW8bit", 256)
    bcp.load(path, {"model": model, "optimizer": optimizer})
    return optimizer.state[model.weight]["exp_avg"]._local_tensor.dequantize()


def test_columns_of_blocks_load_as_rows(rank_pool, tmp_path):
    rank_pool.run(save_columns, str(tmp_path / "a"), world_size=4)
    rows = torch.cat(rank_pool.run(load_columns, str(tmp_path / "a"), world_size=2))
    columns = torch.cat(rank_pool.run(save_columns, str(tmp_path / "b"), world_size=4), 1)
    assert torch.equal(rows, columns)


def save_columns(rank, world_size, path):
    model, optimizer = one_parameter((16, 1024), 1, "AdamW8bit", 256)
    bcp.save(path, {"model": model, "optimizer": optimizer}).result()
    return optimizer.state[model.weight]["exp_avg"]._local_tensor.dequantize()


@pytest.mark.parametrize("config", [Int8WeightOnlyConfig(), Float8WeightOnlyConfig()], ids=["int8", "float8"])
def test_quantized_weights_are_filled_in_place(tmp_path, config):
    def model(seed):
        torch.manual_seed(seed)
        made = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 8)).bfloat16()
        quantize_(made, config)
        return made

    saved, loaded = model(0), model(1)
    inputs = torch.randn(4, 32, dtype=torch.bfloat16)
    bcp.save(tmp_path / "a", {"model": saved}).result()
    assert not torch.equal(loaded[0].weight.dequantize(), saved[0].weight.dequantize())
    bcp.load(tmp_path / "a", {"model": loaded}, strict="exact")
    assert torch.equal(loaded(inputs), saved(inputs))
    plain = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 8)).bfloat16()
    with pytest.raises(MismatchError, match=r"model\.0\.weight"):
        bcp.load(tmp_path / "a", {"model": plain})
