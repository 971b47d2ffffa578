"""Tests of reads of parts of objects, of listings and of removals; and what all tests of stores share."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, TypeVar

import pytest

from ...errors import KeyNotFoundError, StorageError
from ...storage_backends.base import StorageBackend

_T = TypeVar("_T")


class StoreTests:
    """What the store under test supports. Each test gets a new and empty store from the fixture ``backend``."""

    supports_if_absent: ClassVar[bool] = True
    """The store itself decides ``put(if_absent=True)``; if not, that raises a ``StorageError`` other than
    ``KeyExistsError``."""

    supports_if_version: ClassVar[bool] = True
    """The store itself decides ``put(if_version=...)``; if not, that raises a ``StorageError`` other than
    ``KeyChangedError``."""

    atomic_replace: ClassVar[bool] = True
    """A reader of a key that is being replaced gets the old or the new object."""

    reports_versions: ClassVar[bool] = True
    """``stat().version`` changes when an object is replaced by one of another size."""

    refused_characters: ClassVar[str] = ""
    """Characters in keys that the store refuses with a ``StorageError``, besides those that all stores refuse."""

    large_bytes: ClassVar[int] = 3 * 2**20 + 17
    """Size of the objects that are written in pieces; choose one above the store's limit for one request."""

    piece_bytes: ClassVar[int] = 256 * 2**10

    writers: ClassVar[int] = 8
    """Threads in the tests of races."""

    @pytest.fixture
    def backend(self) -> Iterator[StorageBackend]:
        raise NotImplementedError("a subclass of StorageConformance defines the fixture `backend`")

    def check_no_leftovers(self, backend: StorageBackend) -> None:
        """Called when the store must be empty. Override it to look for remains behind the backend: files, uploads."""


def reads_of(backend: StorageBackend, key: str) -> list[Callable[[], object]]:
    """Every way to read an object."""
    return [
        lambda: backend.get(key),
        lambda: backend.stat(key),
        lambda: backend.read_into(key, 0, bytearray(1)),
        lambda: backend.read_into(key, 0, bytearray(0)),
    ]


def in_threads(count: int, work: Callable[[int], _T]) -> list[_T]:
    """Call ``work`` with each number below ``count`` in a separate thread, and return the results."""
    with ThreadPoolExecutor(count) as pool:
        return [*pool.map(work, range(count))]


