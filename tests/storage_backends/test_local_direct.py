"""The local backend past the page cache: every alignment, every way back to the page cache, and what it leaves."""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from leak_watch import open_descriptors
from sampling import examples

from benchmarks.page_cache import evict, resident
from bytecheckpoint.errors import StorageError, StorageFullError, UnsupportedURLError
from bytecheckpoint.storage_backends import StorageBackend, open_backend
from bytecheckpoint.storage_backends.local import direct_io, page_cache
from bytecheckpoint.storage_backends.local.backend import LocalBackend
from bytecheckpoint.storage_backends.local.direct_io import PAGE
from bytecheckpoint.storage_backends.local.page_cache import PageCache
from bytecheckpoint.testing.storage import StorageConformance

pytestmark = pytest.mark.sampled(75, of=__name__)

_MIB = 1 << 20
_CONTENT = np.random.default_rng(0).integers(0, 256, 9 * _MIB, dtype=np.uint8)

Bytes = npt.NDArray[np.uint8]
"""Flat, and writable where it is memory to read into."""


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory on a file system where direct writes leave nothing in the page cache."""
    path = tmp_path_factory.mktemp("disk")
    backend = LocalBackend(path)
    _write(backend, "probe", _CONTENT[:_MIB])
    cached = _ask(path / "probe", lambda fd: PageCache(fd).has(0, _MIB))
    if cached or not backend.direct_io:
        pytest.skip("this file system has no direct I/O")
    return path


@pytest.fixture
def backend(disk: Path, tmp_path: Path) -> LocalBackend:
    return LocalBackend(disk / tmp_path.name)


def _write(backend: StorageBackend, key: str, data: Bytes) -> None:
    with backend.create(key, len(data)) as writer:
        writer.write(0, data)
        writer.complete()


def _read_direct(backend: StorageBackend, key: str, start: int, memory: Bytes) -> None:
    """Fill memory as a load does, which reads whole pages."""
    with backend.open_object(key) as opened:
        page = opened.direct_alignment() or 1
        skipped = start % page
        pages = _memory(-(-(skipped + len(memory)) // page) * page, 0)
        assert opened.read_direct(start - skipped, pages) >= skipped + len(memory)
    memory[:] = pages[skipped : skipped + len(memory)]


def _ask(path: Path | str, question: Callable[[int], bool]) -> bool:
    fd = os.open(path, os.O_RDONLY)
    try:
        return question(fd)
    finally:
        os.close(fd)


def _evict(path: Path | str) -> None:
    """Take the file out of the page cache."""
    assert evict(str(path)) == 0.0


def _memory(length: int, misalignment: int) -> Bytes:
    """Zeros at an address that is a multiple of the page size, plus ``misalignment``."""
    block = np.frombuffer(mmap.mmap(-1, length + misalignment + 1), np.uint8)
    assert block.ctypes.data % PAGE == 0
    return block[misalignment : misalignment + length]


def _is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


class TestWithoutDirectIO(StorageConformance):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> LocalBackend:
        return LocalBackend(tmp_path / "root", direct_io=False)


# Bit for bit

_LENGTHS = st.one_of(
    st.sampled_from([1, PAGE - 1, PAGE, PAGE + 1, direct_io.MIN_WRITE, direct_io.MIN_WRITE + PAGE, 2 * _MIB + 1]),
    st.integers(1, 3 * PAGE),
    st.integers(1, 3 * _MIB),
)
_MISALIGNMENTS = st.one_of(st.sampled_from([0, 1, 64, 512, PAGE - 1]), st.integers(0, PAGE - 1))


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
@settings(deadline=None, max_examples=examples(60))
@given(
    pieces=st.lists(st.tuples(_LENGTHS, _MISALIGNMENTS), min_size=1, max_size=6).filter(
        lambda pieces: sum(length for length, _ in pieces) <= len(_CONTENT)
    ),
    shuffle=st.randoms(use_true_random=False),
    reads=st.lists(st.tuples(st.floats(0, 1), _LENGTHS, _MISALIGNMENTS, st.integers(1, 4)), max_size=6),
)
def test_every_alignment(
    disk: Path,
    direct: bool,
    pieces: list[tuple[int, int]],
    shuffle: random.Random,
    reads: list[tuple[float, int, int, int]],
) -> None:
    backend = LocalBackend(disk / "alignments", direct_io=direct)
    ends = np.cumsum([length for length, _ in pieces]).tolist()
    content = _CONTENT[: ends[-1]]
    jobs = []
    for (length, misalignment), end in zip(pieces, ends):
        data = _memory(length, misalignment)
        data[:] = content[end - length : end]
        jobs.append((end - length, data))
    shuffle.shuffle(jobs)
    with backend.create("object", len(content)) as writer, ThreadPoolExecutor(4) as pool:
        for _ in pool.map(lambda job: writer.write(*job), jobs):
            pass
        writer.complete()
    assert backend.direct_io == direct
    assert Path(backend.url, "object").read_bytes() == content.tobytes()

    def read(request: tuple[float, int, int, int]) -> None:
        where, length, misalignment, parts = request
        start = int(where * (len(content) - 1))
        memory = _memory(min(length, len(content) - start), misalignment)
        if parts == 1:
            _read_direct(backend, "object", start, memory)
        else:
            with backend.open_object("object") as opened:
                opened.read(start, np.array_split(memory, parts))
        assert np.array_equal(memory, content[start : start + len(memory)])

    _evict(f"{backend.url}/object")
    with ThreadPoolExecutor(4) as pool:
        for _ in pool.map(read, reads):
            pass


@pytest.mark.parametrize("misalignment", [0, 64])
@pytest.mark.parametrize("size", [0, 1, PAGE - 1, PAGE, PAGE + 1, 8 * _MIB + 1])
def test_sizes(backend: LocalBackend, size: int, misalignment: int) -> None:
    data = _memory(size, misalignment)
    data[:] = _CONTENT[:size]
    step = 3 * _MIB
    with backend.create("object", size) as writer, ThreadPoolExecutor(4) as pool:
        for _ in pool.map(lambda at: writer.write(at, data[at : at + step]), range(0, size, step)):
            pass
        writer.complete()
    found = Path(backend.url, "object").read_bytes()
    assert found == data.tobytes()
    back = _memory(size, misalignment)
    _read_direct(backend, "object", 0, back)
    assert np.array_equal(back, data)
    assert backend.direct_io


# What goes where


def test_a_long_write_leaves_the_page_cache_alone(backend: LocalBackend) -> None:
    _write(backend, "object", _CONTENT)
    assert not _ask(f"{backend.url}/object", lambda fd: PageCache(fd).has(0, len(_CONTENT)))


@pytest.mark.parametrize("missing", [(), ("_cached_pages",), ("_cached_pages", "_mapped_pages")], ids=len)
def test_what_is_cold_and_what_is_warm(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch, missing: tuple[str, ...]
) -> None:
    """Whether the kernel counts cached pages, or (before Linux 6.5, or on overlayfs) those of a mapping, or (of others'
    files) it has to be tried."""
    count = page_cache._mapped_pages
    for name in missing:
        monkeypatch.setattr(page_cache, name, lambda fd, offset, length: None)
    _write(backend, "object", _CONTENT)
    real = os.preadv

    def spy(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if flags and not count(fd, offset, 1):
            raise BlockingIOError  # where the device is done before the kernel looks again, a cold page seems warm
        return real(fd, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", spy)
    buffer = np.zeros_like(_CONTENT)
    _evict(f"{backend.url}/object")
    # A look may leave a page behind, and yet the object never seems to be cached.
    for _ in range(5):
        with backend.open_object("object") as opened:
            assert not opened.is_cached(0, len(_CONTENT))
        _read_direct(backend, "object", 0, buffer)
    assert backend.get("object") == buffer.tobytes() == _CONTENT.tobytes()
    with backend.open_object("object") as opened:
        assert opened.is_cached(0, len(_CONTENT))


@pytest.mark.parametrize("count", ["_cached_pages", "_mapped_pages"])
def test_pages_are_counted_and_left_alone(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch, count: str) -> None:
    """Single pages in the cache would keep the kernel from reading the others ahead in large folios."""
    _write(backend, "object", _CONTENT)
    path = f"{backend.url}/object"
    fd = os.open(path, os.O_RDONLY)
    try:
        os.preadv(fd, [bytearray(1)], 0)
        if not getattr(page_cache, count)(fd, 0, 1):
            pytest.skip("this kernel does not count cached pages (cachestat, Linux 6.5)")
        monkeypatch.setattr(page_cache, "_cached_pages", getattr(page_cache, count))
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        cache = PageCache(fd)
        for at in range(0, len(_CONTENT), _MIB):
            assert not cache.has(at, _MIB)
        assert resident(path) <= 1 / 8  # what was read ahead of the first page
        os.preadv(fd, [memoryview(bytearray(2 * _MIB))], 4 * _MIB)
        assert cache.has(4 * _MIB, 2 * _MIB)
        assert cache.has(4 * _MIB + 5, 1)
        assert not cache.has(4 * _MIB, 4 * _MIB)
    finally:
        os.close(fd)


def test_short_pieces_go_through_the_page_cache(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", _on_direct(os.pwrite, lambda: pytest.fail("a short piece was written directly")))
        with backend.create("object", 2 * _MIB) as writer:
            for at in range(0, 2 * _MIB, 100_000):
                writer.write(at, _CONTENT[at : min(at + 100_000, 2 * _MIB)])
            writer.complete()
    assert Path(backend.url, "object").read_bytes() == _CONTENT[: 2 * _MIB].tobytes()


def test_durable_only_after_every_write(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of either kind, then the file, then the directories: the order that a crash must find."""
    done: list[str] = []

    def spy(name: str) -> None:
        real = getattr(os, name)

        def called(fd: int, *arguments: object) -> object:
            path = os.readlink(f"/proc/self/fd/{fd}")
            result = real(fd, *arguments)
            done.append(f"{name} {os.path.relpath(path, backend.url)}{' directly' * _is_direct(fd)}")
            return result

        monkeypatch.setattr(os, name, called)

    writer = backend.create("a/object", 2 * _MIB + 100)
    for name in ("pwrite", "fsync", "fdatasync"):
        spy(name)
    writer.write(0, _CONTENT[: 2 * _MIB + 100])
    assert os.stat(f"{backend.url}/a/object").st_size == 2 * _MIB + 100
    writer.complete()
    assert done[0].startswith("pwrite a/object directly")
    assert done[1:] == ["pwrite a/object", "fdatasync a/object", "fsync a", "fsync ."]


