"""Data files are plain safetensors files: the stock library opens every one, and loads a single process's model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import bytecheckpoint as bcp

GOLDEN = Path(__file__).parents[1] / "golden" / "v1"


def test_a_saved_model_loads_under_its_own_names(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 10), nn.LayerNorm(10), nn.BatchNorm1d(10))
    bcp.save(tmp_path, {"model": model, "optimizer": torch.optim.Adam(model.parameters())})
    (file,) = tmp_path.glob("attempt-*/model-*.safetensors")
    stored = load_file(file)
    assert stored.keys() == model.state_dict().keys()
    other = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 10), nn.LayerNorm(10), nn.BatchNorm1d(10))
    other.load_state_dict(stored, strict=True)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize(
    "file", sorted(GOLDEN.rglob("*.safetensors")), ids=lambda file: f"{file.parts[-3]}-{file.stem}"
)
def test_the_stock_library_opens_every_data_file(file: Path) -> None:
    """Of one process, of FSDP-2, decomposed flat shards of FSDP-1, tensor parallelism, and every dtype."""
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata()["format"] == "pt"
        names = list(opened.keys())
        tensors = {name: opened.get_tensor(name) for name in names}
    folder = file.parents[1]
    checkpoint = bcp.open(folder.parent / "step-1" if folder.name == "objects" else folder)
    section = file.stem.rpartition("-")[0]
    whole = {name for name in names if f"{section}.{name}" in checkpoint}
    for name in whole:
        ours = checkpoint[f"{section}.{name}"].load()
        theirs = tensors[name].contiguous()
        assert ours.contiguous().reshape(-1).view(torch.uint8).equal(theirs.reshape(-1).view(torch.uint8)), name
    assert names
