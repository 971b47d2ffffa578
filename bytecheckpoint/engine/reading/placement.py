"""Put the bytes of a stored shard in their places in memory, as they are or box by box."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ...tensors.dtypes import DTYPES
from ...tensors.geometry import Box, decompose
from ...tensors.metadata import BasicMeta
from ...tensors.shards import torch_dtype
from ..tensor_bytes import as_bytes, box_view, copy_elements
from .bounce import BounceBuffer


class DeviceCopyIn:
    """The device copies of one read.

    Create it on the caller's thread: the copies wait for the kernels that this thread has already queued, which may
    still use the tensors. ``copy`` may then run on any thread.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(device))
            self._streams[device] = stream

    def covers(self, out: torch.Tensor) -> bool:
        """Return whether ``out`` is on one of its devices."""
        return out.device in self._streams

    def copy(self, out: torch.Tensor, source: torch.Tensor, buffer: BounceBuffer) -> None:
        """Start ``out[...] = source``. The elements of ``source`` are in ``buffer``, which waits for the copy."""
        buffer.pinning.try_pin(out.device)
        stream = self._streams[out.device]
        with torch.cuda.stream(stream):
            if source.is_contiguous() and not (out.is_contiguous() and out.dtype == source.dtype):
                # Copy the bytes to the device first: it casts and rearranges faster than the host.
                landed = torch.empty(source.shape, dtype=source.dtype, device=out.device)
                copy_elements(landed, source, non_blocking=True)
                source = landed
            copy_elements(out, source, non_blocking=True)
        event: Any = stream.record_event()
        buffer.transfers.append(event.synchronize)


_DTYPES = [*DTYPES.values()]


class ReadPart(NamedTuple):
    """A request to read ``box`` (global coordinates) of the manifest's shard ``row`` into ``out``, of the same shape.

    ``out`` may have another dtype (the values are cast), be on any device, and be non-contiguous.
    """

    row: int
    box: Box
    out: torch.Tensor


class MemoryDestination:
    """Copies bytes ``[begin, end)`` of a file to ``out``, whose memory holds them unchanged. Thread-safe.

    ``device`` copies to the memory of a device.
    """

    __slots__ = ("_device", "_out", "begin", "end")

    def __init__(self, begin: int, end: int, out: torch.Tensor, device: DeviceCopyIn | None = None) -> None:
        self.begin, self.end = begin, end
        self._out, self._device = as_bytes(out), device

    def put(self, buffer: BounceBuffer, origin: int, low: int, high: int) -> None:
        """Copy the place's part of bytes ``[low, high)`` of the file; ``buffer`` starts at byte ``origin``."""
        first, last = max(low, self.begin), min(high, self.end)
        if first >= last:
            return
        if self._device is None:
            buffer.copy_out(first - origin, last - first, self._out.data_ptr() + first - self.begin)
        else:
            out = self._out[first - self.begin : last - self.begin]
            self._device.copy(out, buffer.tensor[first - origin : last - origin], buffer)


class BoxDestination:
    """Copies the elements of ``part.box`` to ``part.out``, which may be any memory. Thread-safe.

    ``stored`` is the box of the shard, whose row-major elements start at byte ``begin`` of the file.
    """

    __slots__ = ("_device", "_dtype", "_part", "_stored", "begin")

    def __init__(
        self, begin: int, stored: Box, meta: BasicMeta, part: ReadPart, device: DeviceCopyIn | None = None
    ) -> None:
        self.begin = begin
        self._device = device if device is not None and device.covers(part.out) else None
        self._stored, self._part = stored, part
        self._dtype = torch_dtype(meta)

    def put(self, buffer: BounceBuffer, origin: int, low: int, high: int) -> None:
        """Do as ``MemoryDestination.put``. ``low`` and ``high`` are boundaries of elements, or of the shard."""
        size = self._dtype.itemsize
        at = low - origin
        data = buffer.tensor[at : at + high - low]
        if (buffer.tensor.storage_offset() + at) % size:
            # The shard is not aligned to its element size. (A device reads pageable memory before the call returns, so
            # this copy may be freed then.)
            data = data.clone()
        elements = data if self._dtype == torch.uint8 else data.view(self._dtype)
        done = 0
        for local in decompose((low - self.begin) // size, (high - low) // size, self._stored.lengths):
            box = local.shift(self._stored.offsets)
            common = box.intersect(self._part.box)
            if common is not None:
                source = elements[done : done + box.numel].view(box.lengths)
                out, source = box_view(self._part.out, common, self._part.box), box_view(source, common, box)
                if self._device is None:
                    copy_elements(out, source)
                else:
                    self._device.copy(out, source, buffer)
            done += box.numel


Destination = MemoryDestination | BoxDestination


def hold_as_stored(outs: Sequence[torch.Tensor], codes: Sequence[int]) -> list[bool]:
    """Return whether the memory of each tensor holds elements of the dtype with this code exactly as a file does."""
    dtypes = {code: torch_dtype(BasicMeta(_DTYPES[code], ())) for code in {*codes}}
    plain = torch.Tensor
    facts = zip(
        outs, codes, *(map(fact, outs) for fact in (plain.is_contiguous, plain.is_conj, plain.is_neg)), strict=True
    )
    return [
        is_contiguous and out.dtype == dtypes[code] and not (is_conj or is_neg)
        for out, code, is_contiguous, is_conj, is_neg in facts
    ]
