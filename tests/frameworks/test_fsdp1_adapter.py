"""FSDP-1 on real ranks: flat shards hold the elements of their boxes, and any wrapping loads from any other."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

from bytecheckpoint.errors import MismatchError, StateError, UnsupportedTensorError
from bytecheckpoint.frameworks.base import Context
from bytecheckpoint.frameworks.fsdp1 import FSDP1Adapter
from bytecheckpoint.frameworks.module import ModuleAdapter
from bytecheckpoint.frameworks.optimizer import OptimizerAdapter
from bytecheckpoint.frameworks.registry import find_adapter, parameter_layouts
from bytecheckpoint.tensors.geometry import Box
from bytecheckpoint.tensors.shards import StoredSection

pytestmark = pytest.mark.sampled(6, of=__name__)

CPU = torch.device("cpu")
WRAPS = ("root", "blocks", "layers")


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width + 2)
        self.down = nn.Linear(width + 2, width, bias=False)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x + self.gain * self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Odd shapes, so that flat cuts fall within rows; small parameters; a tie; an unusual memory order."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.wte = nn.Embedding(7, 5)
        self.blocks = nn.ModuleList([Block(5), Block(5)])
        self.conv = nn.Conv2d(2, 3, (2, 3)).to(memory_format=torch.channels_last)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.wte.weight
        self.register_buffer("count", torch.arange(3))
        self.register_buffer("mask", torch.ones(2), persistent=False)

    def forward(self, ids):
        x = self.wte(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x) + self.conv(torch.ones(1, 2, 2, 3, dtype=x.dtype)).sum()


def number(net):
    """Set every element to its index in the model, so that its value identifies its position."""
    start = 0
    with torch.no_grad():
        for param in net.parameters():
            param.copy_(torch.arange(start, start + param.numel(), dtype=param.dtype).view(param.shape))
            start += param.numel()
    return net


def wrap(net, kind, strategy="FULL_SHARD", use_orig_params=True, **more):
    if kind == "plain":
        return net
    if kind == "ddp":
        return DDP(net)
    if kind == "fsdp2":
        net.conv.to(memory_format=torch.contiguous_format)
        for block in net.blocks:
            fully_shard(block, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        return fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    policies = {"root": None, "blocks": {Block}, "layers": {Block, nn.Linear, nn.LayerNorm, nn.Conv2d}}
    policy = policies[kind] and ModuleWrapPolicy(policies[kind] - ({nn.Linear} if kind == "layers" else set()))
    if strategy == "HYBRID_SHARD":
        more["device_mesh"] = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    return FSDP(
        net,
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=use_orig_params,
        auto_wrap_policy=policy,
        device_id=CPU,
        **more,
    )


def capture(model, section="model", state=None):
    return find_adapter(model).capture(model, Context(section, state or {"model": model}, layouts_of=parameter_layouts))


def exported(source):
    """A source in a form that travels between processes."""
    return {
        "metas": source.metas,
        "shards": [(s.fqn, s.box.offsets, s.box.lengths, s.tensor.detach().clone().numpy()) for s in source.shards],
        "values": source.values,
        "aliases": source.aliases,
    }


def assembled(parts):
    """Whole tensors from every rank's shards. Checks that they cover everything and that overlaps agree."""
    metas = {}
    for part in parts:
        for name, meta in part["metas"].items():
            assert metas.setdefault(name, meta) == meta, name
    whole = {name: np.zeros(meta.shape, dtype=meta.dtype.name) for name, meta in metas.items()}
    seen = {name: np.zeros(meta.shape, dtype=bool) for name, meta in metas.items()}
    for part in parts:
        for name, offsets, lengths, values in part["shards"]:
            place = Box(offsets, lengths).slices()
            assert np.array_equal(whole[name][place][seen[name][place]], values[seen[name][place]]), name
            whole[name][place] = values
            seen[name][place] = True
    assert all(mask.all() for mask in seen.values()), [name for name, mask in seen.items() if not mask.all()]
    return whole