def test_descriptors_are_closed(backend: LocalBackend, tmp_path: Path) -> None:
    def count() -> int:
        return sum(count for name, count in open_descriptors().items() if name.startswith(f"{backend.url}/"))

    _write(backend, "object", _CONTENT)
    _evict(f"{backend.url}/object")
    _read_direct(backend, "object", 0, np.zeros_like(_CONTENT))
    backend.create("aborted", 8 * _MIB).abort()
    failed = backend.create("hole", 8 * _MIB)
    with pytest.raises(StorageError):
        failed.complete()
    with pytest.raises(StorageError, match="only 9437184 bytes"):
        backend.read_into("object", 1, np.zeros_like(_CONTENT))
    # The page cache's and the direct one, until it is aborted.
    assert count() == 2
    failed.abort()
    assert count() == 0


# Refusals


def _on_direct(function: Callable[..., int], instead: Callable[[], object]) -> Callable[..., int]:
    def called(fd: int, *arguments: object) -> int:
        if _is_direct(fd):
            instead()
        return function(fd, *arguments)

    return called


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    with caplog.at_level(logging.DEBUG, "bytecheckpoint.storage_backends.local.root"):
        yield lambda: [record.getMessage() for record in caplog.records if "direct I/O" in record.getMessage()]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("call", ["open", "pwrite", "preadv"])
