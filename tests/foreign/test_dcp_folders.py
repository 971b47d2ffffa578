"""Load folders of torch.distributed.checkpoint in place, whatever form the state dict had."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import bytecheckpoint as bcp
from bytecheckpoint.errors import CorruptionError, FormatError
from bytecheckpoint.testing.ranks import RankPool

_FORMS = ["nested", "flat", "raw", "app", "unnested"]


class _Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.up = nn.Linear(6, 12)
        self.down = nn.Linear(12, 6)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.head(self.down(self.up(self.embed(tokens)).relu()))


class _Run:
    def __init__(self, seed: int, layout: str = "single") -> None:
        torch.manual_seed(seed)
        self.model = _Network()
        if layout == "tp":
            mesh = init_device_mesh("cpu", (2,))
            parallelize_module(self.model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        elif layout == "fsdp":
            fully_shard(self.model, mesh=init_device_mesh("cpu", (2,)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01 * (seed + 1))

    def train(self, steps: int) -> list[float]:
        losses = []
        for step in range(steps):
            torch.manual_seed(50 + step)
            loss = self.model(torch.randint(13, (4, 3))).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.model.count += 1
            losses.append(loss.item())
        return losses

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def form(self, name: str) -> dict[str, Any]:
        """The state dict that a user of DCP saves."""
        if name == "raw":
            return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": 7}
        options = StateDictOptions(flatten_optimizer_state_dict=name in ("flat", "unnested"))
        parts = {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer, options=options),
        }
        if name == "unnested":  # torchtitan
            return {**parts.pop("model"), **parts, "step": 7}
        return {"app": parts} if name == "app" else {**parts, "step": 7}

    def full(self) -> dict[str, torch.Tensor]:
        """Model and optimizer in one process's form, gathered by torch."""
        options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
        optimizer = get_optimizer_state_dict(self.model, self.optimizer, options=options)
        found = {**get_model_state_dict(self.model, options=options), **optimizer}
        return copy.deepcopy({name: value for name, value in found.items() if value is not None})


def _assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(value)), name


def _save(rank: int, world_size: int, folder: str, layout: str) -> None:
    run = _Run(0, layout)
    run.train(2)
    for form in _FORMS:
        dcp.save(run.form(form), checkpoint_id=f"{folder}/{form}")
    torch.save([run.full(), run.train(3)], f"{folder}/expected-{rank}")


def _load(rank: int, world_size: int, folder: str, form: str, layout: str, same: str) -> None:
    run = _Run(4, layout)
    report = bcp.load(f"{folder}/{form}", run.state(), strict={"model": True, "optimizer": True})
    expected, losses = torch.load(f"{folder}/expected-{rank if same else 0}", weights_only=False)
    _assert_same(run.full(), expected)
    assert report.bytes_unchecked < report.bytes_requested
    found = run.train(3)
    assert found == losses if same else found == pytest.approx(losses, abs=1e-3)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


