"""One rank's part in making tensors whole: what it sends, what it gathers, and how both sides cut it into pieces."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..dtypes import DTYPES
from ..tables import BoxTable, Int64, TensorTable
from .dedup import matrices
from .local_plan import LocalPlan
from .wire import Fields, column, pack

__all__ = ["LEAST_PIECE", "PIECE_SIZE", "Cuts", "GatherShare", "cut_fragments", "item_places"]

PIECE_SIZE = 8 << 20
"""Bytes of a file's data that are gathered and written as one."""

LEAST_PIECE = 16
"""Piece sizes are multiples of this, so that no element lies in two pieces."""

_KIND = "gather share"
_MAX_PLACE = 2**62
_MAX_NDIM = 64


@dataclass(eq=False)
class Cuts:
    """Fragments cut at the borders of their owner's pieces. Rows come in the order in which bytes travel.

    Bytes ``[start, stop)`` of fragment ``fragment`` (its elements in row-major order) belong into piece ``piece`` of
    the output of the owner, which shares them with ``peer``. ``at`` is where they begin in the piece if they lie there
    as one run, else -1.
    """

    piece: Int64
    peer: Int64
    fragment: Int64
    start: Int64
    stop: Int64
    at: Int64

    def __len__(self) -> int:
        return len(self.piece)

    @property
    def nbytes(self) -> int:
        return int((self.stop - self.start).sum())


@dataclass(eq=False)
class GatherShare:
    """What one rank does so that tensors are stored whole.

    It sends its shards ``sent`` (rows of its ``LocalPlan.shards``) to the ranks ``to``, where each one's tensor begins
    at byte ``place`` of what that rank gathers. It writes ``items``: in the order of files (one a section) and of
    bytes, named as in the file and shaped as stored. Box ``i`` of ``boxes`` is a part of item ``boxes.tensor[i]``, in
    the item's own coordinates; it comes from rank ``source[i]``, and where that is this rank itself it is row
    ``row[i]`` of its shards (else -1). Every byte of every item is in exactly one box.
    """

    piece_size: int
    sent: Int64
    to: Int64
    place: Int64
    items: TensorTable
    boxes: BoxTable
    source: Int64
    row: Int64

    @property
    def staged(self) -> Int64:
        """Rows of this rank's shards that it must hold until all is gathered, ascending."""
        return np.union1d(self.sent, self.row[self.row >= 0])

    @property
    def nbytes(self) -> int:
        """Bytes of all items."""
        return int(_nbytes(self.items).sum())

    def item_places(self) -> Int64:
        """The first byte of each item in what this rank gathers: every file begins on a whole piece."""
        return item_places(self.items.section, _nbytes(self.items), self.piece_size)

    def outgoing(self, plan: LocalPlan) -> Cuts:
        """What to send, in order; ``fragment`` is a row of ``sent``."""
        return cut_fragments(plan.tensors, plan.shards.take(self.sent), self.place, self.to, self.piece_size)

    def incoming(self) -> Cuts:
        """What to gather, in order; ``fragment`` is a row of ``boxes``."""
        return cut_fragments(
            self.items, self.boxes, self.item_places()[self.boxes.tensor], self.source, self.piece_size
        )

    def to_bytes(self) -> bytes:
        """For ``from_bytes``, on any machine."""
        items, boxes = self.items, self.boxes
        return pack(
            _KIND,
            {
                "piece_size": column(np.array([self.piece_size], np.int64)),
                "sent": column(self.sent),
                "to": column(self.to),
                "place": column(self.place),
                "names": items.names,
                "sections": items.sections,
                "section": column(items.section),
                "dtype": column(items.dtype),
                "ndim": column(items.ndim),
                "shape": column(items.shape),
                "item": column(boxes.tensor),
                "offsets": column(boxes.offsets),
                "lengths": column(boxes.lengths),
                "source": column(self.source),
                "row": column(self.row + 1),
            },
        )

    @classmethod
    def from_bytes(cls, data: bytes, plan: LocalPlan, world_size: int) -> GatherShare:
        """What the planning rank sent in answer to ``plan``, whose rows it must speak of.

        Raises ``PlanError`` for bytes that ``to_bytes`` would not have written.
        """
        fields = Fields(_KIND, data)
        piece = fields.within("piece_size", fields.integers("piece_size", 1), LEAST_PIECE, _MAX_PLACE)
        sent = fields.within("sent", fields.integers("sent"), 0, len(plan.shards))
        to = fields.within("to", fields.integers("to", len(sent)), 0, world_size)
        place = fields.within("place", fields.integers("place", len(sent)), 0, _MAX_PLACE)
        names, sections = fields.strings("names"), fields.strings("sections")
        count = len(names)
        section = fields.within("section", fields.integers("section", count), 0, len(sections))
        dtype = fields.within("dtype", fields.integers("dtype", count), 0, len(DTYPES))
        ndim = fields.within("ndim", fields.integers("ndim", count), 0, _MAX_NDIM + 1)
        shape = fields.within("shape", fields.integers("shape", int(ndim.sum())), 0, _MAX_PLACE)
        items = TensorTable(names, sections, section, dtype, ndim, shape)
        item = fields.within("item", fields.integers("item"), 0, count)
        total = int(ndim[item].sum())
        offsets, lengths = (
            fields.within(name, fields.integers(name, total), 0, _MAX_PLACE) for name in ("offsets", "lengths")
        )
        source = fields.within("source", fields.integers("source", len(item)), 0, world_size)
        row = fields.within("row", fields.integers("row", len(item)), 0, len(plan.shards) + 1) - 1
        return cls(
            int(piece[0]), sent, to, place, items, BoxTable.from_columns(items, item, offsets, lengths), source, row
        )


