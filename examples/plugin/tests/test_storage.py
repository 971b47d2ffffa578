"""The backend passes the conformance suite and is found by its URL scheme."""

from __future__ import annotations

from pathlib import Path

import pytest
from bcp_example_plugin import SQLiteBackend

from bytecheckpoint.errors import UnsupportedURLError
from bytecheckpoint.storage_backends import open_backend
from bytecheckpoint.testing import FaultRule, FaultyBackend, StorageConformance


class TestSQLiteBackend(StorageConformance):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> SQLiteBackend:
        return SQLiteBackend(tmp_path / "objects.db")


class TestSQLiteBackendWithPrefix(StorageConformance):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> SQLiteBackend:
        SQLiteBackend(tmp_path / "objects.db").put("other/object", b"not below the prefix")
        return SQLiteBackend(tmp_path / "objects.db", "some/root/")


def test_url_opens_the_backend(tmp_path: Path) -> None:
    backend = open_backend(f"sqlite://{tmp_path}/objects.db/root")
    assert isinstance(backend, SQLiteBackend)
    assert backend.url == f"sqlite://{tmp_path}/objects.db/root"
    with pytest.raises(UnsupportedURLError, match="expected sqlite"):
        open_backend("sqlite://relative.db")


def test_faults_can_be_injected(tmp_path: Path) -> None:
    backend = FaultyBackend(SQLiteBackend(tmp_path / "objects.db"), [FaultRule("put", nth=2, error=OSError("lost"))])
    backend.put("first", b"content")
    with pytest.raises(OSError, match="lost"):
        backend.put("second", b"content")
    assert [found.key for found in backend.list()] == ["first"]