def gathered(source):
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, exported(source))
    return parts


def stored_from(parts):
    metas = {name: meta for part in parts for name, meta in part["metas"].items()}
    aliases = {name: whole for part in parts for name, whole in part["aliases"].items()}
    values = {path: value for part in parts for path, value in part["values"].items()}
    return StoredSection(metas | {name: metas[whole] for name, whole in aliases.items()}, values, aliases)


def load(obj, section, state, parts):
    stored, whole = stored_from(parts), assembled(parts)
    target = find_adapter(obj).target(obj, Context(section, state, layouts_of=parameter_layouts), stored)
    for shard in target.shards:
        fqn = stored.aliases.get(shard.fqn, shard.fqn)
        if fqn not in whole:
            assert shard.fqn in target.optional, shard.fqn
            continue
        assert stored.metas[shard.fqn] == shard.meta, shard.fqn
        shard.tensor.copy_(torch.from_numpy(np.array(whole[fqn][shard.box.slices()])))
    missing = target.requested_values - stored.values.keys() - target.optional
    assert not missing, missing
    target.apply(stored.values)
    return target


def train(model, optimizer, steps, seed=3):
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        ids = torch.randint(0, 7, (4, 3), generator=generator)
        optimizer.zero_grad()
        loss = model(ids).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# ------------------------------------------------------------------------------------------------------ boxes and names


def captures(rank, world_size, cases):
    result = []
    for kind, strategy, use_orig_params in cases:
        model = wrap(number(Net()), kind, strategy, use_orig_params)
        assert isinstance(find_adapter(model), FSDP1Adapter)
        if not result:
            with CommDebugMode() as communication:
                capture(model)
            assert communication.get_total_counts() == 0
        source = capture(model)
        memory = {s.tensor.untyped_storage().data_ptr() for s in source.shards}
        held = {h.flat_param.untyped_storage().data_ptr() for h in FSDP.fsdp_modules(model) for h in [h._handle] if h}
        assert held <= memory
        result.append(exported(source))
    return result


CASES = [
    (kind, strategy, orig)
    for kind in WRAPS
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
    for orig in (True, False)
]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_shards_hold_the_elements_of_their_boxes(rank_pool, world_size):
    cases = [case for case in CASES if world_size == 2 or case[1] == "FULL_SHARD"]
    if world_size == 4:
        cases += [("blocks", "HYBRID_SHARD", True), ("blocks", "HYBRID_SHARD", False)]
    results = rank_pool.run(captures, cases, world_size=world_size)
    plain = number(Net())
    expected = ModuleAdapter().capture(plain, Context("model", {"model": plain}))
    for i, case in enumerate(cases):
        parts = [result[i] for result in results]
        whole = assembled(parts)
        assert whole.keys() == expected.metas.keys(), case
        assert parts[0]["aliases"] == expected.aliases == {"head.weight": "wte.weight"}
        for name, tensor in [*plain.named_parameters(), *plain.named_buffers()]:
            if name != "mask":
                assert np.array_equal(whole[name], tensor.detach().numpy()), (case, name)
        if case[1] != "NO_SHARD":
            sizes = [sum(values.size for *_, values in part["shards"]) for part in parts]
            groups = 2 if case[1] == "HYBRID_SHARD" else 1
            copies = sum(sizes) - groups * sum(p.numel() for p in plain.parameters())
            assert copies == world_size * plain.count.numel()


def odd_models(rank, world_size):
    frozen = number(Net())
    frozen.blocks.requires_grad_(False)
    ignored = number(Net())
    offloaded, mixed, inner, checkpointed = (number(Net()) for _ in range(4))
    inner.blocks[1] = wrap(inner.blocks[1], "root")
    checkpointed.blocks[0] = checkpoint_wrapper(checkpointed.blocks[0])
    low = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    models = {
        "frozen": wrap(frozen, "root"),
        "ignored": wrap(ignored, "root", ignored_modules=[ignored.blocks[0]]),
        "offloaded": wrap(offloaded, "blocks", cpu_offload=CPUOffload(offload_params=True)),
        "mixed": wrap(mixed, "blocks", use_orig_params=False, mixed_precision=low),
        "inner": inner,
        "checkpointed": wrap(checkpointed, "blocks", use_orig_params=False),
    }
    models["mixed"](torch.zeros(1, 2, dtype=torch.long))
    return {name: exported(capture(model)) for name, model in models.items()}


