"""What ranks hold alike besides its structure: plain values and plain tensors, compared by a few bytes a rank.

A save that was planned before need not be planned again while every item that was stored once is still the same on
all its holders, and every item that was stored by each of them still is not. Each rank tells 16 bytes for all of the
first kind, and a few bits for each of the second.

The 16 bytes are a sum (exclusive or) over the sets of ranks that hold items in common. The ``p``-th of ``n`` ranks of a
set adds the hash of what it holds, seeded with ``p``, and the one seeded with ``p + 1 mod n``: where all hold the same,
every hash is added twice and all ranks' sums add up to zero. So no rank need know more than its place in its sets, and
rank 0 only adds up.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from operator import xor

import numpy as np
import numpy.typing as npt
import xxhash

from ..errors import PlanError
from ..tables import Int64, ragged_positions, ragged_starts
from .rank_sets import distinct_sets
from .wire import Bool, Fields, column, pack

__all__ = ["CONTENT_BYTES", "Comparison", "ContentChecks", "Contents", "Held", "as_contents", "compare_contents"]

Contents = npt.NDArray[np.uint8]
"""Row ``i`` is the digest of item ``i`` of a rank: ``[n, CONTENT_BYTES]``."""

CONTENT_BYTES = 16
_SUM_BYTES = 16
_MARKS_BYTES = 24
_MARK_BITS = 16
_KIND, _GROUP_KIND = "content checks", "content checks of many ranks"


def as_contents(digests: Sequence[bytes]) -> Contents:
    """Digests of at most 16 bytes each, one item's always of the same length, as rows."""
    joined = b"".join(digest.ljust(CONTENT_BYTES, b"\0") for digest in digests)
    return np.frombuffer(joined, np.uint8).reshape(-1, CONTENT_BYTES)


@dataclass(frozen=True, eq=False)
class Held:
    """Ranks that hold the same items: ``keys`` in their order, and for each of ``ranks`` (ascending) its contents."""

    keys: Sequence[Hashable]
    ranks: Int64
    contents: Sequence[Contents]


