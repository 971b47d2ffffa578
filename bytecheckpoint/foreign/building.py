"""Build the index of another system's checkpoint from boxes, byte ranges and plain values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch

from ..checkpoint.index import Index
from ..checkpoint.values import StoredValue
from ..engine.checksums import chunk_size_for
from ..engine.reading.checks import CrcTable
from ..errors import BytecheckpointError, NameCollisionError, UnsupportedTensorError
from ..format.checksums import checksum_of, empty_checksums
from ..format.manifest.document import Manifest, SectionInfo
from ..format.manifest.files import FileTable
from ..format.manifest.payload import pack_payload
from ..format.manifest.validation import validate_foreign
from ..format.values.encoding import encode_value
from ..format.values.types import path_name
from ..frameworks.base import Context
from ..frameworks.tree_capture import Capture
from ..frameworks.tree_paths import replace_all
from ..storage_backends.base import StorageBackend
from ..tensors.dtypes import DType
from ..tensors.geometry import Box
from ..tensors.metadata import BasicMeta
from ..tensors.shards import Path, torch_dtype
from ..tensors.tables import BoxTable, TensorTable

_MAX_RUNS = 1 << 20  # of one tensor that is not contiguous in its file
_FREE_RUNS = 1 << 16  # of all such tensors, besides one for each byte of the files: expanded tensors have no bytes


class StoredBox(NamedTuple):
    """One box of a tensor in a file.

    ``offset`` counts bytes from the beginning of file ``file`` (a number that ``add_file`` returned). ``strides`` are
    those of the box's elements in the file, counted in elements; None if they are in row-major order.
    """

    box: Box
    file: int
    offset: int
    strides: Sequence[int] | None = None


@dataclass(frozen=True, eq=False)
class StoredLeaf:
    """A tensor in a tree: dtype and shape, and the boxes that tile it."""

    meta: BasicMeta
    boxes: Sequence[StoredBox]

    @classmethod
    def whole(cls, meta: BasicMeta, file: int, offset: int, strides: Sequence[int] | None = None) -> StoredLeaf:
        """A tensor that is in one place."""
        return cls(meta, (StoredBox(Box.whole(meta.shape), file, offset, strides),))


@dataclass(eq=False)
class IndexBuilder:
    """Collects what a reader finds. Names and boxes are checked by ``build``.

    Attributes:
        backend: Storage backend whose root holds the files.
        system: What wrote the files, for messages.
    """

    backend: StorageBackend
    system: str
    _files: dict[str, tuple[int, int]] = field(default_factory=dict)
    _tensors: dict[tuple[str, str], BasicMeta] = field(default_factory=dict)
    _boxes: dict[tuple[str, str], list[StoredBox]] = field(default_factory=dict)
    _names: dict[tuple[str, StoredLeaf], str] = field(default_factory=dict)
    _values: list[StoredValue] = field(default_factory=list)
    _aliases: list[tuple[str, str]] = field(default_factory=list)
    _crcs: dict[tuple[int, int, int, int], None] = field(default_factory=dict)
    _kinds: dict[str, str] = field(default_factory=dict)
    _runs_left: int = 0

    def add_file(self, key: str, size: int) -> int:
        """Return the number of a file of ``size`` bytes."""
        return self._files.setdefault(key, (len(self._files), size))[0]

    def file_number(self, key: str) -> int:
        """Return the number of a file; asks the store for its size at the first call. Raises ``StorageError``."""
        known = self._files.get(key)
        return self.add_file(key, self.backend.stat(key).size) if known is None else known[0]

    def read(self, stored_box: StoredBox, dtype: DType, count: int) -> bytes:
        """Read the first ``count`` elements of a box, in order to find out what it is. Raises ``StorageError``."""
        data = bytearray(count * dtype.itemsize)
        if data:
            self.backend.read_into(list(self._files)[stored_box.file], stored_box.offset, data)
        return bytes(data)

    def add_section(self, section: str, kind: str) -> None:
        """Add a section, which may stay empty. ``kind`` is "module", "optimizer" or "tree", as of this library's."""
        self._kinds[section] = kind

    def has_section(self, section: str) -> bool:
        """Whether something was added to a section."""
        return section in self._kinds

    def add_tensor(self, section: str, fqn: str, leaf: StoredLeaf) -> None:
        """Add a tensor, or more boxes of one. A leaf with a name in the section gets a tied name.

        Raises ``NameCollisionError`` if the tensor has other metadata there.
        """
        self._kinds.setdefault(section, "module")
        first = self._names.setdefault((section, leaf), fqn) if 0 not in leaf.meta.shape else fqn
        if first != fqn:
            self.add_alias(section, fqn, first)
            return
        known = self._tensors.setdefault((section, fqn), leaf.meta)
        if known != leaf.meta:
            raise NameCollisionError(f"{self.backend.url}: {section}.{fqn} is both {known} and {leaf.meta}")
        self._boxes.setdefault((section, fqn), []).extend(leaf.boxes)

    def add_value(self, section: str, path: Path, value: object, rank: int | None = None) -> None:
        """Add a plain value of all ranks, or of one. Raises ``UnserializableError``."""
        self._kinds.setdefault(section, "tree")
        encoded = encode_value(value, f"{section}.{path_name(path)}")
        self._values.append(StoredValue(section, path, rank, encoded))

    def add_alias(self, section: str, alias: str, fqn: str) -> None:
        """Add a tied name of a tensor."""
        self._aliases.append((f"{section}.{alias}", f"{section}.{fqn}"))

    def add_tree(self, section: str, tree: Any, rank: int | None = None) -> None:
        """Add a nested dict, list or tuple of plain values and ``StoredLeaf``s, as a save of such a tree stores it.

        One ``StoredLeaf`` at several places is a tied tensor. A tree of one rank has plain values only. Raises
        ``UnserializableError`` and ``NameCollisionError``.
        """
        self._kinds.setdefault(section, "tree")
        capture = _TreeCapture(self, section)
        capture.visit(replace_all(tree, StoredLeaf, capture.stand_in))
        for path, value in capture.finish().values.items():
            self.add_value(section, path, value, rank)

    def add_crc(self, file: int, begin: int, end: int, crc: int) -> None:
        """Add the CRC-32 of bytes ``[begin, end)`` of a file."""
        self._crcs[file, begin, end, crc] = None

    def build(
        self,
        *,
        name: str = "",
        step: int | None = None,
        world_size: int = 1,
        metadata: Mapping[str, Any] | None = None,
    ) -> Index:
        """Return the validated index. ``name`` is the file's key, if the path is a single file.

        Raises ``FormatError`` if a tensor's boxes do not tile it or lie outside their files, and
        ``UnsupportedTensorError`` for a tensor whose elements are too scattered.
        """
        try:
            manifest = self._manifest(step, world_size, dict(metadata or {}))
            validate_foreign(manifest)
            # Names the contents: a handle that is opened again in another process must find the same ones.
            manifest.attempt = checksum_of(pack_payload(manifest)).hex()
        except BytecheckpointError as error:
            raise type(error)(f"{self.backend.url} ({self.system}): {error}") from error
        crcs = CrcTable.build(list(self._crcs)) if self._crcs else None
        return Index(self.backend, manifest, self.system, name, tuple(self._values), crcs)

    def _manifest(self, step: int | None, world_size: int, metadata: dict[str, Any]) -> Manifest:
        names = list(self._tensors)
        self._runs_left = _FREE_RUNS + sum(size for _, size in self._files.values())
        runs = [(row, run) for row, name in enumerate(names) for run in self._runs(name)]
        sizes = np.array([size for _, size in self._files.values()], np.int64)
        zeros = np.zeros(len(sizes), np.int64)
        tensors = TensorTable.build([(section, fqn, meta) for (section, fqn), meta in self._tensors.items()])
        shards = BoxTable.build([(row, run.box) for row, run in runs])
        nbytes = shards.nbytes(tensors)
        chunk_size = chunk_size_for(int(nbytes.sum()))
        return Manifest(
            library_version="",
            step=step,
            created="",
            world_size=world_size,
            attempt="",
            metadata=metadata,
            sections=[SectionInfo(name, kind) for name, kind in self._kinds.items()],
            files=FileTable(
                name=list(self._files),
                size=sizes,
                section=zeros,
                rank=zeros,
                kind=["tensors"] * len(sizes),
                head_length=zeros,
                head_checksum=empty_checksums(len(sizes)),
                chunk_size=zeros + chunk_size,
                codec=["raw"] * len(sizes),
            ),
            tensors=tensors,
            scope=np.full(len(names), -1, np.int64),
            shards=shards,
            shard_file=np.array([run.file for _, run in runs], np.int64),
            shard_offset=np.array([run.offset for _, run in runs], np.int64),
            checksums=empty_checksums(int((-(-nbytes // chunk_size)).sum())),
            aliases=self._aliases,
        ).in_order()

    def _runs(self, name: tuple[str, str]) -> Iterator[StoredBox]:
        """The boxes of a tensor, each contiguous in its file."""
        itemsize = self._tensors[name].dtype.itemsize
        for stored_box in self._boxes[name]:
            if stored_box.strides is None:
                yield stored_box
                continue
            try:
                limit = min(_MAX_RUNS, self._runs_left)
                for box, start in contiguous_boxes(stored_box.box.lengths, stored_box.strides, limit):
                    self._runs_left -= 1
                    moved = Box(
                        tuple(a + b for a, b in zip(stored_box.box.offsets, box.offsets, strict=True)), box.lengths
                    )
                    yield StoredBox(moved, stored_box.file, stored_box.offset + start * itemsize)
            except UnsupportedTensorError as error:
                raise UnsupportedTensorError(f"{'.'.join(name)}: {error}") from error


class _TreeCapture(Capture):
    """Names the tensors and values of a tree as a save does. Meta tensors stand for the stored ones."""

    def __init__(self, builder: IndexBuilder, section: str) -> None:
        super().__init__(Context(section, {}))
        self._builder, self._section = builder, section
        self._leaves: dict[torch.Tensor, StoredLeaf] = {}  # by stand-in

    def stand_in(self, leaf: StoredLeaf) -> torch.Tensor:
        """Return a meta tensor for a leaf."""
        made = torch.empty(leaf.meta.shape, dtype=torch_dtype(leaf.meta), device="meta")
        self._leaves[made] = leaf
        return made

    def store(self, fqn: str, tensor: torch.Tensor, *, own: bool = False) -> None:
        self._builder.add_tensor(self._section, fqn, self._leaves[tensor])


def contiguous_boxes(
    lengths: Sequence[int], strides: Sequence[int], limit: int = _MAX_RUNS
) -> Iterator[tuple[Box, int]]:
    """Yield boxes that tile a strided box and are contiguous in row-major order, with their first element's position.

    Lengths and strides count elements. Raises ``UnsupportedTensorError`` if there would be more than ``limit`` boxes.
    """
    if 0 in lengths:
        yield Box.whole(tuple(lengths)), 0
        return
    ndim = len(lengths)
    first, run = ndim, 1  # dimensions [first, ndim) are contiguous
    while first and (lengths[first - 1] == 1 or strides[first - 1] == run):
        first -= 1
        run *= lengths[first]
    inner = set(range(first, ndim))
    for d in range(first):
        if strides[d] == 1 and lengths[d] > run:
            inner, run = {d}, lengths[d]
    outer = [range(1) if d in inner else range(length) for d, length in enumerate(lengths)]
    if math.prod(map(len, outer)) > limit:
        raise UnsupportedTensorError(
            f"its elements are scattered in the file (shape {list(lengths)}, strides {list(strides)}); "
            f"call .contiguous() before saving"
        )
    box_lengths = tuple(length if d in inner else 1 for d, length in enumerate(lengths))
    for offsets in product(*outer):
        yield Box(offsets, box_lengths), sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
