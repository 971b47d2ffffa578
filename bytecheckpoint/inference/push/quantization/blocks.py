"""Quantising to 8 bits with a scale for each block, as the checkpoints of DeepSeek V3 and Qwen 3 have it.

The last two dimensions of a tensor are cut into blocks from its beginning on; those at its ends may be smaller. A value
is its float8_e4m3fn times the scale of its block, which is the block's maximum by 448. What comes out is, bit for bit,
what vLLM's ``per_block_cast_to_fp8`` makes of the whole tensor on one process.

Blocks are counted in a *grid*: one place for each block, behind the tensor's other dimensions. Boxes of the grid are
boxes like others.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import torch

from ...dtypes import DTYPES
from ...engine.tensor_bytes import copy_elements
from ...geometry import Box

__all__ = [
    "QUANTIZED",
    "SCALE",
    "Blocks",
    "Scratch",
    "blocks_of",
    "cut_blocks",
    "elements_of",
    "grid_of",
    "maxima_of",
    "partial_blocks",
    "quantize",
    "scale_name",
    "scales_of",
    "whole_blocks",
    "without",
]

QUANTIZED = DTYPES["float8_e4m3fn"]
SCALE = DTYPES["float32"]

_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_LEAST = 1e-4  # a block's maximum counts as this at least, so that zeros have a scale to divide by

Blocks = tuple[int, int]
"""Rows and columns of a block."""


def scale_name(name: str) -> str:
    """Of the tensor of a tensor's scales: ``X.weight_scale_inv`` for ``X.weight``."""
    return f"{name}_scale_inv"


