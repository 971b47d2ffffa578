"""Block quantization to 8 bits, in the format of the checkpoints of DeepSeek V3 and Qwen 3.

The last two dimensions of a tensor are divided into blocks, from the first element on; the last ones may be smaller. A
value is its float8_e4m3fn number times the scale of its block, which is the block's maximum divided by 448. The result
is bit for bit what vLLM's ``per_block_cast_to_fp8`` computes from the entire tensor in one process.

Blocks are addressed by a grid: one element for each block, after the tensor's leading dimensions.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence

import torch

from ...engine.blocks import Block, page_round
from ...engine.tensor_bytes import copy_elements
from ...tensors.dtypes import DTYPES, DType
from ...tensors.geometry import Box
from ...tensors.metadata import BasicMeta
from ...tensors.shards import basic_meta
from ..layouts.recording import Copy
from .messages import check_faults

QUANTIZED = DTYPES["float8_e4m3fn"]
SCALE = DTYPES["float32"]

_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_LEAST = 1e-4  # the lower bound of a block's maximum, so that a block of zeros has a nonzero scale

Blocks = tuple[int, int]
"""The rows and columns of a block."""


def grid_of(shape: Sequence[int], blocks: Blocks) -> tuple[int, ...]:
    """Return the shape of the tensor of scales."""
    rows, columns = shape[-2:]
    return (*shape[:-2], -(-rows // blocks[0]), -(-columns // blocks[1]))


def blocks_of(box: Box, blocks: Blocks) -> Box:
    """Return the grid box of the blocks that intersect ``box``."""
    offsets, stops = list(box.offsets), list(box.stops)
    for d, size in zip((-2, -1), blocks, strict=True):
        offsets[d], stops[d] = offsets[d] // size, -(-stops[d] // size)
    return _box(offsets, stops)


def elements_of(grid: Box, shape: Sequence[int], blocks: Blocks) -> Box:
    """Return the box of all elements of the blocks at ``grid``."""
    offsets, stops = list(grid.offsets), list(grid.stops)
    for d, size in zip((-2, -1), blocks, strict=True):
        offsets[d], stops[d] = offsets[d] * size, min(stops[d] * size, shape[d])
    return _box(offsets, stops)


def cut_blocks(box: Box, blocks: Blocks, limit: int) -> Iterator[Box]:
    """Cut ``box`` into runs of complete block rows of up to ``limit`` elements, at least one row each."""
    begin, stop = box.offsets[-2], box.stops[-2]
    at_once = max(limit // max(box.lengths[-1], 1) // blocks[0], 1) * blocks[0]
    while begin < stop:
        end = min(begin // blocks[0] * blocks[0] + at_once, stop)
        offsets = (*box.offsets[:-2], begin, box.offsets[-1])
        yield Box.unchecked(offsets, (*box.lengths[:-2], end - begin, box.lengths[-1]))
        begin = end


class Scratch(threading.local):
    """Memory that each thread reuses: the first touch of a page costs more than the computation in it."""

    _block: Block | None = None

    def take(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, source: torch.device | None = None
    ) -> torch.Tensor:
        """Return an uninitialized tensor, which is valid until the next call in this thread. Host memory is registered
        with CUDA, if that is the ``source`` from which it is filled."""
        if device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if self._block is None or self._block.nbytes < nbytes:
            self._block = Block(page_round(nbytes))
        if source is not None and source.type == "cuda":
            self._block.pinning.try_pin(source)
        return self._block.tensor[:nbytes].view(dtype).view(shape)


def maxima_of(tensor: torch.Tensor, box: Box, blocks: Blocks, scratch: Scratch) -> torch.Tensor:
    """Return the largest absolute value in each block of ``tensor``, the elements of ``box``.

    The result is float32 on the CPU, in the shape of ``blocks_of(box)``. A block with a NaN has the maximum NaN.
    """
    grid = blocks_of(box, blocks)
    found = torch.zeros(grid.lengths, dtype=torch.float32)
    skipped = box.offsets[-1] % blocks[1]
    width = grid.lengths[-1] * blocks[1]
    for number, rows in enumerate(_rows(box, blocks)):
        part = tensor[rows]
        largest = torch.abs(part, out=scratch.take(part.shape, part.dtype, part.device)).amax(-2).float().cpu()
        padded = torch.nn.functional.pad(largest, (skipped, width - skipped - box.lengths[-1]))
        found[..., number, :] = padded.view(*grid.lengths[:-2], -1, blocks[1]).amax(-1)
    return found


def scales_of(maxima: torch.Tensor) -> torch.Tensor:
    """Return the scales of blocks with these maxima."""
    return maxima.clamp(_LEAST) / _LARGEST


def quantize(
    out: torch.Tensor, tensor: torch.Tensor, box: Box, maxima: torch.Tensor, blocks: Blocks, scratch: Scratch
) -> None:
    """Quantize ``tensor``, the elements of ``box``, into ``out`` (float8_e4m3fn). ``maxima`` are those of the complete
    blocks ``blocks_of(box)``."""
    factors = (1.0 / scales_of(maxima)).repeat_interleave(blocks[1], -1)
    factors = factors.narrow(-1, box.offsets[-1] % blocks[1], box.lengths[-1]).to(tensor.device)
    made = out if tensor.device == out.device else torch.empty(out.shape, dtype=out.dtype, device=tensor.device)
    for number, rows in enumerate(_rows(box, blocks)):
        part = tensor[rows]
        scaled = scratch.take(part.shape, torch.float32, part.device).copy_(part)
        # Rounding may put a block's maximum slightly above 448; the cast makes it 448.
        made[rows].copy_(scaled.mul_(factors[..., number : number + 1, :]))
    if made is not out:
        copy_elements(out, made)


def _rows(box: Box, blocks: Blocks) -> Iterator[tuple[slice, ...]]:
    """Yield the slices of each row of blocks, relative to ``box``."""
    return (rows.relative_to(box).slices() for rows in cut_blocks(box, blocks, 0))


def _box(offsets: Sequence[int], stops: Sequence[int]) -> Box:
    return Box.unchecked(tuple(offsets), tuple(stop - begin for begin, stop in zip(offsets, stops, strict=True)))


def is_narrow(dtype: DType) -> bool:
    return dtype.kind == "float" and dtype.itemsize == 1


def is_wide(dtype: DType) -> bool:
    return dtype.kind == "float" and dtype.itemsize > 1


def check_quantizable(
    blocks: Blocks | None, metas: Mapping[str, BasicMeta], copies: Sequence[Copy], seen: frozenset[str]
) -> list[str]:
    """Return the tensors that must be quantized for a loader that makes these ``copies``.

    Raises ``MismatchError`` for tensors that would be cast to 8 bits and cannot be quantized; ``seen`` are those with
    whose values the loader computes.
    """
    faults: dict[str, str] = {}
    narrowed: dict[str, None] = {}
    for copy in copies:
        meta, held = metas[copy.name], basic_meta(copy.target.dtype, ()).dtype
        if copy.view.numel and is_wide(meta.dtype) and is_narrow(held):
            narrowed[copy.name] = None
            if blocks is None:
                faults[copy.name] = f"{meta} is sent for {held}, and the engine's model has no scales for its blocks"
            elif held != QUANTIZED:
                faults[copy.name] = f"{meta} is sent for {held}, to which bytecheckpoint cannot quantize"
            elif len(meta.shape) < 2:
                faults[copy.name] = f"{meta} is sent for {held}, and has no blocks"
            elif copy.name in seen:
                faults[copy.name] = f"{meta} is sent for {held}, and the engine's loader computes with its values"
    check_faults(
        f"{len(faults)} tensor(s) would be cast to 8 bits without a scale; no weight was changed. Use "
        "tensors in the format of the engine's own checkpoints, with their scales",
        [("dtype", name, text) for name, text in faults.items()],
    )
    return list(narrowed)
