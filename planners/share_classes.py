"""Who wants the same: how ranks find out, without handing each other lists of what they want.

Each sorts its wants into a few classes that ranks of common layouts have alike (all replicated tensors of a section;
all that are cut as finely in the same dimensions) and brings one digest of each. Ranks with equal digests want the same
boxes of the same tensors: what one of them reads goes *round a ring* of all.

A *stripe* is a want that lies in storage in runs too short to be read one by one, as some columns of a matrix do:
whoever reads it reads the whole *frame*, in which the other stripes are. The digest of a class of stripes is that of
their frames, and every rank adds which stripe is its own; ranks that have all of them between them read a share of the
frames each, and *scatter* it.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np

from ..geometry import Box
from ..tables import BoxTable, TensorTable

__all__ = [
    "Groups",
    "Offer",
    "Stripe",
    "Want",
    "WantClass",
    "classify_wants",
    "group_ranks",
    "is_scattered",
    "rings_of",
    "scatters_of",
    "stripe_of",
]

_LARGEST_RING = 64  # ranks; a piece is late by one hop for each, and a slow rank holds all of its ring up
_MOST_CLASSES = 16  # of one rank; each may become a ring with connections and threads of its own
_MOST_STRIPES = 16  # of one frame; each rank has a connection and a thread for every other
_LONG_RUN = 1 << 20  # bytes that lie together, and are read with little more than a chunk at each end


@dataclass(frozen=True)
class Want:
    """``box`` of the manifest's tensor ``tensor``, wanted as elements of ``dtype`` (any name that says which)."""

    tensor: int
    box: Box
    dtype: str


class Stripe(NamedTuple):
    """Part ``number`` of ``parts`` equal ones into which ``frame`` is cut along ``axis``."""

    frame: Box
    axis: int
    parts: int
    number: int

    def box_of(self, number: int) -> Box:
        """The stripe of this number in the same frame."""
        lengths, offsets = [*self.frame.lengths], [*self.frame.offsets]
        lengths[self.axis] //= self.parts
        offsets[self.axis] += number * lengths[self.axis]
        return Box(tuple(offsets), tuple(lengths))


class Offer(NamedTuple):
    """What a rank tells of one class: wants of equal ``digest`` are the ``parts`` stripes of the same frames, or, with
    one part, the same."""

    digest: bytes
    parts: int
    number: int


@dataclass(frozen=True)
class WantClass:
    """Wants (by their index) that a rank may share with others; ``nbytes`` as they are stored. ``stripes`` are those
    of the wants, or empty."""

    offer: Offer
    wants: tuple[int, ...]
    nbytes: int
    stripes: tuple[Stripe, ...] = ()


Groups = Mapping[bytes, Sequence[Sequence[int]]]
"""By digest, and for each stripe in their order, the ranks that want it, ascending."""


