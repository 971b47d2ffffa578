"""HDFS, through hdfs-native."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from store_rows import CheckpointRows
from store_servers import Store, store_for_tests

from bytecheckpoint.storage_backends import StorageBackend, open_backend
from bytecheckpoint.testing.storage import StorageConformance

store = store_for_tests("hdfs")


class TestHdfs(StorageConformance):
    large_bytes = 34 * 2**20 + 17
    piece_bytes = 3 * 2**20
    sequences = 5
    supports_if_version = False
    refused_characters = "?#"

    @pytest.fixture
    def backend(self, store: Store) -> Iterator[StorageBackend]:
        backend = open_backend(f"{store.root}/{uuid.uuid4().hex}", **store.options)
        yield backend
        backend.close()


class TestHdfsCheckpoints(CheckpointRows):
    pass
