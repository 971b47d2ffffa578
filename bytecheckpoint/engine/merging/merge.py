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

from ...control.base import Operation, Streams
from ...control.single import NoStreams
from ...errors import ControlError
from ...format.safetensors import HeaderEntry, build_header
from ...planners import FragmentSlices, GatherShare, LocalPlan
from ...storage_backends.base import StorageBackend
from ...telemetry.trace import Timings
from ...tensors.tables import Int64
from ..blocks import Block
from ..files import FileImage, FileLayout
from ..staging.arena import Arena
from ..tensor_bytes import byte_view
from ..writing import FileSequence, WrittenFile
from .fragments import Fragments
from .piece_fill import CHANNEL, PieceFill

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
            metas = [(items.fqn_of(row), items.meta_of(row)) for row in rows.tolist()]
            head = build_header([HeaderEntry(fqn, m.dtype, m.shape, m.nbytes) for fqn, m in metas], metadata)
            sizes = nbytes[rows]
            files.append(FileLayout(section, [], head, (np.cumsum(sizes) - sizes).tolist(), sizes.tolist()))
        outgoing, incoming = share.outgoing(plan), share.incoming()
        own = np.flatnonzero(share.row[incoming.fragment] >= 0)
        piece = np.concatenate((outgoing.piece, incoming.piece[own]))
        rows = np.concatenate((share.sent[outgoing.fragment], share.row[incoming.fragment[own]]))
        staged = list(dict.fromkeys(rows[np.argsort(piece, kind="stable")].tolist()))
        return cls(share, outgoing, files, staged, int(plan.shards.nbytes(plan.tensors)[sorted(staged)].sum()))


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
