"""The contract of ``StorageBackend`` as tests. Needs pytest.

Subclass it in a test module and say how a fresh backend is made::

    class TestMyBackend(StorageConformance):
        @pytest.fixture
        def backend(self, tmp_path):
            backend = MyBackend(tmp_path)
            yield backend
            backend.close()

Class attributes say what the store can do; every one that is turned off should stand in the backend's documentation.
"""

from __future__ import annotations

import mmap
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest

from ..errors import KeyExistsError, KeyNotFoundError, StorageError
from ..storage_backends.base import StorageBackend

__all__ = ["HOSTILE_KEYS", "StorageConformance"]

HOSTILE_KEYS = (
    "",
    ".",
    "..",
    "/",
    "/etc/passwd",
    "../x",
    "a/../../x",
    "a/..",
    "a/./b",
    "./a",
    "a//b",
    "a/",
    "a\\b",
    "..\\x",
    "a\0b",
    "a\nb",
    "\ud800",
    "x" * 256,
    "/".join(["d"] * 600),
)
"""Names that a manifest may contain and that no operation may accept."""

_UNICODE_KEYS = (
    "größe/Ω",
    "数据/チェック",
    "emoji-\U0001f9ea",
    "space in name",
    "percent%20",
    "a+b=c&d?e#f",
    "quo'te\"s",
)


