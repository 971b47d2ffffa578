"""S3, on Ceph's radosgw."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from store_rows import HttpRows
from store_servers import Store, store_for_tests

from bytecheckpoint.storage_backends import StorageBackend, open_backend
from bytecheckpoint.testing.storage import StorageConformance

store = store_for_tests("radosgw")


class TestRadosgw(StorageConformance):
    large_bytes = 34 * 2**20 + 17
    piece_bytes = 3 * 2**20
    sequences = 5

    @pytest.fixture
    def backend(self, store: Store) -> Iterator[StorageBackend]:
        backend = open_backend(f"{store.root}/{uuid.uuid4().hex}", **store.options)
        yield backend
        backend.close()


class TestRadosgwCheckpoints(HttpRows):
    def options_at(self, store: Store, endpoint: str) -> dict[str, Any]:
        return {**store.options, "endpoint_url": endpoint}
