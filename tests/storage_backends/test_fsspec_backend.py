"""The fsspec backend on fsspec's memory and local files, on a file system with nothing but the basics, and on S3."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import fsspec
import pytest
from forked_store import use_in_forked_child
from fsspec.exceptions import FSTimeoutError
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

import bytecheckpoint as bcp
from bytecheckpoint.errors import (
    AccessDeniedError,
    CommitUnknownError,
    KeyExistsError,
    KeyNotFoundError,
    StorageError,
    StorageFullError,
    UnansweredError,
    UnsupportedURLError,
)
from bytecheckpoint.storage_backends import IncompleteUpload, StorageBackend, open_backend
from bytecheckpoint.storage_backends.fsspec import connection
from bytecheckpoint.storage_backends.fsspec.backend import FsspecBackend, explain
from bytecheckpoint.storage_backends.remote import parts
from bytecheckpoint.storage_backends.remote.session import EndpointSession, Request
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.storage import StorageConformance

pytestmark = pytest.mark.sampled(141, of=__name__)


class TestFsspecMemory(StorageConformance):
    supports_if_version = False
    supports_if_absent = False
    atomic_replace = False

    @pytest.fixture
    def backend(self) -> Iterator[FsspecBackend]:
        name = uuid.uuid4().hex
        yield FsspecBackend(f"memory://{name}/root")
        fs = fsspec.filesystem("memory")
        for path in fs.find(f"/{name}"):
            fs.rm_file(path)


class TestFsspecFile(StorageConformance):
    supports_if_version = False
    supports_if_absent = False
    atomic_replace = False
    large_bytes = 9 * 2**20 + 17
    piece_bytes = 2**20

    @pytest.fixture
    def backend(self, tmp_path: Path) -> FsspecBackend:
        return FsspecBackend(f"file://{tmp_path}/not/made/yet")

    def check_no_leftovers(self, backend: StorageBackend) -> None:
        root = Path(backend.url.partition("://")[2])
        assert [path for path in root.rglob("*") if path.is_file()] == []


class TestFsspecChain(TestFsspecFile):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> StorageBackend:
        return open_backend(f"dir::file://{tmp_path}/chained")

    def check_no_leftovers(self, backend: StorageBackend) -> None:
        pass


class PlainFileSystem(LocalFileSystem):  # type: ignore[misc]
    """What SFTP or HDFS look like: real directories, one user at a time, a rename that does not replace, no links."""

    protocol = "bcpplain"

    def mv(self, path1: str, path2: str, **options: Any) -> None:
        if self.exists(path2):
            raise OSError("a rename does not replace")
        os.rename(self._strip_protocol(path1), self._strip_protocol(path2))

    def link(self, src: str, dst: str, **options: Any) -> None:
        raise NotImplementedError


class SilentFileSystem(PlainFileSystem):
    """As WebHDFS: a rename over an object does nothing and says nothing."""

    protocol = "bcpsilent"

    def mv(self, path1: str, path2: str, **options: Any) -> None:
        if not self.exists(path2):
            super().mv(path1, path2)


@pytest.fixture
def registered() -> None:
    for served in (PlainFileSystem, SilentFileSystem):
        fsspec.register_implementation(served.protocol, served, clobber=True)


@pytest.mark.usefixtures("registered")
class TestFsspecPlainFileSystem(StorageConformance):
    supports_if_version = False
    supports_if_absent = False
    atomic_replace = False
    large_bytes = 9 * 2**20 + 17
    piece_bytes = 2**20

    @pytest.fixture
    def backend(self, tmp_path: Path) -> FsspecBackend:
        return FsspecBackend(f"bcpplain://{tmp_path}/root")


class _GuardedFileSystem(PlainFileSystem):
    """Reads a file with a password when it is created, as clients of stores do."""

    protocol = "bcpguarded"
    password: ClassVar[str] = "old"

    def __init__(self, *, login: Mapping[str, str], **options: Any) -> None:
        super().__init__(**options)
        self._password = Path(login["file"]).read_text()

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        if self._password != self.password:
            raise PermissionError("the password is wrong")
        content: bytes = super().cat_file(path, start=start, end=end, **options)
        return content


def test_credentials_that_are_replaced_in_their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation(_GuardedFileSystem.protocol, _GuardedFileSystem, clobber=True)
    (tmp_path / "password").write_text("old")
    backend = FsspecBackend(f"bcpguarded://{tmp_path}/root", login={"file": str(tmp_path / "password")})
    backend.put("object", b"x")
    assert backend.get("object") == b"x"
    monkeypatch.setattr(_GuardedFileSystem, "password", "new")
    with pytest.raises(AccessDeniedError, match="the password is wrong"):
        backend.get("object")
    (tmp_path / "password").write_text("new!")
    with pytest.raises(AccessDeniedError, match="the password is wrong"):
        backend.get("object")
    (tmp_path / "password").write_text("new")
    assert backend.get("object") == b"x"


class _CountingFileSystem(PlainFileSystem):
    protocol = "bcpcounting"
    listed: ClassVar[list[str]] = []

    def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
        self.listed.append(path)
        return super().ls(path, detail=detail, **options)


def test_a_deletion_lists_each_directory_once(tmp_path: Path) -> None:
    """Not once for each of its objects, which would take quadratic time."""
    fsspec.register_implementation(_CountingFileSystem.protocol, _CountingFileSystem, clobber=True)
    backend = FsspecBackend(f"bcpcounting://{tmp_path}/root")
    keys = [f"{folder}/{number}" for folder in ("a", "b/c") for number in range(20)]
    for key in keys:
        backend.put(key, b"x")
    _CountingFileSystem.listed.clear()
    backend.delete(keys[1:])
    assert len(_CountingFileSystem.listed) == 3  # a, b/c and b
    assert [path.name for path in (tmp_path / "root").iterdir()] == ["a"]


@pytest.mark.usefixtures("registered")
def test_rename_that_silently_refuses(tmp_path: Path) -> None:
    backend = FsspecBackend(f"bcpsilent://{tmp_path}/root")
    backend.put("object", b"first")
    backend.put("object", b"second")
    assert backend.get("object") == b"second"
    assert os.listdir(tmp_path / "root") == ["object"]


@pytest.mark.usefixtures("registered")
def test_temporary_files_of_a_killed_process(tmp_path: Path) -> None:
    """No writer will publish them. They are listed and removed, and nothing else is."""
    backend = FsspecBackend(f"bcpplain://{tmp_path}/root")
    backend.put("a/other", b"x")
    for folder in ("a", "b/c"):
        writer = backend.create(f"{folder}/object", 9 << 20)
        writer.write(0, bytes(1 << 20))
    found = [*backend.incomplete()]
    assert [os.path.dirname(one.key) for one in found] == ["a", "b/c"]
    assert all(0 <= one.age_s < time_limit(60) for one in found)
    assert [one.key for one in backend.incomplete("b/")] == [found[1].key]
    assert [stat.key for stat in backend.list()] == ["a/other"]
    backend.abort_incomplete([*found, *found, IncompleteUpload("a/other", "a/other", 0.0)])
    assert [*backend.incomplete()] == []
    assert sorted(os.listdir(tmp_path / "root")) == ["a"]
    assert backend.get("a/other") == b"x"


class StuckFileSystem(PlainFileSystem):
    """A client that waits for ever in the method ``stuck``."""

    protocol = "bcpstuck"
    stuck, go_on = "", threading.Event()

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        return self._wait if name == StuckFileSystem.stuck else value

    def _wait(self, *arguments: Any, **options: Any) -> None:
        StuckFileSystem.go_on.wait(time_limit(60))
        raise RuntimeError("the test has ended")


@pytest.mark.parametrize("method", ["open", "mv", "cat_file", "info", "find", "ls", "walk", "rm_file"])
@pytest.mark.usefixtures("registered")
def test_a_client_that_never_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    fsspec.register_implementation("bcpstuck", StuckFileSystem, clobber=True)
    backend = FsspecBackend(f"bcpstuck://{tmp_path}/root")
    backend.put("a/b", b"before")
    operations: dict[str, Callable[[], object]] = {
        "open": lambda: backend.put("a/b", b"after"),
        "mv": lambda: backend.put("c", b"after"),
        "cat_file": lambda: backend.get("a/b"),
        "info": lambda: backend.stat("a/b"),
        "find": lambda: [*backend.list()],
        "ls": lambda: backend.list_children(),
        "walk": lambda: backend.list_children(),
        "rm_file": lambda: backend.delete(["a/b"]),
    }
    monkeypatch.setattr(StuckFileSystem, "stuck", method)
    monkeypatch.setattr(StuckFileSystem, "go_on", threading.Event())
    backend.deadline_s = 0.2
    with pytest.raises(StorageError, match="did not answer in time") as caught:
        operations[method]()
    assert isinstance(caught.value, UnansweredError) is (method in ("open", "mv"))
    monkeypatch.setattr(StuckFileSystem, "stuck", "")
    backend.deadline_s = time_limit(20)
    assert backend.get("a/b") == b"before"  # with another connection
    StuckFileSystem.go_on.set()


class _FirstIsStuckFileSystem(PlainFileSystem):
    """Its first instance never returns from ``info``."""

    protocol = "bcpfirst"
    go_on = threading.Event()
    made = 0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.number = _FirstIsStuckFileSystem.made
        _FirstIsStuckFileSystem.made += 1

    def info(self, path: str, **options: Any) -> Any:
        if not self.number:
            _FirstIsStuckFileSystem.go_on.wait(time_limit(60))
        return super().info(path, **options)


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_client_that_never_returned_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_shared: bool
) -> None:
    """Also one that several threads share, as hdfs-native's."""
    fsspec.register_implementation("bcpfirst", _FirstIsStuckFileSystem, clobber=True)
    if is_shared:
        monkeypatch.setattr(connection, "_HDFS_NATIVE", __name__)
    monkeypatch.setattr(_FirstIsStuckFileSystem, "made", 0)
    monkeypatch.setattr(_FirstIsStuckFileSystem, "go_on", threading.Event())
    (tmp_path / "object").write_bytes(b"x")
    backend = FsspecBackend(f"bcpfirst://{tmp_path}")
    backend.deadline_s = 0.2
    with pytest.raises(StorageError, match="did not answer in time"):
        backend.stat("object")
    backend.deadline_s = time_limit(30)
    assert backend.stat("object").size == 1
    _FirstIsStuckFileSystem.go_on.set()


