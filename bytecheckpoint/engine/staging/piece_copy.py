"""From tensors to the bytes of a file: any part of a file's image, copied in one pass and with no large temporary."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator

import numpy as np
import torch

from ...geometry import decompose
from ..files import FileImage
from ..tensor_bytes import as_bytes, copy_elements, copy_memory
from .arena import Block

__all__ = ["copy_flat_range", "copy_head", "copy_piece", "is_plain", "parts"]


def parts(image: FileImage, start: int, stop: int) -> Iterator[tuple[torch.Tensor, int, int, int]]:
    """What of the image's tensors lies in bytes ``[start, stop)`` of the file, in order.

    Yields the tensor, the first and last byte of it that are wanted, and where they begin, counted from ``start``.
    """
    low, high = start - len(image.head), stop - len(image.head)
    begin = max(bisect_right(image.offsets, low) - 1, 0)
    end = bisect_left(image.offsets, high)
    # Once for each of many thousand small tensors: every look at an attribute counts.
    for shard, offset, nbytes in zip(image.shards[begin:end], image.offsets[begin:end], image.nbytes[begin:end]):
        first = low - offset if offset < low else 0
        last = nbytes if offset + nbytes <= high else high - offset
        if first < last:
            yield shard.tensor, first, last, offset + first - low


def copy_piece(
    image: FileImage,
    start: int,
    stop: int,
    block: Block,
    place: int,
    only: Callable[[torch.Tensor], bool] | None = None,
) -> None:
    """Copy bytes ``[start, stop)`` of the file into ``block`` from byte ``place`` on; returns when they are there.
    With ``only``, those of some tensors."""
    copy_head(image, start, stop, block, place)
    base = block.address + place
    for tensor, first, last, at in parts(image, start, stop):
        if only is not None and not only(tensor):
            continue
        if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
            copy_memory(base + at, tensor.data_ptr() + first, last - first)
        else:
            copy_flat_range(block.tensor[place + at : place + at + last - first], tensor, first)


def copy_head(image: FileImage, start: int, stop: int, block: Block, place: int) -> None:
    """The part of ``copy_piece`` that is not tensors."""
    if start < len(image.head):
        head = np.frombuffer(image.head, np.uint8)[start:stop]
        np.copyto(np.frombuffer(block.view, np.uint8)[place : place + len(head)], head)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory is, byte for byte, its elements row by row."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def copy_flat_range(out: torch.Tensor, tensor: torch.Tensor, first: int, *, non_blocking: bool = False) -> None:
    """Fill ``out`` (bytes) with those from byte ``first`` on of ``tensor`` as it would lie row by row.

    Both ends are ends of elements. What is not contiguous is copied box by box, none larger than ``out``.
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
