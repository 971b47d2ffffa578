"""The local backend on real files, with real faults: limits, full and read-only file systems, links, kills."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from warm_python import warm_python

from bytecheckpoint.errors import (
    AccessDeniedError,
    KeyExistsError,
    KeyNotFoundError,
    StorageError,
    StorageFullError,
)
from bytecheckpoint.storage_backends import StorageBackend, posix
from bytecheckpoint.storage_backends.local import objects as local_objects
from bytecheckpoint.storage_backends.local import root as local_root
from bytecheckpoint.storage_backends.local.backend import LocalBackend
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.storage import StorageConformance


class TestLocalBackend(StorageConformance):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> LocalBackend:
        return LocalBackend(tmp_path / "not" / "made" / "yet")

    def check_no_leftovers(self, backend: StorageBackend) -> None:
        assert os.listdir(backend.url) == []


class TestLocalBackendThroughALink(StorageConformance):
    """The root itself may be a symbolic link: only what is below it is confined."""

    @pytest.fixture
    def backend(self, tmp_path: Path) -> LocalBackend:
        (tmp_path / "target").mkdir()
        (tmp_path / "link").symlink_to("target")
        return LocalBackend(tmp_path / "link")


@pytest.fixture
def backend(tmp_path: Path) -> LocalBackend:
    return LocalBackend(tmp_path / "root")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"none", os.fsencode(path), b"tmpfs", 0, b"size=1m") != 0:
        pytest.skip("needs the right to mount a tmpfs")
    yield path
    assert libc.umount2(os.fsencode(path), 2) == 0


def _read_only(path: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    remount, read_only = 32, 1
    assert libc.mount(b"none", os.fsencode(path), b"tmpfs", remount | read_only, b"size=1m") == 0


def _run(script: str, *arguments: object, code: int = 0) -> str:
    done = warm_python().run(["-c", script, *map(str, arguments)], timeout=time_limit(120))
    assert done.returncode == code, done.stderr
    return done.stdout


# Full


def test_a_file_that_does_not_fit_is_refused_before_the_first_byte(small_disk: Path) -> None:
    backend = LocalBackend(small_disk / "root")
    with pytest.raises(StorageFullError, match=r"needed: 5000000 bytes, free .*: \d+ bytes"):
        backend.create("dir/object", 5_000_000)
    assert os.listdir(small_disk / "root") == []


def test_without_fallocate_the_free_space_is_asked(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_objects, "preallocate", lambda fd, size: False)
    backend = LocalBackend(small_disk)
    with pytest.raises(StorageFullError, match=r"needed: 5000000 bytes"):
        backend.create("object", 5_000_000)
    assert os.listdir(small_disk) == []


def test_disk_that_fills_during_a_write(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_objects, "preallocate", lambda fd, size: False)
    backend = LocalBackend(small_disk)
    writer = backend.create("object", 800_000)
    (small_disk / "other").write_bytes(b"x" * 500_000)
    with pytest.raises(StorageFullError, match="object"):
        writer.write(0, b"x" * 800_000)
    with pytest.raises(StorageError, match="failed"):
        writer.complete()
    writer.abort()
    assert os.listdir(small_disk) == ["other"]


def test_full_disk_keeps_the_old_object(small_disk: Path) -> None:
    backend = LocalBackend(small_disk)
    backend.put("object", b"old")
    with pytest.raises(StorageFullError, match=r"object.*needed: 2000000"):
        backend.put("object", b"x" * 2_000_000)
    assert backend.get("object") == b"old"
    assert os.listdir(small_disk) == ["object"]


def test_file_size_limit(tmp_path: Path) -> None:
    script = """
import os, resource, sys
from bytecheckpoint.errors import StorageFullError
from bytecheckpoint.storage_backends.local.backend import LocalBackend

resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
backend = LocalBackend(sys.argv[1])
backend.put("small", b"x" * 100_000)
for attempt in (lambda: backend.put("large", b"x" * 100_001), lambda: backend.create("large", 100_001)):
    try:
        attempt()
    except StorageFullError as error:
        assert "ulimit -f" in str(error) and "EFBIG" in str(error), error
    else:
        raise AssertionError("no error")