def item_places(file: Int64, nbytes: Int64, piece_size: int) -> Int64:
    """Where each item begins in what its owner gathers: items of one file (its number ascends) back to back, every
    file on a whole piece."""
    ends = np.cumsum(nbytes)
    first = np.flatnonzero(np.diff(file, prepend=-1))
    file_begin = (ends - nbytes)[first]
    size = np.diff(np.append(file_begin, ends[-1:]))
    room = -(-size // piece_size) * piece_size
    count = np.diff(np.append(first, len(file)))
    places: Int64 = ends - nbytes + np.repeat(np.cumsum(room) - room - file_begin, count)
    return places


def cut_fragments(tensors: TensorTable, boxes: BoxTable, place: Int64, peer: Int64, piece_size: int) -> Cuts:
    """Cut every fragment at the borders of the pieces of its owner's output; empty fragments have no cuts.

    ``boxes`` lie in ``tensors``, whose first byte is at ``place`` (by box) of the output. Within a piece the bytes of
    one peer come in the order of the boxes; a box's bytes in any piece are one stretch of its own memory, because
    both count its elements in row-major order.
    """
    itemsize, numel = tensors.itemsize()[boxes.tensor], boxes.numel()
    first, last = _ends(tensors, boxes)
    some = np.flatnonzero(numel > 0)
    piece = (place + first * itemsize)[some] // piece_size
    count = (place + (last + 1) * itemsize - 1)[some] // piece_size - piece + 1
    fragment = np.repeat(some, count)
    piece = np.repeat(piece - (np.cumsum(count) - count), count) + np.arange(len(fragment), dtype=np.int64)
    lowest = (piece * piece_size - place[fragment]) // itemsize[fragment]
    bounds = (lowest, lowest + piece_size // itemsize[fragment])
    straight = (last - first + 1 == numel)[fragment]
    start, stop = (np.clip(bound - first[fragment], 0, numel[fragment]) for bound in bounds)
    # A fragment within one piece is all there; only those that are strided and cut need counting.
    bent = np.flatnonzero(~straight & np.repeat(count > 1, count))
    for column_, bound in ((start, bounds[0]), (stop, bounds[1])):
        column_[bent] = _elements_before(tensors, boxes, fragment[bent], bound[bent])
    whole = np.flatnonzero(~straight & np.repeat(count == 1, count))
    start[whole], stop[whole] = 0, numel[fragment[whole]]
    at = np.where(straight, (first[fragment] + start) * itemsize[fragment] + place[fragment] - piece * piece_size, -1)
    order = np.lexsort((fragment, peer[fragment], piece))
    order = order[stop[order] > start[order]]
    size = itemsize[fragment]
    columns = (piece, peer[fragment], fragment, start * size, stop * size, at)
    return Cuts(*(one[order] for one in columns))


def _ends(tensors: TensorTable, boxes: BoxTable) -> tuple[Int64, Int64]:
    """Row-major positions of the first and the last element of each box in its tensor."""
    first, last = np.zeros(len(boxes), np.int64), np.zeros(len(boxes), np.int64)
    for rows, offsets, lengths in matrices(boxes):
        shape = _shapes(tensors, boxes.tensor[rows], offsets.shape[1])
        for axis in range(offsets.shape[1]):
            first[rows] = first[rows] * shape[:, axis] + offsets[:, axis]
            last[rows] = last[rows] * shape[:, axis] + offsets[:, axis] + lengths[:, axis] - 1
    return first, last


def _elements_before(tensors: TensorTable, boxes: BoxTable, rows: Int64, position: Int64) -> Int64:
    """How many elements of box ``rows[i]`` come before row-major position ``position[i]`` of its tensor."""
    before = np.zeros(len(rows), np.int64)
    for part, offsets, lengths in matrices(boxes.take(rows)):
        ndim = offsets.shape[1]
        shape = _shapes(tensors, boxes.tensor[rows[part]], ndim)
        rest = np.clip(position[part], 0, shape.prod(axis=1))
        found, inside = np.zeros(len(rest), np.int64), np.ones(len(rest), np.bool_)
        for axis in range(ndim):
            index, rest = np.divmod(rest, shape[:, axis + 1 :].prod(axis=1))
            passed = np.clip(index - offsets[:, axis], 0, lengths[:, axis])
            found += np.where(inside, passed * lengths[:, axis + 1 :].prod(axis=1), 0)
            inside &= (index >= offsets[:, axis]) & (index < offsets[:, axis] + lengths[:, axis])
        before[part] = found
    return before


def _shapes(tensors: TensorTable, rows: Int64, ndim: int) -> Int64:
    shapes: Int64 = tensors.shape[tensors.starts[rows][:, None] + np.arange(ndim)]
    return shapes


def _nbytes(items: TensorTable) -> Int64:
    nbytes: Int64 = items.numel() * items.itemsize()
    return nbytes
