"""The module adapter: names, ties, meta targets, and real shards of FSDP-2 and tensor parallelism."""

from __future__ import annotations

import math
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from bytecheckpoint.errors import NameCollisionError, StateError, UnsupportedTensorError
from bytecheckpoint.frameworks.base import Context
from bytecheckpoint.frameworks.dtensor import empty_like_dtensor
from bytecheckpoint.frameworks.module import ModuleAdapter
from bytecheckpoint.frameworks.optimizer import OptimizerAdapter
from bytecheckpoint.frameworks.tensors import tensor_shards
from bytecheckpoint.tensors.dtypes import DTYPES
from bytecheckpoint.tensors.shards import StoredSection

pytestmark = pytest.mark.sampled(25, of=__name__)

ADAPTER = ModuleAdapter()


def context(**more):
    return Context("model", more.pop("state", {}), **more)


def stored_from(source):
    metas = dict(source.metas) | {name: source.metas[whole] for name, whole in source.aliases.items()}
    return StoredSection(metas, dict(source.values), dict(source.aliases))


def load(module, source, values, **more):
    """Load as the library does: fill the target's shards from whole tensors by name, then apply."""
    ctx = context(**{"state": {"model": module}, **more})
    target = ADAPTER.target(module, ctx, stored_from(source))
    for shard in target.shards:
        shard.tensor.copy_(values[source.aliases.get(shard.fqn, shard.fqn)][shard.box.slices()])
    target.apply(source.values)
    return target, ctx


def values_of(source):
    return {shard.fqn: shard.tensor.clone() for shard in source.shards}


def numbered(module):
    """Set every element of every parameter to its flat index, so that its value identifies its position."""
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(index_of(param.shape))
    return module


def index_of(shape):
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)


