"""The merge stage: every tensor has one owner, which collects its fragments from all ranks and writes it whole.

Each owner's output is divided into pieces, and all pieces of all owners have one global order: by number, then by
owner. Every rank sends in that order from one thread and gathers its own pieces in that order in another. This is free
of deadlocks, however few bytes may be in transit: the owner of the first incomplete piece waits for nothing else, and
every sender has already sent everything before it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Executor, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from ...control.base import NoStreams, Operation, Streams
from ...errors import ControlError
from ...format.safetensors import build_header
from ...planners.gather_share import FragmentSlices, GatherShare
from ...planners.local_plan import LocalPlan
from ...storage_backends.base import StorageBackend
from ...telemetry.trace import Timings
from ...tensors.geometry import decompose, row_major_strides
from ...tensors.tables import Int64
from ..blocks import Block
from ..files import FileImage, FileLayout
from ..staging.arena import Arena
from ..tensor_bytes import CARRIERS, byte_view
from ..writing import FileSequence, WrittenFile
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


MIN_MERGE_BLOCKS = 4
"""Blocks that the stage needs: two for pieces, one for bytes that are rearranged, one for bytes that are sent."""


@dataclass(frozen=True, eq=False)
class MergeWork:
    """One rank's part of the merge stage, the same for every save of a plan.

    ``files`` are the files that this rank puts together, in order. ``staged`` are the rows of its local plan that it
    contributes to its own and to other ranks' files, in the order in which they are needed.
    """

    share: GatherShare
    outgoing: FragmentSlices
    files: list[FileLayout]
    staged: list[int]
    staged_nbytes: int

    @classmethod
    def of(cls, share: GatherShare, plan: LocalPlan, metadata: dict[str, str]) -> MergeWork:
        """Derive the work from ``plan``, which lists this rank's shards. ``metadata`` goes into the files' headers."""
        items = share.items
        nbytes: Int64 = items.numel() * items.itemsize()
        files = []
        for index, section in enumerate(items.sections):
            rows = np.flatnonzero(items.section == index)
            head = build_header([(items.fqn_of(row), items.meta_of(row)) for row in rows.tolist()], metadata)
            sizes = nbytes[rows]
            files.append(FileLayout(section, [], head, (np.cumsum(sizes) - sizes).tolist(), sizes.tolist()))
        outgoing, incoming = share.outgoing(plan), share.incoming()
        own = np.flatnonzero(share.row[incoming.fragment] >= 0)
        piece = np.concatenate((outgoing.piece, incoming.piece[own]))
        rows = np.concatenate((share.sent[outgoing.fragment], share.row[incoming.fragment[own]]))
        staged = list(dict.fromkeys(rows[np.argsort(piece, kind="stable")].tolist()))
        return cls(share, outgoing, files, staged, int(plan.shards.nbytes(plan.table.tensors)[sorted(staged)].sum()))


@dataclass(frozen=True, eq=False)
class MergeResources:
    """Resources of the stage: ``arena`` lends blocks for pieces, ``threads`` has two threads, ``io`` writes.

    ``deadline_s`` bounds the wait for a block, that is, for one piece to be written.
    """

    arena: Arena
    threads: Executor
    io: Executor
    deadline_s: float


def merge(
    op: Operation,
    backend: StorageBackend,
    work: MergeWork,
    images: Sequence[FileImage],
    fragments: Fragments,
    resources: MergeResources,
    chunk_size: int,
    timings: Timings,
) -> list[WrittenFile]:
    """Send the fragments that other ranks gather, gather those of this rank's ``images``, and write these durably.

    Every rank of ``op`` calls it; ``images`` are those of ``work.files``. A failure is reported to the other ranks at
    once, so that none of them waits for this one, and raised when no thread uses memory or streams any more.
    Incomplete files are removed then; removing complete ones is up to the caller.
    """
    others = len(work.outgoing) or bool((work.share.source != op.rank).any())
    stop = threading.Event()
    fragments.begin()
    streams = op.streams() if others else NoStreams()
    job = _Merge(work, op.rank, fragments, streams, resources, timings, stop)
    tasks: list[Future[list[WrittenFile]]] = []
    # Report a failure before waiting for the other thread: it may wait for a rank that waits for this one.
    with _awaited(tasks, stop), op.phase("merge"):
        tasks += [
            resources.threads.submit(job.gather, backend, images, chunk_size),
            resources.threads.submit(job.send),
        ]
        wait(tasks, return_when=FIRST_EXCEPTION)
        return [file for task in tasks if task.done() for file in task.result()]


@contextmanager
def _awaited(tasks: Sequence[Future[list[WrittenFile]]], stop: threading.Event) -> Iterator[None]:
    try:
        yield
    finally:
        stop.set()
        wait(tasks)


@dataclass(frozen=True, eq=False)
class _Merge:
    work: MergeWork
    rank: int
    fragments: Fragments
    streams: Streams
    resources: MergeResources
    timings: Timings
    stop: threading.Event

    def send(self) -> list[WrittenFile]:
        """Send every fragment, piece by piece, in the global order."""
        slices, rows = self.work.outgoing, self.work.share.sent.tolist()
        needs_buffer = self.fragments.needs_buffer and len(slices) > 0
        with self._scratch(self.work.share.piece_size if needs_buffer else 0) as buffer:
            self.timings.point("merge.send")
            columns = (slices.peer, slices.fragment, slices.start, slices.stop)
            for peer, fragment, start, stop in zip(*(column.tolist() for column in columns), strict=True):
                self._check()
                with self.timings.measure("send", stop - start):
                    for part in self.fragments.parts(rows[fragment], start, stop, buffer):
                        self.streams.send(peer, CHANNEL, byte_view(part))
                self.fragments.release(rows[fragment], start, stop)
        return []

    def gather(self, backend: StorageBackend, images: Sequence[FileImage], chunk_size: int) -> list[WrittenFile]:
        """Put the files together piece by piece, while earlier pieces are being written."""
        fill = PieceFill(self.work.share, self.rank, self.fragments, self.streams)
        piece_size = self.work.share.piece_size
        piece = 0
        with (
            self._scratch(piece_size if fill.needs_scratch else 0) as scratch,
            FileSequence(backend, chunk_size, self.resources.io, self.timings, self._point) as files,
        ):
            for image in images:
                file = files.create(image)
                file.write(0, memoryview(image.head))
                for start in range(0, image.data_size, piece_size):
                    nbytes = min(piece_size, image.data_size - start)
                    block = self._block(nbytes)
                    try:
                        with self.timings.measure("gather", nbytes):
                            fill.fill(piece, block.tensor, scratch)
                    except BaseException:
                        self.resources.arena.release(block)
                        raise
                    release = partial(self.resources.arena.release, block)
                    file.write(len(image.head) + start, block.view[:nbytes], release)
                    piece += 1
            return files.finish()

    @contextmanager
    def _scratch(self, nbytes: int) -> Iterator[torch.Tensor]:
        """Lend memory of ``nbytes``, or an empty tensor if that is 0."""
        if not nbytes:
            yield torch.empty(0, dtype=torch.uint8)
            return
        block = self._block(nbytes)
        try:
            yield block.tensor
        finally:
            self.resources.arena.release(block)

    def _block(self, nbytes: int) -> Block:
        self._check()
        block = self.resources.arena.acquire(self.resources.deadline_s)
        block.fault_in(nbytes)
        return block

    def _point(self, name: str) -> None:
        self.timings.point(f"merge.{name}")

    def _check(self) -> None:
        if self.stop.is_set():
            raise ControlError("the merge stage ended because its other thread failed")
