"""``bcp reshard``, ``diff``, ``copy`` and ``rm``."""

from __future__ import annotations

import shutil
from pathlib import Path

import cli_checkpoints as kit
import layouts
import pytest
import torch
from safetensors.torch import save_file
from warm_python import warm_python

import bytecheckpoint as bcp
from bytecheckpoint.convert.diff import diff
from bytecheckpoint.convert.reshard import reshard
from bytecheckpoint.errors import UsageError
from bytecheckpoint.storage_backends import open_backend
from bytecheckpoint.testing import time_limit

pytestmark = pytest.mark.sampled(10, of=__name__)


@pytest.mark.parametrize("which", ["one", "four"])
@pytest.mark.parametrize(("files", "layout"), [(1, "whole"), (3, "whole"), (1, "sharded"), (3, "sharded")])
def test_reshard_is_bit_equal(
    which: str, files: int, layout: str, request: pytest.FixtureRequest, tmp_path: Path, bcp_command
) -> None:
    path = request.getfixturevalue(which)
    ran = bcp_command("reshard", path, tmp_path / "new", "-n", files, "--layout", layout, "--json")
    assert ran.code == 0
    kit.assert_same_tensors(kit.tensors_of(tmp_path / "new"), kit.tensors_of(path))
    old, new = bcp.open(path), bcp.open(tmp_path / "new")
    assert new.verify().ok
    assert (new.step, new.metadata, new.world_size, new.aliases) == (
        old.step,
        old.metadata,
        old.world_size,
        old.aliases,
    )
    assert {file["name"] for file in ran.json["files"]} == set(new.manifest.files.name)
    shards = [new.manifest.shards_of(row) for row in range(len(new.manifest.tensors))]
    if layout == "whole" or files == 1:
        assert all(rows.stop - rows.start == 1 for rows in shards)
    else:
        assert max(rows.stop - rows.start for rows in shards) == 3
    model_files = [name for name in new.manifest.files.name if "model-" in name]
    assert len(model_files) == files
    assert bcp_command("diff", path, tmp_path / "new").code == 0


def test_resharded_checkpoints_load(one: Path, four: Path, tmp_path: Path) -> None:
    reshard(bcp.open(one), str(tmp_path / "one"), files=3, layout="sharded")
    model = kit.Tied(seed=4)
    optimizer = torch.optim.Adam(model.parameters())
    extra = {"step": 0, "note": "", "ids": torch.zeros(4, dtype=torch.int64)}
    report = bcp.load(tmp_path / "one", {"model": model, "optimizer": optimizer, "extra": extra})
    assert not report.missing
    assert (extra["step"], extra["note"], extra["ids"].tolist()) == (5, "hello", [0, 1, 2, 3])
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert torch.equal(model.inner.weight, kit.tensors_of(one)["model.inner.weight"])
    reshard(bcp.open(four), str(tmp_path / "four"), files=2, layout="whole")
    built = layouts.build("plain-1", seed=2, steps=0)
    bcp.load(tmp_path / "four", built.state)
    assert layouts.differences(built, layouts.build("plain-1", seed=1, steps=2)) == []


def test_a_dry_run_prints_the_plan_of_the_real_run(four: Path, tmp_path: Path, bcp_command) -> None:
    arguments = ("reshard", four, tmp_path / "new", "-n", 2, "--layout", "sharded", "--json")
    plan = bcp_command(*arguments, "--dry-run")
    assert plan.code == 0
    assert not (tmp_path / "new").exists()
    done = bcp_command(*arguments)
    assert done.code == 0
    assert plan.json["dry_run"]
    assert plan.json["bytes_read"] == 0
    sizes = [[(f["section"], f["shards"], f["bytes"]) for f in ran.json["files"]] for ran in (plan, done)]
    assert sizes[0] == sizes[1]
    for file in done.json["files"]:
        assert (tmp_path / "new" / file["name"]).stat().st_size == file["bytes"]
    assert done.json["bytes_read"] >= plan.json["bytes_to_read"]


def test_files_are_balanced(tmp_path: Path) -> None:
    bcp.save(tmp_path / "c", {"model": {f"t{n}": torch.zeros(n) for n in range(1, 60)}})
    report = reshard(bcp.open(tmp_path / "c"), str(tmp_path / "new"), files=4)
    manifest = bcp.open(tmp_path / "new").manifest
    data = (manifest.files.size - manifest.files.head_length)[:4].tolist()
    assert [file.name.endswith(".safetensors") for file in report.files] == [True] * 4 + [False]
    assert sum(data) == manifest.nbytes
    assert max(data) - min(data) <= 16


def test_a_failed_rewrite_leaves_nothing(four: Path, tmp_path: Path, bcp_command) -> None:
    path = tmp_path / "damaged"
    shutil.copytree(four, path)
    file = next(path.glob("*/optimizer-00002.safetensors"))
    data = bytearray(file.read_bytes())
    data[-2] ^= 4
    file.write_bytes(data)
    before = kit.folder_contents(tmp_path)
    for arguments in (("reshard", path, tmp_path / "new", "-n", 2), ("copy", path, tmp_path / "new")):
        ran = bcp_command(*arguments)
        assert ran.code == 4
        assert file.name in ran.stderr
        assert "checksum mismatch" in ran.stderr
        assert kit.folder_contents(tmp_path) == before