class Net(nn.Module):
    """Dimensions that do not divide by two or four, or are smaller than four."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(3, 7)
        self.down = nn.Linear(7, 2)
        self.norm = nn.LayerNorm(2)
        self.register_buffer("steps", torch.tensor(3))

    def forward(self, x):
        return self.norm(self.down(torch.relu(self.up(x))))


# ------------------------------------------------------------------------------------------------------ one process


def test_plain_module_yields_views_under_its_names():
    net = Net()
    source = ADAPTER.capture(net, context())
    expected = net.state_dict(keep_vars=True)
    assert list(source.metas) == list(expected)
    assert {s.fqn: s.tensor.data_ptr() for s in source.shards} == {n: t.data_ptr() for n, t in expected.items()}
    assert not any(s.tensor.requires_grad for s in source.shards)
    assert source.aliases == {}
    assert source.values == {}


def test_round_trip_keeps_identity():
    saved, net = numbered(Net()), Net()
    source = ADAPTER.capture(saved, context())
    before = {name: id(param) for name, param in net.named_parameters()}
    load(net, source, values_of(source))
    assert {name: id(param) for name, param in net.named_parameters()} == before
    assert all(torch.equal(a, b) for a, b in zip(saved.state_dict().values(), net.state_dict().values()))


def test_non_persistent_buffers_and_none_are_left_out():
    net = nn.Linear(2, 2, bias=False)
    net.register_buffer("kept", torch.ones(1))
    net.register_buffer("passing", torch.ones(1), persistent=False)
    net.register_buffer("absent", None)
    assert set(ADAPTER.capture(net, context()).metas) == {"weight", "kept"}


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_names_do_not_contain_wrappers():
    names = set(ADAPTER.capture(Net(), context()).metas)
    net = Net()
    net.up = checkpoint_wrapper(net.up)
    net.down = torch.compile(net.down)
    assert set(ADAPTER.capture(torch.compile(net), context()).metas) == names
    assert set(ADAPTER.capture(nn.DataParallel(net), context()).metas) == names


def test_lists_are_a_union_of_names():
    net = Net()
    stages = [nn.ModuleDict({"up": net.up}), nn.ModuleDict({"down": net.down, "up": net.up})]
    source = ADAPTER.capture(stages, context())
    assert set(source.metas) == {"up.weight", "up.bias", "down.weight", "down.bias"}
    assert source.aliases == {}
    with pytest.raises(NameCollisionError, match=r"weight belongs to two different tensors .*separate sections"):
        ADAPTER.capture([nn.Linear(2, 2), nn.Linear(2, 3)], context())
    assert not ADAPTER.recognizes([])
    assert not ADAPTER.recognizes([net, 3])
    assert not ADAPTER.recognizes({"a": torch.ones(1)})


def tied(same_object=True):
    net = nn.ModuleDict({"wte": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
    net.head.weight = net.wte.weight if same_object else nn.Parameter(net.wte.weight.detach())
    return net


@pytest.mark.parametrize("same_object", [True, False])
def test_tied_weights_are_stored_once(same_object):
    source = ADAPTER.capture(tied(same_object), context())
    assert list(source.metas) == ["wte.weight"]
    assert source.aliases == {"head.weight": "wte.weight"}
    assert len(source.shards) == 1


def test_tied_and_untied_load_into_each_other():
    together, apart = numbered(tied()), nn.ModuleDict({"wte": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
    source = ADAPTER.capture(together, context())
    target, _ = load(apart, source, values_of(source))
    assert set(target.metas) == {"wte.weight", "head.weight"}
    assert torch.equal(apart.head.weight, together.wte.weight)

    with torch.no_grad():
        apart.wte.weight.mul_(2)
    source = ADAPTER.capture(apart, context())
    target, ctx = load(together, source, values_of(source))
    assert target.aliases == {"head.weight": "wte.weight"}
    assert target.ignorable == {"head.weight"}
    assert torch.equal(together.head.weight, apart.wte.weight)
    assert "stored separately" in ctx.notes[0]


def test_tied_target_is_filled_from_the_name_that_is_stored():
    source = ADAPTER.capture(nn.ModuleDict({"head": numbered(nn.Linear(3, 4, bias=False))}), context())
    net = tied()
    target, _ = load(net, source, values_of(source))
    assert list(target.metas) == ["head.weight"]
    assert torch.equal(net.wte.weight, index_of((4, 3)))


def test_memory_shared_in_part_is_stored_for_each():
    net, base = nn.Module(), torch.arange(6.0)
    net.register_buffer("all", base)
    net.register_buffer("head", base[:4])
    net.register_buffer("turned", base.view(2, 3).t())
    net.register_buffer("none", base[:0])
    net.register_buffer("none_either", base[:0])
    source = ADAPTER.capture(net, context())
    assert source.aliases == {}
    assert len(source.shards) == 5


@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
@pytest.mark.parametrize("name", [name for name in DTYPES if isinstance(getattr(torch, name, None), torch.dtype)])
def test_every_dtype_and_the_smallest_shapes(name):
    dtype = getattr(torch, name)
    if name.startswith(("quint", "qint")):
        pytest.skip("quantised")
    net = nn.Module()
    for label, shape in {"scalar": (), "one": (1,), "none": (0, 3), "some": (2, 3)}.items():
        net.register_buffer(label, torch.empty(shape, dtype=dtype))
    source = ADAPTER.capture(net, context())
    assert {s.fqn: s.box.lengths for s in source.shards} == {"scalar": (), "one": (1,), "none": (0, 3), "some": (2, 3)}
    assert {meta.dtype.name for meta in source.metas.values()} == {name}


def test_non_contiguous_and_expanded_tensors_are_views():
    net = nn.Module()
    net.register_buffer("turned", index_of((3, 2)).t())
    net.register_buffer("wide", torch.tensor([[1.0], [2.0]]).expand(2, 4))
    source = ADAPTER.capture(net, context())
    assert [s.tensor.data_ptr() for s in source.shards] == [net.turned.data_ptr(), net.wide.data_ptr()]
    target = ADAPTER.target(net, context(), StoredSection(source.metas, {}, {}))
    assert [s.tensor.data_ptr() for s in target.shards] == [net.turned.data_ptr(), net.wide.data_ptr()]
    assert [s.tensor.stride() for s in target.shards] == [net.turned.stride(), (1, 0)]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_without_dense_memory_are_refused_by_name():
    quantised = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    fake = torch._subclasses.FakeTensorMode().from_tensor(torch.ones(2))
    for tensor, hint in [
        (torch.eye(3).to_sparse(), "to_dense"),
        (torch.eye(3).to_sparse_csr(), "to_dense"),
        (torch.ones(2, 2).to_mkldnn(), "to_dense"),
        (quantised, "dequantize"),
        (nested, "convert it"),
        (fake, "convert it"),
        (nn.LazyLinear(3).weight, "forward"),
    ]:
        with pytest.raises(UnsupportedTensorError, match=rf"a\.w: .*{hint}"):
            tensor_shards("a.w", tensor)


def test_dense_subclasses_are_stored_by_their_contents():
    class Marked(torch.Tensor):
        pass

    class MarkedParameter(nn.Parameter):
        pass

    for tensor in (torch.ones(2).as_subclass(Marked), MarkedParameter(torch.ones(2)), nn.Buffer(torch.ones(2))):
        _, (shard,) = tensor_shards("w", tensor)
        assert type(shard.tensor) is torch.Tensor
        assert shard.tensor.data_ptr() == tensor.data_ptr()


def test_meta_target_gets_memory_and_stays_the_same_object():
    saved = numbered(tied())
    saved.register_buffer("steps", torch.tensor(3))
    with torch.device("meta"):
        net = tied()
        net.register_buffer("steps", torch.tensor(0))
        net.register_buffer("mask", torch.zeros(2), persistent=False)
    net.wte.weight.kind = "embedding"
    weight, optimizer = net.wte.weight, torch.optim.SGD(net.parameters(), lr=1.0)
    source = ADAPTER.capture(saved, context())
    _, ctx = load(net, source, values_of(source), state={"optimizer": optimizer})
    assert net.wte.weight is weight
    assert net.head.weight is weight
    assert weight.kind == "embedding"
    assert isinstance(weight, nn.Parameter)
    assert weight.requires_grad
    assert weight.device.type == "cpu"
    assert net.steps == 3
    assert "mask" in ctx.notes[0]
    net.head(net.wte(torch.tensor([1]))).sum().backward()
    optimizer.step()
    assert not torch.equal(weight, saved.wte.weight)


def test_meta_tensors_cannot_be_saved():
    with pytest.raises(UnsupportedTensorError, match=r"model: weight is on the meta device.*initialize"):
        ADAPTER.capture(nn.Linear(2, 2, device="meta"), context())


def test_meta_tensors_not_stored_stay_meta():
    source = ADAPTER.capture(nn.Linear(2, 2, bias=False), context())
    net = nn.Linear(2, 2, device="meta")
    target, _ = load(net, source, values_of(source) | {"bias": torch.zeros(2)})
    assert net.bias.is_meta
    assert not net.weight.is_meta
    assert "bias" in target.metas


def test_meta_parameter_that_cannot_be_swapped():
    import weakref

    source = ADAPTER.capture(numbered(nn.Linear(2, 2, bias=False)), context())
    net = nn.Linear(2, 2, bias=False, device="meta")
    optimizer, watcher = torch.optim.SGD(net.parameters(), lr=1.0), weakref.ref(net.weight)
    with pytest.raises(StateError, match=r"weight: .*'optimizer'.*to_empty"):
        load(net, source, values_of(source), state={"optimizer": optimizer})
    _, ctx = load(net, source, values_of(source))
    assert net.weight is not watcher()
    assert net.weight.tolist() == [[0, 1], [2, 3]]
    assert "weight" in ctx.notes[0]


def test_layouts_of_plain_parameters():
    net = tied()
    net.extra = nn.Parameter(torch.zeros(2, 2))
    layouts = ADAPTER.parameter_layouts(net)
    assert set(layouts) == {id(net.wte.weight), id(net.extra)}
    assert layouts[id(net.wte.weight)].fqns == {"wte.weight": (4, 3)}


def test_extra_state_of_modules():
    class Scaled(nn.Linear):
        history = ()

        def get_extra_state(self):
            return {"history": list(self.history), "amax": torch.tensor([len(self.history)])}

        def set_extra_state(self, state):
            self.history, self.amax = tuple(state["history"]), state["amax"]

    saved, net = nn.ModuleDict({"a": Scaled(2, 2)}), nn.ModuleDict({"a": Scaled(2, 2)})
    saved["a"].history = (1, 2, 3)
    source = ADAPTER.capture(saved, context())
    assert any(path[:2] == ("_extra_state", "a") for path in source.values)
    load(net, source, values_of(source))
    assert net["a"].history == (1, 2, 3)
    assert net["a"].amax.tolist() == [3]


# ------------------------------------------------------------------------------------------------------- many ranks


def tensor_parallel(net, mesh):
    return parallelize_module(net, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def sharded(world_size, kind):
    """A model of plain arange values, distributed by torch itself."""
    torch.manual_seed(0)
    net = numbered(Net())
    if kind == "fsdp2":
        return fully_shard(net, mesh=init_device_mesh("cpu", (world_size,)))
    if kind == "nested fsdp2":
        mesh = init_device_mesh("cpu", (world_size,))
        fully_shard(net.up, mesh=mesh, shard_placement_fn=lambda param: Shard(0))
        return fully_shard(net, mesh=mesh)
    if kind == "hsdp":
        return fully_shard(net, mesh=init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("r", "s")))
    if kind == "tp":
        return tensor_parallel(net, init_device_mesh("cpu", (world_size,)))
    if kind == "tp x fsdp2":
        mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
        return fully_shard(tensor_parallel(net, mesh["tp"]), mesh=mesh["dp"])
    if kind == "tp x hsdp":
        mesh = init_device_mesh("cpu", (2, world_size // 4, 2), mesh_dim_names=("r", "s", "tp"))
        return fully_shard(tensor_parallel(net, mesh["tp"]), mesh=mesh["r", "s"])
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(net)
    raise AssertionError(kind)


def prove(rank, world_size, kind):
    """Check that every shard is the model's memory with the values of its box, and that a load fills the model."""
    model = sharded(world_size, kind)
    with CommDebugMode() as comm:
        source = ADAPTER.capture(model, context())
    assert comm.get_total_counts() == 0
    held = {p.to_local().data_ptr() if isinstance(p, DTensor) else p.data_ptr() for p in model.parameters()}
    for shard in source.shards:
        if shard.fqn != "steps":
            assert torch.equal(shard.tensor, index_of(shard.meta.shape)[shard.box.slices()]), shard
            assert shard.tensor.data_ptr() in held
    for param, layout in ((p, ADAPTER.parameter_layouts(model)[id(p)]) for p in model.parameters()):
        local = param.to_local() if isinstance(param, DTensor) else param
        for shard in layout.describe(local.detach(), str)[1]:
            assert torch.equal(shard.tensor, index_of(shard.meta.shape)[shard.box.slices()]), shard

    values = {fqn: index_of(meta.shape) + 100 for fqn, meta in source.metas.items()}
    with CommDebugMode() as comm:
        load(model, source, values)
    assert comm.get_total_counts() == 0
    for name, param in model.named_parameters():
        whole = values[name.removeprefix("module.")]
        for shard in tensor_shards(name, param)[1]:
            assert torch.equal(shard.tensor, whole[shard.box.slices()])
        if isinstance(param, DTensor) and "tp" not in kind:
            assert torch.equal(param.full_tensor(), whole)
    if "tp" not in kind:  # torch itself cannot run uneven tensor parallelism
        model(torch.ones(4, 3)).sum().backward()
    return [(s.fqn, s.box.slices()) for s in source.shards], {n: m.shape for n, m in source.metas.items()}