@dataclass(frozen=True, eq=False)
class ContentChecks:
    """What a rank tells of its contents. ``number[i]`` and ``size[i]`` are of a set of ranks that hold the items
    ``alike[i]`` in common, of which this rank is the ``place[i]``-th; ``bits`` is the width of the mark of each item
    that is stored ``apart``."""

    rank: int
    world_size: int
    number: list[int]
    size: list[int]
    alike: list[Int64]
    apart: Int64
    bits: int
    place: list[int]

    def tell(self, contents: Contents, everywhere: bytes) -> bytes:
        """At most 40 bytes for ``Comparison.holds``. ``everywhere`` is what must be equal on all ranks."""
        total = _edge(everywhere, 0, self.rank, self.world_size)
        for number, place, size, items in zip(self.number, self.place, self.size, self.alike):
            total ^= _edge(contents[items].tobytes(), number, place, size)
        return total.to_bytes(_SUM_BYTES, "little") + self._marks(contents)

    def _marks(self, contents: Contents) -> bytes:
        marks = 0
        for at, item in enumerate(self.apart.tolist()):
            mark = xxhash.xxh3_64_intdigest(contents[item].tobytes()) & ((1 << self.bits) - 1)
            marks |= mark << (at * self.bits)
        return marks.to_bytes(-(-len(self.apart) * self.bits // 8), "little")

    @classmethod
    def from_bytes(cls, data: bytes, rank: int, world_size: int, count: int) -> ContentChecks:
        """What rank 0 sent (``Comparison.checks``) to a rank that holds ``count`` items. Raises ``PlanError`` for what
        it would not send."""
        outer = Fields(_KIND, data)
        place = outer.within("place", outer.integers("place"), 0, world_size)
        fields = Fields(_GROUP_KIND, outer.blobs("group", 1)[0])
        number = fields.within("number", fields.integers("number", len(place)), 1, 1 << 31)
        size = fields.within("size", fields.integers("size", len(place)), 1, world_size + 1)
        if (place >= size).any():
            raise outer.malformed("a rank stands outside a set")
        alike = [_spelled_out(fields, stretches, count) for stretches in fields.columns("alike", len(place))]
        apart = fields.within("apart", fields.integers("apart"), 0, count)
        (bits,) = fields.within("bits", fields.integers("bits", 1), 0, _MARK_BITS + 1).tolist()
        return cls(rank, world_size, number.tolist(), size.tolist(), alike, apart, bits, place.tolist())


def _stretches(items: Int64) -> Int64:
    """Ascending numbers as stretches of neighbours: the first of each and how many."""
    begins = np.flatnonzero(np.diff(items, prepend=-2) != 1)
    return np.stack((items[begins], np.diff(np.append(begins, len(items)))), axis=1).reshape(-1)


def _spelled_out(fields: Fields, stretches: Int64, count: int) -> Int64:
    if len(stretches) % 2:
        raise fields.malformed("half a stretch of items")
    first, lengths = stretches[::2], fields.within("alike", stretches[1::2], 0, count + 1)
    fields.within("alike", first, 0, count + 1)
    if int(lengths.sum()) > count:
        raise fields.malformed("more items than there are")
    return fields.within("alike", ragged_positions(first, lengths), 0, count)


def _edge(data: bytes, number: int, place: int, size: int) -> int:
    """What the ``place``-th of ``size`` ranks adds for what it holds. All ranks' add up to 0 where all are alike."""
    here = xxhash.xxh3_128_intdigest(data, seed=number << 32 | place)
    return int(here ^ xxhash.xxh3_128_intdigest(data, seed=number << 32 | (place + 1) % size))


@dataclass(frozen=True, eq=False)
class _Apart:
    """An item that some ranks hold differently: who holds it, and as which of its marks."""

    ranks: Int64
    mark: Int64


@dataclass(eq=False)
class Comparison:
    """What rank 0 found out about all ranks' contents, once.

    ``differing`` are the keys that are not alike on all their holders. ``is_cacheable``: whether ``ContentChecks`` can
    tell later that they still are not, within the bytes that they may take.
    """

    differing: list[Hashable]
    is_cacheable: bool
    _world_size: int
    _bits: int
    _sets: list[Int64]
    _members: list[tuple[Int64, list[tuple[int, Int64]], Int64]]
    _apart: list[_Apart]

    def checks(self) -> list[bytes]:
        """By rank, for ``ContentChecks.from_bytes`` there: what each is to tell before the next save of the plan."""
        packed = [b""] * self._world_size
        for ranks, in_sets, apart in self._members:
            sets = [self._sets[which] for which, _ in in_sets]
            group = pack(
                _GROUP_KIND,
                {
                    "number": [which + 1 for which, _ in in_sets],
                    "size": [len(one) for one in sets],
                    "alike": [column(_stretches(items)) for _, items in in_sets],
                    "apart": column(apart),
                    "bits": [self._bits],
                },
            )
            places = np.array([np.searchsorted(one, ranks) for one in sets], np.int64).reshape(-1, len(ranks))
            for rank, place in zip(ranks.tolist(), places.T.tolist()):
                packed[rank] = pack(_KIND, {"place": place, "group": [group]})
        return packed

    def holds(self, told: Sequence[bytes]) -> bool:
        """Whether what all ranks ``tell`` says that nothing changed which the plan relies on."""
        sums = [int.from_bytes(one[:_SUM_BYTES], "little") for one in told]
        return reduce(xor, sums, 0) == 0 and self._still_apart([one[_SUM_BYTES:] for one in told])

    def _still_apart(self, told: Sequence[bytes]) -> bool:
        if not self._apart:
            return True
        rows = np.frombuffer(b"".join(one.ljust(_MARKS_BYTES, b"\0") for one in told), np.uint8)
        bits = np.unpackbits(rows.reshape(len(told), _MARKS_BYTES), axis=1, bitorder="little")
        for item in self._apart:
            marks = bits[item.ranks[:, None], item.mark[:, None] * self._bits + np.arange(self._bits)]
            # Marks of items that differ may be alike by chance; planning anew then finds out.
            if (marks == marks[0]).all():
                return False
        return True


def compare_contents(held: Sequence[Held], world_size: int) -> Comparison:
    """Compare all ranks' contents. Every rank is in exactly one of ``held``.

    Raises ``PlanError`` for a rank that has an item twice.
    """
    for one in held:
        if len(set(one.keys)) != len(one.keys) or any(len(c) != len(one.keys) for c in one.contents):
            raise PlanError(
                f"rank {int(one.ranks[0])} tells of {len(one.contents[0])} contents of {len(one.keys)} items"
            )
    items = _Items.of(held)
    alike = items.alike(held)
    in_sets = np.flatnonzero(alike & ~items.alone(held))
    sets, number = items.sets(in_sets)
    mine, in_set = items.parts(in_sets, number)
    by_group = [np.flatnonzero(items.group[mine] == group) for group in range(len(held))]
    apart: list[list[int]] = [[] for _ in held]
    differing: list[tuple[Hashable, list[tuple[int, int]]]] = []
    for key in np.flatnonzero(~alike).tolist():
        rows = range(int(items.starts[key]), int(items.starts[key + 1]))
        places = [(int(items.group[row]), int(items.item[row])) for row in rows]
        differing.append((items.keys[key], [(group, len(apart[group])) for group, _ in places]))
        for group, item in places:
            apart[group].append(item)
    most = max(map(len, apart), default=0)
    bits = min(_MARK_BITS, _MARKS_BYTES * 8 // most) if most else 0
    return Comparison(
        [key for key, _ in differing],
        not most or bits > 0,
        world_size,
        bits,
        [np.sort(np.concatenate([held[group].ranks for group in groups])) for groups in sets],
        [
            (one.ranks, _by_set(in_set[rows], items.item[mine[rows]]), np.array(others, np.int64))
            for one, rows, others in zip(held, by_group, apart)
        ],
        [_apart(held, places) for _, places in differing],
    )


@dataclass(frozen=True, eq=False)
class _Items:
    """Every item of every group, by key: those of ``keys[k]`` are rows ``[starts[k], starts[k + 1])``, by ``group``,
    which lists it as its ``item``-th. Keys are in the order in which groups list them first."""

    keys: list[Hashable]
    starts: Int64
    group: Int64
    item: Int64

    @classmethod
    def of(cls, held: Sequence[Held]) -> _Items:
        counts = np.array([len(one.keys) for one in held], np.int64)
        number_of: dict[Hashable, int] = dict.fromkeys(chain.from_iterable(one.keys for one in held), 0)
        keys = list(number_of)
        number_of = dict(zip(keys, range(len(keys))))
        listed = chain.from_iterable(one.keys for one in held)
        number = np.fromiter(map(number_of.__getitem__, listed), np.int64, int(counts.sum()))
        order = np.argsort(number, kind="stable")
        group = np.repeat(np.arange(len(held)), counts)[order]
        starts = ragged_starts(np.bincount(number, minlength=len(keys)))
        return cls(keys, starts, group, ragged_positions(np.zeros_like(counts), counts)[order])

    def alike(self, held: Sequence[Held]) -> Bool:
        """By key, whether all ranks that have it hold the same."""
        if not self.keys:
            return np.empty(0, np.bool_)
        listed = ragged_starts(np.array([len(one.keys) for one in held], np.int64))[self.group] + self.item
        same = np.concatenate([_alike(one.contents) for one in held])[listed]
        rows = np.concatenate([one.contents[0] for one in held])[listed]
        same &= (rows == np.repeat(rows[self.starts[:-1]], np.diff(self.starts), axis=0)).all(axis=1)
        found: Bool = np.logical_and.reduceat(same, self.starts[:-1])
        return found

    def alone(self, held: Sequence[Held]) -> Bool:
        """By key, whether only one rank has it."""
        is_single = np.array([len(one.ranks) == 1 for one in held], np.bool_)
        found: Bool = (np.diff(self.starts) == 1) & is_single[self.group[self.starts[:-1]]]
        return found

    def sets(self, keys: Int64) -> tuple[list[list[int]], Int64]:
        """The distinct sets of groups that have any of ``keys``, in the order of keys, and which of them has each."""
        counts = self.starts[keys + 1] - self.starts[keys]
        starts = ragged_starts(counts)
        groups = self.group[ragged_positions(self.starts[keys], counts)]
        first, kind = distinct_sets(groups, starts)
        order = np.argsort(first)
        number = np.empty_like(order)
        number[order] = np.arange(len(order))
        return [groups[starts[key] : starts[key + 1]].tolist() for key in first[order].tolist()], number[kind]

    def parts(self, keys: Int64, number: Int64) -> tuple[Int64, Int64]:
        """The rows of ``keys`` (those of one ``number`` together, each of them in the order of keys) and their
        numbers."""
        order = np.argsort(number, kind="stable")
        keys, number = keys[order], number[order]
        counts = self.starts[keys + 1] - self.starts[keys]
        return ragged_positions(self.starts[keys], counts), np.repeat(number, counts)


def _by_set(number: Int64, items: Int64) -> list[tuple[int, Int64]]:
    """Items of each number, which ascends."""
    begins = np.flatnonzero(np.diff(number, prepend=-1))
    return list(zip(number[begins].tolist(), np.split(items, begins[1:])))


def _alike(contents: Sequence[Contents]) -> Bool:
    """By item, whether all of a group's ranks hold the same."""
    alike = np.ones(len(contents[0]), np.bool_)
    for other in contents[1:]:
        if other is not contents[0]:
            alike &= (other == contents[0]).all(axis=1)
    return alike


def _apart(held: Sequence[Held], places: list[tuple[int, int]]) -> _Apart:
    ranks = np.concatenate([held[group].ranks for group, _ in places])
    marks = [np.full(len(held[group].ranks), mark, np.int64) for group, mark in places]
    return _Apart(ranks, np.concatenate(marks))
