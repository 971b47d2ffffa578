from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples

from bytecheckpoint.errors import StorageError, UnsupportedURLError
from bytecheckpoint.storage_backends import StorageBackend, absolute_url, check_key, join, open_backend, registry
from bytecheckpoint.storage_backends.buffers import WrittenRanges
from bytecheckpoint.storage_backends.fsspec.backend import FsspecBackend
from bytecheckpoint.storage_backends.keys import is_object_key
from bytecheckpoint.storage_backends.local.backend import LocalBackend
from bytecheckpoint.storage_backends.memory import MemoryBackend
from bytecheckpoint.version import install_command


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of sys.path in which a test installs distributions."""
    monkeypatch.syspath_prepend(str(tmp_path))
    registry.plugin_schemes.cache_clear()
    yield tmp_path
    registry.plugin_schemes.cache_clear()


def _install(folder: Path, distribution: str, scheme: str, value: str, source: str = "") -> None:
    info = folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[bytecheckpoint.storage_backends]\n{scheme} = {value}\n")
    if source:
        (folder / f"{value.partition(':')[0]}.py").write_text(source)
    registry.plugin_schemes.cache_clear()


def test_paths_and_file_urls_are_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    expected = {
        str(tmp_path): str(tmp_path),
        "runs/x": str(tmp_path / "runs/x"),
        "file:///a/b": "/a/b",
        "file://localhost/a/b": "/a/b",
        "local:///a/b": "/a/b",
        "~/runs": "/home/somebody/runs",
        "/odd::name": "/odd::name",
        "file:///a%20b": "/a b",
        "/a%20b": "/a%20b",
    }
    for url, path in expected.items():
        backend = open_backend(url)
        assert isinstance(backend, LocalBackend)
        assert backend.url == path
        assert open_backend(backend.url).url == absolute_url(url) == path
    assert open_backend(tmp_path / "x").url == str(tmp_path / "x")


def test_other_schemes() -> None:
    assert isinstance(open_backend("memory://x/y"), MemoryBackend)
    assert isinstance(open_backend("dir::file:///tmp/x"), FsspecBackend)
    pytest.importorskip("s3fs")
    from bytecheckpoint.storage_backends.s3.backend import S3Backend

    assert isinstance(open_backend("s3://bucket/x"), S3Backend)
    assert isinstance(open_backend("dir::s3://bucket/x"), FsspecBackend)
    assert open_backend("s3://bucket/x/").url == "s3://bucket/x"


def test_opening_local_storage_imports_no_fsspec() -> None:
    script = (
        "from bytecheckpoint.storage_backends import open_backend; open_backend('/tmp/x'); open_backend('memory://x')"
    )
    check = "import sys; assert not {'fsspec', 's3fs'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", f"import bytecheckpoint; {check}; {script}; {check}"], check=True)


def test_unknown_scheme_says_what_is_known() -> None:
    with pytest.raises(UnsupportedURLError, match=r"nosuch://.*Known schemes: .*file.*memory.*s3.*Install"):
        open_backend("nosuch://x/y")


MISSING = [
    ("s3://bucket/x", None, install_command("s3")),
    ("s3a://bucket/x", None, install_command("s3")),
    ("gs://bucket/x", None, install_command("fast")),
    ("az://container/x", None, install_command("fast")),
    ("gs://bucket/x", "obstore", install_command("fast")),
    ("gs://bucket/x", "fsspec", "pip install gcsfs"),
    ("abfs://container/x", "fsspec", "pip install adlfs"),
    ("hdfs://host/x", None, "pip install hdfs-native"),
    ("sftp://host/x", None, "paramiko"),
]
_WITHOUT_PACKAGES = """
import json, sys
for name in "s3fs gcsfs adlfs obstore hdfs_native pyarrow paramiko urllib3 aiohttp requests".split():
    sys.modules[name] = None
from bytecheckpoint.errors import UnsupportedURLError
from bytecheckpoint.storage_backends import open_backend
open_backend("https://host/x")  # needs no package
for url, client, command in json.loads(sys.argv[1]):
    try:
        open_backend(url, **({"client": client} if client else {}))
    except UnsupportedURLError as error:
        assert command in str(error), f"{url}: {error}"
    else:
        raise AssertionError(url)
"""


def test_a_package_that_is_missing_is_named_with_the_command() -> None:
    subprocess.run([sys.executable, "-c", _WITHOUT_PACKAGES, json.dumps(MISSING)], check=True)


@pytest.mark.parametrize("url", ["s3:/bucket/x", Path("s3://bucket/x"), "file:/x", "", "file://host/x", "file://x"])
def test_slips_are_not_taken_for_directories(url: str | Path) -> None:
    with pytest.raises(UnsupportedURLError):
        open_backend(url)


def test_unknown_options() -> None:
    for url in ("/tmp/x", "memory://x"):
        with pytest.raises(UnsupportedURLError, match="endpoint_url"):
            open_backend(url, endpoint_url="http://x")


# Plug-ins


def test_entry_point_serves_its_scheme(installed: Path) -> None:
    source = """
