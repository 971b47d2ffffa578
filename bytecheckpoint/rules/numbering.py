"""Numbers that start again on every rank, such as the layers of a pipeline stage, and their global values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from .compiled import Compiled
from .faults import Faults
from .kinds import Shaped
from .patterns import Captures
from .regions import Source

__all__ = ["Matched", "Numbering", "indexed_by", "place_text"]


class Matched(NamedTuple):
    """A stored tensor, its number, its rule, and what the pattern captured."""

    number: int
    source: Source
    rule: Compiled
    captures: Captures


_Digits = tuple["str | int", ...]


class Numbering:
    """Adds to a number what lower ranks have.

    A stage has as many layers as the highest number among all tensors of the stage states.
    """

    def __init__(self, items: Iterable[Matched], faults: Faults) -> None:
        counts: dict[tuple[str, tuple[str, ...]], dict[_Digits, int]] = {}
        for item in items:
            for name, axes in indexed_by(item.rule).items():
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
            self._firsts[key] = dict(zip(order, accumulate((found[one] for one in order), initial=0)))

    def first(self, item: Matched, name: str) -> int:
        """The global value of 0 on this rank; 0 for numbers that are global."""
        axes = indexed_by(item.rule).get(name, ())
        return self._firsts[name, axes].get(_digits(item, axes), 0) if (name, axes) in self._firsts else 0


def indexed_by(rule: Compiled) -> Mapping[str, tuple[str, ...]]:
    return rule.rule.indexed if isinstance(rule.rule, Shaped) else {}


def place_text(place: Mapping[str, int]) -> str:
    return ", ".join(f"{axis}={index}" for axis, index in place.items()) or "the only rank"


def _digits(item: Matched, axes: Sequence[str]) -> _Digits:
    known = {**item.source.place, **item.captures}
    return tuple(known[axis] for axis in axes if axis in known)


def _count(item: Matched, name: str) -> int:
    """How many values of the number the rank has, judged by this tensor alone."""
    if name in item.captures:
        return int(item.captures[name]) + 1
    dim = item.rule.spread.index(name)
    return item.source.shape[dim] if dim < len(item.source.shape) else 0