class StorageConformance:
    """Every test takes a fresh, empty store from the fixture ``backend``."""

    supports_if_absent: ClassVar[bool] = True
    """``put(if_absent=True)`` is decided by the store; otherwise it must raise ``StorageError`` that is no
    ``KeyExistsError``."""

    atomic_replace: ClassVar[bool] = True
    """Readers of a key that is being replaced see the old object or the new one."""

    tells_versions: ClassVar[bool] = True
    """``stat().version`` changes when an object is replaced by one of another size."""

    large_bytes: ClassVar[int] = 3 * 2**20 + 17
    """Size of the objects that are written in pieces; above the store's limit for single requests, if you can."""

    piece_bytes: ClassVar[int] = 256 * 2**10

    writers: ClassVar[int] = 8
    """Threads in the tests of races."""

    @pytest.fixture
    def backend(self) -> Iterator[StorageBackend]:
        raise NotImplementedError("a subclass of StorageConformance defines the fixture `backend`")

    # Whole objects

    @pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 100_000])
    def test_put_then_get(self, backend: StorageBackend, size: int) -> None:
        data = _content(size)
        backend.put("dir/object", data)
        assert backend.get("dir/object") == data
        assert backend.stat("dir/object").key == "dir/object"
        assert backend.stat("dir/object").size == size

    @pytest.mark.parametrize("make", [bytes, bytearray, memoryview], ids=lambda make: make.__name__)
    def test_put_takes_any_buffer(self, backend: StorageBackend, make: Callable[[bytes], Any]) -> None:
        backend.put("object", make(b"some bytes"))
        got = backend.get("object")
        assert got == b"some bytes"
        assert type(got) is bytes

    def test_put_does_not_keep_the_buffer(self, backend: StorageBackend) -> None:
        data = bytearray(b"before")
        backend.put("object", data)
        data[:] = b"after!"
        assert backend.get("object") == b"before"

    def test_put_replaces(self, backend: StorageBackend) -> None:
        for content in (b"first, long", b"second", b"", b"third, the longest of all"):
            backend.put("object", content)
            assert backend.get("object") == content
        assert [found.key for found in backend.list()] == ["object"]

    def test_version_changes(self, backend: StorageBackend) -> None:
        if not self.tells_versions:
            pytest.skip("this store tells no versions")
        backend.put("object", b"one")
        first = backend.stat("object").version
        assert first == backend.stat("object").version
        backend.put("object", b"three")
        assert first
        assert backend.stat("object").version != first

    def test_get_max_size(self, backend: StorageBackend) -> None:
        backend.put("object", b"12345")
        assert backend.get("object", max_size=5) == b"12345"
        with pytest.raises(StorageError, match="object") as caught:
            backend.get("object", max_size=4)
        assert not isinstance(caught.value, KeyNotFoundError)

    def test_missing_keys(self, backend: StorageBackend) -> None:
        backend.put("there/object", b"x")
        for key in ("missing", "there", "there/missing", "there/object/below"):
            for operation in _reads(backend, key):
                with pytest.raises(KeyNotFoundError, match=key):
                    operation()

    def test_unicode_keys(self, backend: StorageBackend) -> None:
        for key in _UNICODE_KEYS:
            backend.put(key, key.encode())
        for key in _UNICODE_KEYS:
            assert backend.get(key) == key.encode()
        assert [found.key for found in backend.list()] == sorted(_UNICODE_KEYS)
        backend.delete(_UNICODE_KEYS)
        assert [*backend.list()] == []

    @pytest.mark.parametrize("key", HOSTILE_KEYS, ids=lambda key: ascii(key[:12]))
    def test_hostile_keys_are_refused(self, backend: StorageBackend, key: str) -> None:
        operations: list[Callable[[], object]] = [
            *_reads(backend, key),
            lambda: backend.put(key, b"x"),
            lambda: backend.create(key, 1),
            lambda: backend.delete([key]),
        ]
        for operation in operations:
            with pytest.raises(StorageError) as caught:
                operation()
            # "Not found" would mean that it was looked for.
            assert not isinstance(caught.value, KeyNotFoundError)
        assert [*backend.list()] == []

    def test_hostile_prefixes_are_refused(self, backend: StorageBackend) -> None:
        for prefix in ("../", "/", "a/../", "a//", "\0"):
            with pytest.raises(StorageError):
                backend.list(prefix)
            with pytest.raises(StorageError):
                backend.list_children(prefix)
        with pytest.raises(StorageError):
            backend.list_children("no-slash-at-the-end")

    # Conditional writes

    def test_if_absent(self, backend: StorageBackend) -> None:
        if not self.supports_if_absent:
            with pytest.raises(StorageError) as caught:
                backend.put("object", b"first", if_absent=True)
            assert not isinstance(caught.value, KeyExistsError)
            return
        backend.put("dir/object", b"first", if_absent=True)
        with pytest.raises(KeyExistsError, match="dir/object"):
            backend.put("dir/object", b"second", if_absent=True)
        assert backend.get("dir/object") == b"first"
        assert [found.key for found in backend.list()] == ["dir/object"]

    def test_if_absent_has_one_winner(self, backend: StorageBackend) -> None:
        if not self.supports_if_absent:
            pytest.skip("this store has no conditional put")
        gate = threading.Barrier(self.writers)

        def write(me: int) -> bytes | None:
            mine = f"writer {me}".encode()
            gate.wait(60)
            try:
                backend.put("race/object", mine, if_absent=True)
            except KeyExistsError:
                return None
            return mine

        with ThreadPoolExecutor(self.writers) as pool:
            won = [result for result in pool.map(write, range(self.writers)) if result is not None]
        assert len(won) == 1
        assert backend.get("race/object") == won[0]
        assert [found.key for found in backend.list()] == ["race/object"]

    def test_readers_see_old_or_new(self, backend: StorageBackend) -> None:
        if not self.atomic_replace:
            pytest.skip("replacing is not atomic on this store")
        versions = [bytes([65 + index]) * (20_000 + 1000 * index) for index in range(12)]
        backend.put("object", versions[0])
        done = threading.Event()

        def read() -> int:
            last = 0
            while not done.is_set():
                content = backend.get("object")
                assert content in versions
                assert versions.index(content) >= last
                last = versions.index(content)
            return last

        with ThreadPoolExecutor(3) as pool:
            readers = [pool.submit(read) for _ in range(3)]
            try:
                for content in versions[1:]:
                    backend.put("object", content)
            finally:
                done.set()
            for reader in readers:
                reader.result(60)
        assert backend.get("object") == versions[-1]

    # Ranges

    def test_ranged_reads(self, backend: StorageBackend) -> None:
        data = _content(10_000)
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

    def test_scattered_reads(self, backend: StorageBackend) -> None:
        data = _content(self.large_bytes)
        backend.put("object", data)
        many = [1] * 2000
        for start, sizes in [
            (0, [10, 0, 5]),
            (3, []),
            (7, [0, 0]),
            (11, many),
            (1, [len(data) - 2]),
            (100, [1000] * 9),
        ]:
            buffers = [bytearray(size) for size in sizes]
            backend.read_scattered("object", start, buffers)
            assert b"".join(buffers) == data[start : start + sum(sizes)]
        with pytest.raises(StorageError, match="object"):
            backend.read_scattered("object", len(data) - 5, [bytearray(3), bytearray(3)])
        with pytest.raises(KeyNotFoundError):
            backend.read_scattered("missing", 0, [bytearray(3)])

    def test_an_open_object_is_read_in_any_order(self, backend: StorageBackend) -> None:
        data = _content(self.large_bytes)
        backend.put("object", data)
        buffers = [bytearray(b"."), bytearray(70), bytearray(len(data) - 100)]
        with backend.open_object("object") as opened:
            opened.read(29, buffers)
            assert b"".join(buffers) == data[29:]
            opened.read(3, [buffers[1]])
            assert buffers[1] == data[3:73]
            opened.read(5, [])
            assert isinstance(opened.is_at_hand(0, 1), bool)
            with pytest.raises(StorageError, match="object"):
                opened.read(len(data) - 5, [bytearray(3), bytearray(3)])
            with pytest.raises(StorageError, match="object"):
                opened.read(-1, [bytearray(3)])

            def read(seed: int) -> None:
                chance = random.Random(seed)
                for _ in range(10):
                    start = chance.randrange(len(data))
                    piece = bytearray(chance.randrange(min(len(data) - start, 50_000)))
                    opened.read(start, [piece])
                    assert piece == data[start : start + len(piece)]

            with ThreadPoolExecutor(4) as pool:
                for _ in pool.map(read, range(4)):
                    pass
        with pytest.raises(KeyNotFoundError), backend.open_object("missing") as opened:
            opened.read(0, [bytearray(1)])

    def test_direct_reads_of_an_open_object(self, backend: StorageBackend) -> None:
        data = _content(self.large_bytes)
        with backend.create("object", len(data)) as writer:
            writer.write(0, data)
            writer.complete()
        with backend.open_object("object") as opened:
            page = opened.direct_pages()
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
        data = _content(200_000)
        backend.put("object", data)

        def read(seed: int) -> None:
            chance = random.Random(seed)
            for _ in range(10):
                start = chance.randrange(len(data))
                buffer = bytearray(chance.randrange(len(data) - start))
                backend.read_into("object", start, buffer)
                assert buffer == data[start : start + len(buffer)]

        with ThreadPoolExecutor(4) as pool:
            for _ in pool.map(read, range(4)):
                pass

    # Objects written in pieces

    @pytest.mark.parametrize("size", [0, 1, 5000])
    def test_create_small(self, backend: StorageBackend, size: int) -> None:
        data = _content(size)
        with backend.create("dir/object", size) as writer:
            writer.write(0, data)
            writer.complete()
        assert backend.get("dir/object") == data
        assert [(found.key, found.size) for found in backend.list()] == [("dir/object", size)]

    @pytest.mark.parametrize("order", ["forwards", "backwards", "shuffled"])
    def test_pieces_in_any_order_from_one_thread(self, backend: StorageBackend, order: str) -> None:
        data = _content(self.large_bytes)
        pieces = self._pieces(order)
        buffer = bytearray(self.piece_bytes)
        with backend.create("large", len(data)) as writer:
            for start, end in pieces:
                # One buffer for all: a piece may be reused as soon as write returns.
                buffer[: end - start] = data[start:end]
                writer.write(start, memoryview(buffer)[: end - start])
            writer.complete()
        self._check_large(backend, data)

    def test_pieces_from_many_threads(self, backend: StorageBackend) -> None:
        data = _content(self.large_bytes)
        with backend.create("large", len(data)) as writer, ThreadPoolExecutor(4) as pool:
            for _ in pool.map(
                lambda piece: writer.write(piece[0], data[piece[0] : piece[1]]), self._pieces("shuffled")
            ):
                pass
            writer.complete()
        self._check_large(backend, data)

    def test_create_replaces(self, backend: StorageBackend) -> None:
        backend.put("object", b"an older and longer object")
        with backend.create("object", 3) as writer:
            writer.write(0, b"new")
            writer.complete()
        assert backend.get("object") == b"new"

    def test_incomplete_object_does_not_complete(self, backend: StorageBackend) -> None:
        writer = backend.create("object", 10)
        writer.write(0, b"abc")
        writer.write(6, b"ghij")
        with pytest.raises(StorageError, match=r"\[3, 6\)"):
            writer.complete()
        writer.abort()
        assert [*backend.list()] == []

    @pytest.mark.parametrize("piece", [(8, b"xyz"), (-1, b"x"), (0, b"x" * 11), (2, b"x"), (0, b"x" * 4), (4, b"xx")])
    def test_stray_pieces_are_refused(self, backend: StorageBackend, piece: tuple[int, bytes]) -> None:
        writer = backend.create("object", 10)
        writer.write(2, b"abc")
        with pytest.raises(StorageError, match="object"):
            writer.write(*piece)
        writer.abort()
        assert [*backend.list()] == []

    @pytest.mark.parametrize("written", [0.0, 0.6, 1.0])
    @pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
    def test_abort_leaves_nothing(self, backend: StorageBackend, written: float, large: bool) -> None:
        data = _content(self.large_bytes if large else 1000)
        writer = backend.create("dir/sub/object", len(data))
        writer.write(0, data[: int(len(data) * written)])
        writer.abort()
        writer.abort()
        with pytest.raises(StorageError):
            writer.write(0, b"x")
        with pytest.raises(StorageError):
            writer.complete()
        del writer
        assert [*backend.list()] == []
        assert list(backend.list_children()) == []
        self.check_no_leftovers(backend)

    def test_error_in_a_with_block_aborts(self, backend: StorageBackend) -> None:
        def fail() -> None:
            with backend.create("object", 10) as writer:
                writer.write(0, b"abc")
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        assert [*backend.list()] == []

    def test_abort_after_complete_does_nothing(self, backend: StorageBackend) -> None:
        writer = backend.create("object", 3)
        writer.write(0, b"abc")
        writer.complete()
        writer.abort()
        assert backend.get("object") == b"abc"
        with pytest.raises(StorageError):
            writer.write(0, b"abc")

    def test_unfinished_object_is_not_visible(self, backend: StorageBackend) -> None:
        if not backend.atomic_writer:
            pytest.skip("this store writes in place")
        data = _content(self.large_bytes)
        writer = backend.create("object", len(data))
        writer.write(0, data)
        with pytest.raises(KeyNotFoundError):
            backend.stat("object")
        assert [*backend.list()] == []
        writer.complete()
        assert backend.stat("object").size == len(data)

    # Listing and deleting

    def test_empty_store_lists_nothing(self, backend: StorageBackend) -> None:
        assert [*backend.list()] == []
        assert [*backend.list("a/b")] == []
        assert list(backend.list_children()) == []
        assert list(backend.list_children("a/b/")) == []

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

    def test_listing_sees_the_latest(self, backend: StorageBackend) -> None:
        for index in range(3):
            backend.put(f"d/{index}", b"x")
            assert list(backend.list_children("d/")) == [str(i) for i in range(index + 1)]
            assert len([*backend.list()]) == index + 1
        backend.delete(["d/1"])
        assert list(backend.list_children("d/")) == ["0", "2"]

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

        with ThreadPoolExecutor(4) as pool:
            for _ in pool.map(work, range(4)):
                pass
        assert [*backend.list()] == []

    # Resources

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
            failing: list[Callable[[], object]] = _reads(backend, "missing")
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
        # A pool of connections may have grown by some; a leak would show in every turn.
        assert len(os.listdir("/proc/self/fd")) < before + 4

    # For subclasses

    def check_no_leftovers(self, backend: StorageBackend) -> None:
        """Called where the store must be empty. A subclass that can see behind the backend (files, multipart uploads)
        looks there."""

    def _pieces(self, order: str) -> Sequence[tuple[int, int]]:
        size, step = self.large_bytes, self.piece_bytes
        pieces = [(start, min(size, start + step)) for start in range(0, size, step)]
        if order == "backwards":
            pieces.reverse()
        elif order == "shuffled":
            random.Random(size).shuffle(pieces)
        return pieces

    def _check_large(self, backend: StorageBackend, data: bytes) -> None:
        assert backend.stat("large").size == len(data)
        assert backend.get("large") == data
        middle = len(data) // 2
        buffer = bytearray(1000)
        backend.read_into("large", middle, buffer)
        assert buffer == data[middle : middle + 1000]


def _reads(backend: StorageBackend, key: str) -> list[Callable[[], object]]:
    return [
        lambda: backend.get(key),
        lambda: backend.stat(key),
        lambda: backend.read_into(key, 0, bytearray(1)),
        lambda: backend.read_into(key, 0, bytearray(0)),
    ]


def _content(size: int) -> bytes:
    return random.Random(size).randbytes(size)
