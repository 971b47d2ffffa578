"""Detect, with a few bytes per rank, whether plain values and tensors changed in a way that affects a cached plan.

A cached plan is valid while every item that was stored once is still equal on all its holders, and every item that each
holder stored separately still differs. Each rank sends 16 bytes for all items of the first kind, and a few bits for
each item of the second kind.

The 16 bytes are an exclusive-or over the sets of ranks that hold items in common. Rank ``p`` of the ``n`` ranks of a
set adds the hash of its contents seeded with ``p``, and the hash seeded with ``p + 1 mod n``. If all contents are
equal, every hash is added twice and the sum over all ranks is zero. So a rank needs only its position in its sets, and
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

from ..tensors.tables import Int64, ragged_positions, ragged_starts
from .rank_sets import distinct_sets
from .wire import Bool, pack, unpack

ContentDigests = npt.NDArray[np.uint8]
"""The digests of a rank's items, by row: ``[n, DIGEST_BYTES]``."""

DIGEST_BYTES = 16
CONTRIBUTION_BYTES = 16
_MARKS_BYTES = 24
_MARK_BITS = 16


def stack_digests(digests: Sequence[bytes]) -> ContentDigests:
    """Return digests as rows.

    Args:
        digests: Digests of at most 16 bytes; those of one item always have the same length.

    Returns:
        The digests, padded with zero bytes, as ``[n, DIGEST_BYTES]``.
    """
    joined = b"".join(digest.ljust(DIGEST_BYTES, b"\0") for digest in digests)
    return np.frombuffer(joined, np.uint8).reshape(-1, DIGEST_BYTES)


@dataclass(frozen=True, eq=False)
class HeldContents:
    """Ranks that hold the same items.

    Attributes:
        keys: The items, in order.
        ranks: The ranks, ascending.
        contents: For each rank, the digests of its items.
    """

    keys: Sequence[Hashable]
    ranks: Int64
    contents: Sequence[ContentDigests]


