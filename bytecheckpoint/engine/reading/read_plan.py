"""Plan which bytes of files are read together, and where each of them goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ...format.checksums import Checksums
from ...format.manifest.document import Manifest
from ...planners.extents import Extents, byte_span, plan_extents, split_box
from ...tensors.dtypes import DTYPES
from ...tensors.tables import Int64
from .placement import BoxDestination, Destination, DeviceCopyIn, MemoryDestination, ReadPart, hold_as_stored

_OVER_READ = 2  # times what is requested
_MIN_OVER_READ = 64 << 20  # bytes; less costs no time that one would notice

_ITEMSIZE: Int64 = np.array([dtype.itemsize for dtype in DTYPES.values()], np.int64)


class ReadPlan:
    """Extents, each a run of blocks of one file, in the order of files and bytes. Lists describe the blocks by number.

    Attributes:
        file: The file of each block.
        begin: First byte of the block in its file.
        end: Byte after the block in its file.
        row: The shard that the block is part of.
        shard: First byte of this shard in the file.
        checksum: Checksum of the block's first chunk.
        target: Address that all bytes of the block go to unchanged, or 0: then ``places`` lists where they go.
        size: Intended bytes of an extent.
        max_bytes: Most bytes of an extent that is not a single block.
        requested: Bytes that the caller requested.
        over_reads: Bytes that are read and that were requested of each tensor of which far more are read, by name.
    """

    def __init__(self, extents: Extents, ranges: _Ranges, manifest: Manifest, size: int, requested: int) -> None:
        self.size = size
        self.requested = requested
        self.over_reads: Mapping[str, tuple[int, int]] = {}
        self.max_bytes = _max_bytes(size)
        self.starts: list[int] = extents.starts.tolist()
        self.file: list[int] = extents.file.tolist()
        self.begin: list[int] = extents.begin.tolist()
        self.end: list[int] = extents.end.tolist()
        first = extents.uses[extents.use_starts[:-1]]
        self.row: list[int] = ranges.row[first].tolist()
        self.shard: list[int] = ranges.shard[first].tolist()
        start = extents.begin - ranges.shard[first]
        self.checksum: list[bytes] = _checksums_at(manifest, ranges.row[first], start).tolist()
        self.target: list[int] = _targets(extents, ranges, first).tolist()
        self._ranges = ranges
        self._use_starts, self._uses = extents.use_starts.tolist(), extents.uses.tolist()

    def __len__(self) -> int:
        return len(self.starts) - 1

    def blocks(self, extent: int) -> range:
        """Return the numbers of an extent's blocks."""
        return range(self.starts[extent], self.starts[extent + 1])

    def file_of(self, extents: range) -> int:
        """Return the file that consecutive extents are in."""
        return self.file[self.starts[extents[0]]]

    def groups(self, nbytes: int) -> list[range]:
        """Return all extents in groups. A group lies in one file and spans at most ``nbytes``, or is one extent."""
        starts = [0]
        for extent in range(1, len(self)):
            first, last = self.starts[starts[-1]], self.starts[extent + 1] - 1
            if self.file[first] != self.file[last] or self.end[last] - self.begin[first] > nbytes:
                starts.append(extent)
        return (
            [range(low, high) for low, high in zip(starts, [*starts[1:], len(self)], strict=True)] if len(self) else []
        )

    def places(self, block: int) -> list[Destination]:
        """Return the places that bytes of a block go to, each once."""
        ranges = self._ranges
        uses = self._uses[self._use_starts[block] : self._use_starts[block + 1]]
        found = {int(ranges.source[use]): use for use in uses}
        return [place for place in map(ranges.place, found.values()) if place is not None]


