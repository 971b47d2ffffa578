"""A sender's work: cast or quantize each box once, hash it, and write it to every worker that does not have it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import msgpack
import torch

from ...engine.blocks import Block, page_round
from ...errors import StateError
from ...planners.extents import runs_of
from ...runtime.threads import Threads
from ...tensors.dtypes import find_dtype
from ...tensors.geometry import Box
from ..layouts.parts import torch_dtype_of
from .layout import ChunkTarget, Write
from .quantizer import Quantizer
from .transports.base import THREADS, Digests, OutgoingChunk, Transport
from .transports.cuda_ipc import synchronize

_CHECK_S = 0.5
_BATCH_BYTES = 64 << 20  # fetched at once; a checkpoint reads a batch in one request

SENT, UNCHANGED, KEPT = range(3)
"""The fate of a chunk, in the order of ``WorkerReport``: sent; the worker copies it from the served version; the arena
already holds it."""


class _Making(NamedTuple):
    """A write, the elements of its box, the digests that each of its places has already, and that of finite values."""

    write: Write
    tensor: torch.Tensor
    known: Sequence[Sequence[Any]]
    finite: int | None


class SenderResult(NamedTuple):
    """What one sender did: the digests of its chunks, and the fate of each of their places."""

    digests: list[int]
    fates: bytes


@dataclass(frozen=True)
class ChunkFormat:
    """How chunks are made.

    Attributes:
        device: The device on which they are made.
        digests: Their digest function.
        finite: Whether their values must be finite.
        run_bytes: How many bytes are made at once.
        found_finite: The digest with which each write's values are known to be finite.
    """

    device: torch.device
    digests: Digests
    finite: bool
    run_bytes: int
    found_finite: Sequence[int] = ()


def pack_writes(writes: Sequence[Write]) -> bytes:
    packed: bytes = msgpack.packb([(write.name, *write.box, write.dtype.name, write.places) for write in writes])
    return packed


def unpack_writes(data: bytes) -> list[Write]:
    return [
        Write(name, Box(offsets, lengths), find_dtype(dtype), tuple(ChunkTarget(*place) for place in places))
        for name, offsets, lengths, dtype, places in msgpack.unpackb(data, use_list=False)
    ]


def check_finite(boxes: Iterable[tuple[str, Box, torch.Tensor]]) -> None:
    """Raise ``StateError`` for a tensor with a NaN or an infinity; each is the box of the tensor of that name."""
    floating = [one for one in boxes if one[2].is_floating_point() and one[2].numel()]
    # The host waits once for each device. Only a sum or a maximum that is no proof is looked at more closely.
    for device in {tensor.device for _, _, tensor in floating}:
        there = [one for one in floating if one[2].device == device]
        is_proven = torch.stack([_is_surely_finite(tensor) for _, _, tensor in there]).tolist()
        for (name, box, tensor), proven in zip(there, is_proven, strict=True):
            wide = tensor.float() if tensor.element_size() == 1 else tensor
            count = 0 if proven else tensor.numel() - int(wide.isfinite().sum())
            if count:
                raise StateError(
                    f"{name} {box}: {count:,} of {tensor.numel():,} values are NaN or infinite, in the engine's dtype; "
                    "no engine serves them. Find out why, or use check_finite=False"
                )


def _is_surely_finite(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.element_size() == 1:
        # Torch computes nothing with 8 bits. The largest exponents of e5m2, and one pattern of e4m3fn, are no numbers.
        bits = tensor.view(torch.uint8).bitwise_and(0x7F)
        return bits.max() < (0x7C if tensor.dtype == torch.float8_e5m2 else 0x7F)
    return tensor.sum().isfinite()  # finite only if all values are; the sum of finite ones may overflow, though


def write_all(
    writes: Sequence[Write],
    quantizer: Quantizer,
    transports: Mapping[int, Transport],
    known: Sequence[Sequence[Any]],
    chunk_format: ChunkFormat,
    check: Callable[[], None],
    on_written: Callable[[int], None],
) -> SenderResult:
    """Make a sender's writes, and finish all transports.

    Args:
        writes: The writes, in order.
        quantizer: Fetches their elements, and quantizes those that engines request quantized.
        transports: The transport to each target.
        known: For each place, the digests that the arena and the served version have there (None where unknown).
        chunk_format: Where and how chunks are made.
        check: Called now and then; raises when the push is over.
        on_written: Called with the bytes of finished writes.
    """
    digests: list[int] = []
    fates = bytearray()
    sizes = [write.room for write in writes]
    longest = min(sum(sizes), max(chunk_format.run_bytes, *sizes)) if sizes else 0
    writer = _Writer(transports, longest, quantizer, chunk_format)
    at, finite = 0, iter(chunk_format.found_finite)
    with Threads(THREADS, thread_name_prefix="bcp-push-write") as threads:
        for batch in runs_of(writes, attrgetter("room"), max(_BATCH_BYTES, THREADS * chunk_format.run_bytes)):
            check()
            tensors = quantizer.fetch(batch)
            synchronize(tensors)  # the threads below use other streams than this one may
            making = []
            for write, tensor in zip(batch, tensors, strict=True):
                making.append(_Making(write, tensor, known[at : at + len(write.places)], next(finite, None)))
                at += len(write.places)
            runs = list(runs_of(making, attrgetter("write.room"), chunk_format.run_bytes))
            writing = [threads.submit(writer.write, run) for run in runs]
            left = dict(zip(writing, runs, strict=True))
            try:
                while left:
                    # A write may wait for room that an engine makes only when all senders write.
                    done = wait(left, _CHECK_S, FIRST_COMPLETED).done
                    if not done:
                        check()
                    for one in done:
                        one.result()
                        on_written(sum(made.write.nbytes_of_places for made in left.pop(one)))
            except BaseException:
                for transport in transports.values():
                    transport.interrupt()  # other threads may be waiting
                raise
            for one in writing:
                found, kinds = one.result()
                digests += found
                fates += kinds
    for transport in dict.fromkeys(transports.values()):
        transport.finish()
    return SenderResult(digests, bytes(fates))


class _Writer:
    """Makes and delivers one run at a time in each thread."""

    def __init__(
        self, transports: Mapping[int, Transport], longest: int, quantizer: Quantizer, chunk_format: ChunkFormat
    ) -> None:
        self._transports, self._quantizer, self._format = transports, quantizer, chunk_format
        self._scratch_bytes = max(longest, 1)
        self._local = threading.local()

    def write(self, run: Sequence[_Making]) -> tuple[list[int], bytes]:
        """Make, check and deliver a run; return its digests and fates."""
        made = self._make(run)
        digests = self._format.digests(made)
        if self._format.finite:
            check_finite(
                [
                    # Where values stay as they are, the device that holds them checks them.
                    (write.name, write.box, tensor if tensor.dtype == dtype else data.view(dtype))
                    for (write, tensor, _, finite), data, digest in zip(run, made, digests, strict=True)
                    if digest != finite
                    for dtype in [torch_dtype_of(write.dtype)]
                ]
            )
        fates = bytearray()
        ready: dict[Transport, list[OutgoingChunk]] = {}
        for (write, _, known, _), data, digest in zip(run, made, digests, strict=True):
            places: dict[Transport, list[ChunkTarget]] = {}
            for place, (in_arena, in_served) in zip(write.places, known, strict=True):
                if in_arena == digest:
                    fates.append(KEPT)
                elif in_served == digest:
                    fates.append(UNCHANGED)
                else:
                    fates.append(SENT)
                    places.setdefault(self._transports[place.target], []).append(place)
            for transport, of_transport in places.items():
                chunk = OutgoingChunk(of_transport, data, digest)
                if transport.has_room(of_transport):
                    ready.setdefault(transport, []).append(chunk)
                else:
                    _deliver(ready)  # workers may need what is before this chunk in order to make room
                    transport.write([chunk])
        _deliver(ready)
        return digests, bytes(fates)

    def _make(self, run: Sequence[_Making]) -> list[torch.Tensor]:
        made: list[torch.Tensor] = []
        used = 0
        for write, tensor, *_ in run:
            data = self._quantizer.unchanged_bytes(tensor, write, self._format.device)
            if data is None:
                data = self._scratch(tensor)[used : used + write.nbytes]
                used += write.room
                self._quantizer.fill(data.view(torch_dtype_of(write.dtype)).view(write.box.lengths), tensor, write)
            made.append(data)
        return made

    def _scratch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this thread's memory for a run with ``tensor``. A device copies into host memory that is registered
        with CUDA."""
        if not hasattr(self._local, "scratch"):
            if self._format.device.type == "cpu":
                self._local.block = Block(page_round(self._scratch_bytes))
                self._local.scratch = self._local.block.tensor
            else:
                self._local.scratch = torch.empty(self._scratch_bytes, dtype=torch.uint8, device=self._format.device)
        found: torch.Tensor = self._local.scratch
        if tensor.is_cuda and not found.is_cuda:
            self._local.block.pinning.try_pin(tensor.device)
        return found


def _deliver(ready: dict[Transport, list[OutgoingChunk]]) -> None:
    for transport, chunks in ready.items():
        transport.write(chunks)
    ready.clear()
