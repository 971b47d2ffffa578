"""Which ranks stored a tensor, and whether a rule explains that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod

from .compiled import Compiled
from .numbering import Matched, place_text

__all__ = ["Mesh", "Unplaced", "position_on", "ranks_of"]

Mesh = Mapping[str, int]
"""The number of ranks along each axis."""


class Unplaced(Exception):
    """The ranks that stored a tensor are not those that its rule describes. The caller adds name and rule."""


def ranks_of(rule: Compiled, items: Sequence[Matched], mesh: Mesh) -> dict[tuple[int, ...], list[Matched]]:
    """Return the copies of each shard, by its position along each split of the rule. Raises ``Unplaced``."""
    _check_holders(rule, items)
    ranks: dict[tuple[int, ...], list[Matched]] = {}
    for item in items:
        index = tuple(position_on(split.axis, item.source.place, mesh) for split in rule.splits)
        ranks.setdefault(index, []).append(item)
    sizes = [prod(mesh[axis] for axis in split.axis) for split in rule.splits]
    if len(ranks) < prod(sizes):
        lost = next(index for index in product(*map(range, sizes)) if index not in ranks)
        where: dict[str, int] = {}
        for split, position in zip(rule.splits, lost):
            for axis in reversed(split.axis):
                position, where[axis] = divmod(position, mesh[axis])
        raise Unplaced(f"needs the shard of {place_text(where)}, which no rank stored")
    return ranks


def position_on(axes: Sequence[str], place: Mapping[str, int], mesh: Mesh) -> int:
    """Return the number of a rank along these axes. Raises ``Unplaced``."""
    position = 0
    for axis in axes:
        if axis not in mesh:
            known = ", ".join(f"{name}={size}" for name, size in mesh.items()) or "no axes"
            raise Unplaced(f"divides along axis {axis!r}, which is not in the mesh ({known})")
        index = place.get(axis, 0 if mesh[axis] == 1 else None)
        if index is None:
            raise Unplaced(f"divides along axis {axis!r}, but {place_text(place)} is no coordinate on it")
        position = position * mesh[axis] + index
    return position


def _check_holders(rule: Compiled, items: Sequence[Matched]) -> None:
    """Raise ``Unplaced`` if several ranks hold the tensor and the rule does not explain it."""
    seen: dict[tuple[tuple[str, int], ...], str] = {}
    for item in items:
        key = tuple(sorted(item.source.place.items()))
        if key in seen:
            both = f"{seen[key]!r} and {item.source.name!r}"
            raise Unplaced(f"describes one tensor, but {place_text(item.source.place)} stored {both}")
        seen[key] = item.source.name
    if rule.replicas is None:
        return
    explained = {*rule.replicas, *(axis for split in rule.splits for axis in split.axis)}
    for axis in sorted({axis for item in items for axis in item.source.place} - explained):
        found = sorted({item.source.place.get(axis, -1) for item in items})
        if len(found) > 1:
            raise Unplaced(
                f"does not explain that the ranks {axis} = {', '.join(map(str, found[:4]))} hold it; if these are "
                f'copies, use kind = "replicated" or add {axis!r} to replicas'
            )
