"""Tests of ``list``, ``list_children`` and ``delete``, and of what a store keeps open."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from ...errors import KeyNotFoundError, StorageError
from ...storage_backends.base import StorageBackend
from .store_tests import StoreTests, reads_of


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

        with ThreadPoolExecutor(4) as pool:
            for _ in pool.map(work, range(4)):
                pass
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
