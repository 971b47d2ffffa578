"""``layout="whole"``: the directory that Hugging Face libraries and vLLM load without an export."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from independent_reader import read_checkpoint, read_values
from safetensors import safe_open
from sorted_arguments import saving
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage

import bytecheckpoint as bcp
from bytecheckpoint.convert.reshard import reshard
from bytecheckpoint.errors import CorruptionError, UsageError
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool

INDEX = "model.safetensors.index.json"


class _Config:
    """A stand-in for a Hugging Face configuration."""

    def __init__(self, text: str = '{"model_type": "tiny", "hidden_size": 6}') -> None:
        self._text = text

    def to_json_string(self) -> str:
        return self._text


class Tied(nn.Module):
    def __init__(self, seed: int = 0, config: Any = None) -> None:
        super().__init__()
        self.config = config or _Config()
        self.embedding = nn.Embedding(11, 6)
        self.body = nn.Linear(6, 7)
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.tensor(3 + seed))
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) + 100.0 * number + seed)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


def read_with_safetensors(directory: str) -> dict[str, torch.Tensor]:
    """Read every tensor that the index names with the safetensors library."""
    index = json.loads(Path(directory, INDEX).read_text())
    tensors = {}
    for name, file in index["weight_map"].items():
        with safe_open(os.path.join(directory, file), framework="pt") as opened:
            assert opened.metadata()["format"] == "pt"
            tensors[name] = opened.get_tensor(name)
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in tensors.values())
    return tensors


def _wrapped(kind: str, seed: int) -> nn.Module:
    model = Tied(seed)
    if kind == "fsdp2":
        return fully_shard(model)
    if kind == "fsdp1":
        return FSDP(model, device_id=torch.device("cpu"), use_orig_params=True)
    return nn.parallel.DistributedDataParallel(model)


def _save(rank: int, world_size: int, kind: str, path: str, use_async: bool) -> None:
    """Save twice to the same path, as a run does that keeps only its last checkpoint."""
    for step in range(2):
        model = _wrapped(kind, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.5)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        state = {"model": model, "optimizer": optimizer, "extra": {"step": step}}
        bcp.save(
            path,
            state,
            step=step,
            async_save=use_async,
            options=bcp.SaveOptions(layout="whole", deadline_s=time_limit(60)),
        ).result(time_limit(60))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2", "ddp"])
def test_the_directory_holds_a_model(pool: RankPool, tmp_path: Path, kind: str) -> None:
    path = str(tmp_path / "checkpoint")
    pool.run(_save, kind, path, kind != "ddp")
    checkpoint = bcp.open(path)
    directory = checkpoint.model_directory
    assert directory is not None
    found = read_with_safetensors(directory)
    expected = {name: tensor for name, tensor in Tied(1).state_dict().items() if name != "head.weight"}
    assert found.keys() == expected.keys(), "tied weights once, and no optimizer"
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    config = json.loads(Path(directory, "config.json").read_text())
    assert config == {"architectures": ["Tied"], "hidden_size": 6, "model_type": "tiny"}
    assert os.listdir(path).count(os.path.basename(directory)) == 1
    assert len(os.listdir(path)) == 2, "the first save's index is removed with its files"
    assert checkpoint.verify().ok
    model = Tied(5)
    bcp.load(path, {"model": model})
    assert torch.equal(model.head.weight, expected["embedding.weight"])


def _save_stage(rank: int, world_size: int, path: str) -> None:
    part = nn.ModuleDict({f"layer{rank}": nn.Linear(2, 2)})
    stage = PipelineStage(part, rank, world_size, torch.device("cpu"), input_args=(torch.ones(1, 2),))
    bcp.save(path, {"model": Tied(1), "critic": stage}, options=bcp.SaveOptions(layout="whole"))


def test_a_pipeline_stage_is_a_model(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_save_stage, str(tmp_path))
    index = json.loads(Path(bcp.open(tmp_path).model_directory or "", "critic.safetensors.index.json").read_text())
    assert sorted(index["weight_map"]) == ["layer0.bias", "layer0.weight", "layer1.bias", "layer1.weight"]


def _save_plain(path: Path, **more: Any) -> bcp.Checkpoint:
    bcp.save(path, {"model": Tied(2), "extra": {"step": 4}}, **saving(**more))
    return bcp.open(path)


def test_a_reader_written_from_the_format_page_skips_companions(tmp_path: Path) -> None:
    checkpoint = _save_plain(tmp_path, layout="whole")
    assert "companion" in checkpoint.manifest.files.kind
    assert set(read_checkpoint(tmp_path)) == set(checkpoint)
    assert read_values(tmp_path, 0)["extra"] == {("step",): 4}


def test_other_layouts_have_no_model_directory(tmp_path: Path) -> None:
    for layout in ("shards", "merged"):
        assert _save_plain(tmp_path / layout, layout=layout).model_directory is None


def test_a_single_process_writes_a_model_directory(tmp_path: Path) -> None:
    checkpoint = _save_plain(tmp_path, layout="whole")
    assert checkpoint.model_directory is not None
    assert torch.equal(read_with_safetensors(checkpoint.model_directory)["body.weight"], Tied(2).body.weight)


def test_companions_are_checked_copied_and_removed(tmp_path: Path) -> None:
    from bytecheckpoint.convert.copy import copy, remove

    checkpoint = _save_plain(tmp_path / "a", layout="whole")
    copy(checkpoint, str(tmp_path / "b"))
    copied = bcp.open(tmp_path / "b")
    assert copied.model_directory is not None
    assert (
        read_with_safetensors(copied.model_directory).keys()
        == read_with_safetensors(checkpoint.model_directory or "").keys()
    )
    assert remove(str(tmp_path / "b")).left == ()
    index = Path(checkpoint.model_directory or "", INDEX)
    index.write_text(index.read_text().replace("body.weight", "body.Weight"))
    assert INDEX in "".join(checkpoint.verify().problems)
    with pytest.raises(CorruptionError, match="index"):
        copy(checkpoint, str(tmp_path / "c"))
    # No load reads the index.
    bcp.load(tmp_path / "a", {"model": Tied(0)})


def test_several_models_and_plain_values(tmp_path: Path) -> None:
    state = {"model": Tied(1), "critic": Tied(2), "extra": {"note": "x"}}
    bcp.save(tmp_path, state, options=bcp.SaveOptions(layout="whole"))
    checkpoint = bcp.open(tmp_path)
    names = os.listdir(checkpoint.model_directory or "")
    assert {INDEX, "critic.safetensors.index.json", "config.json"} <= set(names)
    weights = json.loads(Path(checkpoint.model_directory or "", "critic.safetensors.index.json").read_text())
    assert set(weights["weight_map"].values()) == {"critic-00000.safetensors"}
    assert checkpoint.section_values("extra") == bcp.open(tmp_path).section_values("extra") != {}


@pytest.mark.parametrize("config", [_Config("no json"), _Config("[1]"), object()], ids=["text", "list", "none"])
def test_an_unusable_configuration_is_left_out(tmp_path: Path, config: Any) -> None:
    bcp.save(tmp_path, {"model": Tied(1, config)}, options=bcp.SaveOptions(layout="whole"))
    checkpoint = bcp.open(tmp_path)
    assert not Path(checkpoint.model_directory or "", "config.json").exists()
    assert read_with_safetensors(checkpoint.model_directory or "")


def _gpt2(seed: int) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    config = transformers.GPT2Config(vocab_size=37, n_positions=16, n_embd=12, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config)


def _save_gpt2(rank: int, world_size: int, path: str) -> None:
    bcp.save(path, {"model": fully_shard(_gpt2(7))}, options=bcp.SaveOptions(layout="whole", deadline_s=time_limit(60)))


def test_transformers_loads_the_model_directory(pool: RankPool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pool.run(_save_gpt2, str(tmp_path), timeout_s=120)
    checkpoint = bcp.open(tmp_path)
    model, info = transformers.GPT2LMHeadModel.from_pretrained(checkpoint.model_directory, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    expected = _gpt2(7).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    auto = transformers.AutoModelForCausalLM.from_pretrained(checkpoint.model_directory)
    assert type(auto).__name__ == "GPT2LMHeadModel"


@pytest.mark.parametrize("layout", ["whole", "sharded"])
def test_resharding_drops_the_companions(tmp_path: Path, layout: Any) -> None:
    bcp.save(tmp_path / "from", {"model": Tied(), "extra_state": {"step": 3}}, options=bcp.SaveOptions(layout="whole"))
    reshard(bcp.open(tmp_path / "from"), str(tmp_path / "to"), files=2, layout=layout)
    found = bcp.open(tmp_path / "to")
    assert found.verify().ok
    assert found.model_directory is None
    assert not list((tmp_path / "to").rglob("*.json"))
    assert found.section_values("extra_state") == {("step",): 3}


class _LoraLinear(nn.Module):
    """A stand-in for PEFT's layer, with its names."""

    adapter_layer_names = ("lora_A", "lora_B")

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(2, 2)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(2, 1, bias=False)})


