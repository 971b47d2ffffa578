"""A sender's part: its boxes, cast or quantised once, hashed, put into every arena that wants them and has them not."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgpack
import torch

from ...dtypes import dtype_named
from ...geometry import Box
from .device_memory import settle
from .digesting import Digest, xxh3_of
from .planning import Write
from .quantizer import Quantizer, torch_dtype_of
from .roads import Place, Road
from .sources import Source

__all__ = [
    "IN_HOST_MEMORY",
    "KEPT",
    "SENT",
    "THREADS",
    "UNCHANGED",
    "Job",
    "Making",
    "pack_writes",
    "unpack_writes",
    "write_all",
]

THREADS = min(4, len(os.sched_getaffinity(0)))
_BATCH = 64 << 20  # bytes fetched at a time; a checkpoint reads them in one go

SENT, UNCHANGED, KEPT = range(3)
"""What became of a chunk: sent; the worker shall copy it from what it serves; the arena holds it already."""


@dataclass(frozen=True)
class Job:
    """A ``Write`` as its sender gets it, and where the chunk goes in each of its targets."""

    write: Write
    places: tuple[Place, ...]

    @property
    def nbytes(self) -> int:
        """In all places."""
        return self.write.nbytes * len(self.places)


@dataclass(frozen=True)
class Making:
    """On which device chunks are made, and what their digests are."""

    device: torch.device
    digest: Digest


IN_HOST_MEMORY = Making(torch.device("cpu"), xxh3_of)


def pack_writes(jobs: Sequence[Job]) -> bytes:
    rows = [
        [
            job.write.name,
            job.write.box.offsets,
            job.write.box.lengths,
            job.write.dtype.name,
            job.write.chunks,
            job.places,
        ]
        for job in jobs
    ]
    packed: bytes = msgpack.packb(rows)
    return packed


def unpack_writes(data: bytes) -> list[Job]:
    return [
        Job(
            Write(name, Box(tuple(offsets), tuple(lengths)), dtype_named(dtype), tuple(map(tuple, chunks))),
            tuple(Place(*place) for place in places),
        )
        for name, offsets, lengths, dtype, chunks, places in msgpack.unpackb(data)
    ]


def write_all(
    source: Source,
    jobs: Sequence[Job],
    quantizer: Quantizer,
    roads: Mapping[int, Road],
    known: Sequence[Sequence[Any]],
    check: Callable[[], None],
    making: Making = IN_HOST_MEMORY,
    wrote: Callable[[int], None] = lambda nbytes: None,
) -> tuple[list[int], bytes]:
    """Digests of the jobs' chunks, and what became of each of their places, in order.

    ``known``: for each place ``(digest in the arena, digest in what is served)``, None where unknown. ``check`` is
    called now and then, and raises where the push is over; ``wrote`` with the bytes of each job that is done.
    """
    digests: list[int] = []
    became = bytearray()
    writer = _Writer(roads, max((job.write.nbytes for job in jobs), default=0), quantizer, making)
    at = 0
    try:
        with ThreadPoolExecutor(THREADS, thread_name_prefix="bcp-push-write") as threads:
            for batch in _batches(jobs):
                check()
                writes = [job.write for job in batch]
                fetches = quantizer.fetches(writes)
                fetched = source.fetch([(fetch.name, fetch.box) for fetch in fetches])
                settle(fetched)  # other threads copy from streams of their own
                tensors = quantizer.ready(writes, fetches, fetched, threads)
                held = []
                for job in batch:
                    held.append(known[at : at + len(job.places)])
                    at += len(job.places)
                for job, (digest, kinds) in zip(batch, threads.map(writer.write, batch, tensors, held), strict=True):
                    digests.append(digest)
                    became += kinds
                    wrote(job.nbytes)
    except BaseException:
        writer.raise_failure()  # other threads were only interrupted; all have ended
        raise
    for road in roads.values():
        road.finish()
    return digests, bytes(became)


class _Writer:
    """Does one job at a time in each thread. The first that fails interrupts the others, which may be waiting for what
    will not come any more."""

    def __init__(self, roads: Mapping[int, Road], longest: int, quantizer: Quantizer, making: Making) -> None:
        self._roads, self._longest, self._quantizer, self._making = roads, longest, quantizer, making
        self._own = threading.local()
        self._failing = threading.Lock()
        self._failure: BaseException | None = None

    def raise_failure(self) -> None:
        """The first one, once."""
        failure, self._failure = self._failure, None
        try:
            if failure is not None:
                raise failure from failure.__cause__
        finally:
            del failure  # it has this frame, which must not have it: nobody would give up what the writer holds

    def write(self, job: Job, tensor: torch.Tensor, known: Sequence[Sequence[Any]]) -> tuple[int, bytes]:
        try:
            return self._write(job, tensor, known)
        except BaseException as error:
            with self._failing:
                self._failure = self._failure or error
            for road in self._roads.values():
                road.interrupt()
            raise

    def _write(self, job: Job, tensor: torch.Tensor, known: Sequence[Sequence[Any]]) -> tuple[int, bytes]:
        data = self._cast(tensor, job.write)
        digest = self._making.digest(data)
        became = bytearray()
        for place, (in_arena, in_served) in zip(job.places, known, strict=True):
            if in_arena == digest:
                became.append(KEPT)
            elif in_served == digest:
                became.append(UNCHANGED)
            else:
                self._roads[place.target].write(place, data, digest)
                became.append(SENT)
        return digest, bytes(became)

    def _cast(self, tensor: torch.Tensor, write: Write) -> torch.Tensor:
        as_it_is = self._quantizer.as_they_are(tensor, write, self._making.device)
        if as_it_is is not None:
            return as_it_is
        if not hasattr(self._own, "scratch"):
            self._own.scratch = torch.empty(self._longest, dtype=torch.uint8, device=self._making.device)
        out: torch.Tensor = self._own.scratch[: write.nbytes]
        self._quantizer.fill(out.view(torch_dtype_of(write)).view(write.box.lengths), tensor, write)
        return out


def _batches(jobs: Sequence[Job]) -> Iterator[list[Job]]:
    batch: list[Job] = []
    nbytes = 0
    for job in jobs:
        if batch and nbytes + job.write.nbytes > _BATCH:
            yield batch
            batch, nbytes = [], 0
        batch.append(job)
        nbytes += job.write.nbytes
    if batch:
        yield batch
