"""The merge stage: fragments travel to one owner for each tensor, which writes it whole.

Every owner's output is cut into pieces, and there is one order of all pieces of all owners: by number, then by owner.
Every rank sends in that order from one thread and gathers its own pieces in that order in another. So whatever bounds
the bytes that are on their way, the first piece that is not complete can be completed: its owner waits for nothing
else, and every sender has sent all that comes before it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Executor, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from ...control.base import Operation
from ...control.streams import NoStreams, Streams
from ...errors import ControlError
from ...planners import Cuts, GatherShare, LocalPlan
from ...safetensors_file import HeaderEntry, build_header
from ...storage_backends.base import StorageBackend
from ...tables import Int64
from ...trace import Timings
from ..file_layout import FileLayout
from ..files import FileImage
from ..staging.arena import Arena, Block
from ..tensor_bytes import byte_view
from ..writing.image_write import ImageWrite, WrittenFile
from .fragments import Fragments
from .piece_fill import CHANNEL, PieceFill

__all__ = ["LEAST_RING", "MergeWork", "Merging", "merge"]

LEAST_RING = 4
"""Blocks that the stage needs: two for pieces, one for bytes to be put in their places, one for bytes to be sent."""

_FILES_AT_ONCE = 2  # while one is made durable, the next one keeps the device busy


@dataclass(frozen=True, eq=False)
class MergeWork:
    """What one rank has to do in every save of one plan. ``files`` are those it puts together, in order; ``staged`` are
    the rows of its local plan that it contributes to these and to others', in the order in which they are needed."""

    share: GatherShare
    outgoing: Cuts
    files: list[FileLayout]
    staged: list[int]
    staged_nbytes: int

    @classmethod
    def of(cls, share: GatherShare, plan: LocalPlan, metadata: dict[str, str]) -> MergeWork:
        """``plan`` is what this rank holds; ``metadata`` goes into the headers of the files."""
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
class Merging:
    """The means of the stage: ``ring`` lends blocks for pieces under way, ``threads`` has two threads, ``io`` those
    that write. ``deadline_s`` bounds the wait for one piece to be written."""

    ring: Arena
    threads: Executor
    io: Executor
    deadline_s: float


def merge(
    op: Operation,
    backend: StorageBackend,
    work: MergeWork,
    images: Sequence[FileImage],
    fragments: Fragments,
    means: Merging,
    chunk_size: int,
    timings: Timings,
) -> list[WrittenFile]:
    """Send what others gather, gather what this rank owns, and make ``images`` (those of ``work.files``) durable.

    Every rank of ``op`` calls it, whatever it has to do. A failure is reported at once, so that nobody waits for this
    rank; it is raised when no thread uses anything any more. Nothing of files that are not complete remains then;
    those completed before are the caller's to remove.
    """
    rank = op.rank
    others = len(work.outgoing) or bool((work.share.source != rank).any())
    stop = threading.Event()
    fragments.begin()
    job = _Merge(
        work,
        rank,
        backend,
        images,
        fragments,
        op.streams() if others else NoStreams(),
        means,
        chunk_size,
        timings,
        stop,
    )
    tasks: list[Future[list[WrittenFile]]] = []
    # A failure is reported before the other thread is awaited, which may wait for a rank that waits for this one.
    with _ended(tasks, stop), op.phase("merge"):
        tasks += [means.threads.submit(job.gather), means.threads.submit(job.send)]
        wait(tasks, return_when=FIRST_EXCEPTION)
        return [file for task in tasks if task.done() for file in task.result()]


@contextmanager
def _ended(tasks: Sequence[Future[list[WrittenFile]]], stop: threading.Event) -> Iterator[None]:
    try:
        yield
    finally:
        stop.set()
        wait(tasks)


