"""Folders of safetensors files that others wrote, opened as if they were checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import bytecheckpoint as bcp
from bytecheckpoint.convert.diff import diff
from bytecheckpoint.convert.export import export_safetensors
from bytecheckpoint.convert.reshard import reshard
from bytecheckpoint.errors import FormatError, NotACheckpointError, StateError


def _tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {
        "model.embed.weight": torch.randn(37, 16),
        "model.norm.weight": torch.randn(16).to(torch.bfloat16),
        "model.step": torch.tensor(7),
        "model.empty": torch.empty(0, 4),
        "lm_head.weight": torch.randn(37, 16).to(torch.float8_e4m3fn),
    }


def _save_in_parts(folder: Path) -> dict[str, torch.Tensor]:
    """As ``save_pretrained`` does with a small ``max_shard_size``."""
    folder.mkdir()
    tensors = _tensors()
    places = {name: f"model-{1 + index % 2:05d}-of-00002.safetensors" for index, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in tensors if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (folder / "config.json").write_text("{}")
    return tensors


@pytest.mark.parametrize("how", ["one file", "parts", "a named file"])
def test_reads_what_is_there(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "hf"
    if how == "parts":
        tensors, path = _save_in_parts(folder), folder
    else:
        folder.mkdir()
        tensors = _tensors()
        name = "model.safetensors" if how == "one file" else "weights.safetensors"
        save_file(tensors, folder / name)
        path = folder if how == "one file" else folder / name
    found = bcp.open(path)
    assert sorted(found) == sorted(f"model.{name}" for name in tensors)
    for name, tensor in tensors.items():
        stored = found[f"model.{name}"]
        assert (stored.shape, stored.dtype) == (tuple(tensor.shape), tensor.dtype)
        assert torch.equal(stored.load().flatten().view(torch.uint8), tensor.flatten().view(torch.uint8))
    assert torch.equal(found["model.model.embed.weight"][3:5, 2:9], tensors["model.embed.weight"][3:5, 2:9])
    assert found.step is None
    assert found.model_directory is None


def test_checksums_are_refused_but_not_needed(tmp_path: Path) -> None:
    tensors = _save_in_parts(tmp_path / "hf")
    found = bcp.open(tmp_path / "hf")
    with pytest.raises(StateError, match=r"no checksums to check; .* bcp import"):
        found.verify()
    reshard(found, str(tmp_path / "resharded"), files=2)
    export_safetensors(found, str(tmp_path / "exported"))
    assert bcp.open(tmp_path / "resharded").verify().ok
    for copy in (bcp.open(tmp_path / "resharded"), bcp.open(tmp_path / "exported")):
        for name, tensor in tensors.items():
            stored = copy[f"model.{name}"].load()
            assert torch.equal(stored.flatten().view(torch.uint8), tensor.flatten().view(torch.uint8))


def test_folders_without_checksums_are_compared_by_value(tmp_path: Path) -> None:
    """The placeholder of checksums is the same in all folders."""
    for name, value in (("one", 1.0), ("same", 1.0), ("other", 2.0)):
        (tmp_path / name).mkdir()
        save_file({"weight": torch.full((3, 5), value)}, tmp_path / name / "model.safetensors")
    assert not diff(bcp.open(tmp_path / "one"), bcp.open(tmp_path / "same")).tensors
    report = diff(bcp.open(tmp_path / "one"), bcp.open(tmp_path / "other"))
    assert [(found.name, found.differing, found.max_abs) for found in report.tensors] == [("model.weight", 15, 1.0)]


def test_a_folder_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    _save_in_parts(tmp_path / "hf")
    index = tmp_path / "hf" / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["weight_map"]["model.ghost"] = document["weight_map"]["model.step"]
    index.write_text(json.dumps(document))
    with pytest.raises(FormatError, match=r"model\.ghost"):
        bcp.open(tmp_path / "hf")


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    with pytest.raises(NotACheckpointError):
        bcp.open(tmp_path)