class _PeftModel(nn.Module):
    """A stand-in for ``peft.PeftModel``."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._peft_config = None
        self.base_model = inner


@pytest.mark.parametrize("make", [_LoraLinear, lambda: _PeftModel(nn.Linear(2, 2))], ids=["layer", "model"])
def test_models_with_adapters_are_not_stored_as_directories(make: Any, tmp_path: Path) -> None:
    model = nn.Sequential(make())
    with pytest.raises(UsageError, match=r"'model' is a model with PEFT adapters.*random.*bcp export --lora peft"):
        bcp.save(tmp_path / "whole", {"model": model}, options=bcp.SaveOptions(layout="whole"))
    for options in (
        bcp.SaveOptions(layout="whole", trainable_only=True),  # no single adapter that is described
        bcp.SaveOptions(trainable_only=True),
        bcp.SaveOptions(layout="whole"),
    ):
        with pytest.raises(UsageError, match=r"'adapter_model' is for the folder that PEFT loads: it needs layout="):
            bcp.save(tmp_path / "whole", {"adapter_model": model}, options=options)
    assert not (tmp_path / "whole").exists()
    bcp.save(tmp_path / "merged", {"model": model}, options=bcp.SaveOptions(layout="merged"))
    bcp.save(tmp_path / "other", {"model": nn.Linear(2, 2)}, options=bcp.SaveOptions(layout="whole"))


@pytest.mark.parametrize("config", [{"r": 8}, 1, None], ids=repr)
def test_what_only_looks_like_an_adapter_of_peft_is_saved(config: Any, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.peft_config = {"default": config}  # type: ignore[assignment]
    bcp.save(tmp_path, {"model": model})
    assert torch.equal(bcp.open(tmp_path)["model.weight"][:], model.weight)
    assert not list(tmp_path.rglob("adapter_config.json"))
