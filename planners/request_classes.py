"""Find the ranks that request the same boxes without exchanging lists of requests.

Each rank sorts its requests into a few classes that ranks with common layouts have in common (all replicated tensors
of a section; all tensors that are split equally finely in the same dimensions) and announces one digest per class.
Ranks with equal digests request the same boxes of the same tensors: they form a *ring*, in which each box is read by
one rank and forwarded to the others.

A *stripe* is a request whose bytes are stored in runs too short to read one by one, such as some columns of a matrix.
Reading it means reading the whole *frame*, which contains the other stripes too. The digest of a class of stripes is
computed from their frames, and each rank adds the index of its own stripe. Ranks that together request all stripes
each read a share of the frames and *scatter* the result.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np

from ..tensors.geometry import Box
from ..tensors.tables import BoxTable, TensorTable

# A packet is delayed by one hop per rank, and one slow rank delays its whole ring.
_MAX_RING_RANKS = 64
# Classes per rank. Each may become a ring with its own connections and threads.
_MAX_CLASSES = 16
# Stripes per frame. Each rank has a connection and a thread for every other rank.
_MAX_STRIPES = 16
# A run of this length is read at a cost of little more than one extra chunk at each end.
_LONG_RUN_BYTES = 1 << 20


@dataclass(frozen=True)
class BoxRequest:
    """``box`` of row ``tensor`` of the manifest's tensors, requested as elements of ``dtype`` (any distinct name)."""

    tensor: int
    box: Box
    dtype: str


class Stripe(NamedTuple):
    """Part ``number`` of the ``parts`` equal parts into which ``frame`` is split along ``axis``."""

    frame: Box
    axis: int
    parts: int
    number: int

    def box_of(self, number: int) -> Box:
        """Return the box of a stripe of the same frame.

        Args:
            number: The number of the stripe.

        Returns:
            Its box, in global coordinates.
        """
        lengths, offsets = [*self.frame.lengths], [*self.frame.offsets]
        lengths[self.axis] //= self.parts
        offsets[self.axis] += number * lengths[self.axis]
        return Box(tuple(offsets), tuple(lengths))


class ClassSummary(NamedTuple):
    """What a rank announces about one class of its requests.

    Classes with equal ``digest`` hold stripes ``number`` of ``parts`` of the same frames, or, if ``parts`` is 1, the
    same requests.
    """

    digest: bytes
    parts: int
    number: int


@dataclass(frozen=True)
class RequestClass:
    """Requests that a rank may share with other ranks.

    Attributes:
        summary: What the rank announces about the class.
        requests: Indices of the requests.
        nbytes: Their stored size in bytes.
        stripes: One entry per request, or empty if the requests are not stripes.
    """

    summary: ClassSummary
    requests: tuple[int, ...]
    nbytes: int
    stripes: tuple[Stripe, ...] = ()


RankGroups = Mapping[bytes, Sequence[Sequence[int]]]
"""By digest, for each stripe in order, the ranks that request it, ascending."""


