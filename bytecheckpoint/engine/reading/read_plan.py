"""From parts of stored shards to extents of files: what is read together, and where each byte of it goes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ...dtypes import DTYPES
from ...manifest import Manifest, UInt64
from ...planners.extents import Extents, plan_extents
from ...planners.slabs import slabs, span
from ...tables import Int64
from ..tensor_bytes import byte_view
from .device_copy_in import DeviceCopyIn
from .placement import BoxPlace, MemoryPlace, Place, ReadPart, is_plain_memory

__all__ = ["ReadPlan", "plan_checks", "plan_reads"]

_ITEMSIZE: Int64 = np.array([dtype.itemsize for dtype in DTYPES.values()], np.int64)


class ReadPlan:
    """Extents of blocks, in the order of files and their bytes. Lists have what is asked of every block, by its number.

    ``begin`` and ``end`` are its bytes in ``file``, part of shard ``row``, which begins at byte ``shard``; ``checksum``
    is that of its first chunk. Where all of it goes as it lies to one place, ``target`` is the address; else it is 0,
    and ``places`` tells. ``size`` is what an extent is meant to have in bytes, ``most`` what it has at most, unless it
    is a single block. ``wanted`` bytes were asked for.
    """

    def __init__(self, extents: Extents, ranges: _Ranges, checksums: _Checksums, size: int, wanted: int) -> None:
        self.size = size
        self.wanted = wanted
        self.most = _most(size)
        self.starts: list[int] = extents.starts.tolist()
        self.file: list[int] = extents.file.tolist()
        self.begin: list[int] = extents.begin.tolist()
        self.end: list[int] = extents.end.tolist()
        first = extents.uses[extents.use_starts[:-1]]
        self.row: list[int] = ranges.row[first].tolist()
        self.shard: list[int] = ranges.shard[first].tolist()
        self.checksum: list[int] = checksums.at(ranges.row[first], extents.begin - ranges.shard[first]).tolist()
        self.target: list[int] = _targets(extents, ranges, first).tolist()
        self._ranges, self._first = ranges, first.tolist()
        self._use_starts, self._uses = extents.use_starts.tolist(), extents.uses.tolist()
        self._memory: dict[int, memoryview] = {}

    def __len__(self) -> int:
        return len(self.starts) - 1

    def blocks(self, extent: int) -> range:
        """The numbers of the blocks of an extent."""
        return range(self.starts[extent], self.starts[extent + 1])

    def groups(self, nbytes: int) -> list[range]:
        """All extents, in runs that lie in one file and have ``nbytes`` together at most, or are a single extent."""
        starts = [0]
        for extent in range(1, len(self)):
            first, last = self.starts[starts[-1]], self.starts[extent + 1] - 1
            if self.file[first] != self.file[last] or self.end[last] - self.begin[first] > nbytes:
                starts.append(extent)
        return [range(low, high) for low, high in zip(starts, [*starts[1:], len(self)])] if len(self) else []

    def memory(self, block: int, begin: int, end: int) -> memoryview:
        """The memory that bytes ``[begin, end)`` of a block with a ``target`` go to."""
        use = self._first[block]
        view = self._memory.get(use)
        if view is None:
            view = self._memory[use] = byte_view(self._ranges.part(use).out)
        low = int(self._ranges.low[use])
        return view[begin - low : end - low]

    def places(self, block: int) -> list[Place]:
        """Where bytes of a block go; each place once."""
        ranges = self._ranges
        uses = self._uses[self._use_starts[block] : self._use_starts[block + 1]]
        found = {int(ranges.source[use]): use for use in uses}
        return [place for place in map(ranges.place, found.values()) if place is not None]


@dataclass(eq=False)
class _Ranges:
    """Ranges of files, by number: of part ``source``, in shard ``row``, which begins at byte ``shard``. The memory at
    ``address`` (0: none) takes bytes from ``low`` on to ``high`` as they lie."""

    parts: Sequence[ReadPart]
    source: Int64
    row: Int64
    shard: Int64
    address: Int64
    low: Int64
    high: Int64
    boxes: dict[int, BoxPlace] = field(default_factory=dict)  # by part

    def part(self, use: int) -> ReadPart:
        return self.parts[int(self.source[use])]

    def place(self, use: int) -> Place | None:
        if self.address[use]:
            return MemoryPlace(int(self.low[use]), int(self.high[use]), self.part(use).out)
        return self.boxes.get(int(self.source[use]))


def _targets(extents: Extents, ranges: _Ranges, first: Int64) -> Int64:
    alone = np.diff(extents.use_starts) == 1
    inside = (ranges.low[first] <= extents.begin) & (extents.end <= ranges.high[first])
    plain = ranges.address[first] != 0
    return np.where(alone & inside & plain, ranges.address[first] + extents.begin - ranges.low[first], 0)


@dataclass(eq=False)
class _Checksums:
    manifest: Manifest

    def at(self, row: Int64, start: Int64) -> UInt64:
        """Checksums of the chunks that begin at byte ``start`` of these shards (of any chunk, where none does)."""
        manifest = self.manifest
        chunk = manifest.files.chunk_size[manifest.shard_file[row]]
        return manifest.checksums[manifest.checksum_starts[row] + start // chunk]


class _Shards:
    """Columns of some shards. ``grain``: what is read of one begins and ends at multiples of it, or at its end."""

    def __init__(self, manifest: Manifest, rows: Int64, *, checked: bool) -> None:
        self.rows = rows
        self.file = manifest.shard_file[rows]
        self.code = manifest.tensors.dtype[manifest.shards.tensor[rows]]
        self.itemsize = _ITEMSIZE[self.code]
        # Chunks of a length that does not fit the elements must not cut one in two.
        self.grain = np.lcm(manifest.files.chunk_size[self.file], self.itemsize) if checked else self.itemsize
        self.begin = manifest.files.head_length[self.file] + manifest.shard_offset[rows]
        self.nbytes = manifest.shard_nbytes[rows]
        self.end = self.begin + self.nbytes

    def extents(self, source: Int64, begin: Int64, end: Int64, size: int) -> Extents:
        """For ranges ``[begin, end)`` of their files, range ``i`` being of shard number ``source[i]`` here."""
        file, grain = self.file[source], self.grain[source]
        return plan_extents(file, begin, end, grain, size=size, slack=_most(size) - size, gap=_gap(size))


def _most(size: int) -> int:
    return size + size // 8


def _gap(size: int) -> int:
    """Bytes that are cheaper to read than to pass over."""
    return size // 32


def plan_checks(manifest: Manifest, rows: Int64, size: int) -> ReadPlan:
    """All of these shards, wanted nowhere; those without bytes are left out."""
    shards = _Shards(manifest, rows[manifest.shard_nbytes[rows] > 0], checked=True)
    every = np.arange(len(shards.rows))
    ranges = _Ranges([], every, shards.rows, shards.begin, np.zeros_like(every), shards.begin, shards.end)
    return ReadPlan(shards.extents(every, shards.begin, shards.end, size), ranges, _Checksums(manifest), size, 0)


def plan_reads(manifest: Manifest, parts: Sequence[ReadPart], *, checked: bool, size: int) -> ReadPlan:
    """What must be read for ``parts``, in whole chunks where it is to be ``checked``. Parts may overlap. Raises
    ``PlanError`` for a box that is not inside its shard."""
    parts = [part for part in parts if part.out.numel()]
    shards = _Shards(manifest, np.array([part.row for part in parts], np.int64), checked=checked)
    nbytes = np.array([part.out.numel() for part in parts], np.int64) * shards.itemsize
    plain = np.array([is_plain_memory(part.out, code) for part, code in zip(parts, shards.code.tolist())], bool)
    whole = np.flatnonzero((nbytes == shards.nbytes) & plain)
    other = np.flatnonzero((nbytes != shards.nbytes) | ~plain)
    boxes: dict[int, BoxPlace] = {}
    found: list[_Range] = []
    device = DeviceCopyIn(part.out for part in parts) if any(parts[i].out.is_cuda for i in other.tolist()) else None
    for i in other.tolist():
        found += _box_ranges(manifest, shards, i, parts[i], bool(plain[i]), boxes, size, device)
    rest = np.array(found, np.int64).reshape(-1, len(_Range._fields))
    source, begin, end, low, high = (
        np.concatenate([column, more])
        for column, more in zip(
            (whole, shards.begin[whole], shards.end[whole], shards.begin[whole], shards.end[whole]), rest.T
        )
    )
    addresses = [part.out.data_ptr() if good else 0 for part, good in zip(parts, plain.tolist())]
    address = np.array(addresses, np.int64)[source]
    address[low == high] = 0
    ranges = _Ranges(parts, source, shards.rows[source], shards.begin[source], address, low, high, boxes)
    extents = shards.extents(source, begin, end, size)
    return ReadPlan(extents, ranges, _Checksums(manifest), size, int(nbytes.sum()))


class _Range(NamedTuple):
    source: int
    begin: int
    end: int
    low: int
    high: int


def _box_ranges(
    manifest: Manifest,
    shards: _Shards,
    i: int,
    part: ReadPart,
    plain: bool,
    boxes: dict[int, BoxPlace],
    size: int,
    device: DeviceCopyIn | None,
) -> Iterator[_Range]:
    """The ranges for part of a shard, or for all of it in memory of another kind."""
    stored = manifest.shards.box_of(part.row)
    begin, length = int(shards.begin[i]), int(shards.nbytes[i])
    itemsize, grain = int(shards.itemsize[i]), int(shards.grain[i])
    start, stop = span(part.box, stored, itemsize)
    as_it_lies = stop - start == part.box.numel * itemsize
    low = high = 0
    if plain and as_it_lies:
        low, high = begin + start, begin + stop
    else:
        meta = manifest.tensors.meta_of(int(manifest.shards.tensor[part.row]))
        boxes[i] = BoxPlace(begin, stored, meta, part, device)
    pending: tuple[int, int] | None = None
    for box in [part.box] if as_it_lies else slabs(part.box, stored, itemsize, size, max(grain, _gap(size))):
        first, last = span(box, stored, itemsize)
        first, last = first // grain * grain, min(-(-last // grain) * grain, length)
        if pending is not None and first > pending[1]:
            yield _Range(i, begin + pending[0], begin + pending[1], low, high)
            pending = None
        pending = (first if pending is None else pending[0], last)
    if pending is not None:
        yield _Range(i, begin + pending[0], begin + pending[1], low, high)
