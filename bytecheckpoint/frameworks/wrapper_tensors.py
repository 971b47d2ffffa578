"""Describe tensor subclasses that consist of other tensors, such as torchao's quantized weights and optimizer states.

A *wrapper* (torch's "traceable wrapper subclass") has no memory. It is stored as its inner tensors, under
``<name>.<attribute>``, and a record of its class and attributes, which a load compares. Nothing is unpacked or
dequantized.

A wrapper that is complete on a rank has complete inner tensors. For the local tensor of a sharded DTensor, an inner
tensor with as many dimensions must divide it into equal blocks: its global shape then has as many blocks as the global
tensor, so the stored shape depends on the block size, and another layout with other blocks is a fault of the load. Of
torchao's optimizer states, the inner tensors are flat: one item for each block of consecutive elements. Such blocks are
a grid of the global tensor if the block size divides its innermost dimensions evenly. Otherwise they are ranges of the
flattened global tensor.
"""

from __future__ import annotations

import enum
import re
import sys
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from ..errors import MismatchError, UnsupportedTensorError
from ..tensors.geometry import Box
from ..tensors.metadata import BasicMeta
from ..tensors.shards import Shard, basic_meta
from .dtensor import dtensor_around, dtensor_boxes, is_dtensor, local_tensor
from .tensors import dense_view

WRAPPER = "__wrapper__"
"""The key of the record in the stored entry of a wrapper."""


class _Flat(NamedTuple):
    """A class of torchao whose inner tensors ``items`` are flat and ``constants`` do not depend on the elements.

    ``attributes`` are those that give the items their meaning.
    """

    items: tuple[str, ...]
    constants: tuple[str, ...]
    attributes: tuple[str, ...]


_FLAT = {
    "torchao.optim.subclass_8bit.OptimState8bit": _Flat(("codes", "scale"), ("qmap",), ("signed", "block_size")),
    "torchao.optim.subclass_4bit.OptimState4bit": _Flat(("codes", "scale"), ("qmap",), ("signed", "block_size")),
    "torchao.optim.subclass_fp8.OptimStateFp8": _Flat(("codes", "scale"), (), ("block_size",)),
}


class HeldWrapper(NamedTuple):
    """A wrapper ready to save or to fill: its record, and names, global metadata and shards of its inner tensors."""

    record: dict[str, Any]
    names: tuple[str, ...]
    metas: dict[str, BasicMeta]
    shards: list[Shard]


def held_wrapper(fqn: str, tensor: torch.Tensor) -> HeldWrapper:
    """Describe a wrapper. Raises ``UnsupportedTensorError`` if its inner tensors cannot be placed in global boxes."""
    local, shape = tensor.detach(), tuple(tensor.shape)
    box: Box | None = Box.whole(shape)
    if is_dtensor(tensor):
        local = local_tensor(tensor)
        boxes = dtensor_boxes(fqn, tensor)
        if len(boxes) > 1:
            raise _refusal(fqn, local, "this rank's part of it is not one box")
        box = boxes[0].box if boxes else None
    names, context = local.__tensor_flatten__()  # type: ignore[attr-defined]
    kind = _class_path(type(local))
    flat = _FLAT.get(kind)
    record = {"class": kind, "attributes": _attributes(local, context, flat)}
    held = HeldWrapper(record, tuple(names), {}, [])
    if box is None:  # the ranks with elements describe it
        return held
    part_of = HeldPart(local, shape, box)
    for name in names:
        shard = part_of.part(f"{fqn}.{name}", dense_view(f"{fqn}.{name}", getattr(local, name)), flat, name)
        held.metas[shard.fqn] = shard.meta
        held.shards.append(shard)
    return held


def require_same_wrapper(fqn: str, record: Any, held: HeldWrapper) -> None:
    """Raise ``MismatchError`` if the stored record differs from the target's in class or in a common attribute."""
    stored = record if isinstance(record, dict) else {}
    own, other = held.record["attributes"], stored.get("attributes")
    other = other if isinstance(other, dict) else {}
    faults = [f"{key} = {other[key]!r}, here {own[key]!r}" for key in own if key in other and own[key] != other[key]]
    if stored.get("class") != held.record["class"]:
        faults.insert(0, f"class {stored.get('class')}, here {held.record['class']}")
    if faults:
        detail = f"stored with {'; '.join(faults)}"
        raise MismatchError(
            f"{fqn}: {detail}. Quantize the target like the saved tensor before the load", [("value", fqn, detail)]
        )


