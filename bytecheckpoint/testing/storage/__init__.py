"""The contract of ``StorageBackend`` as tests. Needs pytest.

Subclass it in a test module and say how a fresh backend is made::

    class TestMyBackend(StorageConformance):
        @pytest.fixture
        def backend(self, tmp_path):
            backend = MyBackend(tmp_path)
            yield backend
            backend.close()

Class attributes say what the store can do; every one that is turned off should stand in the backend's documentation.
"""

from __future__ import annotations

from .listing import ListingTests
from .objects import HOSTILE_KEYS, ObjectTests
from .reading import ReadingTests
from .resources import ResourceTests
from .writing import WritingTests

__all__ = ["HOSTILE_KEYS", "StorageConformance"]


class StorageConformance(ObjectTests, ReadingTests, WritingTests, ListingTests, ResourceTests):
    """Every test takes a fresh, empty store from the fixture ``backend``, which a subclass defines."""
