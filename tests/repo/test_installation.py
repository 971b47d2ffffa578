"""Check the name of the distribution, the hints that contain it, and the guard against files of another one."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from bytecheckpoint.version import DISTRIBUTION, VERSION, install_command

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A directory with the package, as an installed wheel leaves it."""
    (tmp_path / "bytecheckpoint").symlink_to(ROOT / "bytecheckpoint")
    return tmp_path


def version_module(site: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("version_of_site", site / "bytecheckpoint" / "version.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_name_of_the_distribution() -> None:
    assert PROJECT["name"] == DISTRIBUTION
    plugin = tomllib.loads((ROOT / "examples" / "plugin" / "pyproject.toml").read_text(encoding="utf-8"))
    assert plugin["project"]["dependencies"] == [DISTRIBUTION]


def test_extras_are_added_to_what_is_installed(site: Path) -> None:
    assert install_command("s3") == f"pip install -e '{ROOT}[s3]'"
    assert version_module(site).install_command("s3") == f"pip install '{DISTRIBUTION}[s3]'"


def test_every_extra_that_is_recommended_exists() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    code = [path for name in ("bytecheckpoint", "planners", "storage_backends") for path in (ROOT / name).rglob("*.py")]
    texts = {path: path.read_text(encoding="utf-8") for path in (*pages, *code)}
    called = {extra for text in texts.values() for extra in re.findall(r'install_command\(["\']([\w-]+)', text)}
    written = {extra for text in texts.values() for extra in re.findall(rf"{DISTRIBUTION}\[([\w-]+)\]", text)}
    assert called
    assert written
    assert called | written <= set(PROJECT["optional-dependencies"])
    assert not [path for path, text in texts.items() if "bytecheckpoint[" in text]


@pytest.mark.parametrize("theirs", ["bytecheckpoint-0.0.2.dist-info", None])
def test_an_import_with_files_of_the_other_distribution(site: Path, theirs: str | None) -> None:
    (site / f"bcp_checkpoint-{VERSION}.dist-info").mkdir()
    if theirs:
        (site / theirs).mkdir()
    command = [sys.executable, "-c", "import bytecheckpoint; print(bytecheckpoint.__file__)"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=site)
    if theirs is None:
        assert done.stdout.strip() == str(site / "bytecheckpoint" / "__init__.py"), done.stderr
        return
    assert done.returncode == 1
    (message,) = re.findall("^ImportError: (.*)", done.stderr, re.MULTILINE)
    assert f"{DISTRIBUTION} and bytecheckpoint-0.0.2" in message
    assert f"pip uninstall bytecheckpoint {DISTRIBUTION} && pip install {DISTRIBUTION}" in message
    assert str(site) in message


def test_the_other_distribution_is_noticed_before_any_other_module(site: Path) -> None:
    """Its folder ``checkpointer`` would be imported in place of our ``checkpointer.py``."""
    (site / "bytecheckpoint").unlink()
    shutil.copytree(ROOT / "bytecheckpoint", site / "bytecheckpoint", ignore=shutil.ignore_patterns("[!_v]*"))
    (site / "bytecheckpoint-0.0.1.dist-info").mkdir()
    done = subprocess.run([sys.executable, "-c", "import bytecheckpoint"], capture_output=True, text=True, cwd=site)
    assert "ImportError: two distributions" in done.stderr
