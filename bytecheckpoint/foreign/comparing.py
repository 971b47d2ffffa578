"""Copies of one box that several ranks stored: choose one of them, and compare them if a rule asks for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ..checkpoint.index import Index
from ..engine.reading.reader import ReadPart, ShardReader
from ..engine.tensor_bytes import as_bytes, box_view
from ..errors import RuleError
from ..planners.extents import split_box
from ..rules import GlobalTensor, Region
from ..runtime.threads import Threads
from ..tensors.geometry import Box, moved_box
from ..tensors.shards import torch_dtype

_PIECE_BYTES = 8 << 20
_THREADS = 4
_MAX_FAULTS = 64

Piece = tuple[Box, int, Box]


@dataclass(frozen=True)
class Comparison:
    """Two copies of a box of a global tensor, the ranks that stored them, and where they are."""

    name: str
    tensor: GlobalTensor
    box: Box
    places: tuple[dict[str, int], dict[str, int]]
    copies: tuple[Sequence[Piece], Sequence[Piece]]


def distinct(tensor: GlobalTensor) -> tuple[list[Region], list[tuple[Region, Region]]]:
    """Return regions that tile a global tensor, and pairs of regions that hold the same elements."""
    first: dict[Box, Region] = {}
    copies: list[tuple[Region, Region]] = []
    for region in tensor.regions:
        kept = first.setdefault(region.box, region)
        if kept is not region:
            copies.append((kept, region))
    if sum(box.numel for box in first) == tensor.meta.numel:
        return list(first.values()), copies
    # Ranks that share a group hold more than a copy: their boxes overlap in part.
    chosen: list[Region] = []
    for region in first.values():
        rest = [region.box]
        for other in chosen:
            common = region.box.intersect(other.box)
            if common is not None:
                copies.append((_part(other, common), _part(region, common)))
                rest = [piece for box in rest for piece in box.without(common)]
        chosen += [_part(region, box) for box in rest]
    return chosen, copies


def compare(index: Index, comparisons: Sequence[Comparison]) -> None:
    """Read all copies in bounded memory. Raises ``RuleError`` that lists the tensors whose copies differ."""
    if not comparisons or index.views is None:
        return
    faults: dict[str, str] = {}
    with Threads(_THREADS, thread_name_prefix="bcp-compare") as pool:
        reader = ShardReader(index.backend, index.views.stored, pool, verify=index.is_own, crcs=index.crcs)
        for one in comparisons:
            if one.name not in faults and len(faults) < _MAX_FAULTS:
                at = _first_difference(reader, one)
                if at is not None:
                    faults[one.name] = _detail(one, at)
    if faults:
        lines = [f"{name}: {detail}" for name, detail in faults.items()]
        head = f"{index.url}: copies that must be equal differ ({len(faults)} tensor(s)):"
        raise RuleError("\n  ".join([head, *lines]), [("compare", *fault) for fault in faults.items()])


def _first_difference(reader: ShardReader, one: Comparison) -> Box | None:
    """The first piece of the box in which the two copies have different bytes."""
    meta = one.tensor.meta
    for box in split_box(one.box, one.box, meta.dtype.itemsize, _PIECE_BYTES, 0):
        values = []
        for pieces in one.copies:
            out = torch.empty(box.lengths, dtype=torch_dtype(meta))
            reader.read(list(_reads(pieces, box, out)))
            values.append(as_bytes(out))
        if not torch.equal(*values):
            return box
    return None


def _reads(pieces: Iterable[Piece], box: Box, out: torch.Tensor) -> Iterator[ReadPart]:
    for whole, row, within in pieces:
        common = whole.intersect(box)
        if common is not None:
            part = moved_box(whole, within, common)
            yield ReadPart(row, part, box_view(out, common, box).view(part.lengths))


def _detail(one: Comparison, box: Box) -> str:
    first, second = (", ".join(f"{axis}={index}" for axis, index in place.items()) for place in one.places)
    return (
        f"the ranks {first} and {second} stored different values of {box}, but the rule {one.tensor.rule.match!r} says "
        f"that they are equal"
    )


def _part(region: Region, box: Box) -> Region:
    found = region.needed_for(box)
    assert found is not None
    return found
