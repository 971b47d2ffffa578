"""Models whose experts transformers joins in memory load what is on the hub, and the optimizer of such names."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bytecheckpoint as bcp
from bytecheckpoint.errors import MismatchError
from bytecheckpoint.testing.ranks import RankPool

pytest.importorskip("peft")

import transformers
from transformers.core_model_loading import revert_weight_conversion

pytestmark = [pytest.mark.huggingface, pytest.mark.filterwarnings("ignore")]

_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
_KINDS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8},
    "DeepseekV3": {
        **_LATENT,
        "n_routed_experts": 4,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
    },
    "Olmoe": {"num_experts": 4},
    "Jamba": {},
    "Glm4Moe": {"n_routed_experts": 4, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "head_dim": 8},
}


def _model(kind: str, seed: int) -> Any:
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**_SIZES, **_KINDS[kind], pad_token_id=0, eos_token_id=1)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def _stepped(model: Any) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return optimizer


class _Tree(nn.Module):
    """A module of parameters with these dotted names, such as transformers 4 had."""

    def __init__(self, parameters: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in {**parameters, **buffers}.items():
            *path, last = name.split(".")
            owner: nn.Module = self
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, nn.Module())
                owner = getattr(owner, part)
            if name in buffers:
                owner.register_buffer(last, tensor.clone())
            else:
                owner.register_parameter(last, nn.Parameter(tensor.clone()))


def _divided(model: Any, optimizer: torch.optim.AdamW) -> tuple[_Tree, torch.optim.AdamW]:
    """The model and the optimizer under the names of the hub, as transformers' own conversion divides them."""
    named = dict(model.named_parameters())
    parameters = revert_weight_conversion(model, {name: tensor.detach() for name, tensor in named.items()})
    stored = model.state_dict()
    tree = _Tree(parameters, {name: tensor for name, tensor in model.named_buffers() if name in stored})
    apart = torch.optim.AdamW(tree.parameters(), lr=0.01)
    for key in ("exp_avg", "exp_avg_sq"):
        moments = {name: optimizer.state[tensor][key] for name, tensor in named.items()}
        of_parts = revert_weight_conversion(model, moments)
        for name, parameter in tree.named_parameters():
            apart.state[parameter].update({"step": torch.tensor(2.0), key: of_parts[name].clone()})
    return tree, apart


def _same_state(found: torch.optim.Optimizer, expected: torch.optim.Optimizer) -> bool:
    pairs = zip(found.state_dict()["state"].values(), expected.state_dict()["state"].values(), strict=True)
    return all(one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one) for one, two in pairs)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", _KINDS)
def test_a_folder_of_save_pretrained_fills_a_model(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    saved, loaded = _model(kind, 1), _model(kind, 2)
    saved.save_pretrained(tmp_path / "hub")
    with caplog.at_level(logging.INFO, logger="bytecheckpoint"):
        report = bcp.load(tmp_path / "hub", {"model": loaded})
    assert (report.missing, report.unexpected) == ([], [])
    (note,) = (note for note in report.notes if "as transformers does" in note)
    assert note in caplog.messages
    expected = saved.state_dict()
    assert all(torch.equal(found, expected[name]) for name, found in loaded.state_dict().items())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe", "DeepseekV3"])
def test_the_optimizer_of_single_experts(tmp_path: Path, kind: str) -> None:
    model = _model(kind, 1)
    optimizer = _stepped(model)
    tree, apart = _divided(model, optimizer)
    bcp.save(tmp_path / "apart", {"model": tree, "optimizer": apart})
    loaded = _model(kind, 2)
    fresh = torch.optim.AdamW(loaded.parameters(), lr=1.0)
    report = bcp.load(tmp_path / "apart", {"model": loaded, "optimizer": fresh})
    assert (report.missing, report.unexpected, report.lazy) == ([], [], [])
    expected = model.state_dict()
    assert all(torch.equal(found, expected[name]) for name, found in loaded.state_dict().items())
    assert _same_state(fresh, optimizer)
    assert fresh.param_groups[0]["lr"] == 0.01


def test_an_expert_that_is_missing_is_an_error(tmp_path: Path) -> None:
    model = _model("Mixtral", 1)
    tree, _ = _divided(model, _stepped(model))
    tensors = {n: t for n, t in tree.state_dict().items() if "layers.1.block_sparse_moe.experts.3.w1" not in n}
    bcp.save(tmp_path / "apart", {"model": tensors})
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(MismatchError, match="all parts are stored") as raised:
        bcp.load(tmp_path / "apart", {"model": model})
    assert ("missing", "model.model.layers.1.mlp.experts.gate_up_proj", "") in raised.value.faults
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_experts_that_stepped_differently_are_an_error(tmp_path: Path) -> None:
    model = _model("Mixtral", 1)
    tree, apart = _divided(model, _stepped(model))
    one = dict(tree.named_parameters())["model.layers.1.block_sparse_moe.experts.3.w1.weight"]
    apart.state[one]["step"] = torch.tensor(1.0)
    bcp.save(tmp_path / "apart", {"model": tree, "optimizer": apart})
    fresh = torch.optim.AdamW(model.parameters())
    with pytest.raises(MismatchError, match="different values"):
        bcp.load(tmp_path / "apart", {"model": model, "optimizer": fresh})


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


@pytest.mark.sampled(1)
@pytest.mark.parametrize("wrapper", ["fsdp1", "fsdp2"])
def test_sharded_experts(pool: RankPool, tmp_path: Path, wrapper: str) -> None:
    model = _model("Qwen3Moe", 1)
    optimizer = _stepped(model)
    tree, apart = _divided(model, optimizer)
    bcp.save(tmp_path / "apart", {"model": tree, "optimizer": apart})
    bcp.save(tmp_path / "joined", {"model": model, "optimizer": optimizer})
    assert all(pool.run(_load_both_sharded, tmp_path, wrapper))


def _load_both_sharded(rank: int, world_size: int, root: Path, wrapper: str) -> bool:
    """Whether a sharded model and its optimizer are the same after loads of single and of joined experts."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    found = []
    for name in ("apart", "joined"):
        model = _model("Qwen3Moe", 3)
        mesh = init_device_mesh("cpu", (2,))
        if wrapper == "fsdp2":
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        else:
            model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
        report = bcp.load(root / name, {"model": model, "optimizer": optimizer})
        assert (report.missing, report.unexpected) == ([], [])
        local = [getattr(p, "_local_tensor", p).detach().clone() for p in model.parameters()]
        states = [optimizer.state[p] for p in model.parameters()]
        local += [getattr(value, "_local_tensor", value) for one in states for value in one.values()]
        found.append(local)
    apart, joined = found
    return len(apart) == len(joined) and all(map(torch.equal, apart, joined))
