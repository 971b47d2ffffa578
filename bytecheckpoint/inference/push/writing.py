"""A sender's work: cast or quantize each box once, hash it, and write it to every worker that does not have it."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack
import torch

from ...engine.blocks import Block, page_round
from ...errors import StateError
from ...runtime.threads import Threads
from ...tensors.dtypes import find_dtype
from ...tensors.geometry import Box
from .layout import Write
from .quantizer import Quantizer, torch_dtype_of
from .sources import PushSource
from .transports.base import ChunkTarget, Digest, Transport
from .transports.cuda_ipc import synchronize

__all__ = [
    "KEPT",
    "SENT",
    "UNCHANGED",
    "ChunkFormat",
    "Job",
    "SenderResult",
    "check_finite",
    "pack_writes",
    "unpack_writes",
    "write_all",
]

_THREADS = min(4, len(os.sched_getaffinity(0)))
_CHECK_S = 0.5
_BATCH_BYTES = 64 << 20  # fetched at once; a checkpoint reads a batch in one request

SENT, UNCHANGED, KEPT = range(3)
"""The fate of a chunk, in the order of ``WorkerReport``: sent; the worker copies it from the served version; the arena
already holds it."""


@dataclass(frozen=True)
class Job:
    """A ``Write``, and the place of the chunk in each of its targets."""

    write: Write
    places: tuple[ChunkTarget, ...]

    @property
    def nbytes(self) -> int:
        """The total size in all places."""
        return self.write.nbytes * len(self.places)


class SenderResult(NamedTuple):
    """What one sender did: the digests of its chunks, and the fate of each of their places."""

    digests: list[int]
    fates: bytes


@dataclass(frozen=True)
class ChunkFormat:
    """The device on which chunks are made, their digest function, and whether their values must be finite."""

    device: torch.device
    digest: Digest
    finite: bool


def pack_writes(jobs: Sequence[Job]) -> bytes:
    packed: bytes = msgpack.packb(
        [(job.write.name, *job.write.box, job.write.dtype.name, job.write.chunks, job.places) for job in jobs]
    )
    return packed


def unpack_writes(data: bytes) -> list[Job]:
    return [
        Job(
            Write(name, Box(offsets, lengths), find_dtype(dtype), chunks),
            tuple(ChunkTarget(*place) for place in places),
        )
        for name, offsets, lengths, dtype, chunks, places in msgpack.unpackb(data, use_list=False)
    ]


def check_finite(name: str, box: Box, tensor: torch.Tensor) -> None:
    """Raise ``StateError`` when the tensor, which is ``box`` of the tensor of this name, has a NaN or an infinity."""
    if not tensor.is_floating_point() or not tensor.numel():
        return
    if tensor.element_size() == 1:
        # Torch computes nothing with 8 bits. The largest exponents of e5m2, and one pattern of e4m3fn, are no numbers.
        bits = tensor.view(torch.uint8).bitwise_and(0x7F)
        if int(bits.max()) < (0x7C if tensor.dtype == torch.float8_e5m2 else 0x7F):
            return
        tensor = tensor.float()
    # One fast pass: a sum is finite only if all values are. The sum of finite ones may overflow, though.
    elif math.isfinite(float(tensor.sum())):
        return
    count = int(tensor.numel() - tensor.isfinite().sum())
    if count:
        raise StateError(
            f"{name} {box}: {count:,} of {tensor.numel():,} values are NaN or infinite, as they would be sent; no "
            "engine serves them. Find out why, or push them with check_finite=False"
        )


def write_all(
    source: PushSource,
    jobs: Sequence[Job],
    quantizer: Quantizer,
    transports: Mapping[int, Transport],
    known: Sequence[Sequence[Any]],
    chunk_format: ChunkFormat,
    check: Callable[[], None],
    on_written: Callable[[int], None],
) -> SenderResult:
    """Run a sender's jobs, and finish all transports.

    Args:
        source: The sender's tensors.
        jobs: The writes, in order.
        quantizer: Quantizes the tensors that engines request quantized.
        transports: The transport to each target.
        known: For each place, the digests that the arena and the served version have there (None where unknown).
        chunk_format: Where and how chunks are made.
        check: Called now and then; raises when the push is over.
        on_written: Called with the bytes of each finished job.
    """
    digests: list[int] = []
    fates = bytearray()
    writer = _Writer(transports, max((job.write.nbytes for job in jobs), default=0), quantizer, chunk_format)
    at = 0
    try:
        with Threads(_THREADS, thread_name_prefix="bcp-push-write") as threads:
            for batch in _batches(jobs):
                check()
                writes = [job.write for job in batch]
                fetches = quantizer.fetches(writes)
                fetched = source.fetch([(fetch.name, fetch.box) for fetch in fetches])
                synchronize(fetched)  # the threads below copy on streams of their own
                tensors = quantizer.elements(writes, fetches, fetched, threads)
                held = []
                for job in batch:
                    held.append(known[at : at + len(job.places)])
                    at += len(job.places)
                writing = [threads.submit(writer.write, *one) for one in zip(batch, tensors, held, strict=True)]
                try:
                    for job, one in zip(batch, writing, strict=True):
                        # A write may wait for room that an engine makes only when all senders write.
                        while not wait((one,), _CHECK_S).done:
                            check()
                        digest, kinds = one.result()
                        digests.append(digest)
                        fates += kinds
                        on_written(job.nbytes)
                except BaseException:
                    writer.stop()
                    raise
    except BaseException:
        writer.raise_failure()  # the other threads were only interrupted; all have ended
        raise
    for transport in dict.fromkeys(transports.values()):
        transport.finish()
    return SenderResult(digests, bytes(fates))


class _Writer:
    """Runs one job at a time in each thread. The first failure interrupts the other threads, which may be waiting."""

    def __init__(
        self, transports: Mapping[int, Transport], longest: int, quantizer: Quantizer, chunk_format: ChunkFormat
    ) -> None:
        self._transports, self._longest, self._quantizer = transports, longest, quantizer
        self._format = chunk_format
        self._local = threading.local()
        self._failing = threading.Lock()
        self._failure: BaseException | None = None
        self._is_stopped = False

    def raise_failure(self) -> None:
        """Raise the first failure, once."""
        failure, self._failure = self._failure, None
        try:
            if failure is not None:
                raise failure from failure.__cause__
        finally:
            del failure  # breaks the reference cycle with this frame, which would keep the writer's memory

    def stop(self) -> None:
        """Make writes that wait raise. What they raise is only a consequence."""
        with self._failing:
            self._is_stopped = True
        self._interrupt()

    def _interrupt(self) -> None:
        for transport in self._transports.values():
            transport.interrupt()

    def write(self, job: Job, tensor: torch.Tensor, known: Sequence[Sequence[Any]]) -> tuple[int, bytes]:
        try:
            return self._write(job, tensor, known)
        except BaseException as error:
            with self._failing:
                if not self._is_stopped:
                    self._failure = self._failure or error
            self._interrupt()
            raise

    def _write(self, job: Job, tensor: torch.Tensor, known: Sequence[Sequence[Any]]) -> tuple[int, bytes]:
        data = self._make(tensor, job.write)
        if self._format.finite:
            check_finite(job.write.name, job.write.box, data.view(torch_dtype_of(job.write)))
        digest = self._format.digest(data)
        fates = bytearray()
        places: dict[Transport, list[ChunkTarget]] = {}
        for place, (in_arena, in_served) in zip(job.places, known, strict=True):
            if in_arena == digest:
                fates.append(KEPT)
            elif in_served == digest:
                fates.append(UNCHANGED)
            else:
                fates.append(SENT)
                places.setdefault(self._transports[place.target], []).append(place)
        for transport, of_transport in places.items():
            transport.write(of_transport, data, digest)
        return digest, bytes(fates)

    def _make(self, tensor: torch.Tensor, write: Write) -> torch.Tensor:
        unchanged = self._quantizer.unchanged_bytes(tensor, write, self._format.device)
        if unchanged is not None:
            return unchanged
        out = self._scratch(tensor)[: write.nbytes]
        self._quantizer.fill(out.view(torch_dtype_of(write)).view(write.box.lengths), tensor, write)
        return out

    def _scratch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this thread's memory for a chunk of ``tensor``. A device copies into host memory that is registered
        with CUDA."""
        if not hasattr(self._local, "scratch"):
            if self._format.device.type == "cpu":
                self._local.block = Block(page_round(max(self._longest, 1)))
                self._local.scratch = self._local.block.tensor
            else:
                self._local.scratch = torch.empty(self._longest, dtype=torch.uint8, device=self._format.device)
        found: torch.Tensor = self._local.scratch
        if tensor.is_cuda and not found.is_cuda:
            self._local.block.pinning.try_pin(tensor.device)
        return found


def _batches(jobs: Sequence[Job]) -> Iterator[list[Job]]:
    batch: list[Job] = []
    nbytes = 0
    for job in jobs:
        if batch and nbytes + job.write.nbytes > _BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(job)
        nbytes += job.write.nbytes
    if batch:
        yield batch
