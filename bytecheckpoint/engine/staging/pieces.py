"""How the images of a save's files map to the arena's blocks, and the copy of one piece.

The ranges of bytes that the images stage are laid out one after another, each as far from the start of a page as in
its file, and this sequence is divided into blocks. A *piece* is the part of one range in one block. Pieces are copied,
hashed, written and released one by one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...errors import StateError
from ...tensors.derived import is_derived
from ...tensors.geometry import decompose
from ..blocks import PAGE, Block
from ..files import FileImage
from ..tensor_bytes import as_bytes, copy_elements, copy_memory, is_plain


@dataclass(frozen=True, eq=False)
class Piece:
    """Bytes ``[start, stop)`` of a file, staged at byte ``offset`` of the block with number ``block``."""

    index: int
    image: FileImage
    start: int
    stop: int
    block: int
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the piece."""
        return self.stop - self.start


def split_images(images: Sequence[FileImage], block_size: int) -> list[Piece]:
    """Divide all images into pieces, in order. Without gaps, each starts on a page, in the file and in memory."""
    pieces: list[Piece] = []
    position = 0
    for image in images:
        for start, end in image.staged_ranges():
            position += (start - position) % PAGE
            while start < end:
                block, offset = divmod(position, block_size)
                stop = min(start + block_size - offset, end)
                pieces.append(Piece(len(pieces), image, start, stop, block, offset))
                position += stop - start
                start = stop
    return pieces


def parts(
    image: FileImage, start: int, stop: int, only: Callable[[torch.Tensor], bool] | None = None
) -> Iterator[tuple[torch.Tensor, int, int, int]]:
    """Yield the parts of the image's tensors that are in bytes ``[start, stop)`` of the file, in order.

    Each item is a tensor, the range of its bytes (first, last), and the position of that range relative to ``start``.
    ``only`` selects tensors. Raises ``StateError`` if a tensor does not have the size that it was described with.
    """
    low, high = start - len(image.head), stop - len(image.head)
    begin = max(bisect_right(image.offsets, low) - 1, 0)
    end = bisect_left(image.offsets, high)
    # This loop runs once for each of many thousand small tensors: attribute look-ups matter.
    for shard, offset, nbytes in zip(
        image.shards[begin:end], image.offsets[begin:end], image.nbytes[begin:end], strict=True
    ):
        first = low - offset if offset < low else 0
        last = nbytes if offset + nbytes <= high else high - offset
        tensor = shard.tensor
        if first < last and (only is None or only(tensor)):
            if tensor.nbytes != nbytes:  # reading its memory might lead outside of it
                raise StateError(
                    f"{image.section}.{shard.fqn} was given other memory while it was being saved, of {tensor.nbytes} "
                    f"bytes instead of {nbytes}"
                )
            yield tensor, first, last, offset + first - low


def copy_piece(
    image: FileImage,
    start: int,
    stop: int,
    block: Block,
    offset: int,
    only: Callable[[torch.Tensor], bool] | None = None,
) -> None:
    """Copy bytes ``[start, stop)`` of the file to byte ``offset`` of ``block``; ``only`` selects tensors."""
    copy_head(image, start, stop, block, offset)
    base = block.address + offset
    for tensor, first, last, at in parts(image, start, stop, only):
        if is_derived(tensor):
            copy_flat_range(block.tensor[offset + at : offset + at + last - first], tensor.compute(), first)
            tensor.release(last - first)
        elif tensor.is_cpu and is_plain(tensor):
            copy_memory(base + at, tensor.data_ptr() + first, last - first)
        else:
            copy_flat_range(block.tensor[offset + at : offset + at + last - first], tensor, first)


def copy_head(image: FileImage, start: int, stop: int, block: Block, offset: int) -> None:
    """Copy the part of the file's head that is in bytes ``[start, stop)``."""
    if start < len(image.head):
        head = np.frombuffer(image.head, np.uint8)[start:stop]
        np.copyto(np.frombuffer(block.view, np.uint8)[offset : offset + len(head)], head)


def copy_flat_range(out: torch.Tensor, tensor: torch.Tensor, first: int, *, non_blocking: bool = False) -> None:
    """Fill ``out`` with the bytes of ``tensor`` in row-major order, starting at byte ``first``.

    The range starts and ends at element boundaries. A tensor that is not contiguous is copied box by box.
    """
    if is_plain(tensor):
        out.copy_(as_bytes(tensor)[first : first + len(out)], non_blocking=non_blocking)
        return
    size = tensor.element_size()
    typed = out if tensor.dtype == torch.uint8 else out.view(tensor.dtype)
    at = 0
    for box in decompose(first // size, len(out) // size, tensor.shape):
        copy_elements(typed[at : at + box.numel].view(box.lengths), tensor[box.slices()], non_blocking=non_blocking)
        at += box.numel
