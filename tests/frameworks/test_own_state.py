"""Modules that define their own state dict: a load leaves them as torch.save and load_state_dict do."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import bytecheckpoint as bcp
from bytecheckpoint.errors import MismatchError, StateError, UnsupportedTensorError
from bytecheckpoint.frameworks.module_tree import named_submodules
from bytecheckpoint.frameworks.own_state import find_own_state


class Packed(nn.Module):
    """Like torch.ao's packed layers: nothing is a parameter or buffer."""

    _version = 2

    def __init__(self):
        super().__init__()
        self.packed, self.kind, self.seen = (torch.zeros(3), None), torch.float32, None

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "packed"], destination[prefix + "kind"] = self.packed, self.kind
        destination[prefix + "scale"] = self.packed[0].sum()

    def _load_from_state_dict(self, state, prefix, local_metadata, *rest):
        self.seen = local_metadata.get("version")
        self.packed, self.kind = state.pop(prefix + "packed"), state.pop(prefix + "kind")
        state.pop(prefix + "scale")
        super()._load_from_state_dict(state, prefix, local_metadata, *rest)


class Fused(nn.Module):
    """Stores its fused weight in two parts, under other names."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(4, 2)), nn.Parameter(torch.zeros(1))
        self.register_state_dict_post_hook(self.split)
        self.register_load_state_dict_pre_hook(self.fuse)

    @staticmethod
    def split(module, state, prefix, metadata):
        state[prefix + "q"], state[prefix + "k"] = state.pop(prefix + "weight").chunk(2)

    @staticmethod
    def fuse(module, state, prefix, *rest):
        if prefix + "q" in state:
            state[prefix + "weight"] = torch.cat([state.pop(prefix + "q"), state.pop(prefix + "k")])


class Resized(nn.Module):
    """Accepts a buffer of any length, like torch.ao's observers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(0))

    def _load_from_state_dict(self, state, prefix, *rest):
        self.seen.resize_(state[prefix + "seen"].shape)
        super()._load_from_state_dict(state, prefix, *rest)


class Lazy(nn.Module):
    """Has an entry only once it is set."""

    amax = None

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.amax is not None:
            destination[prefix + "amax"] = self.amax

    def _load_from_state_dict(self, state, prefix, *rest):
        self.amax = state.pop(prefix + "amax", None)
        super()._load_from_state_dict(state, prefix, *rest)


class Cached(nn.Linear):
    """Computes something from its weight after each load."""

    def __init__(self):
        super().__init__(2, 2)
        self.total = None
        self.register_load_state_dict_post_hook(
            lambda module, keys: setattr(module, "total", module.weight.sum().item())
        )


