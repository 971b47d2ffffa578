"""The command line on other systems' checkpoints: inspect, verify, diff, import, reshard, export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner, Result
from torch import nn

import bytecheckpoint as bcp
from bytecheckpoint.cli import cli


def _bcp(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(one) for one in arguments])


def _document(*arguments: object) -> dict:
    ran = _bcp(*arguments, "--json")
    assert ran.exit_code == 0, ran.output
    return json.loads(ran.stdout)


def _run(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(300, 40), nn.Linear(40, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    model(torch.randn(2, 300)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture(params=["torch", "dcp"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    model, optimizer = _run(0)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    if request.param == "torch":
        torch.save(state, tmp_path / "run.pt")
        return tmp_path / "run.pt"
    dcp.save(state, checkpoint_id=tmp_path / "run", no_dist=True)
    return tmp_path / "run"


def test_inspect(source: Path) -> None:
    document = _document("inspect", source, "--values", "--shards")
    assert document["system"] == ("torch.save" if source.suffix else "torch.distributed.checkpoint")
    assert [one["name"] for one in document["sections"]] == ["model", "optimizer", "extra_state"]
    assert {"name": "extra_state.epoch", "section": "extra_state", "rank": None, "value": 3} in document["values"]
    assert "written by torch" in _bcp("inspect", source).output


def _flip(source: Path) -> None:
    manifest = bcp.open(source).manifest
    row = manifest.tensor_row("model.0.weight")
    assert row is not None
    at = manifest.byte_meta(manifest.shards_of(row).start)
    path = (source.parent if source.is_file() else source) / at.file
    data = bytearray(path.read_bytes())
    data[at.offset + 1000] ^= 1
    path.write_bytes(data)


def test_verify(source: Path) -> None:
    assert _document("verify", source)["ok"]
    _flip(source)
    ran = _bcp("verify", source)
    assert ran.exit_code == 1
    assert "CRC-32 mismatch in tensor model.0.weight" in ran.output


def test_safetensors_cannot_be_verified(tmp_path: Path) -> None:
    safetensors.torch.save_file({"a": torch.ones(3)}, tmp_path / "m.safetensors")
    ran = _bcp("verify", tmp_path / "m.safetensors")
    assert ran.exit_code != 0
    assert "no checksums to check" in ran.output


@pytest.mark.parametrize("tool", ["import", "reshard"])
def test_an_import_holds_everything(source: Path, tmp_path: Path, tool: str) -> None:
    options = ["--files", 2] if tool == "reshard" else []
    if tool == "import":
        _document(tool, source, tmp_path / "c", *options)
        assert bcp.open(tmp_path / "c").verify().ok
        report = _document("diff", source, tmp_path / "c")
        assert report["same"]
        assert report["compared"] == 16
        model, optimizer = _run(1)
        bcp.load(tmp_path / "c", {"model": model, "optimizer": optimizer, "extra_state": (extra := {"epoch": 0})})
        expected_model, expected = _run(0)
        assert extra == {"epoch": 3}
        assert optimizer.param_groups[0]["lr"] == expected.param_groups[0]["lr"]
        for one, other in zip(model.parameters(), expected_model.parameters()):
            assert torch.equal(one, other)
    else:
        _document(tool, source, tmp_path / "c", *options)
        assert _document("diff", source, tmp_path / "c")["same"]


def test_a_damaged_source_is_not_imported(source: Path, tmp_path: Path) -> None:
    _flip(source)
    ran = _bcp("import", source, tmp_path / "c")
    assert ran.exit_code != 0
    assert "CRC-32 mismatch in tensor model.0.weight" in ran.output
    assert not (tmp_path / "c" / "manifest.msgpack").exists()


def test_an_object_that_is_not_read_must_be_excluded(tmp_path: Path) -> None:
    torch.save(
        {"model": _run(0)[0].state_dict(), "config": {"device": slice(1), "kind": CliRunner()}}, tmp_path / "x.pt"
    )
    ran = _bcp("import", tmp_path / "x.pt", tmp_path / "c")
    assert ran.exit_code != 0
    assert "config.kind (an object of class click.testing.CliRunner)" in ran.output
    _document("import", tmp_path / "x.pt", tmp_path / "c", "--exclude", "config.*")
    assert bcp.open(tmp_path / "c").tree("model").keys() == _run(0)[0].state_dict().keys()


def test_diff_finds_what_differs(source: Path, tmp_path: Path) -> None:
    model, optimizer = _run(0)
    with torch.no_grad():
        model[1].bias[2] += 1
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 4}, tmp_path / "other.pt")
    report = json.loads(_bcp("diff", source, tmp_path / "other.pt", "--json").stdout)
    assert [one["name"] for one in report["tensors"]] == ["model.1.bias"]
    assert [one["name"] for one in report["values"]] == ["extra_state.epoch"]


def test_export(source: Path, tmp_path: Path) -> None:
    _document("export", source, tmp_path / "hf")
    found = safetensors.torch.load_file(tmp_path / "hf" / "model.safetensors")
    for name, tensor in _run(0)[0].state_dict().items():
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize("is_whole", [True, False])
def test_weights_of_a_class_that_is_not_read(tmp_path: Path, is_whole: bool) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    state = nn.Linear(4, 3).state_dict()
    state["weight"] = TwoTensor(state["weight"], state["weight"].clone())
    source = tmp_path / "quantized.pt"
    torch.save(state if is_whole else {"model": state, "epoch": 3}, source)
    assert bcp.open(source).sections[0] == "model"
    [name] = _document("inspect", source)["not_read"]
    assert name == "model.weight"
    assert "not read: model.weight (a tensor of class torch" in _bcp("inspect", source).output
    for form in ("safetensors", "torch", "dcp"):
        target = tmp_path / form
        refused = _bcp("export", "--format", form, source, target)
        assert refused.exit_code == 6
        assert "model.weight (a tensor of class torch" in refused.output
        assert not target.exists() or not any(target.iterdir())
        pattern = "weight" if form == "safetensors" else "model.weight"
        assert _bcp("export", "--format", form, "--exclude", pattern, source, tmp_path / f"{form}-2").exit_code == 0
    assert torch.load(tmp_path / "torch-2")["model"].keys() == {"bias"}
    assert _bcp("import", source, tmp_path / "imported").exit_code == 6
