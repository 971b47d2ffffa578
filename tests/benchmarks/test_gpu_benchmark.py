"""A dry run of ``make gpu`` without a GPU: the same code, on a state so small that the figures mean nothing."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import select
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import gpu_faults
import pytest

from benchmarks import report
from benchmarks.gpu import Part, PartFailed, Settings, run_tests
from bytecheckpoint.testing import time_limit

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = Settings("cpu", 1 << 20, 1, "")

_BARE = ("torch", "numpy", "msgpack", "xxhash", "zstandard", "typing_extensions", "pytest")

# Stands for a part that ends its process, and first notes what has been written until then.
_CRASHING = """
import os, shutil
shutil.copy(os.environ["TEST_WRITTEN"], os.environ["TEST_SEEN"])
os.abort()
"""


def _run(
    tmp_path: Path, *arguments: str, python: str = sys.executable, **environment: str
) -> subprocess.CompletedProcess[str]:
    command = [python, "-m", "benchmarks.gpu", "--folder", str(tmp_path), *arguments]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True)


@pytest.mark.full
def test_a_dry_run(tmp_path: Path) -> None:
    done = _run(tmp_path, "--device", "cpu", "--mebibytes", "6", "--rounds", "1", "--tests", "tests/gpu")
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "gpu.json").read_text())
    assert document["is_complete"]
    assert document["failures"] == {}
    counts = document["tests"]["tests/gpu"]["counts"]
    assert counts["passed"] > 15
    assert set(counts) <= {"passed", "skipped"}
    measured = set(document["seconds"])
    for name in ("stall, asynchronous", "stall, gated", "save, durable", "load, cold"):
        assert f"bytecheckpoint: {name}" in measured
    assert {"device to device", "torch DCP: load, cold", "safetensors: save, durable"} <= measured
    assert any(name.startswith("bytecheckpoint: push, shared memory") for name in measured)
    assert {name for name in measured if "checkpoint-engine" in name} <= {
        "a loop like checkpoint-engine's, in one process: push",
        "checkpoint-engine's function for workers, with a sender written here: push",
    }
    text = (tmp_path / "gpu.md").read_text()
    assert "CPU only (a dry run)" in text
    assert "| bytecheckpoint: load, cold |" in text
    assert "| floor: one copy of the weights (" in text
    assert "bytecheckpoint: push, floor" not in text
    assert "has not ended" not in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu.json", "gpu.md"]


@pytest.mark.skipif("os.path.exists('/dev/nvidia0')", reason="has a GPU")
@pytest.mark.full
def test_without_a_device_it_says_so(tmp_path: Path) -> None:
    done = _run(tmp_path, "--tests")
    assert done.returncode == 2
    assert "cuda:0 cannot be used here; --device cpu makes a dry run" in done.stdout
    assert os.listdir(tmp_path) == []


def _bare_machine(folder: Path, *names: str) -> str:
    """Return the Python of an environment that has only these packages, and what they require."""
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    left, seen = list(names), set()
    while left:
        name = re.sub(r"[-_.]+", "-", left.pop()).lower()
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:  # not for this Python, say
            continue
        required = [one for one in distribution.requires or () if "extra ==" not in one]
        left += {found[0] for one in required if (found := re.match(r"[\w.-]+", one))} - seen
        seen |= {name, *left}
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(str(distribution.locate_file(top)))
    return str(folder / "bin/python")


@pytest.mark.full
def test_a_bare_machine_and_a_part_that_crashes(tmp_path: Path) -> None:
    """Neither the plug-ins of pytest nor rich are there. What was finished before a crash is written, the rest runs."""
    python = _bare_machine(tmp_path / "bare", *_BARE)
    (tmp_path / "crashing/safetensors").mkdir(parents=True)
    (tmp_path / "crashing/safetensors/__init__.py").touch()
    (tmp_path / "crashing/safetensors/torch.py").write_text(_CRASHING)
    tests = ["tests/engine/test_pinning.py", "tests/gpu/test_last_save_on_device.py"]
    parts = ["floors", "safetensors", "checkpoint_engine"]
    run = tmp_path / "run"
    run.mkdir()
    done = _run(
        run, "--device", "cpu", "--mebibytes", "3", "--rounds", "1", "--tests", *tests, "--parts", *parts,
        python=python,
        PYTHONPATH=str(tmp_path / "crashing"),
        TEST_WRITTEN=str(run / "gpu.json"),
        TEST_SEEN=str(tmp_path / "seen.json"),
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    (missing,) = [line for line in done.stdout.splitlines() if line.startswith("missing: ")]
    assert {"pytest_timeout", "zmq", "vllm"} <= set(re.findall(r"(\w+) \(", missing))
    seen, document = (json.loads(path.read_text()) for path in (tmp_path / "seen.json", run / "gpu.json"))
    assert [one["counts"] for one in seen["tests"].values()] == [{"passed": 4}, {"skipped": 1}]
    assert not seen["is_complete"]
    assert list(document["failures"]) == ["safetensors"]
    assert "Fatal Python error: Aborted" in document["failures"]["safetensors"]
    assert document["is_complete"]
    assert {"device to device", "a loop like checkpoint-engine's, in one process: push"} <= set(document["seconds"])


@pytest.mark.full
def test_a_machine_without_what_the_library_needs(tmp_path: Path) -> None:
    python = _bare_machine(tmp_path / "bare", "numpy")
    done = _run(tmp_path, "--device", "cpu", python=python, PYTHONPATH="")
    assert done.returncode == 2
    assert "the library needs torch, msgpack, xxhash, zstandard, typing_extensions" in done.stdout


@pytest.mark.parametrize(
    ("served", "message"),
    [(gpu_faults.crash, "its process ended with code -11"), (gpu_faults.hang, "(?s)in hang.*no end after 1 s")],
)
@pytest.mark.full
def test_a_part_that_fails(tmp_path: Path, served: Callable[..., None], message: str) -> None:
    part = Part("a part", SETTINGS, tmp_path / "log", served)
    with pytest.raises(PartFailed, match=message):
        part.run(1 if served is gpu_faults.hang else time_limit(60))


@pytest.mark.full
def test_what_a_part_has_started_ends_with_it(tmp_path: Path) -> None:
    part = Part("a part", SETTINGS, tmp_path / "log", gpu_faults.leave_processes)
    started = os.pidfd_open(part.run(time_limit(60)))
    part.kill()
    try:
        assert select.select([started], [], [], time_limit(60))[0]
    finally:
        os.close(started)


@pytest.mark.full
def test_tests_that_hang(tmp_path: Path) -> None:
    """They have started a process that keeps their output open."""
    (tmp_path / "test_hang.py").write_text(
        "import subprocess, sys\n\n"
        "def test_first():\n    pass\n\n"
        "def test_hangs():\n    subprocess.run([sys.executable, '-c', 'import signal; signal.pause()'])\n"
    )
    limit_s = time_limit(5)
    found = run_tests(str(tmp_path / "test_hang.py"), limit_s, tmp_path / "log", "cpu")
    assert found["failure"] == f"no end after {limit_s:.0f} s"
    assert found["counts"] == {"passed": 1}
    assert "in test_hangs" in found["output"]


def test_the_page_of_results_says_whether_there_are_any() -> None:
    link, docs = "[performance/gpu.md](performance/gpu.md)", ROOT / "docs"
    assert link in report.INTRODUCTION
    assert link in (docs / "performance.md").read_text()
    has_run = (ROOT / "benchmarks/results/gpu.json").exists()
    assert ("No run has been made yet" in (docs / "performance/gpu.md").read_text()) == (not has_run)
