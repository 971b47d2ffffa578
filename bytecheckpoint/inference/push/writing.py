"""A sender's work: cast or quantize each box once, hash it, and write it to every worker that does not have it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from operator import attrgetter
from typing import Any, NamedTuple

import msgpack
import torch

from ...errors import StateError
from ...planners.extents import runs_of
from ...runtime.threads import Threads
from ...tensors.dtypes import find_dtype
from ...tensors.geometry import Box
from ..layouts.parts import torch_dtype_of
from .block_quantization import Scratch
from .layout import ChunkTarget, Write
from .messages import pack
from .quantizer import Quantizer
from .transports.base import THREADS, Digests, OutgoingChunk, Transport, word_digests, xxh3_digests
from .transports.cuda_ipc import compute_device, synchronize

_CHECK_S = 0.5
# Made, hashed and delivered at once. In host memory, a chunk that the cache still holds is hashed and copied faster; a
# device is waited for once.
_RUN_BYTES, _DEVICE_RUN_BYTES = 4 << 20, 32 << 20
_BATCH_BYTES = 64 << 20  # fetched at once; a checkpoint reads a batch in one request

SENT, UNCHANGED, KEPT = range(3)
"""The fate of a chunk, in the order of ``WorkerReport``: sent; the worker copies it from the served version; the arena
already holds it."""


def fate_of(digest: int, in_arena: int | None, in_served: int | None) -> int:
    """Return the fate of a chunk, given the digests that its place has in the arena and in the served version."""
    return KEPT if in_arena == digest else UNCHANGED if in_served == digest else SENT


class _Making(NamedTuple):
    """A write, the elements of its box, the digests that each of its places has already, and that of finite values."""

    write: Write
    tensor: torch.Tensor
    known: Sequence[Sequence[Any]]
    finite: int | None


def pack_writes(writes: Sequence[Write]) -> bytes:
    return pack([(write.name, *write.box, write.dtype.name, write.places) for write in writes])


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


class ChunkWriter:
    """Makes a sender's writes: in runs, one at a time in each thread.

    Args:
        transports: The transport to each target.
        quantizer: Fetches elements, and quantizes those that engines request quantized.
        on_device: Whether chunks are made and hashed on the device that the transports write from.
        finite: The digest with which each write's values are known to be finite; others are checked.
            None for no checks.
    """

    def __init__(
        self,
        transports: Mapping[int, Transport],
        quantizer: Quantizer,
        *,
        on_device: bool,
        finite: Sequence[int] | None,
    ) -> None:
        self._transports, self._quantizer, self._finite = transports, quantizer, finite
        self._device = compute_device() if on_device else torch.device("cpu")
        self._digests: Digests = word_digests if on_device else xxh3_digests
        self._run_bytes = _DEVICE_RUN_BYTES if on_device else _RUN_BYTES
        self._scratch = Scratch()

    def run(
        self,
        writes: Sequence[Write],
        known: Sequence[Sequence[Any]],
        check: Callable[[], None],
        on_written: Callable[[int], None],
    ) -> list[int]:
        """Make the writes in order, and finish all transports. Returns the digests of the chunks.

        Args:
            writes: The writes.
            known: For each place, the digests that the arena and the served version have there (None where unknown).
            check: Called now and then; raises when the push is over.
            on_written: Called with the bytes of finished writes.
        """
        digests: list[int] = []
        at, finite = 0, iter(self._finite or ())
        with Threads(THREADS, thread_name_prefix="bcp-push-write") as threads:
            for batch in runs_of(writes, attrgetter("room"), max(_BATCH_BYTES, THREADS * self._run_bytes)):
                check()
                tensors = self._quantizer.fetch(batch)
                synchronize(tensors)  # the threads below use other streams than this one may
                making = []
                for write, tensor in zip(batch, tensors, strict=True):
                    making.append(_Making(write, tensor, known[at : at + len(write.places)], next(finite, None)))
                    at += len(write.places)
                runs = list(runs_of(making, attrgetter("write.room"), self._run_bytes))
                writing = [threads.submit(self._write, run) for run in runs]
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
                    for transport in self._transports.values():
                        transport.interrupt()  # other threads may be waiting
                    raise
                for one in writing:
                    digests += one.result()
        for transport in dict.fromkeys(self._transports.values()):
            transport.finish()
        return digests

    def _write(self, run: Sequence[_Making]) -> list[int]:
        """Make, check and deliver a run; return its digests."""
        made = self._make(run)
        digests = self._digests(made)
        if self._finite is not None:
            check_finite(
                [
                    # Where values stay as they are, the device that holds them checks them.
                    (write.name, write.box, tensor if tensor.dtype == dtype else data.view(dtype))
                    for (write, tensor, _, finite), data, digest in zip(run, made, digests, strict=True)
                    if digest != finite
                    for dtype in [torch_dtype_of(write.dtype)]
                ]
            )
        ready: dict[Transport, list[OutgoingChunk]] = {}
        for (write, _, known, _), data, digest in zip(run, made, digests, strict=True):
            places: dict[Transport, list[ChunkTarget]] = {}
            for place, known_there in zip(write.places, known, strict=True):
                if fate_of(digest, *known_there) == SENT:
                    places.setdefault(self._transports[place.target], []).append(place)
            for transport, of_transport in places.items():
                chunk = OutgoingChunk(of_transport, data, digest)
                if transport.has_room(of_transport):
                    ready.setdefault(transport, []).append(chunk)
                else:
                    _deliver(ready)  # workers may need what is before this chunk in order to make room
                    transport.write([chunk])
        _deliver(ready)
        return digests

    def _make(self, run: Sequence[_Making]) -> list[torch.Tensor]:
        made: list[torch.Tensor] = []
        memory, used = torch.empty(0, dtype=torch.uint8), 0
        for write, tensor, *_ in run:
            data = self._quantizer.unchanged_bytes(tensor, write, self._device)
            if data is None:
                if not used:
                    room = sum(one.write.room for one in run)
                    memory = self._scratch.take([room], torch.uint8, self._device, tensor.device)
                data = memory[used : used + write.nbytes]
                used += write.room
                self._quantizer.fill(data.view(torch_dtype_of(write.dtype)).view(write.box.lengths), tensor, write)
            made.append(data)
        return made


def _deliver(ready: dict[Transport, list[OutgoingChunk]]) -> None:
    for transport, chunks in ready.items():
        transport.write(chunks)
    ready.clear()
