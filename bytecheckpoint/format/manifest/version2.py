"""The payload of format version 2: version 1, and the frames of encoded files, what they refer to, and digests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from .columns import count_of, pack_names, pack_numbers, unpack_names, unpack_numbers, unpack_uint64
from .document import Manifest
from .frames import FrameTable, ReferenceTable, is_encoded
from .version1 import ManifestV1, fields

__all__ = ["ManifestV2"]


class ManifestV2(ManifestV1):
    """Version 2 as a type. A writer uses it only for a checkpoint with an encoded file or digests."""

    top: ClassVar[tuple[str, ...]] = (*ManifestV1.top, "frames", "references", "digests")

    @staticmethod
    def columns(manifest: Manifest) -> dict[str, Any]:
        """Return the columns of a valid manifest."""
        frames, none = manifest.files.frames, np.empty(0, np.int64)
        if frames is None:
            frames = FrameTable(none, none.astype(np.uint64), none, none, none, none, none, ReferenceTable())
        return {
            **ManifestV1.columns(manifest),
            "frames": {
                "length": pack_numbers(frames.length),
                "checksum": pack_numbers(frames.checksum),
                "source": pack_numbers(frames.source),
                "offset": pack_numbers(frames.position[frames.source != 0]),
            },
            "references": {
                "name": pack_names(frames.references.name),
                "size": pack_numbers(frames.references.size),
            },
            "digests": pack_numbers(manifest.digests),
        }

    @staticmethod
    def manifest(top: Mapping[str, Any]) -> Manifest:
        """Return the manifest with these columns. Raises ``FormatError``."""
        manifest = ManifestV1.manifest(top)
        column, found = fields("frames", top["frames"], _FRAMES), fields("references", top["references"], _REFERENCES)
        names = unpack_names("references.name", found["name"])
        references = ReferenceTable(names, unpack_numbers("references.size", found["size"], len(names)))
        count = count_of("frames.length", column["length"])
        source = unpack_numbers("frames.source", column["source"], count)
        files, encoded = manifest.files, is_encoded(manifest.files.codec)
        frames = FrameTable.build(
            unpack_numbers("frames.length", column["length"], count),
            unpack_uint64("frames.checksum", column["checksum"], count),
            source=source,
            offset=unpack_numbers("frames.offset", column["offset"], int(np.count_nonzero(source))),
            references=references,
            encoded=encoded,
            head_length=files.head_length,
            chunk_size=files.chunk_size,
            shard_file=manifest.shard_file,
            shard_offset=manifest.shard_offset,
            shard_nbytes=manifest.shard_nbytes,
        )
        manifest.files = replace(files, frames=frames if encoded.any() else None)
        manifest.digests = unpack_uint64("digests", top["digests"], count_of("digests", top["digests"]))
        return manifest


_FRAMES = ("length", "checksum", "source", "offset")
_REFERENCES = ("name", "size")