class _Merge:
    def __init__(
        self,
        work: MergeWork,
        rank: int,
        backend: StorageBackend,
        images: Sequence[FileImage],
        fragments: Fragments,
        streams: Streams,
        means: Merging,
        chunk_size: int,
        timings: Timings,
        stop: threading.Event,
    ) -> None:
        self._work, self._rank, self._backend, self._images = work, rank, backend, images
        self._fragments, self._streams, self._means = fragments, streams, means
        self._chunk_size, self._timings, self._stop = chunk_size, timings, stop

    def send(self) -> list[WrittenFile]:
        """Send every fragment, cut by cut, in the one order."""
        cuts, rows = self._work.outgoing, self._work.share.sent.tolist()
        buffer = self._block(self._work.share.piece_size) if self._fragments.needs_buffer and len(cuts) else None
        memory = torch.empty(0, dtype=torch.uint8) if buffer is None else buffer.tensor
        try:
            self._timings.point("merge.send")
            columns = (cuts.peer, cuts.fragment, cuts.start, cuts.stop)
            for peer, fragment, start, stop in zip(*(column.tolist() for column in columns)):
                self._check()
                with self._timings.working("send", stop - start):
                    for part in self._fragments.parts(rows[fragment], start, stop, memory):
                        self._streams.send(peer, CHANNEL, byte_view(part))
                self._fragments.release(rows[fragment], start, stop)
        finally:
            self._give_back(buffer)
        return []

    def gather(self) -> list[WrittenFile]:
        """Put the files together piece by piece, while pieces before are hashed and written."""
        fill = PieceFill(self._work.share, self._rank, self._fragments, self._streams)
        piece_size = self._work.share.piece_size
        scratch = self._block(piece_size) if fill.needs_scratch else None
        memory = torch.empty(0, dtype=torch.uint8) if scratch is None else scratch.tensor
        outputs: list[_Output] = []
        written: list[WrittenFile] = []
        at = 0
        try:
            for image in self._images:
                self._timings.point("merge.file")
                outputs.append(_Output(self._backend, image, self._chunk_size, self._timings, self._means.io))
                for start in range(0, image.data_size, piece_size):
                    nbytes = min(piece_size, image.data_size - start)
                    block = self._block(nbytes)
                    try:
                        with self._timings.working("gather", nbytes):
                            fill.fill(at, block.tensor, memory)
                    except BaseException:
                        self._give_back(block)
                        raise
                    outputs[-1].write(start, block, nbytes, self._means.ring)
                    at += 1
                if len(outputs) >= _FILES_AT_ONCE:
                    written.append(outputs[0].finish())
                    outputs.pop(0)
            while outputs:
                written.append(outputs[0].finish())
                outputs.pop(0)
        except BaseException:
            for output in outputs:
                output.abandon()
            raise
        finally:
            self._give_back(scratch)
        return written

    def _block(self, nbytes: int) -> Block:
        self._check()
        block = self._means.ring.acquire(self._means.deadline_s)
        block.fault_in(nbytes)
        return block

    def _give_back(self, block: Block | None) -> None:
        if block is not None:
            self._means.ring.give_back(block)

    def _check(self) -> None:
        if self._stop.is_set():
            raise ControlError("the merge stage ended because its other thread failed")


class _Output:
    """One file being put together. Its pieces are hashed as they come, and written by other threads."""

    def __init__(
        self, backend: StorageBackend, image: FileImage, chunk_size: int, timings: Timings, io: Executor
    ) -> None:
        self._image, self._io, self._timings = image, io, timings
        self._write = ImageWrite(backend, image, chunk_size, timings)
        self._tasks: list[Future[None]] = []
        try:
            head = memoryview(image.head)
            self._write.hash_piece(0, head)
            self._tasks.append(io.submit(self._write.write_piece, 0, head))
        except BaseException:
            self._write.abandon()
            raise

    def write(self, start: int, block: Block, nbytes: int, ring: Arena) -> None:
        """Write a piece of the data area, and give its block back."""
        try:
            self._raise_failure()
            self._write.hash_piece(len(self._image.head) + start, block.view[:nbytes])
            self._tasks.append(self._io.submit(self._write_piece, start, block, nbytes, ring))
        except BaseException:
            ring.give_back(block)
            raise

    def finish(self) -> WrittenFile:
        """Wait until all is written, and make it durable."""
        wait(self._tasks, return_when=FIRST_EXCEPTION)
        self._raise_failure()
        self._timings.point("merge.complete")
        return self._write.finish()

    def abandon(self) -> None:
        """Leave nothing behind. Returns when no block is in use any more."""
        # What was submitted runs all the same, if only to give its block back.
        wait(self._tasks)
        self._write.abandon()

    def _write_piece(self, start: int, block: Block, nbytes: int, ring: Arena) -> None:
        try:
            self._write.write_piece(len(self._image.head) + start, block.view[:nbytes])
        finally:
            ring.give_back(block)

    def _raise_failure(self) -> None:
        for task in self._tasks:
            if task.done():
                task.result()
