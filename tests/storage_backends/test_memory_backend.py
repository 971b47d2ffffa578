from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from bytecheckpoint.errors import KeyNotFoundError, UnsupportedURLError
from bytecheckpoint.storage_backends import open_backend
from bytecheckpoint.storage_backends.memory import MemoryBackend
from bytecheckpoint.testing.storage import StorageConformance


@pytest.fixture
def name() -> Iterator[str]:
    name = uuid.uuid4().hex
    yield name
    MemoryBackend.delete_store(name)


class TestMemoryBackend(StorageConformance):
    @pytest.fixture
    def backend(self, name: str) -> MemoryBackend:
        return MemoryBackend(name)


class TestMemoryBackendWithPrefix(StorageConformance):
    @pytest.fixture
    def backend(self, name: str) -> MemoryBackend:
        outside = MemoryBackend(name)
        outside.put("a", b"not below the prefix")
        outside.put("a/bc", b"its name only begins like the prefix")
        return MemoryBackend(name, "a/b")


def test_backends_of_one_name_share_their_objects(name: str) -> None:
    open_backend(f"memory://{name}").put("a/b/c", b"x")
    assert open_backend(f"memory://{name}/a").get("b/c") == b"x"
    assert open_backend(f"memory://{name}/a/b/").get("c") == b"x"
    assert open_backend(f"memory://{name}/a").url == f"memory://{name}/a"
    MemoryBackend.delete_store(name)
    with pytest.raises(KeyNotFoundError):
        open_backend(f"memory://{name}").get("a/b/c")


@pytest.mark.parametrize("url", ["memory://", "memory:///path"])
def test_a_store_needs_a_name(url: str) -> None:
    with pytest.raises(UnsupportedURLError, match="memory://name/path"):
        open_backend(url)
