"""Load files of torch.save in place: models, optimizers, schedulers and plain values."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import bytecheckpoint as bcp
from bytecheckpoint.errors import CorruptionError, FormatError, MismatchError, NotACheckpointError, StorageError
from bytecheckpoint.testing.ranks import RankPool


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 8, bias=False))


class _Run:
    """A model, its optimizer and its scheduler."""

    def __init__(self, seed: int, *, shard: bool = False) -> None:
        torch.manual_seed(seed)
        self.model = _model()
        if shard:
            fully_shard(self.model, mesh=init_device_mesh("cpu", (2,)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05 * (seed + 1))
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)

    def train(self, steps: int) -> list[float]:
        losses = []
        for step in range(steps):
            torch.manual_seed(100 + step)
            loss = self.model(torch.randn(6, 8)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            losses.append(loss.item())
        return losses

    def stored(self) -> dict[str, Any]:
        return {
            "model_state_dict": self.model.state_dict(),
            "optimizer_state_dict": self.optimizer.state_dict(),
            "lr_scheduler": self.scheduler.state_dict(),
            "epoch": 3,
            "args": Namespace(lr=0.1),
        }

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "lr_scheduler": self.scheduler}


def _assert_equal(run: _Run, stored: dict[str, Any]) -> None:
    for name, tensor in run.model.state_dict().items():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        assert torch.equal(whole, stored["model_state_dict"][name]), name
    expected = stored["optimizer_state_dict"]
    found = run.optimizer.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    for index, entries in expected["state"].items():
        for key, tensor in entries.items():
            one = found["state"][index][key]
            assert torch.equal(one.full_tensor() if hasattr(one, "full_tensor") else one, tensor), (index, key)
    assert run.scheduler.state_dict() == stored["lr_scheduler"]


def test_a_run_continues_from_torch_save(tmp_path: Path) -> None:
    saved = _Run(0)
    saved.train(3)
    torch.save(saved.stored(), tmp_path / "run.pt")
    before = sorted(tmp_path.iterdir())
    run, extra = _Run(1), {"epoch": 0, "args": Namespace()}
    report = bcp.load(tmp_path / "run.pt", {**run.state(), "extra_state": extra})
    assert extra == {"epoch": 3, "args": Namespace(lr=0.1)}
    assert report.bytes_unchecked == 0
    assert sorted(tmp_path.iterdir()) == before
    _assert_equal(run, torch.load(tmp_path / "run.pt", weights_only=False))
    assert run.train(3) == saved.train(3)


def _load_sharded(rank: int, world_size: int, path: str) -> None:
    run = _Run(1, shard=True)
    report = bcp.load(path, run.state())
    _assert_equal(run, torch.load(path, weights_only=False))
    assert report.bytes_read <= 1.1 * report.bytes_requested + 4096


def test_a_model_next_to_its_optimizer(tmp_path: Path) -> None:
    saving, loading = _Run(0), _Run(1)
    saving.train(2)
    torch.save({**saving.model.state_dict(), "optimizer": saving.optimizer.state_dict(), "epoch": 3}, tmp_path / "a.pt")
    assert {*bcp.open(tmp_path / "a.pt").sections} == {"model", "optimizer", "extra_state"}
    bcp.load(tmp_path / "a.pt", {"model": loading.model, "optimizer": loading.optimizer, "extra_state": {"epoch": 0}})
    loading.scheduler.load_state_dict(saving.scheduler.state_dict())
    assert loading.train(2) == saving.train(2)
    torch.save({"a.b": torch.ones(1), "model": saving.model.state_dict(), "optimizer": {}}, tmp_path / "b.pt")
    assert bcp.open(tmp_path / "b.pt").tree("extra_state") == {"a.b": torch.ones(1)}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


def test_two_ranks_shard_a_file_of_torch_save(tmp_path: Path, pool: RankPool) -> None:
    saved = _Run(0)
    saved.train(2)
    torch.save(saved.stored(), tmp_path / "run.ckpt")
    pool.run(_load_sharded, str(tmp_path / "run.ckpt"))


@pytest.mark.parametrize("name", ["m.pth", "m.bin", "checkpoint_100"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod."])
def test_a_state_dict_alone_is_the_model(tmp_path: Path, name: str, prefix: str) -> None:
    model, other = _model(), _model()
    torch.save({f"{prefix}{key}": value for key, value in model.state_dict().items()}, tmp_path / name)
    bcp.load(tmp_path / name, {"model": other})
    for key, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[key], value)


def test_slices_and_strided_views_are_read_in_place(tmp_path: Path) -> None:
    base = torch.randn(64, 32)
    stored = {"rows": base[3:9], "columns": base[:, 4:20], "turned": base.t(), "tied": base[3:9], "scalar": base[0, 0]}
    torch.save(stored, tmp_path / "views.pt")
    found = bcp.open(tmp_path / "views.pt")
    for name, tensor in stored.items():
        assert torch.equal(found[f"model.{name}"].load(), tensor), name
    assert found.aliases == {"model.tied": "model.rows"}
    read = found.stats.read
    assert torch.equal(found["model.rows"][2:4], base[5:7])
    assert found.stats.read - read == 2 * 32 * 4


def test_lightning_checkpoints_have_the_usual_sections(tmp_path: Path) -> None:
    run = _Run(0)
    run.train(2)
    stored = run.stored()
    lightning = {
        "epoch": 1,
        "global_step": 24,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": stored["model_state_dict"],
        "loops": {"fit_loop": {"state_dict": {}}},
        "callbacks": {},
        "optimizer_states": [stored["optimizer_state_dict"]],
        "lr_schedulers": [stored["lr_scheduler"]],
    }
    torch.save(lightning, tmp_path / "last.ckpt")
    assert bcp.open(tmp_path / "last.ckpt").step == 24
    other = _Run(1)
    bcp.load(tmp_path / "last.ckpt", other.state())
    _assert_equal(other, stored)


class _Custom:
    def __init__(self) -> None:
        self.value = 1


def test_an_unknown_object_fails_only_if_it_is_requested(tmp_path: Path) -> None:
    torch.save({"model": _model().state_dict(), "config": {"a": _Custom(), "b": 2}}, tmp_path / "x.pt")
    bcp.load(tmp_path / "x.pt", {"model": _model()})
    with pytest.raises(
        MismatchError, match=r"config\.a: an object of class .*_Custom, which this library does not read"
    ):
        bcp.load(tmp_path / "x.pt", {"config": {"a": None, "b": 0}})
    config = {"b": 0}
    bcp.load(tmp_path / "x.pt", {"config": config}, exclude=["config.a"])
    assert config == {"b": 2}


def test_a_flipped_byte_is_found(tmp_path: Path) -> None:
    torch.save(_model().state_dict(), tmp_path / "m.pt")
    data = bytearray((tmp_path / "m.pt").read_bytes())
    at = bcp.open(tmp_path / "m.pt").manifest.byte_meta(0).offset
    data[at] ^= 1
    (tmp_path / "m.pt").write_bytes(data)
    with pytest.raises(CorruptionError, match=r"m\.pt: CRC-32 mismatch in tensor model\.0\.bias"):
        bcp.load(tmp_path / "m.pt", {"model": _model()})


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (b"GGUF\3\0\0\0" + bytes(64), NotACheckpointError, "is a GGUF file of llama.cpp"),
        (b"PK\3\4" + bytes(64), FormatError, "no zip archive ends here"),
        (b"", NotACheckpointError, "x.pt is not a checkpoint"),
        (b"hello world", NotACheckpointError, "x.pt is not a checkpoint"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, error: type[Exception], message: str) -> None:
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(error, match=message):
        bcp.open(tmp_path / "x.pt")


@pytest.mark.parametrize("is_folder", [False, True])
def test_files_from_before_archives_are_named(tmp_path: Path, is_folder: bool) -> None:
    name = "pytorch_model.bin" if is_folder else "old.pt"
    torch.save(_model().state_dict(), tmp_path / name, _use_new_zipfile_serialization=False)
    with pytest.raises(FormatError, match=rf"{name}: a torch before 1\.6 wrote it.*torch\.save\(torch\.load\("):
        bcp.open(tmp_path if is_folder else tmp_path / name)


_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "manifest.msgpack"])
def test_pointers_of_git_lfs_are_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(_POINTER)
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(NotACheckpointError, match=r"is a pointer of Git LFS.*git lfs pull"):
            bcp.open(path)


def test_a_module_that_was_pickled_as_a_whole_is_named(tmp_path: Path) -> None:
    torch.save(_model(), tmp_path / "model.pt")
    with pytest.raises(NotACheckpointError, match=r"class torch.nn.modules.container.Sequential.*state_dict\(\)"):
        bcp.open(tmp_path / "model.pt")


def test_a_snapshot_of_the_hugging_face_cache_consists_of_links(tmp_path: Path) -> None:
    model, other = _model(), _model()
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    save_file(model.state_dict(), blobs / "abc")
    (snapshot / "model.safetensors").symlink_to("../../blobs/abc")
    for path in (snapshot, snapshot / "model.safetensors"):
        bcp.load(path, {"model": other})
        assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in model.state_dict().items())
    (blobs / "abc").unlink()
    for path in (snapshot, snapshot / "model.safetensors"):
        with pytest.raises(
            StorageError, match=r"model.safetensors.*symbolic link to .*blobs/abc, which does not exist"
        ):
            bcp.open(path)
    (snapshot / "model.safetensors").unlink()
    (tmp_path / "secret").write_bytes(b"x")
    (snapshot / "model.safetensors").symlink_to("../../../secret")
    with pytest.raises(StorageError, match="leads out of the root"):
        bcp.open(snapshot / "model.safetensors")
