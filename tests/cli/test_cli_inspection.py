"""``bcp ls``, ``inspect`` and ``verify``; every command on a path without a valid checkpoint."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import cli_checkpoints as kit
import click
import pytest
import torch
from warm_python import warm_python

import bytecheckpoint as bcp
from bytecheckpoint import CheckpointManager
from bytecheckpoint.cli import cli
from bytecheckpoint.cli.options import exit_code
from bytecheckpoint.cli.output import Output, age_text, plain, printable, size_text
from bytecheckpoint.testing import time_limit

pytestmark = pytest.mark.sampled(13, of=__name__)


def test_ls_lists_checkpoints_and_other_folders(one: Path, tmp_path: Path, bcp_command) -> None:
    for step in (9, 10):
        shutil.copytree(one, tmp_path / f"step-{step}")
    (tmp_path / "half" / "attempt-20260101T000000Z-00").mkdir(parents=True)
    (tmp_path / "half" / "attempt-20260101T000000Z-00" / "model-00000.safetensors").write_bytes(b"x")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a.txt").write_text("a")
    (tmp_path / "step-10" / "attempt-dead").mkdir()
    (tmp_path / "step-10" / "attempt-dead" / "f").write_bytes(b"x")
    ran = bcp_command("ls", tmp_path, "--json")
    assert ran.code == 0
    assert ran.stderr == ""
    entries = {entry["name"]: entry for entry in ran.json["entries"]}
    assert {name: entry["status"] for name, entry in entries.items()} == {
        "step-9": "checkpoint",
        "step-10": "checkpoint",
        "half": "partial",
        "logs": "other",
    }
    assert entries["step-9"]["step"] == 5
    assert entries["step-9"]["world_size"] == 1
    assert entries["step-9"]["sections"] == ["extra", "model", "optimizer"]
    assert entries["step-9"]["bytes"] > 0
    assert entries["step-10"]["attempts"] == ["attempt-dead"]
    assert "none was committed" in entries["half"]["problem"]
    text = bcp_command("ls", tmp_path).stdout
    assert "half: partial, not a checkpoint" in text
    assert "step-10: 1 uncommitted attempt(s)" in text


def test_ls_of_a_checkpoint_of_deep_roots_and_of_a_broken_manifest(one: Path, tmp_path: Path, bcp_command) -> None:
    assert [entry["name"] for entry in bcp_command("ls", one, "--json").json["entries"]] == ["."]
    shutil.copytree(one, tmp_path / "a" / "b")
    assert bcp_command("ls", tmp_path, "-d", 2, "--json").json["latest"] == "a/b"
    manifest = tmp_path / "a" / "b" / "manifest.msgpack"
    manifest.write_bytes(manifest.read_bytes()[:-3])
    ran = bcp_command("ls", tmp_path, "-d", 2, "--json")
    assert ran.code == 4
    assert ran.json["entries"][0]["status"] == "broken"
    assert "truncated" in ran.json["entries"][0]["problem"]


def test_inspect_of_one_process(one: Path, bcp_command) -> None:
    ran = bcp_command("inspect", one, "--files", "--shards", "--values", "--json")
    assert ran.code == 0
    found = ran.json
    assert found["step"] == 5
    assert found["metadata"] == {"run": "r1"}
    assert found["aliases"] == {"model.head.weight": "model.embed.weight"}
    assert {s["name"]: s["kind"] for s in found["sections"]} == {
        "extra": "tree",
        "model": "module",
        "optimizer": "optimizer",
    }
    tensors = {t["name"]: t for t in found["tensors"]}
    assert tensors["model.inner.weight"]["shape"] == [6, 4]
    assert tensors["model.coarse"]["dtype"] == "bfloat16"
    assert tensors["model.count"]["shape"] == []
    assert [s["bytes"] for s in tensors["model.inner.weight"]["shards"]] == [96]
    assert sum(f["shard_count"] for f in found["files"]) == found["shard_count"]
    assert {"name": "extra.note", "section": "extra", "rank": None, "value": "hello"} in found["values"]


def test_inspect_begins_with_figures_that_people_say(tmp_path: Path, bcp_command) -> None:
    model = {"a": torch.zeros(1_500_000, dtype=torch.bfloat16), "b": torch.zeros(250_000), "n": torch.tensor(1)}
    extra = {"scale": torch.zeros(3)}
    bcp.save(tmp_path, {"model": model, "extra": extra})
    sections = {s["name"]: s for s in bcp_command("inspect", tmp_path, "--json").json["sections"]}
    assert sections["model"]["elements"] == 1_750_001
    assert list(sections["model"]["dtypes"].items()) == [("bfloat16", 3_000_000), ("float32", 1_000_000), ("int64", 8)]
    lines = bcp_command("inspect", tmp_path, "--no-tensors").stdout.splitlines()
    rows = [" ".join(line.split()) for line in lines]
    assert lines[1] == "  1.8 M parameters, 3.8 MiB, bfloat16 75 %, float32 25 %"
    assert "SECTION KIND TENSORS ELEMENTS SIZE DTYPES" in rows
    assert "extra tree 1 3 12 B float32 100 %" in rows
    assert "all 4 1.8 M 3.8 MiB bfloat16 75 %, float32 25 %" in rows


def test_inspect_prints_equal_values_of_ranks_once(four: Path, bcp_command) -> None:
    shown = bcp_command("inspect", four, "--no-tensors", "--values").stdout.splitlines()
    assert [line for line in shown if line.startswith("own.half")] == ["own.half@0-1 = 0", "own.half@2-3 = 1"]
    assert [line for line in shown if line.startswith("own.rank")] == [f"own.rank@{rank} = {rank}" for rank in range(4)]


def test_inspect_shows_which_rank_wrote_what(four: Path, bcp_command) -> None:
    found = bcp_command("inspect", four, "--shards", "--files", "--values", "-t", "model.emb*", "--json").json
    assert found["world_size"] == 4
    (tensor,) = found["tensors"]
    assert tensor["shard_count"] == 4
    assert {shard["rank"] for shard in tensor["shards"]} == {0, 1, 2, 3}
    assert [shard["offsets"] for shard in tensor["shards"]] == [[0, 0], [2, 0], [4, 0], [6, 0]]
    assert {f["rank"] for f in found["files"] if f["section"] == "model"} == {0, 1, 2, 3}
    assert {v["name"]: v["value"] for v in found["values"] if v["name"].startswith("own.rank")} == {
        f"own.rank@{rank}": rank for rank in range(4)
    }
    text = bcp_command("inspect", four, "--files", "-t", "model.emb*").stdout
    assert "model.emb.weight" in text
    assert "model-00003.safetensors" in text
    assert "optimizer.state" not in bcp_command("inspect", four, "--no-tensors").stdout


@pytest.mark.parametrize("which", ["one", "four"])
def test_verify_of_an_intact_checkpoint(which: str, request: pytest.FixtureRequest, bcp_command) -> None:
    ran = bcp_command("verify", request.getfixturevalue(which), "--json")
    assert ran.code == 0
    assert ran.json["ok"]
    assert ran.json["problems"] == []


@pytest.mark.parametrize("which", ["one", "four"])
def test_verify_names_damaged_files_and_tensors(
    which: str, request: pytest.FixtureRequest, tmp_path: Path, bcp_command
) -> None:
    path = tmp_path / "damaged"
    shutil.copytree(request.getfixturevalue(which), path)
    checkpoint = bcp.open(path)
    name = "model.inner.weight" if which == "one" else "model.cube"
    row = checkpoint.manifest.tensor_row(name)
    at = checkpoint.manifest.byte_meta(checkpoint.manifest.shards_of(row).start)
    with open(path / at.file, "r+b") as file:
        file.seek(at.offset)
        byte = file.read(1)
        file.seek(at.offset)
        file.write(bytes([byte[0] ^ 1]))
    gone = next(path.glob("*/optimizer-00000.safetensors"))
    gone.unlink()
    ran = bcp_command("verify", path, "--json")
    assert ran.code == 1
    assert not ran.json["ok"]
    assert len(ran.json["problems"]) == 2
    assert any(name in problem and at.file in problem for problem in ran.json["problems"])
    assert any(gone.name in problem and "missing" in problem for problem in ran.json["problems"])
    assert name in bcp_command("verify", path).stdout


COMMANDS = [
    ("inspect", "PATH"),
    ("verify", "PATH"),
    ("diff", "PATH", "PATH"),
    ("reshard", "PATH", "DST", "--files", "1"),
    ("export", "PATH", "DST"),
    ("import", "PATH", "DST"),
    ("copy", "PATH", "DST"),
    ("rm", "PATH", "--yes"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_path_without_a_checkpoint_is_refused_and_not_touched(
    command: tuple[str, ...], tmp_path: Path, bcp_command
) -> None:
    def run(path: Path):
        return bcp_command(*({"PATH": path, "DST": tmp_path / "dst"}.get(word, word) for word in command), "--json")

    something = tmp_path / "something"
    something.mkdir()
    (something / "precious.txt").write_text("not part of a checkpoint")
    for path in (tmp_path / "nothing", something):
        ran = run(path)
        assert ran.code == 3
        assert ran.stdout == ""
        assert path.name in ran.stderr
        assert "Traceback" not in ran.stderr
    assert kit.folder_contents(tmp_path) == ["something/precious.txt"]


@pytest.mark.parametrize("command", [c for c in COMMANDS if c[0] != "import"], ids=lambda command: command[0])
def test_a_damaged_manifest_is_exit_code_4(command: tuple[str, ...], one: Path, tmp_path: Path, bcp_command) -> None:
    path = tmp_path / "damaged"
    shutil.copytree(one, path)
    data = bytearray((path / "manifest.msgpack").read_bytes())
    data[len(data) // 2] ^= 1
    (path / "manifest.msgpack").write_bytes(data)
    before = kit.folder_contents(tmp_path)
    ran = bcp_command(*({"PATH": path, "DST": tmp_path / "dst"}.get(word, word) for word in command))
    assert ran.code == 4
    assert "checksum mismatch in the manifest" in ran.stderr
    assert kit.folder_contents(tmp_path) == before


def test_usage_and_debug(one: Path, bcp_command) -> None:
    assert bcp_command("inspect").code == 2
    assert bcp_command("reshard", one, "x", "--files", 0).code == 2
    assert bcp_command("export", one, "x", "--max-file-size", "much").code == 2
    assert bcp_command("verify", one, "-o", "nonsense").code == 2
    ran = bcp_command("verify", "no/such/path", "--debug")
    assert ran.code == 3
    assert "Traceback" in ran.stderr
    assert "Exit codes" in bcp_command("diff", "--help").stdout


def test_every_error_has_an_exit_code() -> None:
    expected = {
        "MismatchError": 1,
        "CheckpointNotFoundError": 3,
        "NotACheckpointError": 3,
        "CorruptionError": 4,
        "FormatError": 4,
        "UnsupportedVersionError": 4,
        "KeyExistsError": 5,
        "StorageFullError": 5,
        "UnsupportedURLError": 5,
        "StateError": 6,
        "UsageError": 2,
        "NameNotFoundError": 2,
        "CommitUnknownError": 6,
    }
    for name, code in expected.items():
        assert exit_code(getattr(bcp.errors, name)("x")) == code
    assert exit_code(ZeroDivisionError()) == 6


def test_output_helpers() -> None:
    assert printable("a\x1b[31mb\u202ec\nd") == "a\\x1b[31mb\\u202ec\nd"
    assert [size_text(n) for n in (0, 1023, 1536, 5 << 30)] == ["0 B", "1023 B", "1.5 KiB", "5.0 GiB"]
    assert plain({1: (float("nan"), b"x", {"y": 1.5})}) == {"1": ["nan", "b'x'", {"y": 1.5}]}


def test_a_table_has_one_line_per_row(capsys: pytest.CaptureFixture[str]) -> None:
    Output(as_json=False).table(("NAME", ">SIZE"), [("a", 1), ("two\nlines\x1b", 1000)])
    shown = capsys.readouterr().out.splitlines()
    assert shown == ["NAME            SIZE", "a                  1", r"two\nlines\x1b  1000"]


_MAIN = "from bytecheckpoint.cli import main; main()"


def test_as_a_separate_process(one: Path, tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return warm_python().run(["-c", _MAIN, *arguments], timeout=time_limit(120))

    listed = run("ls", str(one.parent))
    assert listed.returncode == 0
    assert "step-5" in listed.stdout
    assert listed.stderr == ""
    missing = run("verify", str(tmp_path / "nothing"), "--json")
    assert missing.returncode == 3
    assert missing.stdout == ""
    assert missing.stderr.startswith("bcp: no checkpoint at")


def test_output_that_cannot_be_written(one: Path) -> None:
    verify, table = ["-c", _MAIN, "verify", str(one)], ["-c", _MAIN, "ls", str(one.parent)]
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as gone, open("/dev/full", "wb") as full:
        found = [
            warm_python().run(command, stdout=output, timeout=time_limit(120))
            for command, output in ((verify, gone), (table, gone), (verify, full))
        ]
    assert [one.returncode for one in found] == [141, 141, 6]
    assert found[0].stderr == found[1].stderr == ""
    assert "No space left" in found[2].stderr


def test_nothing_slow_is_imported_for_nothing(one: Path) -> None:
    """What only some commands need, or only some states: torch takes two seconds."""
    slow = {"torch", "fsspec", "s3fs", "vllm", "transformers", "importlib.metadata"}
    check = f"""