@dataclass(eq=False)
class _Ranges:
    """Ranges of files, by number: of part ``source``, in shard ``row``, which starts at byte ``shard``.

    Bytes ``[low, high)`` go unchanged to the memory at ``address``, unless that is 0.
    """

    parts: Sequence[ReadPart]
    source: Int64
    row: Int64
    shard: Int64
    address: Int64
    low: Int64
    high: Int64
    boxes: dict[int, Destination] = field(default_factory=dict)  # by part

    def part(self, use: int) -> ReadPart:
        return self.parts[int(self.source[use])]

    def place(self, use: int) -> Destination | None:
        if self.address[use]:
            return MemoryDestination(int(self.low[use]), int(self.high[use]), self.part(use).out)
        return self.boxes.get(int(self.source[use]))


def _targets(extents: Extents, ranges: _Ranges, first: Int64) -> Int64:
    alone = np.diff(extents.use_starts) == 1
    inside = (ranges.low[first] <= extents.begin) & (extents.end <= ranges.high[first])
    plain = ranges.address[first] != 0
    return np.where(alone & inside & plain, ranges.address[first] + extents.begin - ranges.low[first], 0)


def _checksums_at(manifest: Manifest, row: Int64, start: Int64) -> Checksums:
    """Return the checksums of the chunks that contain byte ``start`` of these shards."""
    chunk = manifest.files.chunk_size[manifest.shard_file[row]]
    return manifest.checksums[manifest.checksum_starts[row] + start // chunk]


class _Shards:
    """Columns of some shards. Reads of a shard start and end at multiples of its ``grain``, or at its end."""

    def __init__(self, manifest: Manifest, rows: Int64, *, checked: bool) -> None:
        self.rows = rows
        self.file = manifest.shard_file[rows]
        self.code = manifest.tensors.dtype[manifest.shards.tensor[rows]]
        self.itemsize = _ITEMSIZE[self.code]
        # A read must not split an element, even if the chunk size is not a multiple of the element size.
        self.grain = np.lcm(manifest.files.chunk_size[self.file], self.itemsize) if checked else self.itemsize
        self.begin = manifest.files.head_length[self.file] + manifest.shard_offset[rows]
        self.nbytes = manifest.shard_nbytes[rows]
        self.end = self.begin + self.nbytes

    def extents(self, source: Int64, begin: Int64, end: Int64, size: int, gap: int = 0) -> Extents:
        """Plan extents for the ranges ``[begin, end)``; range ``i`` belongs to shard number ``source[i]``."""
        file, grain = self.file[source], self.grain[source]
        return plan_extents(file, begin, end, grain, size=size, slack=_max_bytes(size) - size, gap=gap)


def _max_bytes(size: int) -> int:
    """Return the limit of an extent: one eighth of slack avoids a small last extent."""
    return size + size // 8


def plan_checks(manifest: Manifest, rows: Int64, size: int) -> ReadPlan:
    """Plan to read these shards only to check them. Shards without bytes are left out."""
    shards = _Shards(manifest, rows[manifest.shard_nbytes[rows] > 0], checked=True)
    every = np.arange(len(shards.rows))
    ranges = _Ranges([], every, shards.rows, shards.begin, np.zeros_like(every), shards.begin, shards.end)
    return ReadPlan(shards.extents(every, shards.begin, shards.end, size), ranges, manifest, size, 0)


def plan_reads(manifest: Manifest, parts: Sequence[ReadPart], *, checked: bool, size: int, gap: int) -> ReadPlan:
    """Plan the reads for ``parts``, which may overlap; in whole chunks if they are ``checked``.

    A read has about ``size`` bytes. Up to ``gap`` bytes between two ranges are read rather than skipped.
    Raises ``PlanError`` if a box is not inside its shard.
    """
    parts = [part for part in parts if part.out.numel()]
    outs = [part.out for part in parts]
    shards = _Shards(manifest, np.array([part.row for part in parts], np.int64), checked=checked)
    nbytes = np.array([*map(torch.Tensor.numel, outs)], np.int64) * shards.itemsize
    as_stored = hold_as_stored(outs, shards.code.tolist())
    plain = np.array([good and out.is_cpu for out, good in zip(outs, as_stored, strict=True)], bool)
    whole = np.flatnonzero((nbytes == shards.nbytes) & plain)
    other = np.flatnonzero((nbytes != shards.nbytes) | ~plain)
    boxes: dict[int, Destination] = {}
    found: list[_Range] = []
    device = DeviceCopyIn(outs) if any(outs[i].is_cuda for i in other.tolist()) else None
    for i in other.tolist():
        found += _box_ranges(manifest, shards, i, parts[i], boxes, size, gap, device, as_stored=as_stored[i])
    rest = np.array(found, np.int64).reshape(-1, 5)
    source, begin, end, low, high = (
        np.concatenate([column, more])
        for column, more in zip(
            (whole, shards.begin[whole], shards.end[whole], shards.begin[whole], shards.end[whole]), rest.T, strict=True
        )
    )
    addresses = [out.data_ptr() if good else 0 for out, good in zip(outs, plain.tolist(), strict=True)]
    address = np.array(addresses, np.int64)[source]
    address[low == high] = 0
    ranges = _Ranges(parts, source, shards.rows[source], shards.begin[source], address, low, high, boxes)
    extents = shards.extents(source, begin, end, size, gap)
    plan = ReadPlan(extents, ranges, manifest, size, int(nbytes.sum()))
    plan.over_reads = _over_reads(manifest, extents, np.array(plan.row, np.int64), shards.rows, nbytes)
    return plan


def _over_reads(
    manifest: Manifest, extents: Extents, read_row: Int64, row: Int64, nbytes: Int64
) -> dict[str, tuple[int, int]]:
    """Return the bytes that are read and requested of tensors of which far more are read; none if that is not much."""
    length = extents.end - extents.begin
    if int(length.sum()) < max(_OVER_READ * int(nbytes.sum()), int(nbytes.sum()) + _MIN_OVER_READ):
        return {}
    tensors, tensor_of = manifest.tensors, manifest.shards.tensor
    read = np.bincount(tensor_of[read_row], length, len(tensors)).astype(np.int64)
    requested = np.bincount(tensor_of[row], nbytes, len(tensors)).astype(np.int64)
    far_more = np.flatnonzero((read > 0) & (read >= _OVER_READ * requested)).tolist()
    return {tensors.names[one]: (int(read[one]), int(requested[one])) for one in far_more}


_Range = tuple[int, int, int, int, int]
"""Columns ``source``, ``begin``, ``end``, ``low`` and ``high`` of a range of a file."""


def _box_ranges(
    manifest: Manifest,
    shards: _Shards,
    i: int,
    part: ReadPart,
    boxes: dict[int, Destination],
    size: int,
    gap: int,
    device: DeviceCopyIn | None,
    *,
    as_stored: bool,
) -> list[_Range]:
    """Return the ranges for a part of a shard, or for a whole shard that does not go to plain memory."""
    stored = manifest.shards.box_of(part.row)
    begin, length = int(shards.begin[i]), int(shards.nbytes[i])
    itemsize, grain = int(shards.itemsize[i]), int(shards.grain[i])
    start, stop = byte_span(part.box, stored, itemsize)
    is_contiguous = stop - start == part.box.numel * itemsize
    low = high = 0
    if as_stored and is_contiguous and part.out.is_cpu:
        low, high = begin + start, begin + stop
    elif as_stored and is_contiguous and device is not None and device.covers(part.out):
        boxes[i] = MemoryDestination(begin + start, begin + stop, part.out, device)
    else:
        meta = manifest.tensors.meta_of(int(manifest.shards.tensor[part.row]))
        boxes[i] = BoxDestination(begin, stored, meta, part, device)
    ranges: list[list[int]] = []
    for box in [part.box] if is_contiguous else split_box(part.box, stored, itemsize, size, max(grain, gap)):
        first, last = byte_span(box, stored, itemsize)
        first, last = first // grain * grain, min(-(-last // grain) * grain, length)
        if ranges and first <= ranges[-1][1]:
            ranges[-1][1] = last
        else:
            ranges.append([first, last])
    return [(i, begin + first, begin + last, low, high) for first, last in ranges]
