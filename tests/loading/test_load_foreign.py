"""Load models from safetensors files that other libraries wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mismatches import faults_of
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import bytecheckpoint as bcp
from bytecheckpoint.errors import BytecheckpointError, CheckpointNotFoundError, MismatchError, NotACheckpointError
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(3) as ranks:
        yield ranks


class _Network(nn.Module):
    """Like a model of transformers: tied weights, a computed buffer, and lists of names."""

    _keys_to_ignore_on_load_unexpected = [r"h\.\d+\.attn\.bias"]
    _keys_to_ignore_on_load_missing = [r"masked_bias"]
    _tied_weights_keys = ["head.weight"]

    def __init__(self, *, tie: bool = True) -> None:
        super().__init__()
        self.config = SimpleNamespace(tie_word_embeddings=tie)
        self.embed = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 9)
        self.down = nn.Linear(9, 6)
        self.down.config = self.config  # type: ignore[assignment]  # which parts have, too, but no lists
        self.head = nn.Linear(6, 11, bias=False)
        if tie:
            self.head.weight = self.embed.weight
        self.register_buffer("freq", torch.arange(3.0), persistent=False)
        self.register_buffer("masked_bias", torch.full((), -1.0))

    def get_input_embeddings(self) -> nn.Module:
        return self.embed


def _tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    model = _Network()
    found = {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}
    del found["head.weight"], found["masked_bias"]
    found["freq"] = torch.ones(3)
    found["h.3.attn.bias"] = torch.ones(2)
    found["embeddings.position_ids"] = torch.arange(4)
    return found


def _write(folder: Path, tensors: dict[str, torch.Tensor], files: int = 2) -> None:
    """As ``save_pretrained`` does with a small ``max_shard_size``."""
    folder.mkdir()
    if files == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    places = {name: f"model-{i % files}.safetensors" for i, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in tensors if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def _differing(model: nn.Module, tensors: dict[str, torch.Tensor]) -> list[str]:
    bad = []
    for name, tensor in model.state_dict().items():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        expected = tensors.get("embed.weight" if name == "head.weight" else name, torch.full((), -1.0))
        if not torch.equal(whole.cpu(), expected):
            bad.append(name)
    return bad


@pytest.mark.parametrize("how", ["parts", "one file", "a named file"])
def test_whatever_open_reads_can_be_loaded(tmp_path: Path, how: str) -> None:
    folder, tensors = tmp_path / "hf", _tensors()
    _write(folder, tensors, files=2 if how == "parts" else 1)
    path = folder / "model.safetensors" if how == "a named file" else folder
    assert {name.removeprefix("model.") for name in bcp.open(path)} == set(tensors)
    model = _Network()
    report = bcp.load(path, {"model": model})
    assert not _differing(model, tensors)
    assert model.head.weight is model.embed.weight
    assert report.lazy == ["model.masked_bias"]
    assert "h.3.attn.bias" in report.notes[0]
    assert "freq" in report.notes[0]
    assert "embeddings.position_ids" in report.notes[0]
    with pytest.raises(MismatchError) as caught:
        bcp.load(path, {"model": model}, strict="exact")
    assert faults_of(caught, "missing") == ["model.masked_bias"]
    assert len(faults_of(caught, "unexpected")) == 3


def _load(rank: int, world_size: int, path: str, layout: str, tensors: dict[str, torch.Tensor]) -> Any:
    with torch.device("meta" if layout == "fsdp2 on meta" else "cpu"):
        model = _Network()
    if layout == "tensor parallel":
        mesh = init_device_mesh("cpu", (world_size,))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), "head": ColwiseParallel()}
        parallelize_module(model, mesh, plan)  # the head is no longer tied to the embedding
        assert model.head.weight is not model.embed.weight
    else:
        fully_shard(model)
    try:
        report = bcp.load(
            path, {"model": model}, options=bcp.LoadOptions(share_reads="always", deadline_s=time_limit(30))
        )
    except BytecheckpointError as error:
        return str(error)
    if layout == "fsdp2 on meta":
        model.masked_bias = torch.full((), -1.0)  # is not stored
    return _differing(model, tensors), report.missing, report.unexpected


@pytest.mark.parametrize("layout", ["fsdp2", "fsdp2 on meta", "tensor parallel"])
def test_sharded_models(pool: RankPool, tmp_path: Path, layout: str) -> None:
    """Uneven shards; each rank reads its part; only rank 0 reads the headers."""
    tensors = _tensors()
    _write(tmp_path / "hf", tensors)
    for path in ("hf", "hf/model-0.safetensors"):
        results = pool.run(_load, str(tmp_path / path), layout, tensors, world_size=3)
        if path == "hf":
            assert results == [([], [], [])] * 3
        else:
            assert all("missing" in result for result in results)


def test_only_the_section_model_is_there(tmp_path: Path) -> None:
    _write(tmp_path / "hf", _tensors())
    model = _Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    message = r"optimizer: these files of another library hold only a model; load it as \{'model': module\}"
    with pytest.raises(MismatchError, match=message) as caught:
        bcp.load(tmp_path / "hf", {"model": model, "optimizer": optimizer})
    assert faults_of(caught, "missing") == ["optimizer"]
    report = bcp.load(tmp_path / "hf", {"model": model, "optimizer": optimizer}, strict={"optimizer": False})
    assert report.missing == ["optimizer"]


def test_real_faults_are_still_found(tmp_path: Path) -> None:
    tensors = _tensors()
    del tensors["up.bias"]
    tensors["ghost"] = torch.ones(1)
    _write(tmp_path / "hf", tensors)
    with pytest.raises(MismatchError) as caught:
        bcp.load(tmp_path / "hf", {"model": _Network(tie=False)})
    # A head that the configuration does not tie must be stored.
    assert faults_of(caught, "missing") == ["model.head.weight", "model.up.bias"]
    assert faults_of(caught, "unexpected") == ["model.ghost"]


def test_patterns_renames_and_casts_apply(tmp_path: Path) -> None:
    tensors = {f"transformer.{name}": tensor for name, tensor in _tensors().items()}
    _write(tmp_path / "hf", tensors)
    model = _Network().double()
    report = bcp.load(
        tmp_path / "hf",
        {"model": model},
        include=["model.up.*"],
        rename=lambda name: name.replace("model.transformer.", "model."),
    )
    assert sorted(report.loaded) == ["model.up.bias", "model.up.weight"]
    assert torch.equal(model.up.weight, tensors["transformer.up.weight"].double())


def test_a_path_with_neither(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    with pytest.raises(NotACheckpointError, match=r"notes\.txt"):
        bcp.load(tmp_path, {"model": _Network()})
    with pytest.raises(CheckpointNotFoundError):
        bcp.load(tmp_path / "none.safetensors", {"model": _Network()})


def test_a_manifest_that_looks_like_headers_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "manifest.msgpack").write_bytes(b"safetensors headers\n\x91\x93\xa9/etc/host\x00\x90")
    with pytest.raises(bcp.errors.CheckpointError):
        bcp.load(tmp_path, {"model": _Network()})
