"""Detect, with a few bytes per rank, whether plain values and tensors changed in a way that affects a cached plan.

A cached plan is valid while every item that was stored once is still equal on all its holders, and every item that each
holder stored separately still differs. Each rank sends 16 bytes for all items of the first kind, and 2 bytes for each
item of the second kind.

The 16 bytes are an exclusive-or over the sets of ranks that hold items in common. Rank ``p`` of the ``n`` ranks of a
set adds the hash of its contents seeded with ``p``, and the hash seeded with ``p + 1 mod n``. If all contents are
equal, every hash is added twice and the sum over all ranks is zero. So a rank needs only its position in its sets, and
rank 0 only adds up.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import xor

import numpy as np
import numpy.typing as npt
import xxhash

from ..tensors.tables import Int64, ragged_positions
from .wire import pack, unpack

ContentDigests = npt.NDArray[np.uint8]
"""The digests of a rank's items, by row: ``[n, DIGEST_BYTES]``."""

DIGEST_BYTES = 16
CONTRIBUTION_BYTES = 16
_MARK_BYTES = 2
_MOST_MARKS = 64


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
        place: This rank's position in each of its sets.
    """

    rank: int
    world_size: int
    number: list[int]
    size: list[int]
    equal: list[Int64]
    differing_items: Int64
    place: list[int]

    def summarize(self, contents: ContentDigests, everywhere: bytes, declared: int = 0) -> bytes:
        """Summarize this rank's contents.

        Args:
            contents: The digests of its items.
            everywhere: Bytes that must be equal on all ranks.
            declared: This rank's contributions for what other sets of ranks hold in common.

        Returns:
            16 bytes, and 2 for each differing item, for ``ContentComparison.is_unchanged``.
        """
        total = declared ^ contribution(everywhere, 0, self.rank, self.world_size)
        for number, place, size, items in zip(self.number, self.place, self.size, self.equal, strict=True):
            total ^= contribution(contents[items].tobytes(), number, place, size)
        differing = (xxhash.xxh3_64_digest(contents[item].tobytes()) for item in self.differing_items.tolist())
        return total.to_bytes(CONTRIBUTION_BYTES, "little") + b"".join(digest[:_MARK_BYTES] for digest in differing)

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
        number, size, stretches, differing_items = unpack(of_group)
        equal = [ragged_positions(one[::2], one[1::2]) for one in stretches]
        return cls(rank, world_size, number, size, equal, differing_items, place)


def _stretches(items: Int64) -> Int64:
    """Return numbers as runs of consecutive ones: the first of each run and its length."""
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
        is_cacheable: Whether these are few enough to detect that all of them still differ. Otherwise do not cache the
            plan.
    """

    differing: list[Hashable]
    is_cacheable: bool
    _world_size: int
    _sets: list[Int64]
    _members: list[tuple[Int64, list[tuple[int, Int64]], list[int]]]
    _marks: list[list[tuple[Int64, int]]]

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
            group = pack([numbers, sizes, stretches, np.array(differing_items, np.int64)])
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
        return reduce(xor, sums, 0) == 0 and all(_differs(summaries, mark) for mark in self._marks)


def _differs(summaries: Sequence[bytes], mark: Sequence[tuple[Int64, int]]) -> bool:
    """Whether an item's marks differ. Marks of different contents may be equal by chance; planning again shows that."""
    places = ((summaries[rank], CONTRIBUTION_BYTES + _MARK_BYTES * at) for ranks, at in mark for rank in ranks.tolist())
    found = (summary[begin : begin + _MARK_BYTES] for summary, begin in places)
    first = next(found)
    return any(other != first for other in found)


def compare_contents(held: Sequence[HeldContents], world_size: int) -> ContentComparison:
    """Compare the contents of all ranks.

    Args:
        held: Groups of ranks that hold the same items. Every rank is in one of them.
        world_size: The number of ranks.

    Returns:
        The items that differ, and how to detect later changes.
    """
    holders: dict[Hashable, list[tuple[int, int]]] = {}
    for group, one in enumerate(held):
        for item, key in enumerate(one.keys):
            holders.setdefault(key, []).append((group, item))
    common = [_common_digests(one.contents) for one in held]
    is_shared = [len(one.ranks) > 1 for one in held]
    equal: dict[tuple[int, ...], list[list[int]]] = {}  # by groups that hold items in common, these items
    differing: list[Hashable] = []
    differing_items: list[list[int]] = [[] for _ in held]
    marks: list[list[tuple[Int64, int]]] = []
    for key, places in holders.items():
        (group, item), *others = places
        digest = common[group][item]
        if digest is None or any(common[group][item] != digest for group, item in others):
            differing.append(key)
            marks.append([(held[group].ranks, len(differing_items[group])) for group, _ in places])
            for group, item in places:
                differing_items[group].append(item)
        elif others or is_shared[group]:
            groups = (group, *(group for group, _ in others)) if others else (group,)
            equal.setdefault(groups, []).append([item for _, item in places])
    in_sets: list[list[tuple[int, Int64]]] = [[] for _ in held]
    for number, (groups, rows) in enumerate(equal.items()):
        for group, column in zip(groups, np.array(rows, np.int64).T, strict=True):
            in_sets[group].append((number, column))
    return ContentComparison(
        differing,
        max(map(len, differing_items), default=0) <= _MOST_MARKS,
        world_size,
        [np.sort(np.concatenate([held[group].ranks for group in groups])) for groups in equal],
        list(zip([one.ranks for one in held], in_sets, differing_items, strict=True)),
        marks,
    )


def _common_digests(contents: Sequence[ContentDigests]) -> list[bytes | None]:
    """By item, what all ranks of a group have; None where they differ."""
    equal = np.ones(len(contents[0]), np.bool_)
    for other in contents[1:]:
        if other is not contents[0]:
            equal &= (other == contents[0]).all(axis=1)
    found: list[bytes | None] = contents[0].view(f"V{DIGEST_BYTES}").reshape(-1).tolist()
    for item in np.flatnonzero(~equal).tolist():
        found[item] = None
    return found