@dataclass(frozen=True, eq=False)
class ContentChecks:
    """How one rank summarizes its contents.

    Attributes:
        rank: The rank.
        world_size: The number of ranks.
        number: The numbers of the sets of ranks to which this rank belongs.
        size: The number of ranks in each of these sets.
        equal: The items that each set has in common.
        differing_items: Items that each holder stores separately.
        bits: The width of the mark of a differing item.
        place: This rank's position in each of its sets.
    """

    rank: int
    world_size: int
    number: list[int]
    size: list[int]
    equal: list[Int64]
    differing_items: Int64
    bits: int
    place: list[int]

    def summarize(self, contents: ContentDigests, everywhere: bytes, declared: int = 0) -> bytes:
        """Summarize this rank's contents.

        Args:
            contents: The digests of its items.
            everywhere: Bytes that must be equal on all ranks.
            declared: This rank's contributions for what other sets of ranks hold in common.

        Returns:
            At most 40 bytes for ``ContentComparison.is_unchanged``.
        """
        total = declared ^ contribution(everywhere, 0, self.rank, self.world_size)
        for number, place, size, items in zip(self.number, self.place, self.size, self.equal, strict=True):
            total ^= contribution(contents[items].tobytes(), number, place, size)
        return total.to_bytes(CONTRIBUTION_BYTES, "little") + self._marks(contents)

    def _marks(self, contents: ContentDigests) -> bytes:
        marks = 0
        for at, item in enumerate(self.differing_items.tolist()):
            mark = xxhash.xxh3_64_intdigest(contents[item].tobytes()) & ((1 << self.bits) - 1)
            marks |= mark << (at * self.bits)
        return marks.to_bytes(-(-len(self.differing_items) * self.bits // 8), "little")

    @classmethod
    def from_bytes(cls, data: bytes, rank: int, world_size: int) -> ContentChecks:
        """Unpack what rank 0 sent.

        Args:
            data: One entry of ``ContentComparison.checks``.
            rank: This rank.
            world_size: The number of ranks.

        Returns:
            How this rank summarizes its contents.
        """
        place, of_group = unpack(data)
        number, size, stretches, differing_items, bits = unpack(of_group)
        equal = [ragged_positions(one[::2], one[1::2]) for one in stretches]
        return cls(rank, world_size, number, size, equal, differing_items, bits, place)


def _stretches(items: Int64) -> Int64:
    """Return ascending numbers as runs of consecutive ones: the first of each run and its length."""
    begins = np.flatnonzero(np.diff(items, prepend=-2) != 1)
    return np.stack((items[begins], np.diff(np.append(begins, len(items)))), axis=1).reshape(-1)


def contribution(data: bytes, number: int, place: int, size: int) -> int:
    """Return what one rank of a set adds for its contents. All ranks' contributions cancel if they are equal.

    Args:
        data: The rank's contents.
        number: The number of the set, below 2^32.
        place: The rank's position in the set.
        size: The number of ranks in the set.

    Returns:
        A number of 128 bits, to be combined with the others by exclusive or.
    """
    here = xxhash.xxh3_128_intdigest(data, seed=number << 32 | place)
    return int(here ^ xxhash.xxh3_128_intdigest(data, seed=number << 32 | (place + 1) % size))


@dataclass(eq=False)
class ContentComparison:
    """The result of ``compare_contents``, on rank 0.

    It also makes the summaries with which the ranks detect, before the next save with a cached plan, that contents have
    changed in a way that makes the plan invalid.

    Attributes:
        differing: The keys whose contents are not equal on all holders.
        is_cacheable: True if the summaries of ``ContentChecks`` have enough bits to detect whether all of these keys
            still differ. Otherwise do not cache the plan.
    """

    differing: list[Hashable]
    is_cacheable: bool
    _world_size: int
    _bits: int
    _sets: list[Int64]
    _members: list[tuple[Int64, list[tuple[int, Int64]], Int64]]
    _marks: list[tuple[Int64, Int64]]

    def checks(self) -> list[bytes]:
        """Return how each rank summarizes its contents before the next save with the plan.

        Returns:
            By rank, the bytes for ``ContentChecks.from_bytes``.
        """
        packed = [b""] * self._world_size
        for ranks, in_sets, differing_items in self._members:
            sets = [self._sets[which] for which, _ in in_sets]
            stretches = [_stretches(items) for _, items in in_sets]
            numbers, sizes = [which + 1 for which, _ in in_sets], list(map(len, sets))
            group = pack([numbers, sizes, stretches, differing_items, self._bits])
            places = np.array([np.searchsorted(one, ranks) for one in sets], np.int64).reshape(-1, len(ranks))
            for rank, place in zip(ranks.tolist(), places.T.tolist(), strict=True):
                packed[rank] = pack([place, group])
        return packed

    def is_unchanged(self, summaries: Sequence[bytes]) -> bool:
        """Whether nothing has changed that the plan depends on.

        Args:
            summaries: What ``ContentChecks.summarize`` has returned, by rank.

        Returns:
            True if the plan is still valid.
        """
        sums = [int.from_bytes(one[:CONTRIBUTION_BYTES], "little") for one in summaries]
        return reduce(xor, sums, 0) == 0 and self._still_differ([one[CONTRIBUTION_BYTES:] for one in summaries])

    def _still_differ(self, summaries: Sequence[bytes]) -> bool:
        if not self._marks:
            return True
        rows = np.frombuffer(b"".join(one.ljust(_MARKS_BYTES, b"\0") for one in summaries), np.uint8)
        bits = np.unpackbits(rows.reshape(len(summaries), _MARKS_BYTES), axis=1, bitorder="little")
        for ranks, index in self._marks:
            marks = bits[ranks[:, None], index[:, None] * self._bits + np.arange(self._bits)]
            # Marks of different contents may be equal by chance; planning again detects that.
            if (marks == marks[0]).all():
                return False
        return True


def compare_contents(held: Sequence[HeldContents], world_size: int) -> ContentComparison:
    """Compare the contents of all ranks.

    Args:
        held: Groups of ranks that hold the same items. Every rank is in one of them.
        world_size: The number of ranks.

    Returns:
        The items that differ, and how to detect later changes.
    """
    items = _Items.of(held)
    equal = items.equal(held)
    in_sets = np.flatnonzero(equal & ~items.alone(held))
    sets, number = items.sets(in_sets)
    listed_rows, in_set = items.parts(in_sets, number)
    by_group = _by_number(items.group[listed_rows], len(held))
    differing_items: list[list[int]] = [[] for _ in held]
    differing: list[tuple[Hashable, list[tuple[int, int]]]] = []
    for key in np.flatnonzero(~equal).tolist():
        rows = range(int(items.starts[key]), int(items.starts[key + 1]))
        places = [(int(items.group[row]), int(items.item[row])) for row in rows]
        differing.append((items.keys[key], [(group, len(differing_items[group])) for group, _ in places]))
        for group, item in places:
            differing_items[group].append(item)
    most = max(map(len, differing_items), default=0)
    bits = min(_MARK_BITS, _MARKS_BYTES * 8 // most) if most else 0
    return ContentComparison(
        [key for key, _ in differing],
        not most or bits > 0,
        world_size,
        bits,
        [np.sort(np.concatenate([held[group].ranks for group in groups])) for groups in sets],
        [
            (one.ranks, _by_set(in_set[rows], items.item[listed_rows[rows]]), np.array(others, np.int64))
            for one, rows, others in zip(held, by_group, differing_items, strict=True)
        ],
        [_marks_of(held, places) for _, places in differing],
    )


@dataclass(frozen=True, eq=False)
class _Items:
    """Every item of every group, by key.

    The items of ``keys[k]`` are rows ``[starts[k], starts[k + 1])``: group ``group`` lists it as its item number
    ``item``. Keys are in the order in which groups list them first.
    """

    keys: list[Hashable]
    starts: Int64
    group: Int64
    item: Int64

    @classmethod
    def of(cls, held: Sequence[HeldContents]) -> _Items:
        counts = np.array([len(one.keys) for one in held], np.int64)
        number_of: dict[Hashable, int] = dict.fromkeys(chain.from_iterable(one.keys for one in held), 0)
        keys = list(number_of)
        number_of = dict(zip(keys, range(len(keys)), strict=True))
        listed = chain.from_iterable(one.keys for one in held)
        number = np.fromiter(map(number_of.__getitem__, listed), np.int64, int(counts.sum()))
        order = np.argsort(number, kind="stable")
        group = np.repeat(np.arange(len(held)), counts)[order]
        starts = ragged_starts(np.bincount(number, minlength=len(keys)))
        return cls(keys, starts, group, ragged_positions(np.zeros_like(counts), counts)[order])

    def equal(self, held: Sequence[HeldContents]) -> Bool:
        """By key, whether all holders have the same contents."""
        if not self.keys:
            return np.empty(0, np.bool_)
        listed = ragged_starts(np.array([len(one.keys) for one in held], np.int64))[self.group] + self.item
        same = np.concatenate([_all_equal(one.contents) for one in held])[listed]
        rows = np.concatenate([one.contents[0] for one in held])[listed]
        same &= (rows == np.repeat(rows[self.starts[:-1]], np.diff(self.starts), axis=0)).all(axis=1)
        found: Bool = np.logical_and.reduceat(same, self.starts[:-1])
        return found

    def alone(self, held: Sequence[HeldContents]) -> Bool:
        """By key, whether only one rank holds it."""
        is_single = np.array([len(one.ranks) == 1 for one in held], np.bool_)
        found: Bool = (np.diff(self.starts) == 1) & is_single[self.group[self.starts[:-1]]]
        return found

    def sets(self, keys: Int64) -> tuple[list[list[int]], Int64]:
        """Return the distinct sets of groups that hold any of ``keys``, in the order of keys, and each key's set."""
        counts = self.starts[keys + 1] - self.starts[keys]
        starts = ragged_starts(counts)
        groups = self.group[ragged_positions(self.starts[keys], counts)]
        first, kind = distinct_sets(groups, starts)
        order = np.argsort(first)
        number = np.empty_like(order)
        number[order] = np.arange(len(order))
        return [groups[starts[key] : starts[key + 1]].tolist() for key in first[order].tolist()], number[kind]

    def parts(self, keys: Int64, number: Int64) -> tuple[Int64, Int64]:
        """Return the rows of ``keys``, sorted by ``number``, then in the order of keys, and their numbers."""
        order = np.argsort(number, kind="stable")
        keys, number = keys[order], number[order]
        counts = self.starts[keys + 1] - self.starts[keys]
        return ragged_positions(self.starts[keys], counts), np.repeat(number, counts)


def _by_number(number: Int64, count: int) -> list[Int64]:
    """Return the rows of each number below ``count``, ascending."""
    order = np.argsort(number, kind="stable")
    return np.split(order, np.searchsorted(number[order], np.arange(1, count)))


def _by_set(number: Int64, items: Int64) -> list[tuple[int, Int64]]:
    """Return the items of each number, which ascends."""
    begins = np.flatnonzero(np.diff(number, prepend=-1))
    # Nothing is split into one empty array.
    return list(zip(number[begins].tolist(), np.split(items, begins[1:]), strict=False))


def _all_equal(contents: Sequence[ContentDigests]) -> Bool:
    """By item, whether all ranks of a group have the same contents."""
    equal = np.ones(len(contents[0]), np.bool_)
    for other in contents[1:]:
        if other is not contents[0]:
            equal &= (other == contents[0]).all(axis=1)
    return equal


def _marks_of(held: Sequence[HeldContents], places: list[tuple[int, int]]) -> tuple[Int64, Int64]:
    """Return the holders of a differing item, and the index of its mark on each."""
    ranks = np.concatenate([held[group].ranks for group, _ in places])
    marks = [np.full(len(held[group].ranks), mark, np.int64) for group, mark in places]
    return ranks, np.concatenate(marks)
