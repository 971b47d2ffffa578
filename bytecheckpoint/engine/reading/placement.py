"""Where the bytes of a stored shard go in memory: as they lie, or box by box."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from ...dtypes import DTYPES
from ...geometry import Box, decompose
from ...metadata import BasicMeta
from ...shards import torch_dtype
from ..tensor_bytes import copy_elements
from .bounce import Bounce
from .device_copy_in import DeviceCopyIn

__all__ = ["BoxPlace", "MemoryPlace", "Place", "ReadPart", "is_plain_memory"]

_DTYPES = [*DTYPES.values()]


@dataclass(frozen=True, eq=False)
class ReadPart:
    """Read ``box`` (global coordinates) of stored shard ``row`` of the manifest into ``out``, which has its shape.

    ``out`` may be of another dtype (the values are cast), on any device, and non-contiguous.
    """

    row: int
    box: Box
    out: torch.Tensor


class MemoryPlace:
    """Bytes ``[begin, end)`` of a file go as they are into the memory of ``out``, which is plain. Thread-safe."""

    __slots__ = ("_out", "begin", "end")

    def __init__(self, begin: int, end: int, out: torch.Tensor) -> None:
        self.begin, self.end = begin, end
        self._out = out

    def put(self, bounce: Bounce, origin: int, low: int, high: int) -> None:
        """Copy what is its own of bytes ``[low, high)`` of the file; ``bounce`` begins with byte ``origin``."""
        first, last = max(low, self.begin), min(high, self.end)
        if first < last:
            bounce.copy_out(first - origin, last - first, self._out.data_ptr() + first - self.begin)


class BoxPlace:
    """The elements of ``part.box`` go into ``part.out``, whatever memory that is. Thread-safe.

    ``stored`` is the box of the shard, whose row-major elements begin at byte ``begin`` of the file.
    """

    __slots__ = ("_device", "_dtype", "_part", "_stored", "begin")

    def __init__(
        self, begin: int, stored: Box, meta: BasicMeta, part: ReadPart, device: DeviceCopyIn | None = None
    ) -> None:
        self.begin = begin
        self._device = device if device is not None and device.takes(part.out) else None
        self._stored, self._part = stored, part
        self._dtype = torch_dtype(meta)

    def put(self, bounce: Bounce, origin: int, low: int, high: int) -> None:
        """As ``MemoryPlace.put``. Both ends of the bytes are ends of elements, or of the shard."""
        size = self._dtype.itemsize
        at = low - origin
        data = bounce.tensor[at : at + high - low]
        if (bounce.tensor.storage_offset() + at) % size:
            # A shard that does not begin at a multiple of its element size. (From memory that nobody has pinned, a
            # device takes the bytes before the call returns, so that this may go then.)
            data = data.clone()
        elements = data if self._dtype == torch.uint8 else data.view(self._dtype)
        done = 0
        for local in decompose((low - self.begin) // size, (high - low) // size, self._stored.lengths):
            box = local.shift(self._stored.offsets)
            common = box.intersect(self._part.box)
            if common is not None:
                source = elements[done : done + box.numel].view(box.lengths)
                out, source = _cut(self._part.out, common, self._part.box), _cut(source, common, box)
                if self._device is None:
                    copy_elements(out, source)
                else:
                    self._device.copy(out, source, bounce)
            done += box.numel


Place = MemoryPlace | BoxPlace


def _cut(tensor: torch.Tensor, piece: Box, whole: Box) -> torch.Tensor:
    return tensor if piece == whole else tensor[piece.relative_to(whole).slices()]


@cache
def _dtype_of(code: int) -> torch.dtype:
    return torch_dtype(BasicMeta(_DTYPES[code], ()))


def is_plain_memory(out: torch.Tensor, code: int) -> bool:
    """Whether ``out`` is memory of this machine that holds elements of the dtype of this code as a file does."""
    return out.is_cpu and out.is_contiguous() and out.dtype == _dtype_of(code) and not (out.is_conj() or out.is_neg())
