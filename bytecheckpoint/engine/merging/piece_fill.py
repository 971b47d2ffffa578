"""Filling the pieces of whole tensors with the fragments they are made of: what arrives, and what this rank has."""

from __future__ import annotations

import numpy as np
import torch

from ...control.streams import Streams
from ...geometry import decompose, row_major_strides
from ...planners import GatherShare
from ..tensor_bytes import byte_view
from .fragments import Fragments

__all__ = ["CHANNEL", "PieceFill"]

CHANNEL = "merge"
"""The stream between each two ranks on which fragments travel."""

# What a peer contributes to a piece in shorter parts than this arrives in one go and is then put in its places.
_SHORT = 256 << 10

_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class PieceFill:
    """Puts together what one rank gathers, piece after piece. For one thread.

    ``pieces`` are the numbers of the pieces, ascending; ``scratch`` (flat uint8, a piece long) is for bytes that
    cannot go straight to where they belong. Raises what ``streams`` raise.
    """

    def __init__(self, share: GatherShare, rank: int, fragments: Fragments, streams: Streams) -> None:
        self._share, self._rank, self._fragments, self._streams = share, rank, fragments, streams
        cuts = share.incoming()
        nbytes = cuts.stop - cuts.start
        fresh = np.append(True, (cuts.piece[1:] != cuts.piece[:-1]) | (cuts.peer[1:] != cuts.peer[:-1]))
        begins = np.flatnonzero(fresh[: len(cuts)])
        ends = np.append(begins[1:], len(cuts))
        self.pieces, first = np.unique(cuts.piece[begins], return_index=True)
        columns = (cuts.peer, cuts.fragment, cuts.start, cuts.stop, cuts.at)
        self._peer, self._fragment, self._start, self._stop, self._at = (column.tolist() for column in columns)
        if len(begins):
            total, scattered = np.add.reduceat(nbytes, begins), np.logical_or.reduceat(cuts.at < 0, begins)
        else:
            total, scattered = nbytes, cuts.at < 0
        others = cuts.peer[begins] != rank
        several = (ends - begins > 1) & (total < _SHORT * (ends - begins))
        self.needs_scratch = bool((scattered | (others & several)).any())
        """Whether ``scratch`` is used at all."""
        self._groups = list(zip(begins.tolist(), ends.tolist(), total.tolist(), (scattered | several).tolist()))
        self._first_group = [*first.tolist(), len(begins)]
        self._item, self._row = share.boxes.tensor.tolist(), share.row.tolist()
        self._places, self._sizes = share.item_places().tolist(), share.items.itemsize().tolist()
        self.bytes_received = 0

    def fill(self, number: int, out: torch.Tensor, scratch: torch.Tensor) -> None:
        """Fill ``out`` (flat uint8, a piece long) with the piece ``pieces[number]``; waits for what is not there."""
        piece = int(self.pieces[number])
        for low, high, total, at_once in self._groups[self._first_group[number] : self._first_group[number + 1]]:
            if self._peer[low] == self._rank:
                for row in range(low, high):
                    self._take_own(row, piece, out, scratch)
            elif at_once:
                self._receive(self._peer[low], scratch[:total])
                self._distribute(low, high, piece, out, scratch)
            else:
                for row in range(low, high):
                    begin = self._at[row]
                    self._receive(self._peer[row], out[begin : begin + self._stop[row] - self._start[row]])

    def _take_own(self, row: int, piece: int, out: torch.Tensor, scratch: torch.Tensor) -> None:
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
        self.bytes_received += len(into)

    def _scatter(self, part: torch.Tensor, row: int, piece: int, out: torch.Tensor) -> None:
        """Put bytes of a box that lie back to back where they belong in the piece, which is row-major.

        Elements that are consecutive in a box are a few boxes again, and each of these is a strided view of the piece.
        """
        fragment = self._fragment[row]
        item = self._item[fragment]
        size = self._sizes[item]
        box, strides = self._share.boxes.box_of(fragment), row_major_strides(self._share.items.shape_of(item))
        source, target = part.view(_CARRIERS[size]), out.view(_CARRIERS[size])
        # Where the item's first element would be: often before this piece.
        origin = target.storage_offset() + (self._places[item] - piece * self._share.piece_size) // size
        done = 0
        for inner in decompose(self._start[row] // size, len(source), box.lengths):
            first = sum((a + b) * stride for a, b, stride in zip(box.offsets, inner.offsets, strides))
            view = torch.as_strided(target, inner.lengths, strides, origin + first)
            view.copy_(source[done : done + inner.numel].view(inner.lengths))
            done += inner.numel
