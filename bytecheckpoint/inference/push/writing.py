"""A sender's part: its boxes, cast once, hashed, and put into every arena that wants them and has them not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import torch
import xxhash

from ...dtypes import dtype_named
from ...engine.tensor_bytes import byte_view, copy_elements
from ...geometry import Box
from ...metadata import BasicMeta
from ...shards import torch_dtype
from .planning import Write
from .roads import Road
from .sources import Source

__all__ = ["KEPT", "SENT", "UNCHANGED", "Job", "pack_writes", "unpack_writes", "write_all"]

_BATCH = 64 << 20  # bytes fetched at a time; a checkpoint reads them in one go

SENT, UNCHANGED, KEPT = range(3)
"""What became of a chunk: sent; the worker shall copy it from what it serves; the arena holds it already."""


@dataclass(frozen=True)
class Job:
    """A ``Write`` as its sender gets it: ``places`` are ``(target, offset in its arena)``, and ``known`` for each the
    digests of what the arena holds and what the worker serves there, -1 for unknown."""

    write: Write
    places: tuple[tuple[int, int], ...]


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
            tuple(map(tuple, places)),
        )
        for name, offsets, lengths, dtype, chunks, places in msgpack.unpackb(data)
    ]


def write_all(
    source: Source,
    jobs: Sequence[Job],
    roads: Mapping[int, Road],
    known: Sequence[Sequence[Any]],
    check: Callable[[], None],
) -> tuple[list[int], bytes]:
    """Digests of the jobs' chunks, and what became of each of their places, in order.

    ``known``: for each place ``(digest in the arena, digest in what is served)``, None where unknown. ``check`` is
    called now and then, and raises where the push is over.
    """
    digests: list[int] = []
    became = bytearray()
    scratch = torch.empty(max((job.write.nbytes for job in jobs), default=0), dtype=torch.uint8)
    at = 0
    for batch in _batches(jobs):
        check()
        tensors = source.fetch([(job.write.name, job.write.box) for job in batch])
        for job, tensor in zip(batch, tensors, strict=True):
            data = _cast(tensor, job.write, scratch)
            digest = xxhash.xxh3_64_intdigest(byte_view(data))
            digests.append(digest)
            for target, offset in job.places:
                in_arena, in_served = known[at]
                at += 1
                if in_arena == digest:
                    became.append(KEPT)
                elif in_served == digest:
                    became.append(UNCHANGED)
                else:
                    roads[target].write(offset, data, digest)
                    became.append(SENT)
    for road in roads.values():
        road.finish()
    return digests, bytes(became)


def _cast(tensor: torch.Tensor, write: Write, scratch: torch.Tensor) -> torch.Tensor:
    out = scratch[: write.nbytes]
    dtype = torch_dtype(BasicMeta(write.dtype, ()))
    copy_elements(out.view(dtype).view(write.box.lengths), tensor)
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
