"""Present Megatron's global tensors under one form of names: per layer and per expert, as its adapter stores them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product
from math import prod

from ...errors import FormatError
from ...frameworks.megatron.shards import HALVES, numbered, prepended_axes
from ...tensors.geometry import Box, row_major_strides
from ...tensors.metadata import BasicMeta
from ..building import Piece, StoredLeaf

__all__ = ["per_layer", "wrapper_prefix"]

_PREFIX = "module."  # of a model that was saved inside a wrapper, such as NeMo's
_MAX_ROWS = 1 << 20  # layers times experts


def wrapper_prefix(keys: Iterable[str]) -> str:
    """Return the name of the wrapper with which all keys of the model begin; empty if there is none."""
    return _PREFIX if all(key.startswith(_PREFIX) for key in keys) else ""


def per_layer(tensors: Mapping[str, StoredLeaf], where: str) -> dict[str, StoredLeaf]:
    """Return tensors by name: a stack of layers or experts as one tensor for each, and the halves of a gate as one.

    Raises ``FormatError`` if a stack is no tensor for each layer and expert.
    """
    found: dict[str, StoredLeaf] = {}
    for key, leaf in tensors.items():
        axes = prepended_axes(key)
        parts = {(): leaf} if not axes else _unstacked(key, leaf, axes, where)
        for index, part in parts.items():
            name = numbered(key, index)
            if name in found:
                raise FormatError(f"{where}: {name!r:.200} is stored alone and in a stack of layers or experts")
            found[name] = part
    return _joined(found)


def _unstacked(key: str, leaf: StoredLeaf, axes: int, where: str) -> dict[tuple[int, ...], StoredLeaf]:
    shape, itemsize = leaf.meta.shape, leaf.meta.dtype.itemsize
    if len(shape) < axes:
        raise FormatError(f"{where}: {key!r:.200} of shape {list(shape)} is no stack of layers or experts")
    found: dict[tuple[int, ...], list[Piece]] = {}
    if max(prod(shape[:axes]), sum(prod(piece.box.lengths[:axes]) for piece in leaf.pieces)) > _MAX_ROWS:
        raise FormatError(f"{where}: {key!r:.200} is a stack of {list(shape[:axes])} layers or experts")
    for piece in leaf.pieces:
        offsets, lengths = piece.box.offsets, piece.box.lengths
        strides = row_major_strides(lengths) if piece.strides is None else piece.strides
        inner = None if piece.strides is None else strides[axes:]
        for at in product(*map(range, lengths[:axes])):
            start = sum(position * stride for position, stride in zip(at, strides, strict=True))
            row = Piece(Box(offsets[axes:], lengths[axes:]), piece.file, piece.offset + start * itemsize, inner)
            found.setdefault(tuple(map(sum, zip(offsets, at, strict=True))), []).append(row)
    missing = [index for index in product(*map(range, shape[:axes])) if index not in found]
    if missing:
        raise FormatError(f"{where}: {key!r:.200} of shape {list(shape)} has nothing at {list(missing[0])}")
    return {index: StoredLeaf(BasicMeta(leaf.meta.dtype, shape[axes:]), pieces) for index, pieces in found.items()}


def _joined(tensors: Mapping[str, StoredLeaf]) -> dict[str, StoredLeaf]:
    found: dict[str, StoredLeaf] = {}
    for name, leaf in tensors.items():
        stem = name[:-2]
        halves = [tensors.get(stem + suffix) for suffix in HALVES]
        if not name.endswith(HALVES) or stem in tensors or not leaf.meta.shape or {leaf.meta} != _metas(halves):
            found[name] = leaf
        elif stem not in found:
            rows, *rest = leaf.meta.shape
            pieces = [
                piece._replace(box=piece.box.shift([first, *(0 for _ in rest)]))
                for first, half in zip((0, rows), halves, strict=True)
                for piece in (half.pieces if half is not None else ())
            ]
            found[stem] = StoredLeaf(BasicMeta(leaf.meta.dtype, (2 * rows, *rest)), pieces)
    return found


def _metas(leaves: Iterable[StoredLeaf | None]) -> set[BasicMeta | None]:
    return {None if leaf is None else leaf.meta for leaf in leaves}
