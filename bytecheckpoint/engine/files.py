"""Lay out data files, and describe their images: the bytes of a file before it is written.

A layout depends on shapes only and serves every save of a plan; an image adds a key and the tensors of one save.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..format.checksums import Checksums
from ..format.hf_index import ADAPTER_SECTION
from ..format.manifest.files import encoded_head
from ..format.safetensors import build_header, shard_name
from ..planners.save_plan import consecutive_offsets
from ..tensors.dtypes import DType
from ..tensors.geometry import Box
from ..tensors.metadata import BasicMeta
from ..tensors.shards import Shard
from ..tensors.tables import Int64


@dataclass(frozen=True, eq=False)
class FileLayout:
    """The layout of a safetensors file that holds the shards ``rows`` of a rank's local plan, in this order.

    ``head`` is the padded header. ``offsets`` count bytes from the end of the header. ``widths`` are the bytes of one
    floating-point number of each shard, and 1 for shards of other numbers.
    """

    section: str
    rows: list[int]
    head: bytes
    offsets: list[int]
    nbytes: list[int]
    widths: list[int] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class BaseChunks:
    """Where older checkpoints have the chunks of a file with the same layout, by chunk.

    The frame of a chunk has ``length`` bytes, with ``frame_checksum``, at ``offset`` of the file with the number
    ``source``, from 1. ``is_usable`` is false where a new checkpoint must not refer to it.
    """

    checksum: Checksums
    length: Int64
    frame_checksum: Checksums
    source: Int64
    offset: Int64
    is_usable: npt.NDArray[np.bool_]


@dataclass
class FileImage:
    """The content of one file: ``head`` (a padded safetensors header, or a whole values document), then tensors.

    ``shards[i]`` occupies ``nbytes[i]`` bytes at ``offsets[i]``, counted from the end of the head, in ascending order.
    ``shards`` is empty if the bytes come from elsewhere, and after all of them are staged. With a ``codec``, sizes and
    offsets are those before encoding; ``widths`` are as in ``FileLayout``. Chunks that equal the ``base``'s are not
    written. Of them, those that are known to be equal before they are copied are ``shared``, and long runs of them are
    ``gaps``: ranges of bytes of the file that are not staged.
    """

    key: str
    section: str
    kind: str
    head: bytes
    offsets: Sequence[int] = ()
    nbytes: Sequence[int] = ()
    shards: Sequence[Shard] = ()
    widths: Sequence[int] = ()
    codec: str = "raw"
    base: BaseChunks | None = None
    shared: npt.NDArray[np.bool_] | None = None
    gaps: Sequence[tuple[int, int]] = ()

    @property
    def data_size(self) -> int:
        """Bytes after the head."""
        return self.offsets[-1] + self.nbytes[-1] if self.offsets else 0

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self.head) + self.data_size

    def staged_ranges(self) -> Sequence[tuple[int, int]]:
        """Return the ranges of bytes of the file between the gaps."""
        edges = [0, *(edge for gap in self.gaps for edge in gap), self.size]
        return [(begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True) if begin < end]

    def release_tensors(self) -> None:
        """Drop the references to the caller's tensors; their bytes are staged."""
        self.shards = ()


def data_key(attempt: str, section: str, rank: int, kind: str, codec: str = "raw") -> str:
    """Return the key of a rank's file of this kind (see ``FileTable``); it has one of each kind per section."""
    name = f"{attempt}/{section}-{rank:05d}"
    if section == ADAPTER_SECTION and rank == 0 and (kind, codec) == ("tensors", "raw"):
        return f"{attempt}/{section}.safetensors"
    if kind == "tensors":
        return f"{name}.safetensors" if codec == "raw" else f"{name}.frames"
    return f"{name}{'.rank' if kind == 'rank_values' else ''}.msgpack"


def lay_out_file(section: str, rows: Int64, shards: Sequence[Shard], metadata: dict[str, str]) -> FileLayout:
    """Lay out a file that holds ``shards``, which are the rows ``rows`` of a rank's local plan."""
    names = [shard_name(one.fqn, one.box, whole=one.box == Box.whole(one.meta.shape)) for one in shards]
    metas = [BasicMeta(one.meta.dtype, one.box.lengths) for one in shards]
    nbytes = [meta.nbytes for meta in metas]
    offsets, _ = consecutive_offsets(np.array(nbytes, np.int64))
    widths = [_width(shard.meta.dtype) for shard in shards]
    head = build_header(zip(names, metas, strict=True), metadata)
    return FileLayout(section, rows.tolist(), head, offsets.tolist(), nbytes, widths)


def tensor_image(key: str, layout: FileLayout, shards: Sequence[Shard] = (), codec: str = "raw") -> FileImage:
    """Return the image of a file of tensors. ``shards`` are the layout's ``rows``, if this rank holds them."""
    head = layout.head if codec == "raw" else encoded_head(layout.head)
    return FileImage(key, layout.section, "tensors", head, layout.offsets, layout.nbytes, shards, layout.widths, codec)


def _width(dtype: DType) -> int:
    if dtype.kind == "complex":
        return dtype.itemsize // 2
    return dtype.itemsize if dtype.kind == "float" else 1
