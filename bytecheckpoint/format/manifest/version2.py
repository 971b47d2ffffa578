"""The payload of format version 2: version 1, and the frames of encoded files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from ...errors import FormatError
from .columns import count_of, pack_numbers, unpack_numbers, unpack_uint64
from .document import Manifest
from .frames import FrameTable, is_encoded
from .version1 import ManifestV1

__all__ = ["ManifestV2"]


class ManifestV2(ManifestV1):
    """Version 2 as a type. A writer uses it only for a checkpoint with an encoded file."""

    top: ClassVar[tuple[str, ...]] = (*ManifestV1.top, "frames")

    @staticmethod
    def columns(manifest: Manifest) -> dict[str, Any]:
        """Return the columns of a valid manifest with frames."""
        frames = manifest.files.frames
        assert frames is not None
        packed = {"length": pack_numbers(frames.length), "checksum": pack_numbers(frames.checksum)}
        return {**ManifestV1.columns(manifest), "frames": packed}

    @staticmethod
    def manifest(top: Mapping[str, Any]) -> Manifest:
        """Return the manifest with these columns. Raises ``FormatError``."""
        manifest, column = ManifestV1.manifest(top), top["frames"]
        if not isinstance(column, dict) or set(column) != {"length", "checksum"}:
            raise FormatError("manifest: frames does not have exactly the fields length, checksum")
        count = count_of("frames.length", column["length"])
        files = manifest.files
        frames = FrameTable.build(
            unpack_numbers("frames.length", column["length"], count),
            unpack_uint64("frames.checksum", column["checksum"], count),
            encoded=is_encoded(files.codec),
            head_length=files.head_length,
            chunk_size=files.chunk_size,
            shard_file=manifest.shard_file,
            shard_offset=manifest.shard_offset,
            shard_nbytes=manifest.shard_nbytes,
        )
        manifest.files = replace(files, frames=frames)
        return manifest
