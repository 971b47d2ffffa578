"""Tests of objects that are written in pieces."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from ...errors import KeyNotFoundError, StorageError
from ...storage_backends.base import PartWriter, StorageBackend
from .reading import StoreTests, content_of


class WritingTests(StoreTests):
    @pytest.mark.parametrize("size", [0, 1, 5000])
    def test_create_small(self, backend: StorageBackend, size: int) -> None:
        data = content_of(size)
        with backend.create("dir/object", size) as writer:
            writer.write(0, data)
            writer.complete()
        assert backend.get("dir/object") == data
        assert [(found.key, found.size) for found in backend.list()] == [("dir/object", size)]

    @pytest.mark.parametrize("order", ["forwards", "backwards", "shuffled"])
    def test_pieces_in_any_order_from_one_thread(self, backend: StorageBackend, order: str) -> None:
        data = content_of(self.large_bytes)
        pieces = self._pieces(order)
        buffer = bytearray(self.piece_bytes)
        with backend.create("large", len(data)) as writer:
            for start, end in pieces:
                # The caller may reuse a buffer as soon as write returns.
                buffer[: end - start] = data[start:end]
                writer.write(start, memoryview(buffer)[: end - start])
            writer.complete()
        self._check_large(backend, data)

    def test_pieces_from_many_threads(self, backend: StorageBackend) -> None:
        data = content_of(self.large_bytes)
        with backend.create("large", len(data)) as writer, ThreadPoolExecutor(4) as pool:
            for _ in pool.map(
                lambda piece: writer.write(piece[0], data[piece[0] : piece[1]]), self._pieces("shuffled")
            ):
                pass
            writer.complete()
        self._check_large(backend, data)

    @pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
    @pytest.mark.parametrize("share", [0.3, 0.999, 1.0])
    def test_an_object_that_turns_out_shorter(self, backend: StorageBackend, large: bool, share: float) -> None:
        limit = self.large_bytes if large else 1000
        data = content_of(int(limit * share))
        with backend.create("object", limit) as writer:
            for start in range(0, len(data), self.piece_bytes):
                writer.write(start, data[start : start + self.piece_bytes])
            with pytest.raises(StorageError):
                writer.shrink(len(data) - 1)
            with pytest.raises(StorageError):
                writer.shrink(limit + 1)
            writer.shrink(len(data))
            writer.complete()
        assert backend.stat("object").size == len(data)
        assert list(backend.incomplete()) == []
        assert backend.get("object") == data

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
        data = content_of(self.large_bytes if large else 1000)
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
        assert list(backend.incomplete()) == []
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
        data = content_of(self.large_bytes)
        writer = backend.create("object", len(data))
        writer.write(0, data)
        with pytest.raises(KeyNotFoundError):
            backend.stat("object")
        assert [*backend.list()] == []
        writer.complete()
        assert backend.stat("object").size == len(data)

    @pytest.mark.parametrize("is_large", [False, True], ids=["small", "large"])
    def test_parts(self, backend: StorageBackend, is_large: bool) -> None:
        for size in [self.large_bytes] if is_large else [0, 1, 5000]:
            data = content_of(size)
            writer = backend.create_parts("dir/object", size)
            numbers = range(_part_count(writer, size))
            with ThreadPoolExecutor(4) as pool:
                tags = [*pool.map(partial(_put_part, writer, data), numbers)]
            writer.complete(tags)
            writer.abort()
            assert backend.get("dir/object") == data

    def test_parts_of_several_writers(self, backend: StorageBackend) -> None:
        """An upload with a token continues in another writer, also after one that has completed it."""
        data = content_of(self.large_bytes)
        first = backend.create_parts("object", len(data))
        if not first.token:
            first.abort()
            with pytest.raises(StorageError, match="continue"):
                backend.create_parts("object", len(data), token="of another store")
            assert [*backend.list()] == []
            return
        count = _part_count(first, len(data))
        tags = {number: _put_part(first, data, number) for number in range(0, count, 2)}
        for _ in range(2):
            later = backend.create_parts("object", len(data), token=first.token)
            assert (later.part_bytes, later.token) == (first.part_bytes, first.token)
            tags |= {number: _put_part(later, data, number) for number in range(count) if number not in tags}
            with pytest.raises(StorageError):
                later.complete([tags[number] for number in range(count - 1)])
            later.complete([tags[number] for number in range(count)])
            assert backend.get("object") == data

    @pytest.mark.parametrize("is_large", [False, True], ids=["small", "large"])
    def test_aborted_parts_leave_nothing(self, backend: StorageBackend, is_large: bool) -> None:
        data = content_of(self.large_bytes if is_large else 1000)
        writer = backend.create_parts("dir/object", len(data))
        _put_part(writer, data, 0)
        writer.abort()
        writer.abort()
        assert [*backend.list()] == []
        self.check_no_leftovers(backend)
        if writer.token:
            later = backend.create_parts("dir/object", len(data), token=writer.token)
            with pytest.raises(KeyNotFoundError):
                _put_part(later, data, 0)
            with pytest.raises(KeyNotFoundError):
                later.complete(["tag"] * _part_count(later, len(data)))

    def test_an_upload_that_no_process_completes(self, backend: StorageBackend) -> None:
        """If it outlives its process, it is listed until it is ended, and nothing of it is an object."""
        data = content_of(self.large_bytes)
        writer = backend.create_parts("dir/object", len(data))
        if not writer.token:
            writer.abort()
            return
        _put_part(writer, data, 0)
        assert [*backend.list()] == []
        assert [*backend.incomplete("other/")] == []
        (found,) = backend.incomplete("dir/")
        assert found.key == "dir/object"
        backend.abort_incomplete([found])
        backend.abort_incomplete([found])
        assert [*backend.incomplete()] == []
        with pytest.raises(KeyNotFoundError):
            _put_part(writer, data, 1)

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


def _part_count(writer: PartWriter, size: int) -> int:
    return -(-size // writer.part_bytes)


def _put_part(writer: PartWriter, data: bytes, number: int) -> str:
    start = number * writer.part_bytes
    return writer.put_part(number, data[start : start + writer.part_bytes])