assert os.listdir(sys.argv[1]) == ["small"]
"""
    _run(script, tmp_path)


# Denied


def test_read_only_file_system(small_disk: Path) -> None:
    backend = LocalBackend(small_disk)
    backend.put("dir/object", b"old")
    _read_only(small_disk)
    for attempt in (
        lambda: backend.put("dir/object", b"new"),
        lambda: backend.put("new/object", b"new"),
        lambda: backend.create("dir/other", 3),
        lambda: backend.delete(["dir/object"]),
    ):
        with pytest.raises(AccessDeniedError, match="EROFS"):
            attempt()
    assert backend.get("dir/object") == b"old"


def test_unwritable_directory(tmp_path: Path) -> None:
    script = """
import os, sys
from bytecheckpoint.errors import AccessDeniedError
from bytecheckpoint.storage_backends.local.backend import LocalBackend

root = sys.argv[1]
backend = LocalBackend(root)
backend.put("object", b"x")
os.chmod(root + "/object", 0)
os.chmod(root, 0o555)
if os.getuid() == 0:
    for parent in __import__("pathlib").Path(root).parents:
        if str(parent) != "/" and parent.stat().st_uid == 0 and not parent.stat().st_mode & 1:
            os.chmod(parent, parent.stat().st_mode | 0o111)
    os.setgid(65534)
    os.setuid(65534)
for attempt in (lambda: backend.put("a", b"x"), lambda: backend.create("a/b", 1), lambda: backend.delete(["object"]),
                lambda: backend.get("object")):
    try:
        attempt()
    except AccessDeniedError as error:
        assert "EACCES" in str(error), error
    else:
        raise AssertionError("no error")
"""
    root = tmp_path / "root"
    root.mkdir()
    try:
        _run(script, root)
    finally:
        root.chmod(0o755)


def test_every_errno_has_its_error() -> None:
    expected = {
        errno.ENOSPC: StorageFullError,
        errno.EDQUOT: StorageFullError,
        errno.EFBIG: StorageFullError,
        errno.EACCES: AccessDeniedError,
        errno.EPERM: AccessDeniedError,
        errno.EROFS: AccessDeniedError,
        errno.ENOENT: KeyNotFoundError,
        errno.ENOTDIR: KeyNotFoundError,
        errno.EIO: StorageError,
        errno.ESTALE: StorageError,
    }
    for code, kind in expected.items():
        mapped = posix.map_os_error(OSError(code, "x"), "reading 'k'", absent_is_missing_key=True)
        assert type(mapped) is kind
        assert "reading 'k'" in str(mapped)
    writing = posix.map_os_error(OSError(errno.ENOENT, "x"), "writing 'k'", absent_is_missing_key=False)
    assert type(writing) is StorageError


# What is in the way


def test_root_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"precious")
    backend = LocalBackend(tmp_path / "file")
    for attempt in (
        lambda: backend.put("a", b"x"),
        lambda: backend.create("a/b", 1),
        lambda: backend.get("a"),
        lambda: backend.stat("a"),
        lambda: backend.list_children(),
        lambda: [*backend.list()],
    ):
        with pytest.raises(StorageError, match="is a file, not a directory") as caught:
            attempt()
        assert not isinstance(caught.value, KeyNotFoundError)
    assert (tmp_path / "file").read_bytes() == b"precious"


def test_object_where_a_directory_is_needed(backend: LocalBackend) -> None:
    backend.put("a", b"x")
    for attempt in (lambda: backend.put("a/b", b"x"), lambda: backend.create("a/b/c", 1)):
        with pytest.raises(StorageError, match="is itself an object"):
            attempt()
    backend.put("d/e", b"x")
    for attempt in (lambda: backend.put("d", b"x"), lambda: backend.create("d", 1)):
        with pytest.raises(StorageError, match="EISDIR"):
            attempt()
    with pytest.raises(KeyExistsError):
        backend.put("d", b"x", if_absent=True)
    assert [found.key for found in backend.list()] == ["a", "d/e"]


def test_fifo_is_not_an_object_and_does_not_hang(backend: LocalBackend) -> None:
    backend.put("a", b"x")
    os.mkfifo(os.path.join(backend.url, "fifo"))
    with pytest.raises(KeyNotFoundError, match="not a file"):
        backend.get("fifo")
    assert [found.key for found in backend.list()] == ["a"]
    assert list(backend.list_children()) == ["a"]


def test_empty_directories_are_not_listed(backend: LocalBackend) -> None:
    backend.put("a/b", b"x")
    os.makedirs(os.path.join(backend.url, "empty", "deeper"))
    assert list(backend.list_children()) == ["a/"]


# Links


def test_links_out_of_the_root_are_refused(tmp_path: Path, backend: LocalBackend) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "file").write_bytes(b"secret")
    backend.put("a/object", b"x")
    root = Path(backend.url)
    (root / "dir-link").symlink_to(secret)
    (root / "a" / "file-link").symlink_to("../../secret/file")
    for attempt in (
        lambda: backend.get("dir-link/file"),
        lambda: backend.get("a/file-link"),
        lambda: backend.stat("a/file-link"),
        lambda: backend.read_into("a/file-link", 0, bytearray(1)),
        lambda: backend.put("dir-link/new", b"x"),
        lambda: backend.create("dir-link/file", 1),
        lambda: backend.delete(["dir-link/file"]),
        lambda: [*backend.list("dir-link/")],
        lambda: backend.list_children("dir-link/"),
    ):
        with pytest.raises(StorageError, match="leads out of the root") as caught:
            attempt()
        assert not isinstance(caught.value, KeyNotFoundError)
    assert [found.key for found in backend.list()] == ["a/object"]
    assert list(backend.list_children()) == ["a/"]
    # A write through a link replaces the link and deleting removes it: what it points to stays.
    backend.put("a/file-link", b"data")
    assert backend.get("a/file-link") == b"data"
    (root / "a" / "second").symlink_to("../../secret/file")
    with backend.create("a/second", 1) as writer:
        writer.write(0, b"x")
        writer.complete()
    backend.delete(["dir-link"])
    assert os.listdir(secret) == ["file"]
    assert (secret / "file").read_bytes() == b"secret"


def test_links_within_the_root_are_followed(backend: LocalBackend) -> None:
    backend.put("step-1/object", b"x")
    root = Path(backend.url)
    (root / "latest").symlink_to("step-1")
    (root / "step-1" / "loop").symlink_to("..")
    assert backend.get("latest/object") == b"x"
    assert [found.key for found in backend.list()] == ["latest/object", "step-1/object"]
    assert list(backend.list_children()) == ["latest/", "step-1/"]


# Crashes


def test_leftovers_of_a_killed_put(tmp_path: Path, backend: LocalBackend) -> None:
    script = """
