"""Fill the pieces of whole tensors with their fragments: received ones, and this rank's own."""

from __future__ import annotations

import numpy as np
import torch

from ...control.base import Streams
from ...planners import GatherShare
from ...tensors.geometry import decompose, row_major_strides
from ..tensor_bytes import CARRIERS, byte_view
from .fragments import Fragments

CHANNEL = "merge"
"""Name of the stream between each pair of ranks that carries fragments."""

# If a peer contributes parts shorter than this to a piece, they are received together and then distributed.
_MIN_PART_BYTES = 256 << 10


class PieceFill:
    """Assembles the pieces of one rank. For one thread; raises what ``streams`` raise.

    ``pieces`` are the numbers of the pieces, ascending. ``scratch`` (flat uint8, one piece long) holds bytes that
    cannot be received in place.
    """

    def __init__(self, share: GatherShare, rank: int, fragments: Fragments, streams: Streams) -> None:
        self._share, self._rank, self._fragments, self._streams = share, rank, fragments, streams
        slices = share.incoming()
        nbytes = slices.stop - slices.start
        fresh = np.append(True, (slices.piece[1:] != slices.piece[:-1]) | (slices.peer[1:] != slices.peer[:-1]))
        begins = np.flatnonzero(fresh[: len(slices)])
        ends = np.append(begins[1:], len(slices))[: len(begins)]
        self.pieces, first = np.unique(slices.piece[begins], return_index=True)
        columns = (slices.peer, slices.fragment, slices.start, slices.stop, slices.at)
        self._peer, self._fragment, self._start, self._stop, self._at = (column.tolist() for column in columns)
        if len(begins):
            total, scattered = np.add.reduceat(nbytes, begins), np.logical_or.reduceat(slices.at < 0, begins)
        else:
            total, scattered = nbytes, slices.at < 0
        others = slices.peer[begins] != rank
        several = (ends - begins > 1) & (total < _MIN_PART_BYTES * (ends - begins))
        self.needs_scratch = bool((scattered | (others & several)).any())
        """Whether ``fill`` uses its ``scratch``."""
        self._groups = list(
            zip(begins.tolist(), ends.tolist(), total.tolist(), (scattered | several).tolist(), strict=True)
        )
        self._first_group = [*first.tolist(), len(begins)]
        self._item, self._row = share.boxes.tensor.tolist(), share.row.tolist()
        self._places, self._sizes = share.item_places().tolist(), share.items.itemsize().tolist()

    def fill(self, number: int, out: torch.Tensor, scratch: torch.Tensor) -> None:
        """Fill ``out`` (flat uint8, one piece long) with piece ``pieces[number]``. Waits for the other ranks' bytes."""
        piece = int(self.pieces[number])
        for low, high, total, at_once in self._groups[self._first_group[number] : self._first_group[number + 1]]:
            if self._peer[low] == self._rank:
                for row in range(low, high):
                    self._copy_own(row, piece, out, scratch)
            elif at_once:
                self._receive(self._peer[low], scratch[:total])
                self._distribute(low, high, piece, out, scratch)
            else:
                for row in range(low, high):
                    begin = self._at[row]
                    self._receive(self._peer[row], out[begin : begin + self._stop[row] - self._start[row]])

    def _copy_own(self, row: int, piece: int, out: torch.Tensor, scratch: torch.Tensor) -> None:
        shard, start, stop = self._row[self._fragment[row]], self._start[row], self._stop[row]
        if self._at[row] >= 0:
            self._fragments.copy(shard, start, stop, out[self._at[row] : self._at[row] + stop - start])
        else:
            part = scratch[: stop - start]
            self._fragments.copy(shard, start, stop, part)
            self._scatter(part, row, piece, out)
        self._fragments.release(shard, start, stop)

    def _distribute(self, low: int, high: int, piece: int, out: torch.Tensor, scratch: torch.Tensor) -> None:
        begin = 0
        for row in range(low, high):
            part = scratch[begin : begin + self._stop[row] - self._start[row]]
            if self._at[row] >= 0:
                out[self._at[row] : self._at[row] + len(part)].copy_(part)
            else:
                self._scatter(part, row, piece, out)
            begin += len(part)

    def _receive(self, peer: int, into: torch.Tensor) -> None:
        self._streams.receive(peer, CHANNEL, byte_view(into))

    def _scatter(self, part: torch.Tensor, row: int, piece: int, out: torch.Tensor) -> None:
        """Copy consecutive bytes of a box to their places in the piece, which is row-major.

        Consecutive elements of a box form a few boxes, and each of these is a strided view of the piece.
        """
        fragment = self._fragment[row]
        item = self._item[fragment]
        size = self._sizes[item]
        box, strides = self._share.boxes.box_of(fragment), row_major_strides(self._share.items.shape_of(item))
        source, target = part.view(CARRIERS[size]), out.view(CARRIERS[size])
        # The position of the item's first element, which may be before this piece.
        origin = target.storage_offset() + (self._places[item] - piece * self._share.piece_size) // size
        done = 0
        for inner in decompose(self._start[row] // size, len(source), box.lengths):
            first = sum((a + b) * stride for a, b, stride in zip(box.offsets, inner.offsets, strides, strict=True))
            view = torch.as_strided(target, inner.lengths, strides, origin + first)
            view.copy_(source[done : done + inner.numel].view(inner.lengths))
            done += inner.numel