import sys
from bytecheckpoint.cli import cli
for arguments in (["--help"], ["--version"], ["ls", {str(one.parent)!r}], ["latest", {str(one.parent)!r}]):
    cli(arguments, standalone_mode=False)
    found = {slow} & set(sys.modules)
    assert not found, (arguments, found)
"""
    subprocess.run([sys.executable, "-c", check], check=True, stdout=subprocess.DEVNULL)


def test_help_lists_every_command_by_its_own_name(bcp_command) -> None:
    shown = bcp_command("--help").stdout
    context = click.Context(cli)
    for name in cli.list_commands(context):
        assert cli.get_command(context, name).name == name
        assert re.search(rf"^  {name} +[A-Z].*[.]$", shown, re.MULTILINE)
    unknown = bcp_command("lss")
    assert unknown.code == 2
    assert "lss" in unknown.stderr


def test_ls_shows_the_newest_ages_and_metrics(tmp_path: Path, bcp_command) -> None:
    with CheckpointManager(tmp_path, cadence=bcp.Cadence(every_steps=1)) as manager:
        for step in (1, 2):
            metrics = {"loss": 1 / step, "broken": math.nan}
            manager.save(step, {"extra": {"a": 1}}, metrics=metrics, milestone="best" if step == 1 else None)
    ran = bcp_command("ls", tmp_path, "--json")
    shown = [(entry["name"], entry["metrics"], entry["milestone"]) for entry in ran.json["entries"]]
    assert shown == [("step-1", {"loss": 1.0}, "best"), ("step-2", {"loss": 0.5}, None)]
    lines = [line.split() for line in bcp_command("ls", tmp_path).stdout.splitlines()]
    assert lines[0] == ["NAME", "STEP", "SAVED", "SIZE", "RANKS", "SECTIONS", "METRICS,", "MILESTONE"]
    assert lines[1][:2] == ["step-1", "1"]
    assert lines[1][-3:] == ["loss", "1,", "best"]
    assert lines[2][:3] == ["*", "step-2", "2"]


@pytest.mark.parametrize(
    ("age_s", "shown"), [(0, "0 s ago"), (61, "1 min ago"), (7200, "2 h ago"), (86400 * 40, "40 d ago")]
)
def test_an_age(age_s: int, shown: str) -> None:
    assert age_text((datetime.now(UTC) - timedelta(seconds=age_s + 0.5)).isoformat()) == shown


def test_an_age_of_another_clock() -> None:
    assert age_text("2999-01-02T03:04:05.678Z") == "2999-01-02T03:04:05"
    assert age_text("yesterday") == "yesterday"