class UrlFileSystem(PlainFileSystem):
    """As those of HDFS and Azure: the rest of a name after a question mark is lost."""

    protocol = "bcpurl"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path)).partition("?")[0]


@pytest.mark.usefixtures("registered")
def test_names_that_a_file_system_changes_are_refused(tmp_path: Path) -> None:
    fsspec.register_implementation("bcpurl", UrlFileSystem, clobber=True)
    backend = FsspecBackend(f"bcpurl://{tmp_path}/root")
    backend.put("a", b"x")
    with pytest.raises(StorageError, match=r"UrlFileSystem cannot store names with"):
        backend.put("a?b", b"y")
    assert backend.get("a") == b"x"


@pytest.mark.usefixtures("registered")
def test_if_absent_that_the_store_cannot_decide_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="this store cannot decide whether to put"):
        FsspecBackend(f"bcpplain://{tmp_path}").put("object", b"x", if_absent=True)
    assert os.listdir(tmp_path) == []


def test_object_where_a_directory_is_needed(tmp_path: Path) -> None:
    backend = FsspecBackend(f"file://{tmp_path}")
    backend.put("a", b"x")
    with pytest.raises(StorageError, match="is itself an object") as caught:
        backend.put("a/b", b"x")
    assert not isinstance(caught.value, KeyExistsError)
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("url", ["simplecache::memory://x", "blockcache::memory://x", "filecache::memory://x"])
def test_caches_are_refused(url: str) -> None:
    with pytest.raises(UnsupportedURLError, match="may serve objects that have been replaced"):
        open_backend(url)


