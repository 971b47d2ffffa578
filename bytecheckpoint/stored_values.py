"""Every plain value of a checkpoint, whichever rank it belongs to, without running anything."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .checkpoint import Checkpoint
from .engine.reading.stored_files import read_stored_file
from .errors import StateError
from .manifest import COMPANION
from .shards import Path
from .values import decode_value, decode_values_file, path_name

__all__ = ["StoredValue", "stored_values"]


@dataclass(frozen=True)
class StoredValue:
    """``rank`` is None for a value of every rank. ``encoded`` is the same for equal values."""

    section: str
    path: Path
    rank: int | None
    encoded: bytes

    @property
    def name(self) -> str:
        owner = "" if self.rank is None else f"@{self.rank}"
        return f"{self.section}.{path_name(self.path)}{owner}"

    def decode(self) -> Any:
        """The value; for one that was stored as a pickle a text that says so."""
        try:
            return decode_value(self.encoded, where=self.name)
        except StateError:
            return f"<a pickle of {len(self.encoded)} bytes, not loaded>"


def stored_values(checkpoint: Checkpoint) -> Iterator[StoredValue]:
    """In the order of files and entries. Raises ``CorruptionError``, ``FormatError``."""
    manifest = checkpoint.manifest
    for row, kind in enumerate(manifest.files.kind):
        if kind in ("tensors", COMPANION):
            continue
        section = manifest.section_name(int(manifest.files.section[row]))
        document = read_stored_file(checkpoint.backend, manifest, row, head_only=False)
        for path, shared, raw in decode_values_file(document):
            yield StoredValue(section, path, None if shared else int(manifest.files.rank[row]), raw)
