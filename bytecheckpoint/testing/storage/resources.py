"""Tests that a store releases the resources of the process."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from ...errors import StorageError
from ...storage_backends.base import StorageBackend
from .store_tests import StoreTests, reads_of

__all__ = ["ResourceTests"]


class ResourceTests(StoreTests):
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
