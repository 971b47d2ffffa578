"""Data files are plain safetensors files: the stock library opens every one, and loads a single process's model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import bytecheckpoint as bcp
from bytecheckpoint.convert.export import export_safetensors
from bytecheckpoint.tensors.dtypes import DTYPES

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


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_every_dtype_goes_both_ways_as_in_the_stock_library(tmp_path: Path) -> None:
    """A dtype that torch or safetensors learns fails here, and not at a user's."""
    for name, dtype in {str(d)[6:]: d for d in vars(torch).values() if isinstance(d, torch.dtype)}.items():
        raw = torch.arange(96, dtype=torch.uint8).remainder(2 if dtype is torch.bool else 251)
        try:
            tensor = raw.view(dtype).view(2, -1)
            save_file({"x": tensor}, tmp_path / f"{name}.safetensors")
        except (KeyError, RuntimeError):  # safetensors has no code for it, or torch no bytes
            assert name not in DTYPES or DTYPES[name].safetensors is None, name
            continue
        read = bcp.open(tmp_path / f"{name}.safetensors")["model.x"].load()
        assert (read.dtype, read.shape) == (dtype, tensor.shape)
        assert read.view(torch.uint8).equal(tensor.view(torch.uint8)), name
        bcp.save(tmp_path / name, {"model": {"x": tensor}})
        export_safetensors(bcp.open(tmp_path / name), tmp_path / f"{name}-exported")
        (file,) = (tmp_path / f"{name}-exported").glob("*.safetensors")
        exported = load_file(file)["x"]
        assert (exported.dtype, exported.shape) == (dtype, tensor.shape)
        assert exported.view(torch.uint8).equal(tensor.view(torch.uint8)), name
