"""Tests of reads of parts of objects."""

from __future__ import annotations

import mmap
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from ...errors import KeyNotFoundError, StorageError
from ...storage_backends.base import StorageBackend
from .store_tests import StoreTests, content_of


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
