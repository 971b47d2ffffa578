"""Build and check what a release publishes, from the commit alone: ``release.py REPOSITORY [TAG]``.

``REPOSITORY`` is the address at which the sources are published, without which the package index could follow no link:
the links of the README become addresses of the tag's files, and the metadata get the project's URLs. Nothing else in
the repository contains this address.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("bytecheckpoint", "planners", "storage_backends")
LINK = re.compile(r"\]\((?!https?:|#)([^)\s]+)\)")
IMAGE = re.compile(r'\b(src|srcset)="(?!https?:)([^"]+)"')
URLS = {"Documentation": "blob/{tag}/docs/architecture.md", "Changelog": "blob/{tag}/CHANGELOG.md", "Issues": "issues"}


def absolute_links(page: str, repository: str, tag: str) -> str:
    """Return a page of which every link to a file of the repository, and every picture, is an address."""
    page = IMAGE.sub(rf'\1="{repository}/raw/{tag}/\2"', page)
    return LINK.sub(rf"]({repository}/blob/{tag}/\1)", page)


def with_urls(pyproject: str, repository: str, tag: str) -> str:
    """Return ``pyproject.toml`` with the table of the project's URLs."""
    urls = {"Repository": repository, **{name: f"{repository}/{path.format(tag=tag)}" for name, path in URLS.items()}}
    table = "\n".join(f'{name} = "{url}"' for name, url in urls.items())
    return f"{pyproject}\n[project.urls]\n{table}\n"


def faults(wheel: Path, source: Path, repository: str) -> list[str]:
    """Return what is wrong with a wheel and a source distribution."""
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    tracked = git("ls-files", *PACKAGES).split()
    expected = {f"{'' if name.startswith('bytecheckpoint/') else 'bytecheckpoint/'}{name}" for name in tracked}
    expected -= {f"bytecheckpoint/{name}" for name in PACKAGES}  # the symlinks
    with tarfile.open(source) as tar:
        sources = {name.partition("/")[2] for name in tar.getnames()}
    found = [f"the wheel lacks {name}" for name in sorted(expected - files)]
    found += [f"the wheel has {name}, which is not in the repository" for name in sorted(files - expected)]
    found += [
        f"the source distribution lacks {name}"
        for name in git("ls-files", "tests", "docs").split()
        if name not in sources
    ]
    found += [f"a link that the index cannot follow: {link}" for link in LINK.findall(str(metadata.get_payload()))]
    urls = [url for entry in metadata.get_all("Project-URL", []) if (url := entry.partition(", ")[2])]
    found += [] if repository in urls else ["the metadata lack the address of the repository"]
    return found


def git(*command: str) -> str:
    return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def main(repository: str, tag: str = "") -> int:
    """Build into ``dist/`` and check. Returns an exit status."""
    repository, dist = repository.rstrip("/"), ROOT / "dist"
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        archived = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "x"], cwd=tree, input=archived, check=True)
        version = re.search(r'^VERSION = "(.+)"', (tree / "bytecheckpoint" / "version.py").read_text(), re.MULTILINE)[1]
        if tag not in ("", f"v{version}"):
            print(f"release: the tag is {tag}, and the version {version}", file=sys.stderr)
            return 1
        for name, change in {"README.md": absolute_links, "pyproject.toml": with_urls}.items():
            page = tree / name
            page.write_text(change(page.read_text(encoding="utf-8"), repository, f"v{version}"), encoding="utf-8")
        subprocess.run([sys.executable, "-m", "build", "--outdir", str(dist), folder], check=True)
    wheel, source = dist / f"bcp_checkpoint-{version}-py3-none-any.whl", dist / f"bcp_checkpoint-{version}.tar.gz"
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(source)], check=True)
    for fault in (found := faults(wheel, source, repository)):
        print(f"release: {fault}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