def grid_of(shape: Sequence[int], blocks: Blocks) -> tuple[int, ...]:
    """The shape of the tensor of scales."""
    rows, columns = shape[-2:]
    return (*shape[:-2], -(-rows // blocks[0]), -(-columns // blocks[1]))


def blocks_of(box: Box, blocks: Blocks) -> Box:
    """Where in the grid the blocks are that ``box`` has an element of."""
    offsets, stops = list(box.offsets), list(box.stops)
    for d, size in zip((-2, -1), blocks, strict=True):
        offsets[d], stops[d] = offsets[d] // size, -(-stops[d] // size)
    return _box(offsets, stops)


def whole_blocks(box: Box, shape: Sequence[int], blocks: Blocks) -> Box | None:
    """Where the blocks are of which ``box`` has all elements; None where there are none."""
    offsets, stops = list(box.offsets), list(box.stops)
    for d, size in zip((-2, -1), blocks, strict=True):
        offsets[d] = -(-offsets[d] // size)
        stops[d] = -(-stops[d] // size) if stops[d] == shape[d] else stops[d] // size
        if stops[d] <= offsets[d]:
            return None
    return _box(offsets, stops)


def partial_blocks(box: Box, shape: Sequence[int], blocks: Blocks) -> list[Box]:
    """Where the blocks are of which ``box`` has some elements and not all."""
    touched, whole = blocks_of(box, blocks), whole_blocks(box, shape, blocks)
    if not box.numel:
        return []
    return [touched] if whole is None else without(touched, whole)


def elements_of(grid: Box, shape: Sequence[int], blocks: Blocks) -> Box:
    """All elements of the blocks that lie there in the grid."""
    offsets, stops = list(grid.offsets), list(grid.stops)
    for d, size in zip((-2, -1), blocks, strict=True):
        offsets[d], stops[d] = offsets[d] * size, min(stops[d] * size, shape[d])
    return _box(offsets, stops)


def without(box: Box, hole: Box) -> list[Box]:
    """``box`` without ``hole``, which lies inside it, as disjoint boxes."""
    rest: list[Box] = []
    offsets, stops = list(box.offsets), list(box.stops)
    for d in range(box.ndim):
        for begin, stop in ((offsets[d], hole.offsets[d]), (hole.stops[d], stops[d])):
            if stop > begin:
                rest.append(_box((*offsets[:d], begin, *offsets[d + 1 :]), (*stops[:d], stop, *stops[d + 1 :])))
        offsets[d], stops[d] = hole.offsets[d], hole.stops[d]
    return rest


def cut_blocks(box: Box, blocks: Blocks, limit: int) -> Iterator[Box]:
    """``box`` in rows of whole blocks, so many at a time as have ``limit`` elements, at least one. Who quantises one
    needs elements of few blocks that are not in it."""
    begin, stop = box.offsets[-2], box.stops[-2]
    at_once = max(limit // max(box.lengths[-1], 1) // blocks[0], 1) * blocks[0]
    while begin < stop:
        end = min(begin // blocks[0] * blocks[0] + at_once, stop)
        offsets = (*box.offsets[:-2], begin, box.offsets[-1])
        yield Box.proved(offsets, (*box.lengths[:-2], end - begin, box.lengths[-1]))
        begin = end


class Scratch(threading.local):
    """Memory that each thread uses again and again: a page that is new costs more than what is computed in it."""

    _memory = torch.empty(0, dtype=torch.uint8)

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor of any values, until the next call."""
        if device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if self._memory.numel() < nbytes:
            self._memory = torch.empty(nbytes, dtype=torch.uint8)
        return self._memory[:nbytes].view(dtype).view(shape)


def maxima_of(tensor: torch.Tensor, box: Box, blocks: Blocks, scratch: Scratch) -> torch.Tensor:
    """The largest absolute value of each block's elements in ``box``, whose elements ``tensor`` has, as float32 on the
    CPU, laid out as ``blocks_of(box)``. NaN where there is one."""
    grid = blocks_of(box, blocks)
    found = torch.zeros(grid.lengths, dtype=torch.float32)
    skipped = box.offsets[-1] % blocks[1]
    width = grid.lengths[-1] * blocks[1]
    for number, rows in enumerate(_rows(box, blocks)):
        part = tensor[..., rows, :]
        largest = torch.abs(part, out=scratch.take(part.shape, part.dtype, part.device)).amax(-2).float().cpu()
        padded = torch.nn.functional.pad(largest, (skipped, width - skipped - box.lengths[-1]))
        found[..., number, :] = padded.view(*grid.lengths[:-2], -1, blocks[1]).amax(-1)
    return found


def scales_of(maxima: torch.Tensor) -> torch.Tensor:
    """The scales of blocks with these maxima."""
    return maxima.clamp(_LEAST) / _LARGEST


def quantize(
    out: torch.Tensor, tensor: torch.Tensor, box: Box, maxima: torch.Tensor, blocks: Blocks, scratch: Scratch
) -> None:
    """``out``, float8_e4m3fn, becomes ``box``, whose elements ``tensor`` has. ``maxima`` are those of all
    elements of the blocks ``blocks_of(box)``."""
    factors = (1.0 / scales_of(maxima)).repeat_interleave(blocks[1], -1)
    factors = factors.narrow(-1, box.offsets[-1] % blocks[1], box.lengths[-1]).to(tensor.device)
    made = out if tensor.device == out.device else torch.empty(out.shape, dtype=out.dtype, device=tensor.device)
    for number, rows in enumerate(_rows(box, blocks)):
        part = tensor[..., rows, :]
        scaled = scratch.take(part.shape, torch.float32, part.device).copy_(part)
        # A value that is its block's maximum may come out a rounding above 448, and is 448 after the cast.
        made[..., rows, :].copy_(scaled.mul_(factors[..., number : number + 1, :]))
    if made is not out:
        copy_elements(out, made)


def _rows(box: Box, blocks: Blocks) -> Iterator[slice]:
    """The rows of ``box`` that are of one row of blocks, counted from its beginning."""
    first, stop = box.offsets[-2], box.stops[-2]
    begin = first
    while begin < stop:
        end = min((begin // blocks[0] + 1) * blocks[0], stop)
        yield slice(begin - first, end - first)
        begin = end


def _box(offsets: Sequence[int], stops: Sequence[int]) -> Box:
    return Box.proved(tuple(offsets), tuple(stop - begin for begin, stop in zip(offsets, stops, strict=True)))