def find_stripe(request: BoxRequest, shape: tuple[int, ...], itemsize: int) -> Stripe | None:
    """Return the stripe that a request of a tensor of this shape is, or None if it can be read efficiently alone."""
    box = request.box
    split = [axis for axis, length in enumerate(shape) if box.lengths[axis] < length]
    if not split or all(length == 1 for length in box.lengths[: split[-1]]):
        return None  # the request is one contiguous run
    axis = split[-1]
    part, whole = box.lengths[axis], shape[axis]
    if prod(box.lengths[axis:]) * itemsize >= _LONG_RUN_BYTES:
        return None
    begin = box.offsets[axis]
    if whole % part or begin % part or whole // part > _MAX_STRIPES:
        return None
    return Stripe(box.narrow(axis, -begin, whole - begin), axis, whole // part, begin // part)


def classify_requests(
    tensors: TensorTable, stored: BoxTable, requests: Sequence[BoxRequest], *, salt: str, min_bytes: int
) -> list[RequestClass]:
    """Sort one rank's requests into classes that it may share with other ranks.

    A request that equals an earlier one, a class of fewer than ``min_bytes`` bytes, and stripes of which this rank
    requests several belong to no class.

    Args:
        tensors: Every tensor of the checkpoint.
        stored: The stored boxes of the tensors, sorted by tensor. They decide which requests are stripes: a tensor
            that is stored in stripes is not read as one frame.
        requests: What this rank requests.
        salt: Ranks with different salts never have a class in common.
        min_bytes: The size in stored bytes from which sharing a class is worth a connection.

    Returns:
        The classes, in an order that does not depend on the rank.
    """
    first = {request: index for index, request in reversed([*enumerate(requests)])}
    classes: dict[tuple[object, ...], list[_Member]] = {}
    for request, index in first.items():
        if request.box.numel:
            meta = tensors.meta_of(request.tensor)
            stripe = find_stripe(request, meta.shape, meta.dtype.itemsize)
            if stripe and _longest_stored(stored, request.tensor, stripe.axis) <= request.box.lengths[stripe.axis]:
                stripe = None
            fineness = tuple(round(whole / part) for whole, part in zip(meta.shape, request.box.lengths, strict=True))
            split = fineness if any(parts > 1 for parts in fineness) else ()
            key = (int(tensors.section[request.tensor]), split, stripe and (stripe.axis, stripe.number))
            nbytes = request.box.numel * meta.dtype.itemsize
            classes.setdefault(key, []).append(_Member(request, index, stripe, nbytes))
    found = [_make_class(salt, key[:2], sorted(members, key=_order)) for key, members in classes.items()]
    times = Counter(one.summary.digest for one in found)
    found = [one for one in found if one.nbytes >= max(min_bytes, 1) and times[one.summary.digest] == 1]
    return sorted(found, key=lambda one: (-one.nbytes, one.summary.digest))[:_MAX_CLASSES]


def _longest_stored(stored: BoxTable, tensor: int, axis: int) -> int:
    """The largest length along ``axis`` of a tensor's stored boxes; 0 if it has none."""
    low, high = np.searchsorted(stored.tensor, (tensor, tensor + 1))
    return int(stored.lengths[stored.starts[low:high] + axis].max(initial=0))


class _Member(NamedTuple):
    request: BoxRequest
    position: int
    stripe: Stripe | None
    nbytes: int


def _order(member: _Member) -> tuple[int, tuple[int, ...], tuple[int, ...], str]:
    request = member.request
    return request.tensor, request.box.offsets, request.box.lengths, request.dtype


def _make_class(salt: str, key: tuple[object, ...], members: Sequence[_Member]) -> RequestClass:
    stripes = tuple(member.stripe for member in members if member.stripe is not None)
    boxes = [stripe.frame for stripe in stripes] or [member.request.box for member in members]
    identity = repr(
        (salt, key, [(m.request.tensor, *box, m.request.dtype) for m, box in zip(members, boxes, strict=True)])
    )
    digest = hashlib.blake2b(identity.encode(), digest_size=16).digest()
    summary = ClassSummary(digest, stripes[0].parts, stripes[0].number) if stripes else ClassSummary(digest, 1, 0)
    return RequestClass(summary, tuple(m.position for m in members), sum(m.nbytes for m in members), stripes)


def group_ranks(summaries: Sequence[Sequence[ClassSummary]]) -> dict[bytes, list[list[int]]]:
    """Find the digests that several ranks announced.

    Args:
        summaries: What each rank announced, by rank.

    Returns:
        By digest, for each stripe in order, the ranks that request it (see ``RankGroups``).
    """
    found: dict[bytes, list[list[int]]] = {}
    for rank, of_rank in enumerate(summaries):
        for digest, parts, number in of_rank:
            found.setdefault(digest, [[] for _ in range(parts)])[number].append(rank)
    return {
        digest: ranks
        for digest, ranks in found.items()
        if is_scattered(ranks) or any(len(of_stripe) > 1 for of_stripe in ranks)
    }


def is_scattered(ranks: Sequence[Sequence[int]]) -> bool:
    """Whether the ranks that request these stripes scatter their frames.

    They do if every stripe is requested by the same number of ranks, and there are more stripes than ranks for each.
    Otherwise a ring of the ranks that request the same stripe reads less.

    Args:
        ranks: For each stripe in order, the ranks that request it.

    Returns:
        True if they scatter frames, false if they form rings.
    """
    return len({len(of_stripe) for of_stripe in ranks}) == 1 and 0 < len(ranks[0]) < len(ranks)


def find_rings(
    rank: int, classes: Sequence[RequestClass], groups: RankGroups
) -> dict[tuple[int, ...], list[RequestClass]]:
    """Find the rings of a rank.

    Args:
        rank: The rank.
        classes: Its classes.
        groups: The ranks by digest.

    Returns:
        By ring, its classes in the same order on all of its ranks.
    """
    rings: dict[tuple[int, ...], list[RequestClass]] = {}
    for one, ranks in _shared_classes(rank, classes, groups):
        if not is_scattered(ranks):
            rings.setdefault(_ring_of(rank, ranks[one.summary.number]), []).append(one)
    return {ranks: members for ranks, members in rings.items() if len(ranks) > 1}


def find_scatters(
    rank: int, classes: Sequence[RequestClass], groups: RankGroups
) -> dict[tuple[int, ...], list[RequestClass]]:
    """Find the groups in which a rank scatters frames.

    Args:
        rank: The rank.
        classes: Its classes.
        groups: The ranks by digest.

    Returns:
        By group of ranks in the order of their stripes, its classes.
    """
    scatters: dict[tuple[int, ...], list[RequestClass]] = {}
    for one, ranks in _shared_classes(rank, classes, groups):
        if is_scattered(ranks):
            at = bisect_left(ranks[one.summary.number], rank)
            scatters.setdefault(tuple(of_stripe[at] for of_stripe in ranks), []).append(one)
    return scatters


def _shared_classes(
    rank: int, classes: Sequence[RequestClass], groups: RankGroups
) -> Iterator[tuple[RequestClass, Sequence[Sequence[int]]]]:
    """The classes that other ranks announced too, in an order that is equal on all ranks, with ``groups`` of each."""
    for one in sorted(classes, key=lambda one: one.summary):
        ranks = groups.get(one.summary.digest)
        if ranks is not None and rank in ranks[one.summary.number]:
            yield one, ranks


def _ring_of(rank: int, group: Sequence[int]) -> tuple[int, ...]:
    """The ring of ``rank``, in rank order; a large group is split into several rings of about equal size."""
    rings = -(-len(group) // _MAX_RING_RANKS)
    index = bisect_left(group, rank) * rings // len(group)
    return tuple(member for at, member in enumerate(group) if at * rings // len(group) == index)