def read_at_random(data: bytes, read: Callable[[int, bytearray], None]) -> None:
    """Read parts of an object with the content ``data`` in several threads, and compare them."""

    def read_parts(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(10):
            start = chance.randrange(len(data))
            part = bytearray(chance.randrange(min(len(data) - start, 50_000)))
            read(start, part)
            assert part == data[start : start + len(part)]

    in_threads(4, read_parts)


def content_of(size: int) -> bytes:
    """Random content that depends only on ``size``."""
    return random.Random(size).randbytes(size)


class ReadingTests(StoreTests):
    def test_ranged_reads(self, backend: StorageBackend) -> None:
        data = content_of(10_000)
        backend.put("object", data)
        for start, end in [(0, 10_000), (0, 1), (9_999, 10_000), (1, 9_999), (4_095, 4_097), (0, 0), (10_000, 10_000)]:
            buffer = bytearray(end - start)
            backend.read_into("object", start, buffer)
            assert buffer == data[start:end]

    def test_reads_into_part_of_a_buffer(self, backend: StorageBackend) -> None:
        backend.put("object", b"abcdef")
        buffer = bytearray(b"........")
        backend.read_into("object", 2, memoryview(buffer)[3:6])
        assert buffer == b"...cde.."

    @pytest.mark.parametrize(("offset", "length"), [(0, 6), (4, 2), (5, 1), (6, 1), (10**15, 1), (6, 0), (-1, 2)])
    def test_reads_past_the_end_are_errors(self, backend: StorageBackend, offset: int, length: int) -> None:
        backend.put("object", b"abcde")
        with pytest.raises(StorageError, match="object") as caught:
            backend.read_into("object", offset, bytearray(length))
        assert not isinstance(caught.value, KeyNotFoundError)

    def test_an_open_object_is_read_in_any_order(self, backend: StorageBackend) -> None:
        data = content_of(self.large_bytes)
        backend.put("object", data)
        buffers = [bytearray(b"."), bytearray(70), bytearray(len(data) - 100)]
        with backend.open_object("object") as opened:
            opened.read(29, buffers)
            assert b"".join(buffers) == data[29:]
            opened.read(3, [buffers[1]])
            assert buffers[1] == data[3:73]
            opened.read(5, [])
            opened.read(7, [bytearray(0), bytearray(0)])
            single = [bytearray(1) for _ in range(2000)]
            opened.read(11, single)
            assert b"".join(single) == data[11:2011]
            assert isinstance(opened.is_cached(0, 1), bool)
            assert opened.size in (None, len(data))
            with pytest.raises(StorageError, match="object"):
                opened.read(len(data) - 5, [bytearray(3), bytearray(3)])
            with pytest.raises(StorageError, match="object"):
                opened.read(-1, [bytearray(3)])
            read_at_random(data, lambda start, part: opened.read(start, [part]))
        with pytest.raises(KeyNotFoundError), backend.open_object("missing") as opened:
            opened.read(0, [bytearray(1)])

    def test_direct_reads_of_an_open_object(self, backend: StorageBackend) -> None:
        data = content_of(self.large_bytes)
        with backend.create("object", len(data)) as writer:
            writer.write(0, data)
            writer.complete()
        with backend.open_object("object") as opened:
            page = opened.direct_alignment()
            if not page:
                pytest.skip("this store has no direct reads")
            memory = memoryview(mmap.mmap(-1, -(-len(data) // page) * page + page))
            for start in {0, page, len(data) // page * page}:
                length = len(data) - start
                assert opened.read_direct(start, memory[: -(-length // page) * page]) == length
                assert memory[:length] == data[start:]
            assert opened.read_direct(0, memory[:page]) == page
            assert memory[:page] == data[:page]

    def test_read_only_buffer_is_refused(self, backend: StorageBackend) -> None:
        backend.put("object", b"abcde")
        with pytest.raises(StorageError):
            backend.read_into("object", 0, b"12345")

    def test_concurrent_ranged_reads(self, backend: StorageBackend) -> None:
        data = content_of(200_000)
        backend.put("object", data)
        read_at_random(data, lambda start, part: backend.read_into("object", start, part))


class ListingTests(StoreTests):
    def test_list_is_sorted_and_filtered(self, backend: StorageBackend) -> None:
        keys = ["a-b/z", "a.b", "a/b/c", "a/b.c", "a/b0", "a0", "ab/x", "b", "step-10/m", "step-100/m", "step-9/m"]
        for key in random.Random(0).sample(keys, len(keys)):
            backend.put(key, key.encode())
        listed = [*backend.list()]
        assert [found.key for found in listed] == sorted(keys)
        assert [found.size for found in listed] == [len(key) for key in sorted(keys)]
        for prefix in ("a", "a/", "a/b", "a/b/", "step-1", "step-10", "step-10/", "none", "a/b/c", "a/b/c/d"):
            assert [found.key for found in backend.list(prefix)] == sorted(k for k in keys if k.startswith(prefix))

    def test_list_children(self, backend: StorageBackend) -> None:
        for key in ("x/a", "x/b/c", "x/b/d/e", "x/b.c", "y/z", "top"):
            backend.put(key, b"x")
        assert list(backend.list_children()) == ["top", "x/", "y/"]
        assert list(backend.list_children("x/")) == ["a", "b.c", "b/"]
        assert list(backend.list_children("x/b/")) == ["c", "d/"]
        assert list(backend.list_children("top/")) == []

    def test_delete(self, backend: StorageBackend) -> None:
        for key in ("d/e/1", "d/e/2", "d/3", "4"):
            backend.put(key, b"x")
        backend.delete(["d/e/1", "d/e/1", "missing", "d/missing", "4/below"])
        assert [found.key for found in backend.list()] == ["4", "d/3", "d/e/2"]
        backend.delete([])
        backend.delete(["d"])
        backend.delete(["d/e"])
        assert [found.key for found in backend.list()] == ["4", "d/3", "d/e/2"]
        backend.delete(["d/e/2"])
        assert list(backend.list_children("d/")) == ["3"]
        backend.delete(["d/3", "4"])
        assert [*backend.list()] == []
        assert list(backend.list_children()) == []
        with pytest.raises(KeyNotFoundError):
            backend.get("4")
        self.check_no_leftovers(backend)

    def test_put_and_delete_in_one_place(self, backend: StorageBackend) -> None:
        """Deleting the last object of a "directory" must not break a put into it."""

        def work(me: int) -> None:
            for turn in range(10):
                backend.put(f"shared/dir/{me}", bytes([turn]))
                assert backend.get(f"shared/dir/{me}") == bytes([turn])
                backend.delete([f"shared/dir/{me}"])

        in_threads(4, work)
        assert [*backend.list()] == []

    def test_usable_after_close(self, backend: StorageBackend) -> None:
        backend.put("object", b"x")
        backend.close()
        assert backend.get("object") == b"x"
        backend.close()
        backend.close()

    def test_no_descriptors_leak(self, backend: StorageBackend) -> None:
        if not os.path.isdir("/proc/self/fd"):
            pytest.skip("needs /proc")

        def work(turn: int) -> None:
            backend.put(f"d/{turn}", b"abc")
            with backend.create(f"e/{turn}", 3) as writer:
                writer.write(0, b"abc")
                writer.complete()
            backend.create(f"f/{turn}", 3).abort()
            backend.read_into(f"e/{turn}", 0, bytearray(3))
            failing: list[Callable[[], object]] = reads_of(backend, "missing")
            failing.append(lambda: backend.read_into(f"e/{turn}", 2, bytearray(3)))
            for operation in failing:
                with pytest.raises(StorageError):
                    operation()
            backend.stat(f"d/{turn}")
            assert len([*backend.list()]) == 2
            backend.list_children()
            backend.delete([f"d/{turn}", f"e/{turn}"])

        for turn in range(3):
            work(turn)
        before = len(os.listdir("/proc/self/fd"))
        for turn in range(3, 15):
            work(turn)
        # A connection pool may have grown a little; a leak would add descriptors in every turn.
        assert len(os.listdir("/proc/self/fd")) < before + 4
