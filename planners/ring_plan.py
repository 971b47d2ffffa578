"""Plan which rank of a ring reads which bytes, and in which order the packets travel round the ring.

``classes`` determines the rings. Every rank of a ring computes the same plan from what it already has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd

from ..tensors.geometry import Box, row_major_strides
from .extents import byte_span, runs_of, split_box

PACKET_BYTES = 8 << 20
"""Bytes that are forwarded as one message."""

# Smaller packets cost more in messages than the earlier start of the next rank gains.
_MIN_PACKET_BYTES = 256 << 10
# Packets read as one batch: enough to keep a few reading threads busy.
_BATCH_PACKETS = 4
# A longer row of a tensor is split within the row.
_MAX_ROW_BYTES = 64 << 20


@dataclass(frozen=True)
class SharedPart:
    """A box that a ring reads and forwards.

    Attributes:
        row: An identifier of the caller's.
        box: The box, in global coordinates.
        stored: The stored box that contains it.
        itemsize: Bytes per stored element.
        memory_itemsize: Bytes per element in memory.
        chunk_size: Bytes per checksum of the stored file.
    """

    row: int
    box: Box
    stored: Box
    itemsize: int
    memory_itemsize: int
    chunk_size: int


@dataclass(frozen=True)
class PartBox:
    """A box inside a shared part.

    Attributes:
        row: The ``row`` of the shared part.
        box: The box, in global coordinates.
        nbytes: Its size in memory, in bytes.
    """

    row: int
    box: Box
    nbytes: int


Packet = tuple[PartBox, ...]
"""Boxes that are forwarded as one message."""


@dataclass(frozen=True)
class Batch:
    """Boxes that are read together.

    Attributes:
        reads: The boxes to read.
        packets: The packets in which their contents are forwarded.
    """

    reads: tuple[PartBox, ...]
    packets: tuple[Packet, ...]


@dataclass(frozen=True)
class Ring:
    """Ranks that read parts for each other.

    Attributes:
        ranks: The ranks, in the order in which they forward packets.
        segments: ``ranks[i]`` reads ``segments[i]``.
    """

    ranks: tuple[int, ...]
    segments: tuple[tuple[Batch, ...], ...]

    def packets(self, at: int) -> list[Packet]:
        """Return the packets of one segment.

        Args:
            at: The index of the segment.

        Returns:
            The packets, in order.
        """
        return [packet for batch in self.segments[at] for packet in batch.packets]

    def link(self, at: int) -> Iterator[tuple[int, int]]:
        """Iterate over what ``ranks[at]`` sends to the next rank.

        Of packets with the same index, the one whose reader is nearest is sent first, so that all links are busy at the
        same time.

        Args:
            at: The index of the sender in ``ranks``.

        Yields:
            The segment and the index of each packet, in order.
        """
        counts = [sum(len(batch.packets) for batch in segment) for segment in self.segments]
        for index in range(max(counts, default=0)):
            for hops in range(len(self.ranks) - 1):
                segment = (at - hops) % len(self.ranks)
                if index < counts[segment]:
                    yield segment, index


def plan_ring(ranks: Sequence[int], parts: Sequence[SharedPart], *, packet_bytes: int = PACKET_BYTES) -> Ring:
    """Distribute ``parts`` over the ranks of a ring, evenly by stored bytes.

    Splits fall on chunk boundaries as long as the shares stay about even, so that hardly any chunk is read twice.

    Args:
        ranks: The ranks of the ring, in order.
        parts: What the ring reads, in storage order.
        packet_bytes: The largest packet, in bytes of memory. Packets of a small ring are smaller.

    Returns:
        The same ring on every rank that passes the same arguments.
    """
    queue = deque(_Run.of(part) for whole in parts for part in _split_long_rows(whole))
    rest = sum(run.nbytes for run in queue)
    share = rest // len(ranks)
    packet_bytes = max(min(packet_bytes, share // 4), min(packet_bytes, _MIN_PACKET_BYTES))
    segments = []
    for left in range(len(ranks), 0, -1):
        taken = _take(queue, -(-rest // left), share // 8) if left > 1 else list(queue)
        rest -= sum(run.nbytes for run in taken)
        segments.append(tuple(_batches(deque(taken), packet_bytes)))
    return Ring(tuple(ranks), tuple(segments))


@dataclass(frozen=True)
class _Run:
    """Rows ``[begin, end)`` of a part, along its first axis with more than one index."""

    part: SharedPart
    axis: int
    begin: int
    end: int
    row_nbytes: int

    @classmethod
    def of(cls, part: SharedPart) -> _Run:
        """All rows of ``part``."""
        axis = next((axis for axis, length in enumerate(part.box.lengths) if length > 1), -1)
        rows = part.box.lengths[axis] if axis >= 0 else 1
        return cls(part, axis, 0, rows, part.box.numel // rows * part.itemsize)

    @property
    def nbytes(self) -> int:
        return (self.end - self.begin) * self.row_nbytes

    @property
    def part_box(self) -> PartBox:
        box = self.part.box if self.axis < 0 else self.part.box.narrow(self.axis, self.begin, self.end)
        return PartBox(self.part.row, box, box.numel * self.part.memory_itemsize)

    def split_row(self, nbytes: int, slack: int) -> int:
        """The row, from ``begin`` to ``end`` inclusive, with about ``nbytes`` bytes before it.

        A row that begins a chunk is preferred if one is within ``slack`` bytes; otherwise it is the nearest row.
        """
        ideal = self.begin + min(max(0, nbytes), self.nbytes) / self.row_nbytes
        rows = [self.begin, self.end]
        first, step = self._chunk_rows()
        if step:
            below = first + (int(ideal) - first) // step * step
            rows += [row for row in (below, below + step) if self.begin < row < self.end]
        best = min(rows, key=lambda row: abs(row - ideal))
        near = abs(best - ideal) * self.row_nbytes <= max(slack, 2 * self.part.chunk_size)
        return best if near else round(ideal)

    def _chunk_rows(self) -> tuple[int, int]:
        """``(first, step)``: rows ``first + n * step`` begin a chunk; step 0 if no row does."""
        part = self.part
        if self.axis < 0:
            return 0, 0
        stride = row_major_strides(part.stored.lengths)[self.axis] * part.itemsize
        begin, _ = byte_span(part.box, part.stored, part.itemsize)
        common = gcd(stride, part.chunk_size)
        if begin % common:
            return 0, 0
        step = part.chunk_size // common
        return -(begin // common) * pow(stride // common, -1, step) % step, step


def _split_long_rows(part: SharedPart) -> Iterator[SharedPart]:
    """``part``, or its sub-boxes if its rows are too long to be distributed whole."""
    if _Run.of(part).row_nbytes <= _MAX_ROW_BYTES:
        yield part
        return
    for box in split_box(part.box, part.box, part.itemsize, _MAX_ROW_BYTES, 0):
        yield replace(part, box=box)


def _take(queue: deque[_Run], nbytes: int, slack: int) -> list[_Run]:
    """Remove about ``nbytes`` from the front of a queue, and at least something unless it is empty."""
    taken: list[_Run] = []
    while queue and nbytes > 0:
        run = queue.popleft()
        row = run.split_row(nbytes, slack) if run.nbytes > nbytes else run.end
        if row == run.begin and not taken:
            row = run.end
        if row > run.begin:
            taken.append(replace(run, end=row))
        if row < run.end:
            queue.appendleft(replace(run, begin=row))
            break
        nbytes -= run.nbytes
    return taken


def _batches(queue: deque[_Run], packet_bytes: int) -> Iterator[Batch]:
    size = _BATCH_PACKETS * packet_bytes
    while queue:
        # If none of a part's rows begins a chunk, one long read is better than reading a chunk twice at every split.
        runs = _take(queue, size, 7 * size)
        yield Batch(tuple(run.part_box for run in runs), tuple(_packets(runs, packet_bytes)))


def _packets(runs: Sequence[_Run], packet_bytes: int) -> Iterator[Packet]:
    boxes = (
        PartBox(whole.row, box, box.numel * run.part.memory_itemsize)
        for run in runs
        for whole in [run.part_box]
        for box in split_box(whole.box, whole.box, run.part.memory_itemsize, packet_bytes, 0)
    )
    return map(tuple, runs_of(boxes, lambda one: one.nbytes, packet_bytes))