@pytest.mark.parametrize(
    ("kind", "world_size", "replicas"),
    [
        ("ddp", 2, 2),
        ("fsdp2", 2, 1),
        ("fsdp2", 4, 1),
        ("nested fsdp2", 3, 1),
        ("hsdp", 4, 2),
        ("tp", 2, None),
        ("tp", 4, None),
        ("tp x fsdp2", 4, None),
        ("tp x hsdp", 8, None),
    ],
)
def test_real_shards_hold_the_elements_of_their_boxes(rank_pool, kind, world_size, replicas):
    results = rank_pool.run(prove, kind, world_size=world_size)
    assert all(shapes == results[0][1] for _, shapes in results)
    for name, shape in results[0][1].items():
        count = torch.zeros(shape, dtype=torch.int64)
        for boxes, _ in results:
            for fqn, where in boxes:
                if fqn == name:
                    count[where] += 1
        assert count.min() == count.max() > 0, name
        if replicas is not None and name != "steps":
            assert count.max() == replicas, name


def unsharded_after_forward(rank, world_size):
    model = numbered(Net())
    fully_shard(
        model,
        mesh=init_device_mesh("cpu", (world_size,)),
        reshard_after_forward=False,
        mp_policy=torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    x = torch.ones(4, 3)
    with torch.no_grad():
        model(x)
    assert not isinstance(model.up.weight, DTensor)
    source = ADAPTER.capture(model, context())
    assert source.metas["up.weight"].dtype.name == "float32"
    for shard in source.shards:
        if shard.fqn != "steps":
            assert torch.equal(shard.tensor, index_of(shard.meta.shape)[shard.box.slices()])
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    assert set(ADAPTER.parameter_layouts(model)) == held
    zeros = {fqn: torch.zeros(meta.shape) for fqn, meta in source.metas.items()}
    load(model, source, zeros)
    with torch.no_grad():
        assert model(x).abs().max() == 0
    assert {id(p) for p in model.parameters()} != held
    model.reshard()
    assert {id(p) for p in model.parameters()} == held


def test_gathered_fsdp2_parameters_are_stored_sharded(rank_pool):
    rank_pool.run(unsharded_after_forward, world_size=2)


def meta_fsdp2(rank, world_size):
    saved = sharded(world_size, "fsdp2")
    with torch.device("meta"):
        model = Net()
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    params = dict(model.named_parameters())
    source = ADAPTER.capture(saved, context())
    values = {fqn: index_of(meta.shape) for fqn, meta in source.metas.items()}
    load(model, source, values, state={"optimizer": optimizer})
    assert all(param is params[name] for name, param in model.named_parameters())
    x = torch.ones(4, 3)
    assert torch.equal(model(x), saved(x))
    model(x).pow(2).sum().backward()
    optimizer.step()
    assert model.norm.bias.full_tensor().tolist() != [0, 1]


def test_meta_fsdp2_target(rank_pool):
    rank_pool.run(meta_fsdp2, world_size=2)


def odd_dtensors(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    _, shards = tensor_shards("r", distribute_tensor(torch.ones(3), mesh, [Replicate()]))
    assert [s.box.lengths for s in shards] == [(3,)]
    with pytest.raises(UnsupportedTensorError, match=r"p: .*partial"):
        tensor_shards("p", DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False))
    wrong = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False, shape=(7,), stride=(1,))
    with pytest.raises(UnsupportedTensorError, match=r"w: .*shape \[7\].*\[2\].*\[(4|3)\].*holds \[2\]"):
        tensor_shards("w", wrong)
    empty = distribute_tensor(torch.ones(1, 3), mesh, [Shard(0)])
    assert len(tensor_shards("e", empty)[1]) == (1 if rank == 0 else 0)
    waiting = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)]).redistribute(mesh, [Replicate()], async_op=True)
    _, (shard,) = tensor_shards("a", waiting)
    assert type(shard.tensor) is torch.Tensor
    assert torch.equal(shard.tensor, torch.arange(5.0))

    like = empty_like_dtensor(distribute_tensor(torch.ones(5, 2), mesh, [Shard(0)]), torch.bfloat16)
    assert (like.dtype, tuple(like.shape), like.to_local().dtype) == (torch.bfloat16, (5, 2), torch.bfloat16)
    assert like.placements == (Shard(0),)

    def interleaved():
        placements = [_StridedShard(0, split_factor=2)]
        return DTensor.from_local(torch.ones(4), mesh, placements, run_check=False, shape=(8,), stride=(1,))

    param = nn.Parameter(interleaved())
    optimizer = torch.optim.SGD([("w", param)], momentum=0.9)
    optimizer.state[param]["momentum_buffer"] = interleaved()
    source = OptimizerAdapter().capture(
        optimizer, Context("optimizer", {"optimizer": optimizer}, rank=rank, world_size=world_size)
    )
    assert len(source.shards) == 2
    assert not source.unproven, "a DTensor says which part this rank holds, also if it is several boxes"

    others = init_device_mesh("cpu", (1,)) if rank == 0 else None
    if others is not None:
        assert len(tensor_shards("o", distribute_tensor(torch.ones(2), others, [Shard(0)]))[1]) == 1


def test_odd_dtensors(rank_pool):
    rank_pool.run(odd_dtensors, world_size=2)


def pipeline(rank, world_size):
    layers = nn.Sequential(OrderedDict({f"layer{rank}": numbered(nn.Linear(2, 2))}))
    stage = PipelineStage(layers, rank, world_size, torch.device("cpu"), input_args=(torch.ones(1, 2),))
    assert ADAPTER.recognizes(stage)
    return sorted(ADAPTER.capture([stage], context()).metas)


def test_pipeline_stages(rank_pool):
    assert rank_pool.run(pipeline, world_size=2) == [
        ["layer0.bias", "layer0.weight"],
        ["layer1.bias", "layer1.weight"],
    ]
