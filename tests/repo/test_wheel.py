"""Check that package_dir, the symlinks and the MANIFEST rules together put exactly the tree into the wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOT_SOURCE = ("__pycache__", ".egg-info")

IMPORT_EVERYTHING = """
import importlib, pkgutil, sys
sys.path.insert(0, {folder!r})
import bytecheckpoint
modules = [bytecheckpoint.__name__]
modules += [found.name for found in pkgutil.walk_packages(bytecheckpoint.__path__, "bytecheckpoint.")]
for name in modules:
    # Only vLLM, the host of these plug-ins, and trainers may be missing.
    try:
        file = importlib.import_module(name).__file__
    except ModuleNotFoundError as error:
        is_host = error.name == "vllm" and ".vllm." in name
        trainers = ("accelerate", "lightning", "torchdata", "torchft", "transformers", "tyro", "verl")
        is_trainer = error.name in trainers and ".integrations." in name
        assert is_host or is_trainer, (name, error)
        continue
    assert file.startswith({folder!r}), (name, file)
print(len(modules))
"""


def source_files() -> set[str]:
    """Return every file of the package in the tree, through its two symlinks."""
    found: set[str] = set()
    for folder, _, files in os.walk(ROOT / "bytecheckpoint", followlinks=True):
        for file in files:
            path = (Path(folder) / file).relative_to(ROOT).as_posix()
            if not any(mark in path for mark in NOT_SOURCE):
                found.add(path)
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = tmp_path_factory.mktemp("tree")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("bytecheckpoint", "planners", "storage_backends"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignore)
    # Decoys: the wheel must not contain files next to the package.
    for name in ("tests", "benchmarks", "examples"):
        (tree / name).mkdir()
        (tree / name / "__init__.py").touch()
    for name in ("pyproject.toml", "setup.cfg", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tree / "dist"), str(tree)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = (tree / "dist").glob("*.whl")
    return built


def test_symlinks_are_relative_and_resolve() -> None:
    for name in ("planners", "storage_backends"):
        link = ROOT / "bytecheckpoint" / name
        assert link.is_symlink()
        assert os.readlink(link) == f"../{name}"
        assert (link / "__init__.py").samefile(ROOT / name / "__init__.py")


def test_wheel_holds_every_source_file_once_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        info = [name.partition(".dist-info/")[2] for name in archive.namelist() if ".dist-info/" in name]
    assert not [name for name, count in Counter(names).items() if count > 1]
    assert set(names) == source_files()
    assert "bytecheckpoint/py.typed" in names
    assert {"METADATA", "RECORD", "entry_points.txt", "licenses/LICENSE"} <= set(info)


@pytest.mark.sampled(1, of="packages")
def test_every_module_imports_from_the_unpacked_wheel(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    script = IMPORT_EVERYTHING.format(folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) == sum(name.endswith(".py") for name in source_files())