def _mapped(error: Exception, action: str, kind: str = "small") -> StorageError:
    async def fail() -> None:
        raise error

    with pytest.raises(StorageError) as caught:
        asyncio.run(EndpointSession(explain, repeats=False).repeat(Request(action, time_limit(20), kind), fail))
    return caught.value


def test_errors_are_mapped() -> None:
    cases: list[tuple[Exception, type[StorageError]]] = [
        (FileNotFoundError("x"), KeyNotFoundError),
        (PermissionError("Access Denied"), AccessDeniedError),
        (FileExistsError("x"), KeyExistsError),
        (OSError(errno.ENOSPC, "x"), StorageFullError),
        (OSError(errno.EBUSY, "SlowDown"), StorageError),
        (OSError("no errno"), StorageError),
        (NotImplementedError(), StorageError),
        (TimeoutError(), StorageError),
        (RuntimeError("client library"), StorageError),
    ]
    for error, kind in cases:
        mapped = _mapped(error, "reading 'k' in s3://b")
        assert type(mapped) is kind
        assert "reading 'k' in s3://b" in str(mapped)
    # HDFS appends the stack of its server.
    java = _mapped(FileNotFoundError("no such folder\n\tat org.apache.A.b(A.java:1)\n\tat c"), "writing", "put")
    assert str(java) == "writing: no such object: no such folder; does the bucket or directory exist?"
    # A missing bucket is no missing key when writing.
    assert type(_mapped(FileNotFoundError("b"), "writing", "put")) is StorageError


class _Reply(aiohttp.ClientError):
    status = 403