@pytest.fixture(scope="module", params=["fsdp", "tp"])
def folder(request: pytest.FixtureRequest, pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    where = str(tmp_path_factory.mktemp(f"dcp-{request.param}"))
    pool.run(_save, where, request.param)
    return where, request.param


@pytest.mark.parametrize("form", _FORMS)
def test_two_ranks_load_a_folder(folder: tuple[str, str], form: str, pool: RankPool) -> None:
    before = sorted(Path(folder[0], form).iterdir())
    pool.run(_load, folder[0], form, "fsdp", folder[1] if folder[1] == "fsdp" else "")
    assert sorted(Path(folder[0], form).iterdir()) == before


@pytest.mark.parametrize("form", _FORMS)
def test_one_process_loads_a_folder(folder: tuple[str, str], form: str) -> None:
    run, extra = _Run(4), {"step": 0}
    state = run.state() if form == "app" else {**run.state(), "extra_state": extra}
    bcp.load(f"{folder[0]}/{form}", state)
    assert extra["step"] == (0 if form == "app" else 7)
    expected, losses = torch.load(f"{folder[0]}/expected-0", weights_only=False)
    _assert_same(run.full(), expected)
    assert run.optimizer.param_groups[0]["lr"] == 0.01
    assert run.train(3) == pytest.approx(losses, abs=1e-3)


def _save_short(rank: int, world_size: int, folder: str) -> None:
    model = nn.Linear(3, 1)
    nn.init.ones_(model.bias)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    dcp.save(model.state_dict(), checkpoint_id=folder)


def test_a_tensor_of_which_a_rank_held_nothing(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_save_short, str(tmp_path))
    assert bcp.open(tmp_path)["model.bias"][...].tolist() == [1.0]


def test_a_state_dict_alone_is_the_model(tmp_path: Path) -> None:
    run, other = _Run(0), _Run(1)
    dcp.save(run.model.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    found = bcp.open(tmp_path)
    assert torch.equal(found["model.up.weight"][2:5], run.model.up.weight[2:5].detach())
    bcp.load(tmp_path, {"model": other.model})
    _assert_same(other.model.state_dict(), run.model.state_dict())


def test_values_and_objects_of_a_folder(tmp_path: Path) -> None:
    values = {"betas": (0.9, 0.95), "name": "run", "list": [1, torch.arange(3), {"a": None}], "none": None}
    dcp.save({"model": _Run(0).model.state_dict(), "extra": values}, checkpoint_id=tmp_path, no_dist=True)
    loaded = bcp.open(tmp_path).tree("extra")
    assert torch.equal(loaded["list"].pop(1), torch.arange(3))
    assert loaded == {"betas": (0.9, 0.95), "name": "run", "list": [1, {"a": None}], "none": None}


# ------------------------------------------------------------------------------------------------------------- damage


def _metadata(folder: Path, change: Any) -> None:
    """Rewrite ``.metadata`` with torch's own classes."""
    found = pickle.loads((folder / ".metadata").read_bytes())
    change(found)
    (folder / ".metadata").write_bytes(pickle.dumps(found))


def _first(found: Any) -> Any:
    return next(key for key in found.storage_data if key.fqn == "up.weight")


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    dcp.save(_Run(0).model.state_dict(), checkpoint_id=tmp_path / "c", no_dist=True)
    return tmp_path / "c"


def _another_dtype(found: Any) -> None:
    found.state_dict_metadata["up.weight"].properties.dtype = torch.int32


def _another_shape(found: Any) -> None:
    entry = found.state_dict_metadata["up.weight"]
    entry.size = torch.Size([6, 12])
    entry.chunks[0].sizes = entry.size


def _larger(found: Any) -> None:
    found.state_dict_metadata["up.weight"].size = torch.Size([13, 6])


def _elsewhere(found: Any) -> None:
    found.storage_data[_first(found)].offset += 64


def _outside(found: Any) -> None:
    found.storage_data[_first(found)].relative_path = "../c/__0_0.distcp"


def _without_a_place(found: Any) -> None:
    del found.storage_data[_first(found)]


def _transformed(found: Any) -> None:
    found.storage_data[_first(found)].transform_descriptors = ["stream.zstd"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_another_dtype, r"is float32 \[12, 6\], but \.metadata describes 'up\.weight' .* of int32"),
        (_another_shape, r"is float32 \[12, 6\], but \.metadata describes 'up\.weight'"),
        (_larger, "do not cover it exactly"),
        (_elsewhere, "no zip archive ends here"),
        (_outside, r"'up\.weight' is stored in '\.\./c/__0_0\.distcp', not inside the folder"),
        (_without_a_place, r"does not state where 'up\.weight' at \(0, 0\) is stored"),
        (_transformed, r"is stored with \['stream\.zstd'\]"),
    ],
)
def test_wrong_metadata_is_refused(plain: Path, change: Any, message: str) -> None:
    _metadata(plain, change)
    with pytest.raises(FormatError, match=message):
        bcp.open(plain)


def test_a_missing_file_is_named(plain: Path) -> None:
    (plain / "__0_0.distcp").unlink()
    with pytest.raises(FormatError, match=r"__0_0\.distcp: file is missing"):
        bcp.open(plain)


def test_another_pickle_is_refused(plain: Path) -> None:
    (plain / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(FormatError, match="it has a dict in place of Metadata"):
        bcp.open(plain)


def test_a_flipped_byte_is_found(plain: Path) -> None:
    row = bcp.open(plain).manifest.tensor_row("model.up.weight")
    assert row is not None
    manifest = bcp.open(plain).manifest
    at = manifest.byte_meta(manifest.shards_of(row).start).offset
    data = bytearray((plain / "__0_0.distcp").read_bytes())
    data[at + 5] ^= 4
    (plain / "__0_0.distcp").write_bytes(data)
    with pytest.raises(CorruptionError, match=r"__0_0\.distcp: CRC-32 mismatch in tensor model\.up\.weight"):
        bcp.load(plain, {"model": _Run(1).model})


def test_torch_reads_what_this_library_read(folder: tuple[str, str]) -> None:
    """The oracle of these tests loads the same folder with DCP itself."""
    run = _Run(4)
    state = run.form("nested")
    dcp.load(state, checkpoint_id=f"{folder[0]}/nested", no_dist=True)
    set_model_state_dict(run.model, state["model"])
    set_optimizer_state_dict(run.model, run.optimizer, state["optimizer"])
    _assert_same(run.full(), torch.load(f"{folder[0]}/expected-0", weights_only=False)[0])
