"""What the parts of the conformance suite stand on."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import ClassVar

import pytest

from ...storage_backends.base import StorageBackend

__all__ = ["StoreTests", "content_of", "reads_of"]


class StoreTests:
    """What a store can do. Every test takes a fresh, empty one from the fixture ``backend``."""

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

    def check_no_leftovers(self, backend: StorageBackend) -> None:
        """Called where the store must be empty. A subclass that can see behind the backend (files, multipart uploads)
        looks there."""


def reads_of(backend: StorageBackend, key: str) -> list[Callable[[], object]]:
    """All ways to read an object."""
    return [
        lambda: backend.get(key),
        lambda: backend.stat(key),
        lambda: backend.read_into(key, 0, bytearray(1)),
        lambda: backend.read_into(key, 0, bytearray(0)),
    ]


def content_of(size: int) -> bytes:
    """The same for the same size."""
    return random.Random(size).randbytes(size)