class Halved(nn.Linear):
    """Stores its weight in half precision, under the same name."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = destination[prefix + "weight"].half()


class Whole(nn.Module):
    """Overrides the methods that a caller uses."""

    def __init__(self):
        super().__init__()
        self.inner, self.epoch = nn.Linear(2, 2), 0

    def state_dict(self, *args, **kwargs):
        return {"net": dict(self.inner.state_dict()), "epoch": self.epoch}

    def load_state_dict(self, state, *args, **kwargs):
        self.inner.load_state_dict(state["net"])
        self.epoch = state["epoch"]


def model(part):
    """The module between plain ones, with random parameters."""
    net = nn.ModuleDict({"first": nn.Linear(2, 2), "own": part, "norm": nn.BatchNorm1d(2)})
    with torch.no_grad():
        for tensor in [*net.parameters(), *net.buffers()]:
            tensor.copy_(torch.rand(tensor.shape) * 100)
    return net


def changed(part):
    """The module in a state that differs from a new one."""
    if isinstance(part, Packed):
        part.packed, part.kind = (torch.rand(3), torch.rand(2)), torch.int8
    elif isinstance(part, Resized):
        part.seen.resize_(5).uniform_()
    elif isinstance(part, Lazy):
        part.amax = torch.rand(2)
    elif isinstance(part, Whole):
        part.epoch = 7
    return part


def facts(net):
    """Everything that a load may change."""
    plain = {}
    for name, part in net.named_modules():
        for key, value in vars(part).items():
            if not key.startswith("_") or key in ("_parameters", "_buffers"):
                plain[f"{name}.{key}"] = value
    return plain


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b


def by_torch(saved, net):
    file = io.BytesIO()
    torch.save(saved.state_dict(), file)
    file.seek(0)
    net.load_state_dict(torch.load(file, weights_only=False))
    return net


KINDS = [Packed, Fused, Resized, Lazy, Cached, lambda: Halved(2, 2), Whole]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: getattr(kind, "__name__", "Halved").strip("<>"))
@pytest.mark.parametrize("at_root", [False, True], ids=["nested", "root"])
def test_round_trip_equals_that_of_torch(tmp_path, kind, at_root):
    saved, net, expected = (model(part) for part in (changed(kind()), kind(), kind()))
    if kind is Whole and not at_root:
        pytest.skip("torch ignores the state dict of a nested module that overrides only state_dict")
    if at_root:
        saved, net, expected = saved["own"], net["own"], expected["own"]
    params = {name: id(param) for name, param in net.named_parameters()}
    bcp.save(tmp_path / "c", {"model": saved})
    report = bcp.load(tmp_path / "c", {"model": net})
    assert equal(facts(net), facts(by_torch(saved, expected)))
    assert {name: id(param) for name, param in net.named_parameters()} == params
    assert not report.missing
    assert not report.unexpected


def test_names_are_those_of_the_state_dict(tmp_path):
    bcp.save(tmp_path / "c", {"model": model(Fused())})
    names = set(bcp.open(tmp_path / "c").keys())
    assert {"model.own.q", "model.own.k", "model.own.bias", "model.first.weight"} <= names
    assert "model.own.weight" not in names


def test_versions_are_those_of_the_save(tmp_path):
    saved, net = changed(Packed()), Packed()
    saved._version = 1
    bcp.save(tmp_path / "c", {"model": saved})
    bcp.load(tmp_path / "c", {"model": net})
    assert net.seen == 1


def test_a_filter_of_the_state_dict_loses_nothing(tmp_path):
    net = model(nn.Linear(2, 2))
    net.state_dict = lambda *args, **kwargs: {"first.weight": net.first.weight.detach()}
    bcp.save(tmp_path / "c", {"model": net})
    other = model(nn.Linear(2, 2))
    bcp.load(tmp_path / "c", {"model": other})
    assert torch.equal(other["own"].weight, net["own"].weight)


def test_faults_are_found_before_anything_changes(tmp_path):
    bcp.save(tmp_path / "c", {"model": model(nn.Identity())})
    net = model(Packed())
    before = copy.deepcopy(facts(net))
    with pytest.raises(MismatchError) as caught:
        bcp.load(tmp_path / "c", {"model": net})
    for name in ("model.own.scale", "own.packed", "own.kind"):
        assert name in str(caught.value)
    assert equal(facts(net), before)
    bcp.save(tmp_path / "d", {"model": model(changed(Packed()))})
    with pytest.raises(MismatchError, match=r"unexpected(.|\n)*own\.packed"):
        bcp.load(tmp_path / "d", {"model": model(nn.Identity())})
    for part in (Cached(), nn.Linear(2, 2)):
        bcp.save(tmp_path / type(part).__name__, {"model": model(nn.Linear(2, 2))})
        part.bias = None
        with pytest.raises(MismatchError, match=r"unexpected(.|\n)*own\.bias"):
            bcp.load(tmp_path / type(part).__name__, {"model": model(part)})


def test_entries_without_a_counterpart_are_refused_by_name(tmp_path):
    net = model(nn.Linear(2, 2))
    net["own"]._register_state_dict_hook(
        lambda module, state, prefix, metadata: state.update({prefix + "w": torch.ones(2)})
    )
    bcp.save(tmp_path / "c", {"model": net})
    with pytest.raises(StateError, match=r"own \(Linear\).*does not accept.*own\.w.*counterpart"):
        bcp.load(tmp_path / "c", {"model": net})


def test_failures_of_own_code_name_the_module(tmp_path):
    net = model(Fused())
    net["own"]._register_state_dict_hook(lambda *args: 1 / 0)
    with pytest.raises(StateError, match=r"own \(Fused\).*ZeroDivisionError"):
        bcp.save(tmp_path / "c", {"model": net})
    net = model(Packed())
    net["own"].kind = object()
    with pytest.raises(StateError, match=r"model.*own\.kind is a builtins\.object"):
        bcp.save(tmp_path / "c", {"model": net})


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_dynamic_quantization_is_refused_by_name(tmp_path):
    net = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(2, 2)), {nn.Linear})
    with pytest.raises(UnsupportedTensorError, match=r"cannot store 0 \(Linear\).*_packed_params.*quantized"):
        bcp.save(tmp_path / "c", {"model": net})


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:`torch.jit:DeprecationWarning")
def test_torch_own_modules_and_wrappers_are_not_asked_for_a_state_dict():
    net = nn.ModuleDict(
        {
            "norm": nn.BatchNorm1d(2),
            "instance": nn.InstanceNorm1d(2),
            "old_weight": nn.utils.weight_norm(nn.Linear(2, 2)),
            "weight": nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
            "old_spectral": nn.utils.spectral_norm(nn.Linear(2, 2)),
            "spectral": nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)),
            "checkpoint": checkpoint_wrapper(nn.Linear(2, 2)),
            "attention": nn.MultiheadAttention(2, 1),
            "compiled": torch.compile(nn.Linear(2, 2)),
            "script": torch.jit.script(nn.Linear(2, 2)),
            "traced": torch.fx.symbolic_trace(nn.Linear(2, 2)),
        }
    )
    assert find_own_state(named_submodules([nn.DataParallel(net)]), loading=True) == []


# ------------------------------------------------------------------------------------------------------- many ranks


def sharded_round_trip(rank, world_size, path):
    mesh = init_device_mesh("cpu", (world_size,))
    models = []
    for part in (changed(Packed()), Packed()):
        torch.manual_seed(len(models))
        net = model(part)
        net["cached"] = Cached()
        for part in (net["first"], net["cached"]):
            fully_shard(part, mesh=mesh)
        models.append(net)
    plain = fully_shard(nn.Sequential(nn.Linear(2, 2)), mesh=mesh)
    assert find_own_state(named_submodules([plain]), loading=True) == []
    saved, net = models
    torch.distributed.broadcast_object_list(packed := [saved["own"].packed])
    bcp.save(path, {"model": saved})
    bcp.load(path, {"model": net})
    assert equal(net["own"].packed, packed[0])
    assert net["own"].kind is torch.int8
    assert torch.equal(net["cached"].weight.full_tensor(), saved["cached"].weight.full_tensor())
    assert net["cached"].total is not None


def test_own_state_in_a_sharded_model(rank_pool, tmp_path):
    rank_pool.run(sharded_round_trip, str(tmp_path / "c"), world_size=2)


def refused_fsdp1(rank, world_size, path):
    cpu, hooked = torch.device("cpu"), nn.Linear(4, 4)
    hooked._register_state_dict_hook(lambda *args: None)
    net = FullyShardedDataParallel(
        nn.Sequential(hooked, nn.Linear(4, 4)), device_id=torch.device("cpu"), use_orig_params=True
    )
    with pytest.raises(StateError, match=r"0 \(Linear\).*FSDP-1 manages"):
        bcp.save(path, {"model": net})
    outside = FullyShardedDataParallel(nn.Sequential(Packed(), nn.Linear(4, 4)), device_id=cpu)
    outside.module[0].packed = (torch.arange(3.0), None)
    bcp.save(path, {"model": outside})
    outside.module[0].packed = (torch.zeros(3), None)
    bcp.load(path, {"model": outside})
    assert outside.module[0].packed[0].tolist() == [0, 1, 2]


def test_own_state_under_fsdp1(rank_pool, tmp_path):
    rank_pool.run(refused_fsdp1, str(tmp_path / "c"), world_size=2)