def test_existing_targets_are_not_overwritten(one: Path, four: Path, tmp_path: Path, bcp_command) -> None:
    path = tmp_path / "taken"
    shutil.copytree(one, path)
    before = kit.folder_contents(path)
    for arguments in (("reshard", four, path, "-n", 2), ("copy", four, path), ("copy", path, path)):
        ran = bcp_command(*arguments)
        assert ran.code == 5
        assert "give another target" in ran.stderr
    assert kit.folder_contents(path) == before
    with pytest.raises(UsageError, match="files"):
        reshard(bcp.open(four), str(tmp_path / "x"), files=0)
    with pytest.raises(UsageError, match="layout"):
        reshard(bcp.open(four), str(tmp_path / "x"), files=1, layout="diagonal")  # type: ignore[arg-type]


def _data_files(path: Path) -> dict[str, bytes]:
    """The data files of a checkpoint by their names in the attempt: a copy is a separate attempt."""
    names = [name for name in kit.folder_contents(path) if "/" in name]
    assert names
    return {name.partition("/")[2]: (path / name).read_bytes() for name in names}


@pytest.mark.parametrize("which", ["one", "four"])
@pytest.mark.parametrize("middle", ["memory://cli-copy", "fsspec"])
def test_copy_there_and_back(
    which: str, middle: str, request: pytest.FixtureRequest, tmp_path: Path, bcp_command
) -> None:
    path = request.getfixturevalue(which)
    there = f"dir::file://{tmp_path / 'there'}" if middle == "fsspec" else f"{middle}-{which}"
    ran = bcp_command("copy", path, there, "--json")
    assert ran.code == 0, ran.stderr
    assert bcp_command("verify", there).code == 0
    assert bcp_command("diff", path, there).code == 0
    assert bcp_command("copy", there, tmp_path / "back").code == 0
    assert bcp_command("verify", tmp_path / "back").code == 0
    assert _data_files(tmp_path / "back") == _data_files(path)
    assert bcp_command("rm", there, "--yes").code == 0
    assert list(open_backend(there).list()) == []


def test_rm_asks_and_keeps_other_files(one: Path, tmp_path: Path, bcp_command) -> None:
    path = tmp_path / "c"
    shutil.copytree(one, path)
    (path / "notes.txt").write_text("not part of the checkpoint")
    before = kit.folder_contents(path)
    assert bcp_command("rm", path, input="n\n").code == 1
    assert kit.folder_contents(path) == before
    ran = bcp_command("rm", path, "--json", input="y\n")
    assert ran.code == 0
    assert ran.json["left"] == ["notes.txt"]
    assert "Remove" in ran.stderr
    assert kit.folder_contents(path) == ["notes.txt"]
    assert bcp_command("rm", path, "--yes").code == 3


def test_diff_reports_every_kind_of_difference(one: Path, tmp_path: Path, bcp_command) -> None:
    state = {
        "model": {
            "same": torch.arange(6.0),
            "shape": torch.zeros(2, 3),
            "dtype": torch.arange(4.0),
            "value": torch.tensor([1.0, 2.0, float("nan"), 4.0]),
            "bits": torch.tensor([0.0, float("nan")]),
            "gone": torch.zeros(1),
        },
        "extra": {"step": 1, "gone": "x"},
    }
    bcp.save(tmp_path / "a", state)
    changed = dict(state["model"])
    del changed["gone"]
    changed |= {
        "new": torch.zeros(1),
        "shape": torch.zeros(3, 2),
        "dtype": torch.arange(4.0).to(torch.bfloat16),
        "value": torch.tensor([1.0, 2.5, float("nan"), 1.0]),
        "bits": torch.tensor([-0.0, float("nan")]),
    }
    bcp.save(tmp_path / "b", {"model": changed, "extra": {"step": 2, "more": None}})
    ran = bcp_command("diff", tmp_path / "a", tmp_path / "b", "--json")
    assert ran.code == 1
    found = ran.json
    assert not found["same"]
    assert found["only_a"] == ["model.gone"]
    assert found["only_b"] == ["model.new"]
    tensors = {one["name"]: one for one in found["tensors"]}
    assert set(tensors) == {"model.shape", "model.dtype", "model.value", "model.bits"}
    assert tensors["model.shape"]["kind"] == "shape"
    assert (tensors["model.dtype"]["kind"], tensors["model.dtype"]["differing"]) == ("dtype", 0)
    value = tensors["model.value"]
    assert (value["differing"], value["elements"], value["max_abs"]) == (2, 4, 3.0)
    assert (tensors["model.bits"]["differing"], tensors["model.bits"]["max_abs"]) == (1, 0.0)
    assert {v["name"]: (v["a"], v["b"]) for v in found["values"]} == {
        "extra.step": ("1", "2"),
        "extra.gone": ("'x'", "absent"),
        "extra.more": ("absent", "None"),
    }
    loose = diff(bcp.open(tmp_path / "a"), bcp.open(tmp_path / "b"), atol=1.0)
    assert {one.name: one.differing for one in loose.tensors if one.kind == "values"} == {"model.value": 1}
    assert diff(bcp.open(tmp_path / "a"), bcp.open(tmp_path / "b"), values=False).values == ()
    text = bcp_command("diff", tmp_path / "a", tmp_path / "b").stdout
    assert "model.value: values: float32[4], 2 of 4 elements differ, by at most 3" in text
    summary = "different: 4 of 5 tensors differ, 3 values differ, 1 only in A, 1 only in B; 1 compared by checksum, "
    assert text.splitlines()[-1].startswith(summary)
    with pytest.raises(UsageError):
        diff(bcp.open(tmp_path / "a"), bcp.open(tmp_path / "b"), rtol=-1)


