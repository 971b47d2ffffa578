"""Check what a release contains, the metadata of the project, and the files that describe how to work on it."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from bytecheckpoint.version import VERSION

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
RELEASE = runpy.run_path(str(ROOT / ".ci" / "release.py"))
REPOSITORY = "https://example.org/team/library"
PYTHONS = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)]


def test_the_readme_of_a_release_has_no_relative_links() -> None:
    page = "[a](docs/a.md#b) [b](https://c.org/d) [c](#install)"
    changed = RELEASE["absolute_links"](page, REPOSITORY, "v1")
    assert changed == f"[a]({REPOSITORY}/blob/v1/docs/a.md#b) [b](https://c.org/d) [c](#install)"
    assert RELEASE["LINK"].findall(page) == ["docs/a.md#b"]
    assert RELEASE["LINK"].findall((ROOT / "README.md").read_text(encoding="utf-8")), "the pattern finds no link"


def test_the_pictures_of_the_readme_are_found() -> None:
    pictures = RELEASE["IMAGE"].findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert [kind for kind, _ in pictures] == ["srcset", "src"]
    assert all((ROOT / name).is_file() for _, name in pictures)
    changed = RELEASE["absolute_links"]('<img src="docs/a.svg"> <img src="https://c.org/d.svg">', REPOSITORY, "v1")
    assert changed == f'<img src="{REPOSITORY}/raw/v1/docs/a.svg"> <img src="https://c.org/d.svg">'


def test_the_readme_is_short() -> None:
    """Details belong to docs/features.md and the pages that it links to."""
    assert (ROOT / "README.md").stat().st_size < 6000


def test_a_release_has_the_urls_of_the_project() -> None:
    changed = RELEASE["with_urls"]((ROOT / "pyproject.toml").read_text(encoding="utf-8"), REPOSITORY, "v1")
    urls = tomllib.loads(changed)["project"]["urls"]
    assert urls["Repository"] == REPOSITORY
    assert all(url.startswith(REPOSITORY) for url in urls.values())


def test_every_relative_link_of_a_page_leads_to_a_file() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / ".github").glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    pages += [*(ROOT / "examples").rglob("*.md")]
    lost = [
        f"{page.relative_to(ROOT)}: {link}"
        for page in pages
        for link in RELEASE["LINK"].findall(page.read_text(encoding="utf-8"))
        if not (page.parent / link.partition("#")[0]).exists()
    ]
    assert not lost


def test_the_version_is_stated_once_for_all() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == VERSION
    assert [citation["authors"][0]["name"]] == [author["name"] for author in PROJECT["authors"]]
    assert f"## {VERSION}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert PROJECT["dynamic"] == ["version"]


def test_ci_runs_every_python_that_the_metadata_name() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))["jobs"]
    assert jobs["check"]["strategy"]["matrix"]["python"] == PYTHONS
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"


def test_workflows_and_hooks_call_targets_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(" ".join(re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)).split())
    files = [*(ROOT / ".github" / "workflows").iterdir(), ROOT / ".pre-commit-config.yaml"]
    called = {name for file in files for name in re.findall(r"(?:run|entry): make ([\w-]+)(?:\s|$)", file.read_text())}
    assert {"check", "dist", "style"} <= called
    assert called <= targets


def test_no_requirement_names_an_index() -> None:
    for path in (ROOT / "requirements").iterdir():
        lines = [line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
        pinned = re.compile(r"[\w.-]+==[\w.+!]+")
        assert not [line for line in lines if line and not pinned.fullmatch(line)], path.name


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="a release is made from a commit")
@pytest.mark.sampled(1, of="packages")
def test_a_release_is_complete_and_an_editable_installation_is_a_path(tmp_path: Path) -> None:
    """Builds the wheel from the source distribution, which has no symlinks. Type checkers follow a path, not a hook."""
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "x"], cwd=tmp_path, input=archive, check=True)
    change = RELEASE["with_urls"]((tmp_path / "pyproject.toml").read_text(), REPOSITORY, "v1")
    (tmp_path / "pyproject.toml").write_text(change)
    (tmp_path / "README.md").write_text("[a](https://example.org)")
    source = build(tmp_path, "sdist")
    with tarfile.open(source) as tar:
        tar.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    wheel = build(unpacked, "wheel")
    assert RELEASE["faults"](wheel, source, REPOSITORY) == []
    assert RELEASE["faults"](wheel, source, "https://example.org/other") == [
        "the metadata lack the address of the repository"
    ]
    with zipfile.ZipFile(build(tmp_path, "editable")) as editable:
        (name,) = (name for name in editable.namelist() if name.endswith(".pth"))
        assert Path(editable.read(name).decode().strip()).samefile(tmp_path)


def build(tree: Path, kind: str) -> Path:
    script = f"import setuptools.build_meta as backend; print(backend.build_{kind}('dist'))"
    done = subprocess.run([sys.executable, "-c", script], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "is absent from the `packages`" not in done.stderr
    return tree / "dist" / done.stdout.split()[-1]