def test_a_refusal_is_logged_once_and_worked_around(
    backend: LocalBackend,
    messages: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    code: int,
) -> None:
    def refuse() -> None:
        raise OSError(code, os.strerror(code))

    def refuse_to_open(path: str, flags: int, *arguments: object, **named: object) -> int:
        if flags & os.O_DIRECT:
            refuse()
        return real_open(path, flags, *arguments, **named)  # type: ignore[arg-type]

    real_open = os.open
    monkeypatch.setattr(os, call, refuse_to_open if call == "open" else _on_direct(getattr(os, call), refuse))
    buffer = np.zeros_like(_CONTENT)
    for key in ("one", "two"):
        with backend.create(key, len(_CONTENT)) as writer, ThreadPoolExecutor(4) as pool:
            for _ in pool.map(
                lambda at, writer=writer: writer.write(at, _CONTENT[at : at + _MIB]), range(0, len(_CONTENT), _MIB)
            ):
                pass
            writer.complete()
        assert Path(backend.url, key).read_bytes() == _CONTENT.tobytes()
        _evict(f"{backend.url}/{key}")
        _read_direct(backend, key, 0, buffer)
        assert np.array_equal(buffer, _CONTENT)
    assert len(messages()) == 1
    assert not backend.direct_io


def test_what_statx_denies_is_not_tried(
    backend: LocalBackend, messages: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_io, "_memory_alignment", lambda fd: 0)
    _write(backend, "object", _CONTENT)
    assert Path(backend.url, "object").read_bytes() == _CONTENT.tobytes()
    assert len(messages()) == 1