def stripe_of(want: Want, shape: tuple[int, ...], itemsize: int) -> Stripe | None:
    """The stripe that a want of a tensor of this shape is; None for one that can be read well by itself."""
    box = want.box
    cut = [axis for axis, length in enumerate(shape) if box.lengths[axis] < length]
    if not cut or all(length == 1 for length in box.lengths[: cut[-1]]):
        return None  # one run
    axis = cut[-1]
    part, whole = box.lengths[axis], shape[axis]
    if prod(box.lengths[axis:]) * itemsize >= _LONG_RUN:
        return None
    if whole % part or box.offsets[axis] % part or whole // part > _MOST_STRIPES:
        return None
    offsets, lengths = [*box.offsets], [*box.lengths]
    offsets[axis], lengths[axis] = 0, whole
    return Stripe(Box(tuple(offsets), tuple(lengths)), axis, whole // part, box.offsets[axis] // part)


def classify_wants(
    tensors: TensorTable, stored: BoxTable, wants: Sequence[Want], *, salt: str, least: int
) -> list[WantClass]:
    """Sort one rank's wants into classes, in no order that depends on the rank. ``stored`` are the boxes that the
    tensors lie in, sorted by tensor: what is stored in stripes is not read as one.

    A want that is the same as an earlier one belongs to no class, and neither do those of a class of less than
    ``least`` bytes, and stripes of which this rank has several. Ranks whose ``salt`` differs never have a class in
    common.
    """
    first = {want: index for index, want in reversed([*enumerate(wants)])}
    classes: dict[tuple[object, ...], list[_Member]] = {}
    for want, index in first.items():
        if want.box.numel:
            meta = tensors.meta_of(want.tensor)
            stripe = stripe_of(want, meta.shape, meta.dtype.itemsize)
            if stripe is not None and _longest(stored, want.tensor, stripe.axis) <= want.box.lengths[stripe.axis]:
                stripe = None
            fineness = tuple(round(whole / part) for whole, part in zip(meta.shape, want.box.lengths))
            cut = fineness if any(cuts > 1 for cuts in fineness) else ()
            key = (int(tensors.section[want.tensor]), cut, stripe and (stripe.axis, stripe.number))
            nbytes = want.box.numel * meta.dtype.itemsize
            classes.setdefault(key, []).append(_Member(want, index, stripe, nbytes))
    found = [_class_of(salt, key[:2], sorted(members, key=_order)) for key, members in classes.items()]
    times: dict[bytes, int] = {}
    for one in found:
        times[one.offer.digest] = times.get(one.offer.digest, 0) + 1
    found = [one for one in found if one.nbytes >= max(least, 1) and times[one.offer.digest] == 1]
    return sorted(found, key=lambda one: (-one.nbytes, one.offer.digest))[:_MOST_CLASSES]


def _longest(stored: BoxTable, tensor: int, axis: int) -> int:
    """The length along this axis of the longest of a tensor's stored boxes; 0 where there is none."""
    low, high = np.searchsorted(stored.tensor, (tensor, tensor + 1))
    return int(stored.lengths[stored.starts[low:high] + axis].max(initial=0))


class _Member(NamedTuple):
    want: Want
    at: int
    stripe: Stripe | None
    nbytes: int


def _order(member: _Member) -> tuple[int, tuple[int, ...], tuple[int, ...], str]:
    want = member.want
    return want.tensor, want.box.offsets, want.box.lengths, want.dtype


def _class_of(salt: str, key: tuple[object, ...], members: Sequence[_Member]) -> WantClass:
    stripes = tuple(member.stripe for member in members if member.stripe is not None)
    boxes = [stripe.frame for stripe in stripes] or [member.want.box for member in members]
    said = repr((salt, key, [(m.want.tensor, *box, m.want.dtype) for m, box in zip(members, boxes)]))
    digest = hashlib.blake2b(said.encode(), digest_size=16).digest()
    offer = Offer(digest, stripes[0].parts, stripes[0].number) if stripes else Offer(digest, 1, 0)
    return WantClass(offer, tuple(m.at for m in members), sum(m.nbytes for m in members), stripes)


def group_ranks(offers: Sequence[Sequence[Offer]]) -> dict[bytes, list[list[int]]]:
    """The digests by which some ranks share. ``offers`` is by rank."""
    found: dict[bytes, list[list[int]]] = {}
    for rank, of_rank in enumerate(offers):
        for digest, parts, number in of_rank:
            found.setdefault(digest, [[] for _ in range(parts)])[number].append(rank)
    return {
        digest: ranks
        for digest, ranks in found.items()
        if is_scattered(ranks) or any(len(of_stripe) > 1 for of_stripe in ranks)
    }


def is_scattered(ranks: Sequence[Sequence[int]]) -> bool:
    """Whether frames whose stripes these ranks want are scattered: all stripes are wanted equally often, and more of
    them are than there are ranks for each. (Else a ring of those that want the same reads less.)"""
    return len({len(of_stripe) for of_stripe in ranks}) == 1 and 0 < len(ranks[0]) < len(ranks)


def rings_of(rank: int, classes: Sequence[WantClass], groups: Groups) -> dict[tuple[int, ...], list[WantClass]]:
    """The rings in which ``rank`` is, and the classes that go round each, in the same order on all of its ranks."""
    rings: dict[tuple[int, ...], list[WantClass]] = {}
    for one in sorted(classes, key=lambda one: one.offer):
        ranks = groups.get(one.offer.digest)
        if ranks is not None and not is_scattered(ranks) and rank in ranks[one.offer.number]:
            rings.setdefault(_ring_of(rank, ranks[one.offer.number]), []).append(one)
    return {ranks: members for ranks, members in rings.items() if len(ranks) > 1}


def scatters_of(rank: int, classes: Sequence[WantClass], groups: Groups) -> dict[tuple[int, ...], list[WantClass]]:
    """The ranks, in the order of their stripes, among which ``rank`` scatters frames, and the classes of these."""
    scatters: dict[tuple[int, ...], list[WantClass]] = {}
    for one in sorted(classes, key=lambda one: one.offer):
        ranks = groups.get(one.offer.digest)
        if ranks is not None and is_scattered(ranks) and rank in ranks[one.offer.number]:
            at = bisect_left(ranks[one.offer.number], rank)
            scatters.setdefault(tuple(of_stripe[at] for of_stripe in ranks), []).append(one)
    return scatters


def _ring_of(rank: int, group: Sequence[int]) -> tuple[int, ...]:
    """The ring, neighbours in rank order, in which ``rank`` is; a large group makes several, about equal."""
    rings = -(-len(group) // _LARGEST_RING)
    index = bisect_left(group, rank) * rings // len(group)
    return tuple(member for at, member in enumerate(group) if at * rings // len(group) == index)