import os, signal, sys
from bytecheckpoint.storage_backends.local import backend

def die(source, target):
    os.kill(os.getpid(), signal.SIGKILL)

backend.os.replace = die
backend.LocalBackend(sys.argv[1]).put("dir/object", b"new")
"""
    backend.put("dir/object", b"old")
    _run(script, backend.url, code=-signal.SIGKILL)
    names = sorted(os.listdir(Path(backend.url, "dir")))
    assert len(names) == 2
    leftover = f"dir/{names[0]}"
    assert leftover.startswith("dir/.bcp-tmp-")
    assert backend.get("dir/object") == b"old"
    assert [found.key for found in backend.list()] == ["dir/object"]
    assert list(backend.list_children("dir/")) == ["object"]
    with pytest.raises(StorageError, match="reserved"):
        backend.get(leftover)
    backend.delete(["dir/object"])
    assert os.listdir(backend.url) == []


def test_directory_that_vanishes_under_mkdir(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.mkdir
    lost: list[str] = []

    def found_then_gone(path: str, mode: int = 0o777) -> None:
        if not lost:
            lost.append(path)
            raise FileExistsError(errno.EEXIST, "another process has it, for a moment", path)
        real(path, mode)

    monkeypatch.setattr(os, "mkdir", found_then_gone)
    backend.put("dir/object", b"x")
    assert len(lost) == 1
    assert backend.get("dir/object") == b"x"


@pytest.mark.parametrize("size", [3, 5000])
def test_a_document_is_read_to_its_end_whatever_size_is_reported(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """As of a file that another host has replaced, where asking for the size anew does not help."""
    content, look = bytes(range(200)) * 5, os.fstat
    backend.put("doc", content)

    def stale(fd: int) -> SimpleNamespace:
        found = look(fd)
        return SimpleNamespace(st_mode=found.st_mode, st_size=size, st_ino=found.st_ino, st_mtime_ns=found.st_mtime_ns)

    monkeypatch.setattr(os, "fstat", stale)
    assert backend.get("doc") == content


def test_directories_that_this_host_believes_to_exist(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on sshfs, for some seconds, after another host has removed them."""
    make, look, top = os.mkdir, os.stat, backend.url
    cached = {f"{top}/a", f"{top}/a/b"}

    def mkdir(path: str, *arguments: object) -> None:
        if path in cached:
            raise FileExistsError(errno.EEXIST, "cached", path)
        make(path, *arguments)

    backend.put("object", b"")
    monkeypatch.setattr(os, "mkdir", mkdir)
    monkeypatch.setattr(os, "stat", lambda path, **options: look(top if path in cached else path, **options))
    backend.put("a/b/c/object", b"content")
    assert backend.get("a/b/c/object") == b"content"
    assert backend.list_children("") == ["a/", "object"]