def test_diff_of_any_sources_begins_with_the_largest_difference(tmp_path: Path, bcp_command) -> None:
    a = {"small": torch.zeros(3), "big": torch.zeros(3), "nan": torch.zeros(3), "same": torch.ones(2)}
    b = a | {"small": torch.full((3,), 1.0), "big": torch.full((3,), 2.0), "nan": torch.full((3,), float("nan"))}
    a, b = a | {"shape": torch.zeros(3)}, b | {"shape": torch.zeros(2)}
    save_file(a, tmp_path / "a.safetensors")
    torch.save(b, tmp_path / "b.pt")
    bcp.save(tmp_path / "c", {"model": b})
    for other in ("b.pt", "c"):
        ran = bcp_command("diff", tmp_path / "a.safetensors", tmp_path / other, "--json")
        assert [one["name"] for one in ran.json["tensors"]] == [
            f"model.{name}" for name in ("shape", "nan", "big", "small")
        ]


@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "int64", "uint32", "float16", "float8_e4m3fn", "complex64", "complex128"]
)
def test_diff_of_dtypes(dtype: str, tmp_path: Path) -> None:
    a = torch.tensor([0, 1, 1, 0]).to(getattr(torch, dtype))
    b = torch.tensor([0, 1, 0, 0]).to(getattr(torch, dtype))
    bcp.save(tmp_path / "a", {"model": {"x": a}})
    bcp.save(tmp_path / "b", {"model": {"x": b}})
    bcp.save(tmp_path / "c", {"model": {"x": a.clone()}})
    (found,) = diff(bcp.open(tmp_path / "a"), bcp.open(tmp_path / "b")).tensors
    assert (found.differing, found.max_abs) == (1, 1.0)
    same = diff(bcp.open(tmp_path / "a"), bcp.open(tmp_path / "c"))
    assert same.same
    assert (same.skipped, same.bytes_read) == (1, 0)


def test_shards_with_equal_checksums_are_not_read(four: Path, tmp_path: Path) -> None:
    shutil.copytree(four, tmp_path / "copy")
    report = diff(bcp.open(four), bcp.open(tmp_path / "copy"))
    assert report.same
    assert report.skipped == report.compared
    assert report.bytes_read == 0


_MEMORY = """
import sys
import torch
from click.testing import CliRunner
import bytecheckpoint as bcp
from bytecheckpoint.cli import cli
from bytecheckpoint.convert.copy import copy
from bytecheckpoint.convert.diff import diff
from bytecheckpoint.convert.export import export_safetensors
from bytecheckpoint.convert.importing import import_checkpoint
from bytecheckpoint.convert.reshard import reshard

root = sys.argv[1]
torch.set_num_threads(1)
peak = lambda: next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmHWM"))
c = bcp.open(root + "/c")
diff(c, c)
before = peak()
export_safetensors(c, root + "/hf", max_file_bytes=100_000_000, cast="bfloat16")
reshard(c, root + "/r", files=3, layout="sharded")
copy(c, root + "/k")
import_checkpoint(bcp.open(root + "/hf"), root + "/i")
assert diff(c, bcp.open(root + "/r")).same
assert CliRunner().invoke(cli, ["show", root + "/c", "model.big"]).exit_code == 0
print(c.manifest.nbytes, peak() - before)
"""


def test_memory_is_bounded(tmp_path: Path) -> None:
    """Every tool on a checkpoint of 195 MB that contains a tensor of 128 MB."""

    tensors = {f"t{n}": torch.full((4096, 1024), float(n)) for n in range(4)}
    tensors["big"] = torch.arange(32_000_000, dtype=torch.float32).reshape(1000, -1)
    bcp.save(tmp_path / "c", {"model": tensors})
    done = warm_python().run(["-c", _MEMORY, str(tmp_path)], check=True, timeout=time_limit(120))
    size, growth = map(int, done.stdout.split())
    assert size > 190_000_000
    assert growth < 100_000_000
