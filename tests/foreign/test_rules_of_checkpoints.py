"""Rename, split, join and stack the tensors of existing checkpoints by rules, in place."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from renamed_models import HUB, assert_equal, hub_tensors, save, trained_tensors
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import bytecheckpoint as bcp
from bytecheckpoint.convert.copy import copy as copy_checkpoint
from bytecheckpoint.errors import CorruptionError, MismatchError, RuleError, UsageError
from bytecheckpoint.inference.delivery import StoredWeights
from bytecheckpoint.rules import Flat, Replicated, Rules, Sharded, Unique
from bytecheckpoint.testing.ranks import RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


@pytest.mark.parametrize("codec", [None, "zstd"])
def test_our_checkpoint_under_the_names_of_the_hub(tmp_path: Path, codec: str | None) -> None:
    hub = save(tmp_path / "ours", codec)
    found = bcp.open(tmp_path / "ours", options=bcp.LoadOptions(rules=HUB))
    assert_equal(found.state_dict(), hub)
    assert (found.step, found.tree("extra_state"), sorted(found.sections)) == (3, {"step": 3}, ["extra_state", "model"])
    assert found.verify().ok
    state = {name: torch.zeros_like(tensor) for name, tensor in hub.items()}
    extra = {"step": 0}
    report = bcp.load(tmp_path / "ours", {"model": state, "extra_state": extra}, options=bcp.LoadOptions(rules=HUB))
    assert_equal(state, hub)
    assert (extra, report.bytes_unchecked) == ({"step": 3}, 0)
    name = "model.model.layers.1.self_attn.v_proj.weight"
    assert torch.equal(found[name][2:5, 1:4], hub[name.removeprefix("model.")][2:5, 1:4])
    again = pickle.loads(pickle.dumps(found))
    assert_equal(again.state_dict(), hub)
    with pytest.raises(MismatchError):
        bcp.load(tmp_path / "ours", {"model": state})
    with pytest.raises(UsageError, match="opened with rules"):
        copy_checkpoint(found, str(tmp_path / "copy"))


def test_bytes_are_checked_under_their_new_names(tmp_path: Path) -> None:
    hub = save(tmp_path / "ours")
    (file,) = tmp_path.glob("ours/*/model-*.safetensors")
    row = hub["model.layers.1.self_attn.k_proj.weight"][3:4]
    file.write_bytes(file.read_bytes().replace(row.numpy().tobytes(), bytes(row.nbytes)))
    found = bcp.open(tmp_path / "ours", options=bcp.LoadOptions(rules=HUB))
    with pytest.raises(CorruptionError, match=re.escape("decoder.layers.1.self_attention.linear_qkv.weight")):
        found["model.model.layers.1.self_attn.k_proj.weight"].load()
    assert torch.equal(
        found["model.model.layers.1.mlp.up_proj.weight"].load(), hub["model.layers.1.mlp.up_proj.weight"]
    )
    assert not found.verify().ok


def test_models_of_the_hub_under_the_names_of_megatron(tmp_path: Path) -> None:
    hub = hub_tensors()
    save_file(hub, tmp_path / "model.safetensors")
    assert_equal(bcp.open(tmp_path, options=bcp.LoadOptions(rules=HUB.inverse())).state_dict(), trained_tensors(hub))


def test_vllms_loader_sees_the_names_of_the_hub(tmp_path: Path) -> None:
    hub = save(tmp_path / "ours")
    weights = StoredWeights(bcp.open(tmp_path / "ours", options=bcp.LoadOptions(rules=HUB)))
    assert {name: tuple(tensor.shape) for name, tensor in weights.tensors()} == {
        name: tuple(tensor.shape) for name, tensor in hub.items()
    }


class Stack(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 4) for _ in range(layers))
        self.head = nn.Linear(4, 5, bias=False)


class Stacked(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(layers, 4, 5))
        self.bias = nn.Parameter(torch.zeros(layers, 4))
        self.head = nn.Linear(4, 5, bias=False)


STACKED = Rules(
    [Unique(match="layers.{l:int}.{x}", rename="{x}", stacked=("l",)), Unique(match="head.{x}")],
)


def _stack(rank: int, world_size: int, path: str, codec: str | None) -> None:
    torch.manual_seed(0)
    whole = Stack()
    model = copy.deepcopy(whole)
    mesh = init_device_mesh("cpu", (world_size,))
    fully_shard(model, mesh=mesh)
    bcp.save(path, {"model": model}, options=bcp.SaveOptions(codec=codec))
    stacked = Stacked()
    fully_shard(stacked, mesh=mesh)
    bcp.load(path, {"model": stacked}, options=bcp.LoadOptions(rules=STACKED))
    for name in ("weight", "bias"):
        expected = torch.stack([getattr(layer, name) for layer in whole.layers])
        assert torch.equal(stacked.state_dict()[name].full_tensor(), expected)
    assert torch.equal(stacked.state_dict()["head.weight"].full_tensor(), whole.head.weight)
    bcp.save(f"{path}-stacked", {"model": stacked}, options=bcp.SaveOptions(codec=codec))
    fresh = Stack()
    fully_shard(fresh, mesh=mesh)
    bcp.load(
        f"{path}-stacked", {"model": fresh}, options=bcp.LoadOptions(rules=STACKED.inverse(), share_reads="always")
    )
    for name, tensor in fresh.state_dict().items():
        assert torch.equal(tensor.full_tensor(), whole.state_dict()[name]), name


@pytest.mark.parametrize("codec", [None, "zstd"])
def test_two_ranks_load_stacked_layers_and_back(tmp_path: Path, pool: RankPool, codec: str | None) -> None:
    pool.run(_stack, str(tmp_path / "sharded"), codec)


def test_tied_names_stay_tied(tmp_path: Path) -> None:
    hub = hub_tensors()
    hub["lm_head.weight"] = hub["model.embed_tokens.weight"]
    trained = trained_tensors(hub)
    trained["output_layer.weight"] = trained["embedding.word_embeddings.weight"]
    bcp.save(tmp_path / "ours", {"model": trained})
    found = bcp.open(tmp_path / "ours", options=bcp.LoadOptions(rules=HUB))
    assert set(found.aliases.items()) in (
        {("model.lm_head.weight", "model.model.embed_tokens.weight")},
        {("model.model.embed_tokens.weight", "model.lm_head.weight")},
    )
    assert_equal(found.state_dict(), hub)


def test_other_sections_stay_as_they_are_unless_a_rule_names_them(tmp_path: Path) -> None:
    moments = {"state": {"w": {"exp_avg": torch.ones(4, 2)}}, "step": 5}
    bcp.save(tmp_path / "a", {"model": {"w": torch.zeros(4, 2)}, "optimizer": moments})
    rule = Unique(match="w", rename="v")
    found = bcp.open(tmp_path / "a", options=bcp.LoadOptions(rules=Rules([rule])))
    assert sorted(found) == ["model.v", "optimizer.state.w.exp_avg"]
    other = Unique(match="optimizer.state.w.{key}", rename="optimizer.state.v.{key}")
    found = bcp.open(tmp_path / "a", options=bcp.LoadOptions(rules=Rules([rule, other])))
    assert sorted(found) == ["model.v", "optimizer.state.v.exp_avg"]
    target = {"state": {"v": {"exp_avg": torch.zeros(4, 2)}}, "step": 0}
    bcp.load(tmp_path / "a", {"optimizer": target}, options=bcp.LoadOptions(rules=Rules([rule, other])))
    assert torch.equal(target["state"]["v"]["exp_avg"], torch.ones(4, 2))
    assert target["step"] == 5


def test_what_cannot_be_read_in_place_is_refused(tmp_path: Path) -> None:
    bcp.save(tmp_path / "a", {"model": {"w": torch.zeros(4), "b": torch.zeros(2, 2)}})
    flat = Flat(match="w", axis=("dp",), rename="x.{member}", order=("b",))
    with pytest.raises(RuleError, match="divides along axis 'dp', which is not in the mesh"):
        bcp.open(tmp_path / "a", options=bcp.LoadOptions(rules=Rules([flat, Unique(match="b")])))
    with pytest.raises(RuleError, match="divides along axis 'tp'"):
        bcp.open(tmp_path / "a", options=bcp.LoadOptions(rules=Rules([Sharded(match="{x}", axis=("tp",))])))
    with pytest.raises(RuleError, match=re.escape(f"{tmp_path / 'a'}: the rules do not explain")) as error:
        bcp.open(
            tmp_path / "a",
            options=bcp.LoadOptions(rules=Rules([Replicated(match="w", rename="b"), Unique(match="absent")])),
        )
    assert {kind for kind, _, _ in error.value.faults} == {"missing", "unused"}
    two = Rules([Unique(match="w", rename="new"), Unique(match="b", rename="new")])
    with pytest.raises(RuleError, match="makes 'new', which"):
        bcp.open(tmp_path / "a", options=bcp.LoadOptions(rules=two))


def test_an_empty_tensor_and_a_scalar_are_renamed(tmp_path: Path) -> None:
    tensors = {"a.empty": torch.zeros(0, 3), "a.scalar": torch.tensor(2.0), "a.half": torch.zeros(4, 0)}
    bcp.save(tmp_path / "a", {"model": tensors})
    found = bcp.open(tmp_path / "a", options=bcp.LoadOptions(rules=Rules([Unique(match="a.{x}", rename="b.{x}")])))
    assert_equal(found.state_dict(), {name.replace("a.", "b."): tensor for name, tensor in tensors.items()})