def test_delete_spares_the_temporary_file_of_a_live_put(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.replace

    tries: list[str] = []

    def delete_first(source: str, target: str) -> None:
        tries.append(source)
        backend.delete(["dir/other"])
        real(source, target)

    backend.put("dir/other", b"x")
    monkeypatch.setattr(os, "replace", delete_first)
    backend.put("dir/object", b"y")
    assert len(tries) == 1
    assert [found.key for found in backend.list()] == ["dir/object"]


def test_everything_on_the_way_is_synced(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = os.fsync

    def spy(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fsync", spy)
    monkeypatch.setattr(os, "fdatasync", spy)
    backend.put("a/b/object", b"x")
    root = backend.url
    files = [path for path in synced if ".bcp-tmp-" in path]
    assert len(files) == 1
    after = synced[synced.index(files[0]) + 1 :]
    assert after == [f"{root}/a/b", f"{root}/a", root]
    assert {os.path.dirname(root), root, f"{root}/a"} <= set(synced[: synced.index(files[0])])
    synced.clear()
    with backend.create("a/c/object", 1) as writer:
        writer.write(0, b"x")
        writer.complete()
    assert synced[-4:] == [f"{root}/a/c/object", f"{root}/a/c", f"{root}/a", root]


def test_if_absent_without_hard_links(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    backend.put("object", b"first", if_absent=True)
    with pytest.raises(KeyExistsError):
        backend.put("object", b"second", if_absent=True)
    assert backend.get("object") == b"first"
    monkeypatch.setattr(local_root, "rename_exclusive", lambda source, target: False)
    with pytest.raises(StorageError, match="neither hard links nor renameat2") as caught:
        backend.put("other", b"x", if_absent=True)
    assert not isinstance(caught.value, KeyExistsError)
    assert os.listdir(backend.url) == ["object"]


# Writers


def test_short_writes_and_reads_are_continued(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write, real_read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real_write(fd, data[:7], offset))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: real_read(fd, [buffers[0][:5]], offset))
    data = bytes(range(100))
    with backend.create("object", 100) as writer:
        writer.write(0, data)
        writer.complete()
    assert backend.get("object") == data
    backend.put("object", data * 2)
    buffer = bytearray(150)
    backend.read_into("object", 20, buffer)
    assert buffer == (data * 2)[20:170]


def test_abort_waits_for_a_write_that_is_going_on(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing the descriptor under a write would let it land in whatever file gets the number next."""
    entered, go_on = threading.Event(), threading.Event()
    descriptors: list[bool] = []
    real = os.pwrite

    def slow(fd: int, data: memoryview, offset: int) -> int:
        entered.set()
        assert go_on.wait(time_limit(60))
        descriptors.append(stat.S_ISREG(os.fstat(fd).st_mode))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", slow)
    writer = backend.create("object", 4)
    thread = threading.Thread(target=writer.write, args=(0, b"abcd"))
    aborting = threading.Thread(target=writer.abort)
    thread.start()
    assert entered.wait(time_limit(60))
    aborting.start()
    with pytest.raises(StorageError, match=r"while a thread was writing|aborted"):
        writer.complete()
    go_on.set()
    thread.join(time_limit(60))
    aborting.join(time_limit(60))
    assert descriptors == [True]
    assert os.listdir(backend.url) == []


def test_complete_during_a_write_is_refused(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranges are known by then, but the last bytes are not in the file: it must not become visible."""
    begun, go_on = threading.Event(), threading.Event()
    pwrite = os.pwrite

    def slow(fd: int, data: memoryview, offset: int) -> int:
        begun.set()
        assert go_on.wait(time_limit(30))
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", slow)
    writer = backend.create("object", 100)
    with ThreadPoolExecutor(1) as pool:
        write = pool.submit(writer.write, 0, b"x" * 100)
        try:
            assert begun.wait(time_limit(30))
            with pytest.raises(StorageError, match=r"'object'.* while a thread was writing"):
                writer.complete()
        finally:
            go_on.set()
        write.result(time_limit(30))
    writer.complete()
    assert backend.get("object") == b"x" * 100


def test_old_readers_keep_their_bytes_when_an_object_is_created_anew(backend: LocalBackend) -> None:
    backend.put("object", b"old bytes")
    with open(os.path.join(backend.url, "object"), "rb") as file:
        with backend.create("object", 3) as writer:
            writer.write(0, b"new")
            writer.complete()
        assert file.read() == b"old bytes"


def test_arrays_are_buffers(backend: LocalBackend) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    with backend.create("object", array.nbytes) as writer:
        writer.write(0, array)
        writer.write(0, np.empty((0, 4), dtype=np.float32))
        writer.complete()
    back = np.empty_like(array)
    backend.read_into("object", 0, back)
    assert np.array_equal(array, back)
    backend.read_into("object", 0, np.empty((3, 0)))
    with pytest.raises(StorageError, match="contiguous"):
        backend.read_into("object", 0, back[:, ::2])


def test_truncated_object_names_what_is_missing(backend: LocalBackend) -> None:
    backend.put("dir/object", b"x" * 100)
    os.truncate(os.path.join(backend.url, "dir/object"), 60)
    with pytest.raises(StorageError, match=r"'dir/object'.*requested bytes \[50, 80\), got 10.*only 60 bytes"):
        backend.read_into("dir/object", 50, bytearray(30))


def test_relative_root_survives_chdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    backend = LocalBackend("runs/one")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    backend.put("object", b"x")
    assert (tmp_path / "runs" / "one" / "object").read_bytes() == b"x"


def test_a_path_that_the_locale_cannot_encode(tmp_path: Path) -> None:
    script = f"""
import bytecheckpoint as bcp
def save(path): bcp.save(path, {{}})
def load(path): bcp.load(path, {{}})
def manage(path): bcp.CheckpointManager(path).latest()
for call in (bcp.open, bcp.latest, manage, save, load):
    try:
        call({str(tmp_path)!r} + "/caf\\xe9")
    except bcp.errors.UnsupportedURLError as error:
        assert "caf\\\\xe9' cannot be written in ascii" in str(error), error
    else:
        raise AssertionError(call)
from bytecheckpoint.storage_backends import open_backend
backend, key = open_backend({str(tmp_path)!r}), "caf\\xe9"
for call in (
    lambda: backend.put(key, b""), lambda: backend.create(key, 3), lambda: backend.get(key), lambda: backend.stat(key),
    lambda: list(backend.list(key + "/")), lambda: backend.list_children(key + "/"), lambda: backend.delete([key]),
):
    try:
        call()
    except bcp.errors.StorageError as error:
        assert "cannot be written in ascii" in str(error), error
    else:
        raise AssertionError(call)
"""
    environment = {**os.environ, "LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_key_that_cannot_be_deleted_keeps_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, unlink = LocalBackend(tmp_path), os.unlink
    for key in "abc":
        backend.put(key, b"x")

    def refuse(path: str) -> None:
        if path.endswith("a"):
            raise PermissionError(errno.EACCES, "no")
        unlink(path)

    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(AccessDeniedError, match="deleting 'a'"):
        backend.delete(["a", "b", "c"])
    assert [stat.key for stat in backend.list()] == ["a"]