@pytest.mark.parametrize(
    ("error", "is_open"),
    [
        (TimeoutError(), True),
        (FSTimeoutError(), True),
        (ConnectionResetError(), True),
        (OSError(errno.EPIPE, "x"), True),
        (aiohttp.ServerDisconnectedError(), True),
        (_Reply(), False),
        (OSError(errno.ENOSPC, "x"), False),
        (RuntimeError("client library"), False),
    ],
)
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_put_without_reply_may_still_arrive(
    monkeypatch: pytest.MonkeyPatch, error: Exception, is_open: bool, is_wrapped: bool
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        if is_wrapped:
            raise RuntimeError("the put failed") from error
        raise error

    monkeypatch.setattr(MemoryFileSystem, "mv", fail)
    with pytest.raises(StorageError) as caught:
        FsspecBackend(f"memory://{uuid.uuid4().hex}").put("object", b"x")
    assert isinstance(caught.value, UnansweredError) is is_open


def test_a_commit_without_reply_keeps_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest is stored after the save has failed, and must not refer to files that it has removed."""
    path, late, move = f"dir::memory://{uuid.uuid4().hex}", [], MemoryFileSystem.mv

    def hold(fs: Any, source: str, target: str, **options: Any) -> None:
        if not target.endswith("manifest.msgpack"):
            move(fs, source, target, **options)
            return
        late.append(lambda: move(fs, source, target, **options))
        raise FSTimeoutError

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "mv", hold)
        with pytest.raises(CommitUnknownError):
            bcp.save(path, {"extra_state": {"step": 7}}, step=7)
    late[-1]()
    checkpoint = bcp.open(path)
    assert checkpoint.step == 7
    assert checkpoint.verify().ok


def test_passwords_stay_out_of_messages(tmp_path: Path) -> None:
    backend = FsspecBackend("ftp://user:hunter2@127.0.0.1:1/root", timeout=1)
    with pytest.raises(StorageError) as caught:
        backend.get("object")
    assert "hunter2" not in str(caught.value)
    assert "127.0.0.1" in str(caught.value)
    assert "hunter2" in backend.url


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_usable_in_a_forked_child(tmp_path: Path, scheme: str) -> None:
    use_in_forked_child(f"{scheme}://{tmp_path}/root", {})


class _SlowFileSystem(PlainFileSystem):
    """Accepts the bytes of a file only once ``go_on`` is set."""

    protocol = "bcpslow"
    begun, go_on = threading.Event(), threading.Event()

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        file = super().open(path, mode, **options)
        return _SlowFile(file) if "w" in mode else file


class _SlowFile(io.RawIOBase):
    """Writes in short pieces."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        _SlowFileSystem.begun.set()
        assert _SlowFileSystem.go_on.wait(time_limit(30))
        return int(self._file.write(data[: 1 << 20]))

    def close(self) -> None:
        self._file.close()
        super().close()


@pytest.mark.usefixtures("registered")
def test_parts_that_arrive_early_are_written_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last part is brought first; ``complete`` publishes nothing before all of them are written."""
    fsspec.register_implementation("bcpslow", _SlowFileSystem, clobber=True)
    monkeypatch.setattr(parts, "PART_BYTES", 3 << 20)
    monkeypatch.setattr(_SlowFileSystem, "begun", threading.Event())
    monkeypatch.setattr(_SlowFileSystem, "go_on", threading.Event())
    backend, data = FsspecBackend(f"bcpslow://{tmp_path}/root"), os.urandom(10 << 20)
    writer = backend.create("object", len(data))
    for start in (6 << 20, 3 << 20, 9 << 20):
        writer.write(start, data[start : start + (3 << 20)])
    assert not _SlowFileSystem.begun.is_set()
    writer.write(0, data[: 3 << 20])
    with ThreadPoolExecutor(1) as pool:
        completing = pool.submit(writer.complete)
        assert _SlowFileSystem.begun.wait(time_limit(30))
        assert not completing.done()
        assert [*backend.list()] == []
        _SlowFileSystem.go_on.set()
        completing.result(time_limit(30))
    assert backend.get("object") == data


def test_a_put_that_was_given_up_replaces_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file is written at last, and its caller may have stored another object under the key by then."""
    fsspec.register_implementation("bcpslow", _SlowFileSystem, clobber=True)
    held, free = threading.Event(), threading.Event()
    monkeypatch.setattr(_SlowFileSystem, "go_on", held)
    backend, others = FsspecBackend(f"bcpslow://{tmp_path}/root"), set(threading.enumerate())
    backend.deadline_s = 0.2
    with pytest.raises(UnansweredError):
        backend.put("object", b"late")
    backend.deadline_s = time_limit(30)
    late = [thread for thread in set(threading.enumerate()) - others if thread.name == "bcp-fsspec"]
    free.set()
    monkeypatch.setattr(_SlowFileSystem, "go_on", free)
    backend.put("object", b"since then")
    held.set()
    for thread in late:
        thread.join(time_limit(30))
    assert backend.get("object") == b"since then"
    assert os.listdir(tmp_path / "root") == ["object"]


@pytest.mark.usefixtures("registered")
def test_an_object_that_is_not_complete_is_refused(tmp_path: Path) -> None:
    backend = FsspecBackend(f"bcpplain://{tmp_path}/root")
    writer = backend.create("object", 9 << 20)
    writer.write(4, bytes(100))
    with pytest.raises(StorageError, match=r"writing 'object'.*\[0, 4\)"):
        writer.complete()
    writer.abort()
    assert [*backend.incomplete()] == []
