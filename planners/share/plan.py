"""Reading once what several ranks want: who reads which part of it, and in which order it goes round a ring.

See ``share_classes`` for how ranks find each other. Each of them makes the same plan from what it knows already.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd

from ..geometry import Box, row_major_strides
from .slabs import slabs, span

__all__ = ["Batch", "Piece", "Ring", "SharedPart", "Slab", "plan_ring"]

PIECE = 8 << 20
"""Bytes that are passed on at once."""

_LEAST_PIECE = 256 << 10
_BATCH_PIECES = 4  # read together: what keeps a few reading threads busy
_LONGEST_ROW = 64 << 20  # bytes of one row of a tensor before it is cut within rows


@dataclass(frozen=True)
class SharedPart:
    """What a ring moves of one want: ``box``, a part of stored box ``stored``. ``row`` is for the caller's use."""

    row: int
    box: Box
    stored: Box
    itemsize: int
    memory_itemsize: int
    chunk_size: int


@dataclass(frozen=True)
class Slab:
    """``box`` of part ``row``: ``nbytes`` of memory."""

    row: int
    box: Box
    nbytes: int


Piece = tuple[Slab, ...]


@dataclass(frozen=True)
class Batch:
    """What is read together, and the pieces in which that is passed on."""

    reads: tuple[Slab, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Ring:
    """``segments[i]`` is read by ``ranks[i]`` and goes from there to each next rank, until all have it."""

    ranks: tuple[int, ...]
    segments: tuple[tuple[Batch, ...], ...]

    def pieces(self, at: int) -> list[Piece]:
        """The pieces of segment ``at``, in order."""
        return [piece for batch in self.segments[at] for piece in batch.pieces]

    def link(self, at: int) -> Iterator[tuple[int, int]]:
        """What ``ranks[at]`` sends to the next rank, in order: ``(segment, index of the piece)``.

        A piece comes behind those of its index that are nearer their reader, so all links are busy at the same time.
        """
        counts = [sum(len(batch.pieces) for batch in segment) for segment in self.segments]
        for index in range(max(counts, default=0)):
            for hops in range(len(self.ranks) - 1):
                segment = (at - hops) % len(self.ranks)
                if index < counts[segment]:
                    yield segment, index


def plan_ring(ranks: Sequence[int], parts: Sequence[SharedPart], *, piece: int = PIECE) -> Ring:
    """Deal ``parts``, in the order given, to the ranks by even shares of bytes as they are stored.

    Cuts fall where a chunk begins as long as shares stay about even, so that hardly any chunk is read twice.
    """
    queue = deque(_Run.of(part) for whole in parts for part in _within_rows(whole))
    rest = sum(run.nbytes for run in queue)
    share = rest // len(ranks)
    piece = max(min(piece, share // 4), min(piece, _LEAST_PIECE))
    segments = []
    for left in range(len(ranks), 0, -1):
        taken = _take(queue, -(-rest // left), share // 8) if left > 1 else list(queue)
        rest -= sum(run.nbytes for run in taken)
        segments.append(tuple(_batches(deque(taken), piece)))
    return Ring(tuple(ranks), tuple(segments))


@dataclass(frozen=True)
class _Run:
    """Rows ``[begin, end)`` of a part, along its first axis of more than one index."""

    part: SharedPart
    axis: int
    begin: int
    end: int
    row_nbytes: int

    @classmethod
    def of(cls, part: SharedPart) -> _Run:
        axis = next((axis for axis, length in enumerate(part.box.lengths) if length > 1), -1)
        rows = part.box.lengths[axis] if axis >= 0 else 1
        return cls(part, axis, 0, rows, part.box.numel // rows * part.itemsize)

    @property
    def nbytes(self) -> int:
        return (self.end - self.begin) * self.row_nbytes

    @property
    def slab(self) -> Slab:
        box, axis = self.part.box, self.axis
        if axis >= 0:
            offsets, lengths = [*box.offsets], [*box.lengths]
            offsets[axis] += self.begin
            lengths[axis] = self.end - self.begin
            box = Box(tuple(offsets), tuple(lengths))
        return Slab(self.part.row, box, box.numel * self.part.memory_itemsize)

    def cut(self, nbytes: int, slack: int) -> int:
        """The row, both ends among them, at which about ``nbytes`` come before it. Where no row within ``slack`` bytes
        of that begins a chunk, the one that is nearest."""
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
        """Rows ``first + n * step`` begin where a chunk does; step 0 where none does."""
        part = self.part
        if self.axis < 0:
            return 0, 0
        stride = row_major_strides(part.stored.lengths)[self.axis] * part.itemsize
        begin, _ = span(part.box, part.stored, part.itemsize)
        common = gcd(stride, part.chunk_size)
        if begin % common:
            return 0, 0
        step = part.chunk_size // common
        return -(begin // common) * pow(stride // common, -1, step) % step, step


def _within_rows(part: SharedPart) -> Iterator[SharedPart]:
    """Rows too long to be dealt out become parts of their own."""
    if _Run.of(part).row_nbytes <= _LONGEST_ROW:
        yield part
        return
    for box in slabs(part.box, part.box, part.itemsize, _LONGEST_ROW, 0):
        yield replace(part, box=box)


def _take(queue: deque[_Run], nbytes: int, slack: int) -> list[_Run]:
    """Remove about ``nbytes`` from the front of the queue; at least something where there is something."""
    taken: list[_Run] = []
    while queue and nbytes > 0:
        run = queue.popleft()
        row = run.cut(nbytes, slack) if run.nbytes > nbytes else run.end
        if row == run.begin and not taken:
            row = run.end
        if row > run.begin:
            taken.append(replace(run, end=row))
        if row < run.end:
            queue.appendleft(replace(run, begin=row))
            break
        nbytes -= run.nbytes
    return taken


def _batches(queue: deque[_Run], piece: int) -> Iterator[Batch]:
    wanted = _BATCH_PIECES * piece
    while queue:
        # A part of no rows that begin a chunk is read in one go rather than a chunk twice at every cut.
        runs = _take(queue, wanted, 7 * wanted)
        yield Batch(tuple(run.slab for run in runs), tuple(_pieces(runs, piece)))


def _pieces(runs: Sequence[_Run], piece: int) -> Iterator[Piece]:
    filled: list[Slab] = []
    nbytes = 0
    for run in runs:
        whole, itemsize = run.slab, run.part.memory_itemsize
        for box in slabs(whole.box, whole.box, itemsize, piece, 0):
            slab = Slab(whole.row, box, box.numel * itemsize)
            if filled and nbytes + slab.nbytes > piece:
                yield tuple(filled)
                filled, nbytes = [], 0
            filled.append(slab)
            nbytes += slab.nbytes
    if filled:
        yield tuple(filled)
