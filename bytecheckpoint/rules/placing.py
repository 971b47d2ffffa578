"""The ranks that stored tensors: whether a rule explains them, and how they number layers and experts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, count
from math import prod
from typing import NamedTuple

from .compiled import Compiled
from .faults import Faults, Misfit
from .kinds import Shaped
from .patterns import Captures
from .resolution import Source, place_text

Mesh = Mapping[str, int]
"""The number of ranks along each axis."""


class Matched(NamedTuple):
    """A stored tensor, its number, its rule, and what the pattern captured."""

    number: int
    source: Source
    rule: Compiled
    captures: Captures


_Digits = tuple["str | int", ...]


class Numbering:
    """Adds to a number that starts again on every rank, such as the layers of a pipeline stage, what lower ranks have.

    A stage has as many layers as the highest number among all tensors of the stage states.
    """

    def __init__(self, items: Iterable[Matched], faults: Faults) -> None:
        counts: dict[tuple[str, tuple[str, ...]], dict[_Digits, int]] = {}
        for item in items:
            for name, axes in _indexed_by(item.rule).items():
                digits = _digits(item, axes)
                if len(digits) < len(axes):
                    detail = (
                        f"{item.rule} continues {{{name}}} over {' and '.join(axes)}, but neither captures nor its "
                        f"rank ({place_text(item.source.place)}) have all of them"
                    )
                    faults.add("rank", item.source.name, detail)
                    continue
                found = counts.setdefault((name, axes), {})
                found[digits] = max(found.get(digits, 0), _count(item, name))
        self._firsts: dict[tuple[str, tuple[str, ...]], dict[_Digits, int]] = {}
        for key, found in counts.items():
            order = sorted(found, key=lambda digits: [(isinstance(one, str), one) for one in digits])
            firsts = accumulate((found[one] for one in order), initial=0)
            self._firsts[key] = dict(zip(order, firsts, strict=False))  # the last one is the end

    def first(self, item: Matched, name: str) -> int:
        """The global value of 0 on this rank; 0 for numbers that are global."""
        axes = _indexed_by(item.rule).get(name, ())
        return self._firsts[name, axes].get(_digits(item, axes), 0) if (name, axes) in self._firsts else 0


def _indexed_by(rule: Compiled) -> Mapping[str, tuple[str, ...]]:
    return rule.rule.indexed if isinstance(rule.rule, Shaped) else {}


def _digits(item: Matched, axes: Sequence[str]) -> _Digits:
    known = {**item.source.place, **item.captures}
    return tuple(known[axis] for axis in axes if axis in known)


def _count(item: Matched, name: str) -> int:
    """How many values of the number the rank has, judged by this tensor alone."""
    if name in item.captures:
        return int(item.captures[name]) + 1
    dim = item.rule.spread.index(name)
    return item.source.shape[dim] if dim < len(item.source.shape) else 0


def ranks_of(rule: Compiled, items: Sequence[Matched], mesh: Mesh) -> dict[tuple[int, ...], list[Matched]]:
    """Return the copies of each shard, by its position along each split of the rule. Raises ``Misfit``."""
    _check_holders(rule, items)
    ranks: dict[tuple[int, ...], list[Matched]] = {}
    for item in items:
        index = tuple(position_on(split.axis, item.source.place, mesh) for split in rule.splits)
        ranks.setdefault(index, []).append(item)
    sizes = [prod(mesh[axis] for axis in split.axis) for split in rule.splits]
    if len(ranks) < prod(sizes):
        lost = next(index for n in count() if (index := unravel(n, sizes)) not in ranks)
        where: dict[str, int] = {}
        for split, position in zip(rule.splits, lost, strict=True):
            for axis in reversed(split.axis):
                position, where[axis] = divmod(position, mesh[axis])
        raise Misfit(f"needs the shard of {place_text(where)}, which no rank stored", "rank")
    return ranks


def unravel(n: int, lengths: Sequence[int]) -> tuple[int, ...]:
    """Return index ``n`` of all indices in row-major order.

    The lengths may be from names, and their product 10**18, so never list all: a missing one is among the first.
    """
    index = []
    for length in reversed(lengths):
        n, last = divmod(n, length)
        index.append(last)
    return tuple(reversed(index))


def position_on(axes: Sequence[str], place: Mapping[str, int], mesh: Mesh) -> int:
    """Return the number of a rank along these axes. Raises ``Misfit``."""
    position = 0
    for axis in axes:
        if axis not in mesh:
            known = ", ".join(f"{name}={size}" for name, size in mesh.items()) or "no axes"
            raise Misfit(f"divides along axis {axis!r}, which is not in the mesh ({known})", "rank")
        index = place.get(axis, 0 if mesh[axis] == 1 else None)
        if index is None:
            raise Misfit(f"divides along axis {axis!r}, but {place_text(place)} is no coordinate on it", "rank")
        position = position * mesh[axis] + index
    return position


def _check_holders(rule: Compiled, items: Sequence[Matched]) -> None:
    """Raise ``Misfit`` if several ranks hold the tensor and the rule does not explain it."""
    seen: dict[tuple[tuple[str, int], ...], str] = {}
    for item in items:
        key = tuple(sorted(item.source.place.items()))
        if key in seen:
            both = f"{seen[key]!r} and {item.source.name!r}"
            raise Misfit(f"describes one tensor, but {place_text(item.source.place)} stored {both}", "rank")
        seen[key] = item.source.name
    if rule.replicas is None:
        return
    explained = {*rule.replicas, *(axis for split in rule.splits for axis in split.axis)}
    for axis in sorted({axis for item in items for axis in item.source.place} - explained):
        found = sorted({item.source.place.get(axis, -1) for item in items})
        if len(found) > 1:
            raise Misfit(
                f"does not explain that the ranks {axis} = {', '.join(map(str, found[:4]))} hold it; if these are "
                f'copies, use kind = "replicated" or add {axis!r} to replicas',
                "rank",
            )
