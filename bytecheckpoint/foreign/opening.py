"""Find out what is stored at a path: a checkpoint of this library, or one of another system.

Rank 0 reads it, and the other ranks receive the manifest or the index.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..checkpoint.index import Index, decode_index, encode_index, is_encoded_index
from ..checkpoint.manifest_file import decode_manifest, read_manifest_bytes
from ..errors import CheckpointNotFoundError, NotACheckpointError
from ..storage_backends.base import StorageBackend
from .huggingface import read_safetensors
from .place import Place

__all__ = ["Location"]

_READERS: tuple[Callable[[Place], Index | None], ...] = (read_safetensors,)
"""Each returns None for files of another system, and raises for damaged files that it recognizes."""


@dataclass(frozen=True)
class Location:
    """A path as the caller passed it. ``backend`` serves the path itself, which may be a single file."""

    url: str
    backend: StorageBackend
    storage_options: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def _place(self) -> Place:
        return Place.of(self.url, self.backend, self.storage_options)

    def index(self) -> Index:
        """Return the index of what is stored.

        Raises ``CheckpointNotFoundError`` or ``NotACheckpointError`` if no reader recognizes it, and what decoding a
        manifest or reading a damaged file raises.
        """
        found = self._find()
        return found if isinstance(found, Index) else Index(self.backend, decode_manifest(found, self.backend.url))

    def read(self) -> bytes:
        """Return what every rank needs in order to load, for ``decode``. Raises as ``index``."""
        found = self._find()
        if isinstance(found, Index):
            return encode_index(found)
        if is_encoded_index(found):
            decode_manifest(found, self.backend.url)  # raises: it is no manifest, and must not pass for an index
        return found

    def decode(self, data: bytes) -> Index:
        """Return the index that ``read`` found. Raises ``FormatError`` and ``CorruptionError``."""
        if is_encoded_index(data):
            return decode_index(data, self._place.backend)
        return Index(self.backend, decode_manifest(data, self.backend.url))

    def _find(self) -> bytes | Index:
        """The encoded manifest, or the index of another system's files."""
        foreign = self._read_foreign() if self._place.name else None
        if foreign is not None:
            return foreign
        try:
            return read_manifest_bytes(self.backend)
        except (CheckpointNotFoundError, NotACheckpointError):
            foreign = self._read_foreign()
            if foreign is None:
                raise
            return foreign

    def _read_foreign(self) -> Index | None:
        for read in _READERS:
            found = read(self._place)
            if found is not None:
                return found
        return None
