"""Find out what is stored at a path: a checkpoint of this library, or safetensors files of another one.

Rank 0 reads it, and the other ranks receive the manifest or the headers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgpack

from ..checkpoint.manifest_file import decode_manifest, read_manifest_bytes
from ..errors import CheckpointNotFoundError, NotACheckpointError
from ..format.manifest import Manifest
from ..format.safetensors import HeaderRecord, SafetensorsHeader
from ..storage_backends import open_backend
from ..storage_backends.base import StorageBackend
from .safetensors import MODEL_SECTION, describe_headers
from .safetensors_folder import SafetensorsFolder, split_url

__all__ = ["Location", "Source"]

_HEADERS = b"safetensors headers\n"  # no manifest begins like this


@dataclass(frozen=True)
class Source:
    """Where the bytes of a load come from. Files of another library have no checksums."""

    backend: StorageBackend
    manifest: Manifest
    has_checksums: bool


@dataclass(frozen=True)
class Location:
    """A path as the caller passed it. ``backend`` serves the path itself, which may be a single file."""

    url: str
    backend: StorageBackend
    storage_options: Mapping[str, Any] = field(default_factory=dict)

    def find(self) -> bytes | SafetensorsFolder:
        """Return the encoded manifest, or the headers of another library's files.

        Raises ``CheckpointNotFoundError`` or ``NotACheckpointError`` if there is neither, and what
        ``SafetensorsFolder`` raises for damaged files.
        """
        folder = self._find_folder() if self.url.endswith(".safetensors") else None
        if folder is not None:
            return folder
        try:
            return read_manifest_bytes(self.backend)
        except (CheckpointNotFoundError, NotACheckpointError):
            folder = self._find_folder()
            if folder is None:
                raise
            return folder

    def _find_folder(self) -> SafetensorsFolder | None:
        try:
            return SafetensorsFolder(self.url, storage_options=self.storage_options)
        except (CheckpointNotFoundError, NotACheckpointError):
            return None

    def read(self) -> bytes:
        """Return what every rank needs in order to load, for ``decode``. Raises as ``find``."""
        found = self.find()
        if isinstance(found, SafetensorsFolder):
            packed: bytes = msgpack.packb([[key, *_packed(header)] for key, header in found.headers.items()])
            return _HEADERS + packed
        if found.startswith(_HEADERS):
            decode_manifest(found, self.backend.url)  # raises: it is no manifest, and must not pass for headers
        return found

    def decode(self, data: bytes) -> Source:
        """Return the source that ``read`` found. Raises ``FormatError`` and ``CorruptionError``."""
        if not data.startswith(_HEADERS):
            return Source(self.backend, decode_manifest(data, self.backend.url), has_checksums=True)
        folder, name = split_url(self.url)
        backend = open_backend(folder, **dict(self.storage_options)) if name else self.backend
        headers = {key: _unpacked(*header) for key, *header in msgpack.unpackb(data[len(_HEADERS) :])}
        return Source(backend, describe_headers(headers, backend.url, MODEL_SECTION), has_checksums=False)


def _packed(header: SafetensorsHeader) -> list[Any]:
    records = [[one.name, one.dtype, one.shape, one.begin, one.end] for one in header.entries]
    return [header.data_start, records]


def _unpacked(data_start: int, records: list[Any]) -> SafetensorsHeader:
    entries = [HeaderRecord(name, dtype, tuple(shape), begin, end) for name, dtype, shape, begin, end in records]
    return SafetensorsHeader(data_start, tuple(entries), {})
