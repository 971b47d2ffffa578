"""Which indices of one dimension the ranks of an axis hold: parts, groups, uneven widths, shared heads.

A dimension is described in two coordinate systems: that of a tensor (local or global), and that of its parts, in which
the indices of each part (``q``, ``k``, ``v``) are counted from 0. A list of *atoms* puts the one in terms of the other:
each atom is a range of one part, and the atoms lie one after the other in the tensor. A dimension without parts has one
part, whose name is empty.

The global tensor is what a single rank would hold.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from .faults import Misfit

WHOLE = ""
"""The name of the only part of a dimension without parts."""

_MAX_PAIRED = 1 << 20


class Atom(NamedTuple):
    """A range of the indices of one part."""

    part: str
    start: int
    length: int


class Run(NamedTuple):
    """Consecutive indices: the first one in the local and in the global tensor, and their number."""

    local: int
    start: int
    length: int


class Parts(NamedTuple):
    """The parts of a dimension, as a rule describes them.

    ``sizes`` are the total sizes of the parts over all ranks, or their names if all have the same size. ``groups`` is
    the number of groups (heads of keys and values), or 0. With ``interleaved``, the tensor consists of groups, each
    with its share of every part; otherwise of parts. Ranks that divide a group hold the ``shared`` parts of it whole.
    ``widths`` are the sizes of each rank, by part.
    """

    sizes: Mapping[str, int] | tuple[str, ...] = (WHOLE,)
    groups: int = 0
    interleaved: bool = True
    shared: tuple[str, ...] = ()
    widths: Mapping[str, Sequence[int]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.sizes)

    def only(self, part: str) -> Parts:
        """One part alone, which is a separate tensor."""
        sizes = {part: self.sizes[part]} if isinstance(self.sizes, Mapping) else (part,)
        return self._replace(sizes=sizes)

    def total_sizes(self, found: Sequence[int]) -> dict[str, int]:
        """The size of each part, if the ranks hold ``found`` indices each. Raises ``Misfit``."""
        if isinstance(self.sizes, Mapping):
            return dict(self.sizes)
        names = self.sizes
        uneven = [n for n in found if n % len(names)]
        if uneven:
            raise Misfit(f"needs {len(names)} equal parts ({', '.join(names)}) of each rank's size, found {uneven[0]}")
        total = sum(found)
        if self.groups and len(found) > self.groups and set(names) <= self._shared:
            total = found[0] * self.groups
        return dict.fromkeys(names, total // len(names))

    def in_order(self, sizes: Mapping[str, int]) -> list[Atom]:
        """The atoms of the global tensor."""
        if not self.groups or not self.interleaved or len(sizes) == 1:
            return [Atom(part, 0, size) for part, size in sizes.items()]
        each = {part: size // self.groups for part, size in sizes.items()}
        return [Atom(part, group * size, size) for group in range(self.groups) for part, size in each.items()]

    def held(self, found: Sequence[int], sizes: Mapping[str, int]) -> list[list[Atom]]:
        """The atoms of each rank's tensor, if the ranks hold ``found`` indices each. Raises ``Misfit``."""
        if self.groups:
            return self._held_groups(found, sizes)
        widths = self._widths(found, sizes)
        starts = {part: [0, *accumulate(each)] for part, each in widths.items()}
        expected = [sum(widths[part][rank] for part in sizes) for rank in range(len(found))]
        if list(found) != expected:
            raise Misfit(f"needs {_sum(list(sizes.values()))}{_by_rank(expected)}, found {_sum(found)}")
        return [[Atom(p, starts[p][rank], widths[p][rank]) for p in sizes] for rank in range(len(found))]

    @property
    def _shared(self) -> frozenset[str]:
        return frozenset(self.shared or ((WHOLE,) if self.names == (WHOLE,) else ()))

    def _widths(self, found: Sequence[int], sizes: Mapping[str, int]) -> dict[str, Sequence[int]]:
        """The sizes of each rank by part."""
        result: dict[str, Sequence[int]] = {}
        ranks = len(found)
        for part, size in sizes.items():
            given = self.widths.get(part)
            if given is not None and (len(given) != ranks or sum(given) != size):
                of = f" of {part}" if part else ""
                raise Misfit(f"needs widths{of} of {ranks} ranks that add up to {size}, found {list(given)}")
            if given is None and not isinstance(self.sizes, Mapping):
                given = [n // len(sizes) for n in found]
            elif given is None and len(sizes) == 1 and sum(found) == size:
                given = found
            elif given is None:
                if size % ranks:
                    raise Misfit(
                        f"needs {part or 'size'} = {size} to be divisible by {ranks} ranks, found a remainder of "
                        f"{size % ranks}; state the widths"
                    )
                given = [size // ranks] * ranks
            result[part] = given
        return result

    def _held_groups(self, found: Sequence[int], sizes: Mapping[str, int]) -> list[list[Atom]]:
        for part, size in sizes.items():
            if size % self.groups:
                raise Misfit(f"needs {part or 'a size'} divisible by {self.groups} groups, found {size}")
        each = {part: size // self.groups for part, size in sizes.items()}
        width = sum(each.values())
        counts = [n // width if width else 0 for n in found]
        if all(n == count * width for n, count in zip(found, counts, strict=True)) and sum(counts) == self.groups:
            ends = accumulate(counts)
            return [self._of_groups(end - count, count, each) for end, count in zip(ends, counts, strict=True)]
        ranks = len(found)
        if ranks <= self.groups or ranks % self.groups:
            inner = " + ".join(map(str, each.values()))
            raise Misfit(f"needs {sum(sizes.values())} = {self.groups} x ({inner}), found {_sum(found)}")
        return self._held_shares(found, each, ranks // self.groups)

    def _held_shares(self, found: Sequence[int], each: Mapping[str, int], sharing: int) -> list[list[Atom]]:
        """The atoms where ``sharing`` ranks hold one group. ``each`` are the sizes of the parts in a group."""
        split = {part: size if part in self._shared else size // sharing for part, size in each.items()}
        for part, size in each.items():
            if part not in self._shared and size % sharing:
                raise Misfit(
                    f"needs the {size} indices of {part} in each group divided among the {sharing} ranks that share a "
                    f"group, found a remainder of {size % sharing}; if these ranks all hold {part} whole, add "
                    f'shared = ["{part}"]'
                )
        if any(n != sum(split.values()) for n in found):
            needed = _sum(list(split.values()))
            raise Misfit(
                f"needs {needed} on each of {len(found)} ranks, {sharing} of which share a group, found {_sum(found)}; "
                "shared lists the parts of a group that these ranks all hold"
            )
        return [
            [
                Atom(p, each[p] * (rank // sharing) + (0 if p in self._shared else n * (rank % sharing)), n)
                for p, n in split.items()
            ]
            for rank in range(len(found))
        ]

    def _of_groups(self, first: int, count: int, each: Mapping[str, int]) -> list[Atom]:
        if not self.interleaved or len(each) == 1:
            return [Atom(part, first * size, count * size) for part, size in each.items()]
        return [Atom(part, group * n, n) for group in range(first, first + count) for part, n in each.items()]


def _sum(terms: Sequence[int]) -> str:
    total = str(sum(terms))
    return f"{total} = {' + '.join(map(str, terms))}" if 1 < len(terms) <= 8 else total


def _by_rank(expected: Sequence[int]) -> str:
    return f", by rank {' + '.join(map(str, expected))}" if 1 < len(expected) <= 8 else ""


def paired(atoms: Iterable[Atom], head: int) -> list[Atom]:
    """Return the indices of halves in the order in which heads of pairs have them. Raises ``Misfit``."""
    found: list[Atom] = []
    for part, start, length in atoms:
        if start % head or length % head:
            raise Misfit(f"needs complete heads of {head}, found {length}")
        if length > _MAX_PAIRED:
            raise Misfit(f"has {length} indices of heads, which is more than any model has")
        for first in range(start, start + length, head):
            found += (Atom(part, first + at + half, 1) for at in range(head // 2) for half in (0, head // 2))
    return found


def runs(held: Iterable[Atom], whole: Iterable[Atom]) -> list[Run]:
    """Return where the indices of a local tensor are in a global one. Indices that it lacks are left out."""
    places: dict[str, list[tuple[int, int, int]]] = {}  # start in the part, start in the global tensor, length
    position = 0
    for atom in whole:
        places.setdefault(atom.part, []).append((atom.start, position, atom.length))
        position += atom.length
    for atoms in places.values():
        atoms.sort()
    found: list[Run] = []
    local = 0
    for part, first, length in held:
        others = places.get(part, [])
        for at in range(max(0, bisect_right(others, (first, sys.maxsize)) - 1), len(others)):
            start, place, size = others[at]
            if start >= first + length:
                break
            begin = max(first, start)
            count = min(first + length, start + size) - begin
            if count > 0:
                run = Run(local + begin - first, place + begin - start, count)
                last = found[-1] if found else None
                if last and last.local + last.length == run.local and last.start + last.length == run.start:
                    found[-1] = last._replace(length=last.length + count)
                else:
                    found.append(run)
        local += length
    return found