def test_kernels_without_statx(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_io, "libc_function", lambda name: None)
    data = _memory(_MIB, 512)
    data[:] = _CONTENT[:_MIB]
    _write(backend, "object", data)
    assert backend.get("object") == data.tobytes()
    assert backend.direct_io


def test_transfers_that_stop_short_are_finished(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write, real_read = os.pwrite, os.preadv
    monkeypatch.setattr(
        os, "pwrite", lambda fd, data, offset: real_write(fd, data[:PAGE] if _is_direct(fd) else data, offset)
    )
    monkeypatch.setattr(
        os,
        "preadv",
        lambda fd, buffers, offset, flags=0: real_read(
            fd, [buffers[0][: 3 * PAGE]] if _is_direct(fd) else buffers, offset, flags
        ),
    )
    _write(backend, "object", _CONTENT)
    assert Path(backend.url, "object").read_bytes() == _CONTENT.tobytes()
    _evict(f"{backend.url}/object")
    buffer = np.zeros_like(_CONTENT)
    _read_direct(backend, "object", 0, buffer)
    assert np.array_equal(buffer, _CONTENT)


def test_a_full_disk_is_no_refusal(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    writer = backend.create("object", len(_CONTENT))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", _on_direct(os.pwrite, full))
        with pytest.raises(StorageFullError, match=r"object.*needed: 9437184 bytes"):
            writer.write(0, _CONTENT)
    writer.abort()
    assert backend.direct_io
    assert [*backend.list()] == []


def test_shared_memory_file_system() -> None:
    """It takes O_DIRECT, or not, as the kernel likes; its files are in memory either way."""
    if not os.path.isdir("/dev/shm"):
        pytest.skip("no /dev/shm")
    backend = LocalBackend(f"/dev/shm/bcp-test-{os.getpid()}")
    try:
        _write(backend, "object", _CONTENT)
        buffer = np.zeros_like(_CONTENT)
        backend.read_into("object", 0, buffer)
        assert np.array_equal(buffer, _CONTENT)
    finally:
        backend.delete(["object"])
        os.rmdir(backend.url)


def test_it_is_turned_off_by_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = open_backend(f"file://{tmp_path}", direct_io=False)
    monkeypatch.setattr(os, "pwrite", _on_direct(os.pwrite, lambda: pytest.fail("direct I/O is turned off")))
    _write(backend, "object", _CONTENT)
    assert backend.get("object") == _CONTENT.tobytes()
    with pytest.raises(UnsupportedURLError, match="direct_io"):
        open_backend(str(tmp_path), direct_io="no")
