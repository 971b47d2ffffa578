"""``bcp export --format dcp`` and ``--format torch``: torch alone reads the result."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import bytecheckpoint as bcp
from bytecheckpoint.cli import cli
from bytecheckpoint.convert.torch_file import export_torch_file
from bytecheckpoint.dcp.export import export_dcp
from bytecheckpoint.errors import CorruptionError, KeyExistsError, NameNotFoundError, StateError, UsageError


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.body = nn.ModuleList([nn.Linear(8, 8, dtype=torch.bfloat16), nn.BatchNorm1d(8)])
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("none", torch.empty(0, 3))


def _state(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = _Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    extra = {"epoch": seed, "names": ["a", "b"], "list": [torch.randn(3), {"x": torch.tensor(seed)}], "n": {"1": 2.5}}
    return {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler, "extra": extra}


def _same(one: Any, other: Any) -> None:
    assert type(one) is type(other) or {type(one), type(other)} <= {dict, OrderedDict}
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            _same(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for first, second in zip(one, other):
            _same(first, second)
    else:
        assert one == other


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    bcp.save(tmp_path / "c", _state(0), step=5)
    return tmp_path / "c"


def test_torch_load_reads_the_file_without_this_library(saved: Path, tmp_path: Path) -> None:
    report = export_torch_file(bcp.open(saved), str(tmp_path / "all.pt"))
    assert report.nbytes == (tmp_path / "all.pt").stat().st_size
    torch.save(_state(1), tmp_path / "fresh.pt")
    script = """
import sys, torch
found = torch.load("all.pt", weights_only=True)
torch.save(found, "again.pt")
assert not any(name.startswith("bytecheckpoint") for name in sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)
    found, expected, target = torch.load(tmp_path / "again.pt"), _state(0), _state(1)
    _same(found["model"], expected["model"].state_dict())
    _same(found["extra"], expected["extra"])
    with pytest.raises(KeyError):
        target["optimizer"].load_state_dict(found["optimizer"])  # it goes by order, and would mix up equal shapes
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    set_optimizer_state_dict(target["model"], target["optimizer"], found["optimizer"], options=flat)
    for name in ("model", "lr_scheduler"):
        target[name].load_state_dict(found[name])
    for name in ("model", "optimizer", "lr_scheduler"):
        _same(target[name].state_dict(), expected[name].state_dict())
    assert found["model"]["head.weight"] is found["model"]["embed.weight"]


def test_the_archive_is_a_valid_zip_file_with_checksums(saved: Path, tmp_path: Path) -> None:
    export_torch_file(bcp.open(saved), str(tmp_path / "all.pt"))
    with zipfile.ZipFile(tmp_path / "all.pt") as archive:
        assert archive.testzip() is None
        assert all(entry.CRC for entry in archive.infolist() if entry.file_size)
    assert bcp.open(tmp_path / "all.pt").verify().ok


def test_one_section_is_its_own_state_dict(saved: Path, tmp_path: Path) -> None:
    export_torch_file(bcp.open(saved), str(tmp_path / "model.pt"), section="model", cast="float16", exclude=["*.none"])
    expected = {
        name: tensor.half() if tensor.is_floating_point() else tensor
        for name, tensor in _state(0)["model"].state_dict().items()
        if name != "none"
    }
    _same(torch.load(tmp_path / "model.pt"), expected)


@pytest.mark.parametrize("limit", [5_000_000_000, 3000])
def test_torch_loads_the_folder(saved: Path, tmp_path: Path, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bytecheckpoint.dcp.export._CHUNK_BYTES", 500)
    report = export_dcp(bcp.open(saved), str(tmp_path / "dcp"), max_file_bytes=limit)
    assert sorted(name for name, _ in report.files) == sorted(file.name for file in (tmp_path / "dcp").iterdir())
    assert (len(report.files) > 2) == (limit == 3000)
    assert report.tensors == len(bcp.open(saved).manifest.tensors)
    expected, target = _state(0), _state(1)
    state = {
        "model": get_model_state_dict(target["model"]),
        "optimizer": get_optimizer_state_dict(target["model"], target["optimizer"]),
        "lr_scheduler": target["lr_scheduler"].state_dict(),
        "extra": target["extra"],
    }
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    _same(state["model"], get_model_state_dict(expected["model"]))
    set_optimizer_state_dict(target["model"], target["optimizer"], state["optimizer"])
    _same(target["optimizer"].state_dict(), expected["optimizer"].state_dict())
    _same(state["lr_scheduler"], expected["lr_scheduler"].state_dict())
    _same(state["extra"], expected["extra"])
    again = bcp.open(tmp_path / "dcp")
    _same(again.tree("extra"), expected["extra"])
    assert again.verify().ok


def test_the_folder_of_one_section_is_its_state_dict(saved: Path, tmp_path: Path) -> None:
    export_dcp(bcp.open(saved), str(tmp_path / "dcp"), section="model")
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "model.pt")
    _same(torch.load(tmp_path / "model.pt"), _state(0)["model"].state_dict())


