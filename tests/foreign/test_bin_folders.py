"""Models of Hugging Face libraries in files of torch.save, in place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import bytecheckpoint as bcp
from bytecheckpoint.errors import (
    BytecheckpointError,
    CheckpointNotFoundError,
    CorruptionError,
    FormatError,
    NotACheckpointError,
)
from bytecheckpoint.testing.ranks import RankPool


class _Network(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight


def _write(folder: Path, model: nn.Module, files: int = 1) -> dict[str, torch.Tensor]:
    """As ``save_pretrained(safe_serialization=False)`` of transformers 4 did: tied tensors are in the same file."""
    folder.mkdir(exist_ok=True)
    tensors = dict(model.state_dict())
    if files == 1:
        torch.save(tensors, folder / "pytorch_model.bin")
        return tensors
    places = {
        name: f"pytorch_model-{1 + i * files // len(tensors):05d}-of-{files:05d}.bin" for i, name in enumerate(tensors)
    }
    places["head.weight"] = places["embed.weight"]
    for file in set(places.values()):
        torch.save({name: tensors[name] for name in tensors if places[name] == file}, folder / file)
    document = {"metadata": {"total_size": 1}, "weight_map": places}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(document))
    return tensors


def _assert_equal(model: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in model.state_dict().items():
        whole: Any = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        assert torch.equal(whole, tensors[name]), name


@pytest.mark.parametrize("files", [1, 3])
def test_models_load_in_place(tmp_path: Path, files: int) -> None:
    tensors = _write(tmp_path / "hf", _Network(0), files)
    (tmp_path / "hf/config.json").write_text("{}")
    before = sorted((tmp_path / "hf").iterdir())
    found = bcp.open(tmp_path / "hf")
    assert {name.removeprefix("model.") for name in (*found, *found.aliases)} == set(tensors)
    assert found.aliases == {"model.head.weight": "model.embed.weight"}
    read = found.stats.read
    assert torch.equal(found["model.embed.weight"][2:4], tensors["embed.weight"][2:4])
    assert found.stats.read - read == 2 * 6 * 4
    model = _Network(1)
    report = bcp.load(tmp_path / "hf", {"model": model})
    _assert_equal(model, tensors)
    assert report.bytes_unchecked == 0, "each file has the CRC-32 of each storage"
    assert sorted((tmp_path / "hf").iterdir()) == before


def _load_sharded(rank: int, world_size: int, path: str, tensors: dict[str, torch.Tensor]) -> None:
    model = _Network(1)
    fully_shard(model)
    report = bcp.load(path, {"model": model})
    _assert_equal(model, tensors)
    assert report.bytes_read <= 1.1 * report.bytes_requested + 4096


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


def test_two_ranks(tmp_path: Path, pool: RankPool) -> None:
    tensors = _write(tmp_path / "hf", _Network(0), 3)
    pool.run(_load_sharded, str(tmp_path / "hf"), tensors)


def test_safetensors_come_first(tmp_path: Path) -> None:
    from safetensors.torch import save_model

    _write(tmp_path / "hf", _Network(0))
    save_model(_Network(2), str(tmp_path / "hf/model.safetensors"))
    assert bcp.open(tmp_path / "hf").index.system == "safetensors"
    model = _Network(1)
    bcp.load(tmp_path / "hf", {"model": model})
    _assert_equal(model, _Network(2).state_dict())


def _faulty_folder(folder: Path, fault: str) -> None:
    index = folder / "pytorch_model.bin.index.json"
    if fault == "other model":
        torch.save({"x": torch.ones(1)}, folder / "pytorch_model.bin")
        return
    if fault == "no file":
        (folder / "pytorch_model-00002-of-00003.bin").unlink()
        return
    if fault == "no tensors":
        torch.save({"x": [1, 2]}, folder / "pytorch_model-00002-of-00003.bin")
        return
    document = json.loads(index.read_text())
    names = list(document["weight_map"])
    if fault == "outside":
        document["weight_map"][names[0]] = "../pytorch_model-00001-of-00003.bin"
    elif fault == "missing":
        document["weight_map"]["ghost"] = "pytorch_model-00001-of-00003.bin"
    index.write_text("[" if fault == "no JSON" else json.dumps(document))


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("other model", NotACheckpointError, "holds both pytorch_model.bin.index.json and pytorch_model.bin"),
        ("no file", CorruptionError, "00002-of-00003.bin: file is missing, but pytorch_model.bin.index.json names it"),
        ("no tensors", FormatError, "00002-of-00003.bin: it does not hold a model's tensors"),
        ("outside", FormatError, r"names '\.\./pytorch_model-00001-of-00003.bin', which is not a bin file in the same"),
        ("missing", FormatError, "'ghost' is not in pytorch_model-00001-of-00003.bin"),
        ("no JSON", FormatError, "is not JSON"),
    ],
)
def test_faulty_folders(tmp_path: Path, fault: str, error: type[BytecheckpointError], message: str) -> None:
    _write(tmp_path / "hf", _Network(0), 3)
    _faulty_folder(tmp_path / "hf", fault)
    with pytest.raises(error, match=message):
        bcp.open(tmp_path / "hf")


def test_a_tensor_that_the_index_does_not_list_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    model = _Network(0)
    _write(tmp_path / "hf", model, 3)
    index = tmp_path / "hf" / "pytorch_model.bin.index.json"
    document = json.loads(index.read_text())
    del document["weight_map"]["layers.1.bias"]
    index.write_text(json.dumps(document))
    other = _Network(1)
    bcp.load(tmp_path / "hf", {"model": other})
    _assert_equal(other, model.state_dict())


def test_folders_of_gguf_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model-Q4_K_M.gguf").write_bytes(b"GGUF\3\0\0\0" + bytes(64))
    with pytest.raises(NotACheckpointError, match=r"model-Q4_K_M.gguf is a GGUF file of llama.cpp.*safetensors files"):
        bcp.open(tmp_path)
    (tmp_path / "model-Q4_K_M.gguf").unlink()
    with pytest.raises((NotACheckpointError, CheckpointNotFoundError), match=r"nothing|no checkpoint"):
        bcp.open(tmp_path)
