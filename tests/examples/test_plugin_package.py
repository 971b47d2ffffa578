"""The example plug-in installs, and its own tests pass with only public names of this library."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import bytecheckpoint
from bytecheckpoint.testing import time_limit

_PLUGIN = Path(__file__).parents[2] / "examples" / "plugin"

_PUBLIC_MODULES = {
    "bytecheckpoint",
    "bytecheckpoint.control",
    "bytecheckpoint.errors",
    "bytecheckpoint.frameworks",
    "bytecheckpoint.storage_backends",
    "bytecheckpoint.testing",
}


def test_the_plugin_imports_public_names_only() -> None:
    for path in _PLUGIN.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bytecheckpoint"):
                assert node.module in _PUBLIC_MODULES, f"{path}: {node.module}"
                assert not any(alias.name.startswith("_") for alias in node.names), path


@pytest.mark.full
def test_the_installed_plugin_passes_its_tests(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "installed"
    shutil.copytree(_PLUGIN, source)  # the build writes next to the sources
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-build-isolation", "--no-deps"]
    _run([*pip, "--target", str(target), str(source)], tmp_path)
    shutil.rmtree(source / "bcp_example_plugin")
    library = str(Path(bytecheckpoint.__file__).parents[1])
    tests = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(source),
        str(source / "tests"),
    ]
    _run(tests, tmp_path, PYTHONPATH=os.pathsep.join([str(target), library]))


def _run(command: list[str], directory: Path, **environment: str) -> None:
    done = subprocess.run(
        command,
        cwd=directory,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=time_limit(120),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