from bytecheckpoint.storage_backends.memory import MemoryBackend
from bytecheckpoint.version import install_command

class Backend(MemoryBackend):
    @classmethod
    def from_url(cls, url, **options):
        backend = cls("plugin")
        backend.seen = (url, options)
        return backend
"""
    _install(installed, "bcp-plugin-one", "bcpplug", "bcp_plugin_one:Backend", source)
    assert "bcp_plugin_one" not in sys.modules
    backend = open_backend("bcpplug://host/x", token="t")
    assert backend.seen == ("bcpplug://host/x", {"token": "t"})  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedURLError, match="bcpplug"):
        open_backend("nosuch://x")


def test_entry_point_goes_before_fsspec(installed: Path) -> None:
    source = "from bytecheckpoint.storage_backends.local.backend import LocalBackend as Backend\n"
    _install(installed, "bcp-plugin-two", "s3", "bcp_plugin_two:Backend", source)
    assert registry.plugin_schemes()["s3"][0].value == "bcp_plugin_two:Backend"


def test_broken_plugins_are_named(installed: Path) -> None:
    _install(installed, "bcp-plugin-three", "bcpbroken", "bcp_plugin_three:Backend", "raise ValueError('oh no')\n")
    with pytest.raises(UnsupportedURLError, match=r"bcp-plugin-three.*cannot be imported: oh no"):
        open_backend("bcpbroken://x")
    _install(installed, "bcp-plugin-four", "bcpodd", "bcp_plugin_four:Backend", "Backend = dict\n")
    with pytest.raises(UnsupportedURLError, match=r"bcp-plugin-four.*is not a StorageBackend"):
        open_backend("bcpodd://x")
    _install(installed, "bcp-plugin-five", "bcpodd", "bcp_plugin_five:Backend")
    with pytest.raises(UnsupportedURLError, match="several packages serve bcpodd://"):
        open_backend("bcpodd://x")
    open_backend("/tmp/not-disturbed")


def test_backend_without_from_url() -> None:
    with pytest.raises(UnsupportedURLError, match="construct it directly"):
        StorageBackend.from_url("x://y")


# join


@pytest.mark.parametrize(
    ("url", "parts", "joined"),
    [
        ("s3://bucket", ("step-1",), "s3://bucket/step-1"),
        ("s3://bucket/", ("step-1",), "s3://bucket/step-1"),
        ("s3://bucket/a//", ("b/c", "d"), "s3://bucket/a/b/c/d"),
        ("/", ("a",), "/a"),
        ("/root/", ("a",), "/root/a"),
        ("runs", ("a",), "runs/a"),
        ("file:///", ("a",), "file:///a"),
        ("memory://x", ("a",), "memory://x/a"),
        ("dir::file:///x", ("a",), "dir::file:///x/a"),
        ("zip://in::file:///x.zip", ("a",), "zip://in/a::file:///x.zip"),
        ("s3://bucket/a", (), "s3://bucket/a"),
    ],
)
def test_join(url: str, parts: tuple[str, ...], joined: str) -> None:
    assert join(url, *parts) == joined


def test_join_takes_a_path_and_refuses_what_is_no_key(tmp_path: Path) -> None:
    assert join(tmp_path, "a", "b") == str(tmp_path / "a" / "b")
    for part in ("..", "/etc", "a/../b", ""):
        with pytest.raises(StorageError):
            join("s3://bucket", part)


def test_join_agrees_with_keys() -> None:
    whole = MemoryBackend("join-agrees")
    open_backend(join("memory://join-agrees", "a", "b")).put("c", b"x")
    assert whole.get("a/b/c") == b"x"
    MemoryBackend.delete_store("join-agrees")


# Keys and pieces


@settings(deadline=None, max_examples=examples(300))
@given(st.text(alphabet=st.sampled_from("ab./\\\0\n\x7f\ud800é"), max_size=12))
def test_a_key_never_leaves_the_root(key: str) -> None:
    if not is_object_key(key):
        with pytest.raises(StorageError):
            check_key(key)
        return
    check_key(key)
    assert Path("/root", key).resolve() == Path("/root", *key.split("/"))
    assert str(Path("/root", key)) == "/root/" + key


@settings(deadline=None, max_examples=examples(200))
@given(st.integers(0, 40), st.lists(st.tuples(st.integers(-2, 42), st.integers(0, 12)), max_size=12))
def test_piece_map_is_a_set_of_bytes(size: int, pieces: list[tuple[int, int]]) -> None:
    written: set[int] = set()
    piece_map = WrittenRanges("test", size)
    for offset, length in pieces:
        piece = set(range(offset, offset + length))
        if piece & written or offset < 0 or offset + length > size:
            with pytest.raises(StorageError):
                piece_map.add(offset, length)
        else:
            piece_map.add(offset, length)
            written |= piece
    if written == set(range(size)):
        piece_map.check_whole()
    else:
        first = min(set(range(size)) - written)
        with pytest.raises(StorageError, match=rf"\[{first}, "):
            piece_map.check_whole()
