"""Read the plain values of a checkpoint. Nothing in them is executed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..engine.reading.stored_files import read_stored_file
from ..errors import StateError
from ..format.manifest import COMPANION, Manifest
from ..format.values import decode_value, decode_values_file, path_name
from ..storage_backends.base import StorageBackend
from ..tensors.shards import Path

__all__ = ["StoredValue", "encoded_values", "stored_values", "values_files"]


@dataclass(frozen=True)
class StoredValue:
    """One plain value. ``rank`` is None if all ranks share it. Equal values have equal ``encoded`` bytes."""

    section: str
    path: Path
    rank: int | None
    encoded: bytes

    @property
    def name(self) -> str:
        """The value's full name, with ``@rank`` if one rank owns it."""
        owner = "" if self.rank is None else f"@{self.rank}"
        return f"{self.section}.{path_name(self.path)}{owner}"

    def decode(self) -> Any:
        """Return the value, or a note in place of a pickle, which is never loaded here."""
        try:
            return decode_value(self.encoded, where=self.name)
        except StateError:
            return f"<a pickle of {len(self.encoded)} bytes, not loaded>"


def values_files(manifest: Manifest) -> list[int]:
    """Return the rows of the files that hold plain values."""
    return [row for row, kind in enumerate(manifest.files.kind) if kind not in ("tensors", COMPANION)]


def stored_values(backend: StorageBackend, manifest: Manifest) -> Iterator[StoredValue]:
    """Yield all values, in the order of files and entries. Raises ``CorruptionError`` and ``FormatError``."""
    for row in values_files(manifest):
        section = manifest.section_name(int(manifest.files.section[row]))
        document = read_stored_file(backend, manifest, row, head_only=False)
        for path, is_shared, encoded in decode_values_file(document):
            yield StoredValue(section, path, None if is_shared else int(manifest.files.rank[row]), encoded)


def encoded_values(
    backend: StorageBackend, manifest: Manifest, section: str, rank: int
) -> tuple[dict[Path, bytes], dict[Path, bytes]]:
    """Return a section's encoded values by path: those that all ranks share, and those that ``rank`` owns."""
    index = manifest.section_index(section)
    files = manifest.files
    shared: dict[Path, bytes] = {}
    own: dict[Path, bytes] = {}
    for row in values_files(manifest):
        if files.section[row] != index or (files.kind[row] == "rank_values" and files.rank[row] != rank):
            continue
        document = read_stored_file(backend, manifest, row, head_only=False)
        for path, is_shared, encoded in decode_values_file(document):
            (shared if is_shared else own)[path] = encoded
    return shared, own
