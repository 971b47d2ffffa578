"""The base class of the parts of the conformance suite, and their content."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import ClassVar

import pytest

from ...storage_backends.base import StorageBackend


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


def content_of(size: int) -> bytes:
    """Random content that depends only on ``size``."""
    return random.Random(size).randbytes(size)
