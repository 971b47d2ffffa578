"""Folders that the open-source ByteCheckpoint package writes, read in place."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bytecheckpoint_job import make_model
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import fully_shard
from written_files import written_files

import bytecheckpoint as bcp
from bytecheckpoint.errors import CorruptionError, FormatError, MismatchError
from bytecheckpoint.format.values.types import UnreadObject
from bytecheckpoint.testing import RankPool, time_limit

pytestmark = pytest.mark.bytecheckpoint

KINDS = ("ddp", "fsdp2", "fsdp-orig", "fsdp-flat")
_JOB = Path(__file__).parents[1] / "support" / "bytecheckpoint_job.py"


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("written")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with (where / "output").open("w") as output:
        done = subprocess.run(
            [*torchrun, str(_JOB), request.param, str(where / "c")],
            cwd=where,
            env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=time_limit(100),
            check=False,
        )
    assert done.returncode == 0, (where / "output").read_text()
    return where / "c"


def _fresh() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model, torch.optim.AdamW(model.parameters(), lr=1.0)


def _full(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def _assert_equal(found: Any, expected: Any) -> None:
    model, optimizer = expected
    assert found[0].keys() == model.keys()
    assert all(torch.equal(found[0][name], model[name]) for name in model)
    assert found[1]["state"].keys() == optimizer["state"].keys()
    for name, state in optimizer["state"].items():
        assert found[1]["state"][name].keys() == state.keys()
        assert all(torch.equal(found[1]["state"][name][key], state[key]) for key in state)
    (group,), (expected_group,) = found[1]["param_groups"], optimizer["param_groups"]
    assert {**group, "params": sorted(group["params"])} == {**expected_group, "params": sorted(group["params"])}


def test_one_process(folder: Path) -> None:
    model, optimizer = _fresh()
    extra = {"step": 0, "data": {"epoch": 0}, "seen": torch.zeros(7, dtype=torch.int64)}
    with written_files(str(folder)) as written:
        report = bcp.load(
            folder,
            {"model": model, "optimizer": optimizer, "extra_state": extra},
            strict={"extra_state": False},
            options=bcp.LoadOptions(per_rank="lowest"),
        )
    assert not written
    assert report.bytes_unchecked > 0, "the package stores no checksums"
    _assert_equal(_full(model, optimizer), torch.load(folder / "expected.pt", weights_only=False))
    assert torch.equal(extra.pop("seen"), torch.arange(7))
    assert extra == {"step": 3, "data": {"epoch": 1}}


def _load_sharded(rank: int, world_size: int, path: str) -> Any:
    model = fully_shard(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    extra = {"data": {"epoch": 0, "rank": -1}}
    bcp.load(path, {"model": model, "optimizer": optimizer, "extra_state": extra}, strict={"extra_state": False})
    full = _full(model, optimizer)
    return extra, full if rank == 0 else None


def test_two_ranks_of_fsdp_2(folder: Path, pool: RankPool) -> None:
    (first, full), (second, _) = pool.run(_load_sharded, str(folder))
    assert (first, second) == ({"data": {"epoch": 1, "rank": 0}}, {"data": {"epoch": 1, "rank": 1}})
    _assert_equal(full, torch.load(folder / "expected.pt", weights_only=False))


def test_a_tensor_of_each_rank_is_not_read(folder: Path) -> None:
    assert bcp.open(folder).tree("extra_state")["rng"] == UnreadObject("a tensor that differs between the ranks")
    with pytest.raises(MismatchError, match=r"extra_state\.rng: stored as a tensor that differs between"):
        bcp.load(folder, {"extra_state": {"rng": torch.get_rng_state()}}, options=bcp.LoadOptions(per_rank="lowest"))


def test_tools_read_it(folder: Path, tmp_path: Path) -> None:
    found = bcp.open(folder)
    assert found.index.system == "ByteCheckpoint"
    assert found.sections == ["model", "optimizer", "extra_state"]
    row = torch.load(folder / "expected.pt", weights_only=False)[0]["0.weight"][5:9, 3:]
    assert torch.equal(found["model.0.weight"][5:9, 3:], row)


def test_damage_is_an_error(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "c"
    for file in folder.rglob("*"):
        if file.is_file():
            (copy / file.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
            (copy / file.relative_to(folder)).write_bytes(file.read_bytes())
    file = copy / "model" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises((FormatError, CorruptionError), match=r"__0_0\.distcp"):
        bcp.open(copy)
    metadata = copy / "model" / ".metadata"
    metadata.write_bytes(metadata.read_bytes()[:-20])
    with pytest.raises(FormatError, match="ends early"):
        bcp.open(copy)