def test_other_systems_checkpoints_are_exported(saved: Path, tmp_path: Path) -> None:
    state = {name: value if name == "extra" else value.state_dict() for name, value in _state(0).items()}
    torch.save(state, tmp_path / "theirs.pt")
    export_dcp(bcp.open(tmp_path / "theirs.pt"), str(tmp_path / "dcp"))
    export_torch_file(bcp.open(tmp_path / "dcp"), str(tmp_path / "again.pt"))
    _same(torch.load(tmp_path / "again.pt"), state)


def test_a_damaged_checkpoint_leaves_nothing(saved: Path, tmp_path: Path) -> None:
    (file,) = (
        saved.glob("**/*.safetensors")
        if len([*saved.glob("**/model*.safetensors")]) == 0
        else sorted(saved.glob("**/model*.safetensors"))[:1]
    )
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptionError):
        export_torch_file(bcp.open(saved), str(tmp_path / "out.pt"))
    with pytest.raises(CorruptionError):
        export_dcp(bcp.open(saved), str(tmp_path / "out"))
    assert not (tmp_path / "out.pt").exists()
    assert not [*(tmp_path / "out").glob("*")]


def test_bad_requests_change_nothing(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("other")
    with pytest.raises(KeyExistsError, match="not empty"):
        export_dcp(bcp.open(saved), str(tmp_path / "there"))
    with pytest.raises(KeyExistsError, match="exists already"):
        export_torch_file(bcp.open(saved), str(tmp_path / "there" / "file"))
    with pytest.raises(UsageError, match="is a folder"):
        export_torch_file(bcp.open(saved), f"{tmp_path}/there/")
    for export in (export_dcp, export_torch_file):
        with pytest.raises(NameNotFoundError, match="it has extra, lr_scheduler, model, optimizer"):
            export(bcp.open(saved), str(tmp_path / "new"), section="nothing")
        with pytest.raises(UsageError, match="cast must be"):
            export(bcp.open(saved), str(tmp_path / "new"), cast="int8")
    assert (tmp_path / "there" / "file").read_text() == "other"
    assert not (tmp_path / "new").exists()


def test_a_pickled_value_is_refused_unless_it_is_left_out(tmp_path: Path) -> None:
    state = {"extra": {"path": complex, "epoch": 3}}
    bcp.save(tmp_path / "c", state, options=bcp.SaveOptions(allow_pickle=True))
    with pytest.raises(StateError, match="leave out what the export need not have with exclude"):
        export_torch_file(bcp.open(tmp_path / "c"), str(tmp_path / "out.pt"))
    export_torch_file(bcp.open(tmp_path / "c"), str(tmp_path / "out.pt"), exclude=["extra.path"])
    assert torch.load(tmp_path / "out.pt") == {"extra": {"epoch": 3}}


@pytest.mark.parametrize("form", ["dcp", "torch"])
def test_the_command(saved: Path, tmp_path: Path, form: str) -> None:
    def bcp_export(*options: str) -> Any:
        return CliRunner().invoke(cli, ["export", str(saved), str(tmp_path / "out"), "--format", form, *options])

    refused = bcp_export("--tied", "copy")
    assert refused.exit_code == 2
    assert f"--tied, --masters and --lora do not apply to --format {form}" in refused.output
    done = bcp_export("--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["tensors"] >= 10
    assert (tmp_path / "out").exists()
    assert bcp_export().exit_code != 0, "it exists"


def test_random_states_are_plain_values(tmp_path: Path) -> None:
    state = {"rng": bcp.RNGState(), "extra_state": {"loss": np.float32(0.5), "seen": np.arange(3)}}
    bcp.save(tmp_path / "saved", state)
    expected = np.random.random(4), torch.rand(4), random.random()
    export_torch_file(bcp.open(tmp_path / "saved"), tmp_path / "run.pt")
    found = torch.load(tmp_path / "run.pt")  # weights_only
    assert found["extra_state"] == {"loss": 0.5, "seen": [0, 1, 2]}
    np.random.set_state(found["rng"]["numpy"])
    assert (np.random.random(4) == expected[0]).all()
    bcp.load(tmp_path / "run.pt", {"rng": bcp.RNGState()})
    assert (np.random.random(4) == expected[0]).all()
    assert torch.equal(torch.rand(4), expected[1])
    assert random.random() == expected[2]
