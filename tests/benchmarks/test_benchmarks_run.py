"""Run the benchmarks end to end, on a state so small that the figures mean nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sampling import sample

from benchmarks import report
from benchmarks.floors import FLOORS
from benchmarks.page_cache import evict, resident, warm
from benchmarks.peers import ENTRIES, select
from benchmarks.workloads import WORKLOADS, State, make

ROOT = Path(__file__).resolve().parents[2]
# A contestant that cannot be installed here must be reported.
MISSING = {"torchsnapshot": "not installed"}
WORKLOAD = "tiny-tensors"
ON_RANKS = ("bytecheckpoint", "DCP")
PEERS = [entry.name for entry in select(["default"]) if entry.name not in ON_RANKS]
CHOSEN = (*ON_RANKS, *sample(PEERS, 1), *MISSING)


def run(folder: Path, *arguments: str) -> dict[str, Any]:
    folders = [f"--{name}={folder / name}" for name in ("folder", "cache", "out")]
    # Without a package index, the missing peer cannot be installed on any machine.
    environment = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    command = [sys.executable, "-m", "benchmarks.run", "--scale", "0.001", "--rounds", "1", *arguments, *folders]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list((folder / "folder").iterdir())
    found: dict[str, Any] = json.loads((folder / "out" / "performance.json").read_text())
    return found


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The contestants of this run and one that cannot be installed, in one process each."""
    chosen = ("--parts", "save_load", "--workloads", WORKLOAD, "--peers", *CHOSEN)
    return run(tmp_path_factory.mktemp("one-process"), *chosen)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    chosen = ("--parts", "ranks", "--layouts", "fsdp2-2", "tp-2", "--peers", *ON_RANKS)
    return run(tmp_path_factory.mktemp("ranks"), *chosen)


@pytest.mark.full
def test_every_contestant_is_measured_or_reported(document: dict[str, Any]) -> None:
    result = document["save_load"][WORKLOAD]
    assert set(result["contestants"]) == {entry.name for entry in select(CHOSEN)}
    for name, contestant in result["contestants"].items():
        if name in MISSING:
            assert MISSING[name] in contestant["failure"]
            continue
        assert contestant["failure"] == ""
        (sample,) = contestant["samples"]
        assert set(ENTRIES[name].parts) <= set(sample)
        for part in {"cold", "warm"} & set(sample):
            assert sample[part]["wrong"] is None
            assert sample[part]["seconds"] > 0
        if "save" in ENTRIES[name].parts:
            assert sample["save"]["stall_s"] >= sample["save"]["return_s"] > 0
            assert sample["save"]["file_bytes"] >= result["bytes"]


@pytest.mark.full
def test_floors_are_measured(document: dict[str, Any], ranks: dict[str, Any]) -> None:
    for result in (*document["save_load"].values(), *ranks["ranks"]["layouts"].values()):
        (floors,) = result["floors"]
        assert set(floors) == set(FLOORS)
        assert all(seconds > 0 for seconds in floors.values() if seconds is not None)


@pytest.mark.full
def test_ranks_load_checkpoints_of_both_layouts(ranks: dict[str, Any]) -> None:
    assert set(ranks["ranks"]["layouts"]) == {"fsdp2-2", "tp-2"}
    for result in ranks["ranks"]["layouts"].values():
        assert result["failure"] == ""
        assert {name: one["failure"] for name, one in result["contestants"].items()} == dict.fromkeys(ON_RANKS, "")
    for contestant in ranks["ranks"]["reshard"]["tp-2"]["contestants"].values():
        (sample,) = contestant["samples"]
        assert set(sample) == {f"{source} {part}" for source in ("fsdp2-2", "tp-2") for part in ("cold", "warm")}
        assert all(load["wrong"] is None for load in sample.values())


@pytest.mark.full
def test_results_describe_the_machine_without_its_name(document: dict[str, Any]) -> None:
    assert document["machine"]["cores"] >= 1
    assert document["command"].startswith("python -m benchmarks.run ")
    text = json.dumps(document)
    assert os.uname().nodename not in text
    assert str(ROOT) not in text


@pytest.mark.full
def test_report_is_written(document: dict[str, Any], ranks: dict[str, Any], tmp_path: Path) -> None:
    results = tmp_path / "performance.json"
    results.write_text(json.dumps({**document, "ranks": ranks["ranks"]}))
    text = report.write(results, tmp_path).read_text()
    assert document["command"] in text
    assert "**bytecheckpoint**" in text
    assert "torchsnapshot: not installed" in text
    for picture in (WORKLOAD, "tp-2"):
        for scheme in ("light", "dark"):
            assert f'"performance/{picture}-{scheme}.svg"' in text
            assert (tmp_path / "performance" / f"{picture}-{scheme}.svg").stat().st_size > 1000


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_wrong_byte_is_detected(name: str) -> None:
    workload = make(name, 0.0005)
    state = State(workload)
    state.fill()
    assert state.difference() is None
    fqn = list(state.flat)[len(state.flat) // 2]
    state.flat[fqn].view(-1).view(dtype=state.flat[fqn].dtype)[-1:] *= -1
    assert state.difference() == fqn
    state.scramble()
    assert state.difference() == next(iter(state.flat))
    assert sum(tensor.nbytes for tensor in state.flat.values()) == workload.nbytes


def test_cold_and_warm_states_are_checked(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "file"
    file.parent.mkdir()
    file.write_bytes(os.urandom(1 << 20))
    assert warm(str(tmp_path)) == 1.0
    if evict(str(tmp_path)) == 0.0:  # a file system in memory always stays in the cache
        with open(file, "rb", buffering=0) as stream:
            stream.read(4096)
        assert 0.0 < resident(str(tmp_path)) <= 1.0


def test_unknown_contestants_are_refused() -> None:
    with pytest.raises(ValueError, match="no contestant 'missing'"):
        select(["missing"])