def test_frozen_ignored_offloaded_mixed_inner_and_checkpointed(rank_pool):
    results = rank_pool.run(odd_models, world_size=2)
    plain = dict(number(Net()).named_parameters())
    for name in results[0]:
        whole = assembled([result[name] for result in results])
        assert whole.keys() - {"count"} == plain.keys(), name
        for fqn, param in plain.items():
            assert whole[fqn].dtype == np.float32
            assert np.array_equal(whole[fqn], param.detach().numpy()), (name, fqn)


def tensor_parallel(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    result = []
    for use_orig_params in (True, False):
        net = number(Net())
        net.head.weight = nn.Parameter(net.head.weight.detach().clone())
        net.conv.to(memory_format=torch.contiguous_format)
        for block in net.blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        model = wrap(net, "blocks", use_orig_params=use_orig_params, device_mesh=mesh["dp"])
        optimizer = torch.optim.Adam(model.parameters())
        part = exported(capture(model))
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        state = {"model": model, "optimizer": optimizer}
        result.append((part, exported(capture(optimizer, "optimizer", state))))
    return result


def test_over_tensor_parallelism(rank_pool):
    results = rank_pool.run(tensor_parallel, world_size=4)
    plain = dict(number(Net()).named_parameters())
    for i in range(2):
        whole = assembled([result[i][0] for result in results])
        state = assembled([result[i][1] for result in results])
        for fqn, param in plain.items():
            assert np.array_equal(whole[fqn], param.detach().numpy()), fqn
            assert state[f"state.{fqn}.exp_avg"].shape == param.shape


# -------------------------------------------------------------------------------------------------------------- loading

LAYOUTS = {
    "plain": ("plain",),
    "ddp": ("ddp",),
    "fsdp2": ("fsdp2",),
    "full-orig-blocks": ("blocks", "FULL_SHARD", True),
    "full-flat-layers": ("layers", "FULL_SHARD", False),
    "grad-orig-root": ("root", "SHARD_GRAD_OP", True),
    "grad-flat-blocks": ("blocks", "SHARD_GRAD_OP", False),
    "none-orig-root": ("root", "NO_SHARD", True),
    "none-flat-blocks": ("blocks", "NO_SHARD", False),
    "hybrid-orig-blocks": ("blocks", "HYBRID_SHARD", True),
}


def make(layout, seed):
    model = wrap(Net(seed), *LAYOUTS[layout])
    return model, torch.optim.AdamW(model.parameters(), lr=0.05 if seed == 0 else 0.7)


def saved(layout):
    model, optimizer = make(layout, 0)
    train(model, optimizer, 2)
    state = {"model": model, "optimizer": optimizer}
    before = [value.clone() for entry in optimizer.state.values() for value in entry.values()]
    parts = gathered(capture(model)), gathered(capture(optimizer, "optimizer", state))
    after = [value for entry in optimizer.state.values() for value in entry.values()]
    local = [t.to_local() if hasattr(t, "to_local") else t for t in (*before, *after)]
    assert len(before) == len(after)
    assert all(map(torch.equal, local[: len(before)], local[len(before) :]))
    return parts, train(model, optimizer, 3, seed=5)


def transfers(rank, world_size, sources, targets, warm):
    for source in sources:
        (model_parts, optimizer_parts), losses = saved(source)
        expected = assembled(model_parts), assembled(optimizer_parts)
        for target in targets:
            model, optimizer = make(target, 1)
            if warm:
                train(model, optimizer, 1, seed=8)
            state = {"model": model, "optimizer": optimizer}
            load(model, "model", state, model_parts)
            load(optimizer, "optimizer", state, optimizer_parts)
            found = gathered(capture(model)), gathered(capture(optimizer, "optimizer", state))
            for want, got in zip(expected, map(assembled, found)):
                assert want.keys() == got.keys(), (source, target, want.keys() ^ got.keys())
                for name in want:
                    assert np.array_equal(want[name], got[name]), (source, target, name)
            assert {group["lr"] for group in optimizer.param_groups} == {0.05}
            if target == source:
                assert train(model, optimizer, 3, seed=5) == losses, source
            elif target == targets[0]:
                assert np.allclose(train(model, optimizer, 3, seed=5), losses, rtol=1e-4), (source, target)


@pytest.mark.parametrize("warm", [False, True], ids=["fresh", "warm"])
def test_any_wrapping_loads_any_other(rank_pool, warm):
    layouts = [name for name in LAYOUTS if name != "hybrid-orig-blocks"]
    rank_pool.run(transfers, layouts, layouts[1:6:2] if warm else layouts, warm, world_size=2, timeout_s=120)


def test_four_ranks_and_hybrid(rank_pool):
    names = ["hybrid-orig-blocks", "full-flat-layers", "full-orig-blocks"]
    rank_pool.run(transfers, names, [*names, "ddp"], False, world_size=4, timeout_s=120)


def padding(rank, world_size):
    model, optimizer = make("full-flat-layers", 0)
    train(model, optimizer, 1)
    source = capture(model)
    handles = [module._handle for module in FSDP.fsdp_modules(model) if module._handle]
    total = sum(handle.flat_param.numel() for handle in handles)
    held = sum(shard.tensor.numel() for shard in source.shards if shard.fqn != "count")
    assert total >= held
    for handle in handles:
        handle.flat_param.data.fill_(-1)
    for shard in source.shards:
        shard.tensor.fill_(1)
    untouched = sum(int((handle.flat_param == -1).sum()) for handle in handles)
    assert untouched == total - held
    return untouched


def test_padding_belongs_to_no_parameter(rank_pool):
    assert sum(rank_pool.run(padding, world_size=4)) > 0


def stale_copies(rank, world_size):
    for layout in ("full-orig-blocks", "grad-orig-root", "grad-flat-blocks", "none-orig-root"):
        ids = torch.tensor([[1, 2, 3]])
        known = []
        for seed in (0, 2):
            model, _ = make(layout, seed)
            with torch.no_grad():
                known.append((gathered(capture(model)), model(ids)))
        other, _ = make(layout, 1)
        for context in (torch.no_grad, torch.enable_grad):
            for parts, expected in known:
                with context():
                    assert not torch.equal(other(ids), expected)
                load(other, "model", {"model": other}, parts)
                with torch.no_grad():
                    assert torch.equal(other(ids), expected), (layout, context)


def test_a_copy_gathered_before_the_load_is_not_used_after_it(rank_pool):
    rank_pool.run(stale_copies, world_size=2)


# ------------------------------------------------------------------------------------------------------------- refusals


def refusals(rank, world_size):
    model, _ = make("full-orig-blocks", 0)
    model(torch.zeros(1, 2, dtype=torch.long))
    with FSDP.summon_full_params(model):
        with pytest.raises(StateError, match=r"currently unsharded \(handle state SUMMON_FULL_PARAMS\)"):
            capture(model)
    capture(model)

    seen = []

    def refused(*_):
        with pytest.raises(StateError, match="outside forward"):
            capture(model)
        seen.append(True)

    model.blocks[0].register_forward_hook(refused)
    model(torch.zeros(1, 2, dtype=torch.long))
    assert seen

    moved, _ = make("grad-orig-root", 0)
    param = next(p for p in moved.parameters() if p.numel())
    param.data = param.data.clone()
    with pytest.raises(StateError, match="was given new memory"):
        capture(moved)


def test_unsharded_or_replaced_memory_is_refused(rank_pool):
    rank_pool.run(refusals, world_size=2)


class RowStatistics(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param]["rows"] = torch.zeros(9)


def unplaceable_state(rank, world_size):
    for layout in ("full-orig-blocks", "full-flat-layers"):
        model, _ = make(layout, 0)
        optimizer = RowStatistics(model.parameters())
        train(model, optimizer, 1)
        state = {"model": model, "optimizer": optimizer}
        with pytest.raises(UnsupportedTensorError, match=r"state\..*\.rows: a state tensor of shape \(9,\)"):
            capture(optimizer, "optimizer", state)

    model = DDP(Net())
    optimizer = torch.optim.Adafactor(model.parameters())
    train(model, optimizer, 1)
    parts = gathered(capture(optimizer, "optimizer", {"model": model}))
    sharded, _ = make("full-orig-blocks", 0)
    with pytest.raises(MismatchError, match="how to shard it is unknown"):
        load(torch.optim.Adafactor(sharded.parameters()), "optimizer", {"model": sharded}, parts)
    assert not OptimizerAdapter().recognizes(sharded)


def test_state_that_no_box_describes_is_refused(rank_pool):
    rank_pool.run(unplaceable_state, world_size=2)


def per_name_differences(rank, world_size):
    (_, parts), _ = saved("ddp")
    for part in parts:
        for name, values in list(part["values"].items()):
            if name == ("param_groups", "blocks.0.up.bias"):
                part["values"][name] = {**values, "lr": 9.0}
    flat, optimizer = make("grad-flat-blocks", 1)
    with pytest.raises(MismatchError, match=r"blocks\.0\.up\.bias: lr = 9\.0, but .* has 0\.05"):
        load(optimizer, "optimizer", {"model": flat, "optimizer": optimizer}, parts)

    (_, parts), _ = saved("ddp")
    for part in parts:
        shards = [s for s in part["shards"] if s[0] != "state.blocks.0.up.bias.step"]
        part["shards"] = [*shards, ("state.blocks.0.up.bias.step", (), (), np.array(7.0, dtype=np.float32))]
    with pytest.raises(MismatchError, match=r"one flat parameter now combines were saved with different values"):
        load(optimizer, "optimizer", {"model": flat, "optimizer": optimizer}, parts)


def test_different_scalars_of_one_flat_parameter_are_refused(rank_pool):
    rank_pool.run(per_name_differences, world_size=2)


# ----------------------------------------------------------------------------------------------- optimizers of DTensors


class Columns(torch.optim.Optimizer):
    """Keeps one replicated DTensor of another shape for each parameter, as factored optimizers do."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    mesh, shape = param.device_mesh, param.shape[1:] or (1,)
                    state["columns"] = DTensor.from_local(torch.ones(shape), mesh, [Replicate()], run_check=False)
                state["columns"].mul_(1.5)
                param.add_(param.grad * state["columns"].to_local().mean().item(), alpha=-group["lr"])


def dtensor_optimizers(rank, world_size, name):
    makers = {
        "columns": Columns,
        "sgd": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        "nadam": functools.partial(torch.optim.NAdam, lr=0.05),
        "fused": functools.partial(torch.optim.AdamW, lr=0.05, fused=True),
    }
    model = wrap(Net(0), "fsdp2")
    optimizer = makers[name](model.parameters())
    train(model, optimizer, 2)
    state = {"model": model, "optimizer": optimizer}
    parts = gathered(capture(model)), gathered(capture(optimizer, "optimizer", state))
    losses = train(model, optimizer, 3, seed=5)
    other = wrap(Net(1), "fsdp2")
    restored = makers[name](other.parameters())
    state = {"model": other, "optimizer": restored}
    load(other, "model", state, parts[0])
    load(restored, "optimizer", state, parts[1])
    assert train(other, restored, 3, seed=5) == losses
    return math.isfinite(losses[-1])


@pytest.mark.parametrize("name", ["columns", "sgd", "nadam", "fused"])
def test_optimizers_of_dtensors_continue(rank_pool, name):
    assert all(rank_pool.run(dtensor_optimizers, name, world_size=2))
