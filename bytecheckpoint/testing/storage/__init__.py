"""The conformance suite for storage backends. Needs pytest and hypothesis."""

from __future__ import annotations

from .objects import HOSTILE_KEYS, ObjectTests
from .reading import ListingTests, ReadingTests
from .sequences import SequenceTests, StoreMachine
from .writing import WritingTests

__all__ = ["HOSTILE_KEYS", "StorageConformance", "StoreMachine"]


class StorageConformance(ObjectTests, ReadingTests, WritingTests, ListingTests, SequenceTests):
    """The conformance suite for storage backends.

    A subclass defines the fixture ``backend``, which yields a new and empty store for each test. Class attributes
    declare what the store does not support; document each of them in the backend.

    Attributes:
        supports_if_absent: The store itself decides ``put(if_absent=True)``. If false, such a ``put`` must raise a
            ``StorageError`` that is not a ``KeyExistsError``.
        supports_if_version: The same of ``put(if_version=...)`` and ``KeyChangedError``.
        atomic_replace: A reader of a key that is being replaced gets the old or the new object, never a mixture.
        reports_versions: ``stat().version`` changes when an object is replaced by one of another size.
        refused_characters: Characters in keys that the store refuses with a ``StorageError``.
        large_bytes: Size of objects that are written in pieces; choose one above the store's limit for one request.
        piece_bytes: Size of these pieces.
        writers: Number of threads in tests of races.
        sequences: Number of random sequences of operations that are compared with a model.
        sequence_steps: Maximum number of operations in a sequence.

    Example:
        >>> class TestMyBackend(StorageConformance):
        ...     @pytest.fixture
        ...     def backend(self, tmp_path):
        ...         backend = MyBackend(tmp_path)
        ...         yield backend
        ...         backend.close()
    """