def make_wrapper(fqn: str, record: Any, like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A wrapper of zeros for the state of the parameter ``like``, of the stored class and block size.

    Only torchao's optimizer states can be made, and only if torchao is loaded: the checkpoint names a class, but never
    makes this process import one. Raises ``MismatchError`` for another class, and ``UnsupportedTensorError`` if blocks
    cross the edge of this rank's part.
    """
    found = record if isinstance(record, dict) else {}
    kind, attributes = str(found.get("class")), found.get("attributes")
    module, _, name = kind.rpartition(".")
    cls = getattr(sys.modules.get(module), name, None) if kind in _FLAT else None
    if cls is None or not isinstance(attributes, dict) or type(attributes.get("block_size")) is not int:
        detail = f"stored as a {kind}, which the load cannot create"
        raise MismatchError(
            f"{fqn}: {detail}. Run one optimizer step before the load, so that it exists", [("value", fqn, detail)]
        )
    local = local_tensor(like) if is_dtensor(like) else like.detach()
    block = attributes["block_size"]
    if local.numel() == 0 and like.numel():
        made = torch.zeros_like(local, device=device)  # torchao keeps empty parts plain
    elif block < 1 or local.numel() % block:
        raise _refusal(fqn, kind, f"this rank holds {local.numel()} elements, no multiple of the block size {block}")
    else:
        signed = {"signed": attributes["signed"]} if "signed" in attributes else {}
        made = cls.zeros(tuple(local.shape), block_size=block, device=device, **signed)
    return dtensor_around(like, made) if is_dtensor(like) else made


class HeldPart(NamedTuple):
    """The wrapper ``local``, which holds ``box`` of a tensor of the global ``shape``."""

    local: torch.Tensor
    shape: tuple[int, ...]
    box: Box

    def part(self, fqn: str, inner: torch.Tensor, flat: _Flat | None, name: str) -> Shard:
        """An inner tensor. Raises ``UnsupportedTensorError`` if it cannot be placed in a global tensor."""
        global_shape, box = tuple(inner.shape), Box.whole(tuple(inner.shape))
        if flat is not None and name not in flat.constants:
            size = self.local.numel() // max(inner.numel(), 1)
            if size * inner.numel() != self.local.numel() or not inner.is_contiguous():
                reason = f"{inner.numel()} items do not divide {self.local.numel()} elements into blocks"
                raise _refusal(fqn, self.local, reason)
            global_shape, box = self.items(fqn, size)
            inner = inner.view(box.lengths)
        elif flat is None and self.box.lengths != self.shape:
            global_shape, box = self.grid(fqn, global_shape)
        return Shard(fqn, basic_meta(inner.dtype, global_shape), box, inner)

    def grid(self, fqn: str, blocks: tuple[int, ...]) -> tuple[tuple[int, ...], Box]:
        """Global shape and box of an inner tensor that has one element for each block of the local tensor."""
        lengths = tuple(self.local.shape)
        if len(blocks) != len(lengths) or any(n == 0 or size % n for size, n in zip(lengths, blocks, strict=True)):
            reason = f"its shape {blocks} does not divide the local shape {lengths} into equal blocks"
            raise _refusal(fqn, self.local, reason)
        return self._in_blocks(fqn, [size // n for size, n in zip(lengths, blocks, strict=True)])

    def _in_blocks(self, fqn: str, extents: Sequence[int]) -> tuple[tuple[int, ...], Box]:
        """The shape and the box in units of blocks."""
        parts = (self.shape, self.box.offsets, self.box.lengths)
        if any(n % e for sizes in parts for n, e in zip(sizes, extents, strict=True)):
            raise self._crossing(fqn, prod(extents))
        counts = [tuple(n // e for n, e in zip(sizes, extents, strict=True)) for sizes in parts]
        return counts[0], Box(counts[1], counts[2])

    def items(self, fqn: str, size: int) -> tuple[tuple[int, ...], Box]:
        """Global shape and box of items that each stand for ``size`` consecutive elements of the local memory."""
        extents = _block_extents(self.shape, size)
        if extents is not None:
            return self._in_blocks(fqn, extents)
        # One dimension of items: the part must be one range of the flattened global tensor.
        first, stop = _flat_range(self.shape, self.box)
        if stop - first != self.box.numel or first % size or stop % size or prod(self.shape) % size:
            raise self._crossing(fqn, size)
        return (prod(self.shape) // size,), Box((first // size,), ((stop - first) // size,))

    def _crossing(self, fqn: str, size: int) -> UnsupportedTensorError:
        reason = f"blocks of {size} elements cross the edges of {self.box} of {list(self.shape)}"
        return _refusal(fqn, self.local, reason)


def _block_extents(shape: Sequence[int], size: int) -> list[int] | None:
    """The extent of blocks of ``size`` consecutive elements in each dimension; None if they are no boxes of a grid."""
    extents = []
    for n in reversed(shape):
        if size == 1 or (n and n % size == 0):
            extents.append(size)
            size = 1
        elif n and size % n == 0:
            extents.append(n)
            size //= n
        else:
            return None
    return extents[::-1] if size == 1 else None


def _flat_range(shape: Sequence[int], box: Box) -> tuple[int, int]:
    """First and last element of a box, plus one, in the flattened tensor."""
    first = last = 0
    for n, o, length in zip(shape, box.offsets, box.lengths, strict=True):
        first, last = first * n + o, last * n + o + length - 1
    return first, last + 1


def _attributes(local: torch.Tensor, context: Any, flat: _Flat | None) -> dict[str, Any]:
    if flat is not None:
        return {name: getattr(local, name) for name in flat.attributes}
    items = context if isinstance(context, (dict, list, tuple)) else () if context is None else (context,)
    pairs = items.items() if isinstance(items, dict) else enumerate(items)
    # The shape of a part depends on the layout, and the global shape is compared anyway.
    part = list(local.shape)
    return {str(name): plain for name, value in pairs if (plain := _plain(value)) != part or not part}


def _plain(value: Any) -> Any:
    """A plain value that is equal for equal attributes."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _class_path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _refusal(fqn: str, local: torch.Tensor | str, reason: str) -> UnsupportedTensorError:
    kind = local if isinstance(local, str) else _class_path(type(local))
    return UnsupportedTensorError(
        f"{fqn}: a {kind} cannot be stored or loaded in parts here: {reason}. Shard it so that the edges fall on block "
        "boundaries (FSDP-2 on dimension 0, with a multiple of the block size on every rank), or dequantize it first"
    )
