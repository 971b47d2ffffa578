"""GCS, through gcsfs, on fake-gcs-server. tests/storage_backends/test_obstore_backend.py tests obstore."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from store_rows import HttpRows
from store_servers import Store, store_for_tests

from bytecheckpoint.errors import StorageError
from bytecheckpoint.storage_backends import StorageBackend, open_backend
from bytecheckpoint.testing.storage import StorageConformance

store = store_for_tests("gcs")
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")  # of aiohttp, to its client


class TestGcs(StorageConformance):
    large_bytes = 34 * 2**20 + 17
    piece_bytes = 3 * 2**20
    sequences = 5
    supports_if_version = False

    @pytest.fixture
    def backend(self, store: Store) -> Iterator[StorageBackend]:
        backend = open_backend(f"{store.root}/{uuid.uuid4().hex}", **store.options)
        yield backend
        backend.close()


class TestGcsCheckpoints(HttpRows):
    def options_at(self, store: Store, endpoint: str) -> dict[str, Any]:
        return {**store.options, "endpoint_url": endpoint}


def test_this_server_has_no_uploads_for_obstore(store: Store) -> None:
    """If this fails, the server has learned GCS's XML interface: run the conformance suite with obstore here."""
    backend = open_backend(f"{store.root}/{uuid.uuid4().hex}", **{**store.options, "client": "obstore"})
    with pytest.raises(StorageError, match=r"\b404\b"):
        backend.put("object", b"x")
