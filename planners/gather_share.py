"""One rank's part of a gather plan: what it sends, what it gathers, and how both sides split it into pieces."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..tensors.tables import BoxTable, Int64, TensorTable
from .dedup import matrices
from .local_plan import LocalPlan, tensor_columns
from .wire import pack, unpack

PIECE_SIZE = 8 << 20
"""Bytes of a file's data that are gathered and written at once."""


@dataclass(eq=False)
class FragmentSlices:
    """Fragments split at the borders of their owner's pieces, in the order in which the bytes travel.

    Attributes:
        piece: The piece of the owner's output to which a slice belongs.
        peer: The receiver of an outgoing slice, or the sender of an incoming one.
        fragment: The fragment that contains the slice.
        start: The first byte of the slice in the fragment, whose elements are in row-major order.
        stop: The byte after its last one.
        at: Its first byte in the piece if it is one run there, else -1.
    """

    piece: Int64
    peer: Int64
    fragment: Int64
    start: Int64
    stop: Int64
    at: Int64

    def __len__(self) -> int:
        return len(self.piece)


@dataclass(eq=False)
class GatherShare:
    """What one rank does so that tensors are stored whole. Every byte of every item is in exactly one box.

    Attributes:
        piece_size: Bytes of a file that are gathered and written at once.
        sent: The shards to send, as rows of ``LocalPlan.shards``.
        to: The receiver of each.
        place: The byte in the receiver's output where the tensor of each begins.
        items: The tensors to write, in the order of files (one per section) and bytes, named as in the file and shaped
            as stored.
        boxes: The parts of the items, in the item's own coordinates; ``tensor`` is the item.
        source: The rank that holds each part.
        row: The part's row in this rank's shards if this rank holds it, else -1.
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
        """Rows of this rank's shards that stay in staging memory until everything is gathered, ascending."""
        return np.union1d(self.sent, self.row[self.row >= 0])

    def item_places(self) -> Int64:
        """Return where each item begins in this rank's output. Every file begins on a new piece.

        Returns:
            The first byte of each item.
        """
        return item_places(self.items.section, _nbytes(self.items), self.piece_size)

    def outgoing(self, plan: LocalPlan) -> FragmentSlices:
        """Return what to send.

        Args:
            plan: This rank's plan.

        Returns:
            The slices in order; ``fragment`` is a row of ``sent``.
        """
        return split_fragments(plan.table.tensors, plan.shards.take(self.sent), self.place, self.to, self.piece_size)

    def incoming(self) -> FragmentSlices:
        """Return what to gather.

        Returns:
            The slices in order; ``fragment`` is a row of ``boxes``.
        """
        return split_fragments(
            self.items, self.boxes, self.item_places()[self.boxes.tensor], self.source, self.piece_size
        )

    def to_bytes(self) -> bytes:
        """Pack for ``from_bytes``.

        Returns:
            Bytes that any machine can unpack.
        """
        columns = (self.sent, self.to, self.place, self.boxes.tensor, self.boxes.offsets, self.boxes.lengths)
        return pack([self.piece_size, tensor_columns(self.items), columns, self.source, self.row + 1])

    @classmethod
    def from_bytes(cls, data: bytes) -> GatherShare:
        """Unpack what the planning rank sent.

        Args:
            data: What ``to_bytes`` has returned.

        Returns:
            This rank's part of the gather plan.
        """
        piece_size, items, (sent, to, place, *boxes), source, row = unpack(data)
        tensors = TensorTable(*items)
        return cls(piece_size, sent, to, place, tensors, BoxTable.from_columns(tensors, *boxes), source, row - 1)


def item_places(file: Int64, nbytes: Int64, piece_size: int) -> Int64:
    """Return where each item begins in its owner's output.

    ``file`` is the file of each item, ascending. Items of a file lie back to back, and every file begins on a new
    piece.
    """
    ends = np.cumsum(nbytes)
    first = np.flatnonzero(np.diff(file, prepend=-1))
    file_begin = (ends - nbytes)[first]
    size = np.diff(np.append(file_begin, ends[-1:]))
    room = -(-size // piece_size) * piece_size
    count = np.diff(np.append(first, len(file)))
    places: Int64 = ends - nbytes + np.repeat(np.cumsum(room) - room - file_begin, count)
    return places


def split_fragments(
    tensors: TensorTable, boxes: BoxTable, place: Int64, peer: Int64, piece_size: int
) -> FragmentSlices:
    """Split every fragment at the borders of the pieces of its owner's output. Empty fragments have no slices.

    ``boxes`` lie in ``tensors``; ``place`` is, by box, the first byte of its tensor in the output. Within a piece, the
    bytes of one peer come in the order of the boxes. The bytes of a box in any piece are one run of the box's own
    memory, because both count its elements in row-major order.
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
    # Only fragments that are strided and lie in several pieces need counting.
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
    return FragmentSlices(*(one[order] for one in columns))


def _ends(tensors: TensorTable, boxes: BoxTable) -> tuple[Int64, Int64]:
    """Return the row-major positions of the first and the last element of each box in its tensor."""
    first, last = np.zeros(len(boxes), np.int64), np.zeros(len(boxes), np.int64)
    for rows, offsets, lengths in matrices(boxes):
        shape = _shapes(tensors, boxes.tensor[rows], offsets.shape[1])
        for axis in range(offsets.shape[1]):
            first[rows] = first[rows] * shape[:, axis] + offsets[:, axis]
            last[rows] = last[rows] * shape[:, axis] + offsets[:, axis] + lengths[:, axis] - 1
    return first, last


def _elements_before(tensors: TensorTable, boxes: BoxTable, rows: Int64, position: Int64) -> Int64:
    """Return how many elements of box ``rows[i]`` precede row-major position ``position[i]`` of its tensor."""
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
