"""Flat buffers: several flattened tensors in one, which ranks divide (ZeRO, FSDP-1, distributed optimizers).

The members of a buffer are resolved like stored tensors, with the shapes that they had before they were flattened, so
that their own rules apply (tensor parallelism inside ZeRO). Then each of their regions is cut to what a buffer holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from operator import mul
from typing import NamedTuple

from ..tensors.geometry import decompose_strided, row_major_strides
from .compiled import Compiled
from .faults import Faults, Misfit
from .kinds import Flat
from .patterns import MEMBER, Captures
from .placing import Matched, Mesh, position_on
from .resolution import Region, Source, place_text
from .shaping import Draft, shape_tensors

Member = tuple[str, tuple[int, ...]]
_Find = Callable[[str], "tuple[Compiled, Captures] | None"]


class _Cut(NamedTuple):
    """Elements ``[first, first + length)`` of a flattened member are in a buffer, from ``position`` on."""

    buffer: int
    first: int
    length: int
    position: int


class _Family:
    """The members of all buffers whose global names differ by the member only."""

    def __init__(self, rule: Compiled, captures: Captures) -> None:
        self.rule, self.captures = rule, captures
        self.members: list[Matched] = []
        self.cuts: list[list[_Cut]] = []


def add_flat_tensors(
    items: Iterable[Matched],
    find: _Find,
    mesh: Mesh,
    stored: Mapping[str, Sequence[Source]],
    faults: Faults,
    drafts: dict[str, Draft],
) -> None:
    """Add the global tensors of the members of flat buffers to ``drafts``, and what is wrong to ``faults``.

    ``find`` returns the rule of a member. ``stored`` are all stored tensors, for the shapes of members that a rule
    names.
    """
    families: dict[str, _Family] = {}
    groups: dict[tuple[int, str, tuple[tuple[str, int], ...]], list[Matched]] = {}
    for item in items:
        key = (id(item.rule), item.source.name, tuple(sorted(_outside(item).items())))
        groups.setdefault(key, []).append(item)
    for buffers in groups.values():
        first = buffers[0]
        assert first.rule.template is not None
        name = first.rule.template.format({**first.captures, MEMBER: "\0"})
        family = families.setdefault(name, _Family(first.rule, first.captures))
        try:
            _add(family, buffers, find, mesh, stored)
        except Misfit as error:
            faults.add(error.kind, first.source.name, f"{first.rule} {error}")
    for family in families.values():
        _resolve(family, mesh, faults, drafts)


def _outside(item: Matched) -> dict[str, int]:
    """The coordinates of a buffer on the axes that do not divide it."""
    return {axis: index for axis, index in item.source.place.items() if axis not in _flat(item.rule).axis}


def _flat(rule: Compiled) -> Flat:
    assert isinstance(rule.rule, Flat)
    return rule.rule


def _add(
    family: _Family, buffers: Sequence[Matched], find: _Find, mesh: Mesh, stored: Mapping[str, Sequence[Source]]
) -> None:
    """Add the members of the buffers that the ranks of one axis hold."""
    rule = _flat(buffers[0].rule)
    by_rank: dict[int, Matched] = {}
    for item in buffers:
        rank = position_on(rule.axis, item.source.place, mesh)
        if rank in by_rank:
            raise Misfit(f"describes one buffer, but {place_text(item.source.place)} stored it twice", "rank")
        by_rank[rank] = item
    ranks = prod(mesh[axis] for axis in rule.axis)
    if len(by_rank) < ranks:
        missing = next(rank for rank in range(ranks) if rank not in by_rank)
        raise Misfit(f"needs the buffer of rank {missing} of {' x '.join(rule.axis)}, which no rank stored", "rank")
    members = _members(rule, list(by_rank.values()), stored)
    cuts, sizes, used = _layout(rule, [prod(shape) for _, shape in members], ranks)
    for rank, item in by_rank.items():
        shape, size = item.source.shape, sizes[rank]
        # Some systems remove the padding at the end of the last buffers.
        if len(shape) != 1 or shape[0] not in (size, used[rank]):
            raise Misfit(
                f"needs {size} = {size * ranks} / {ranks} elements on each rank for {len(members)} members with "
                f"alignment = {rule.alignment} and padding = {rule.padding}, found {list(shape)} on "
                f"{place_text(item.source.place)}"
            )
    for (name, shape), places in zip(members, cuts, strict=True):
        found = find(name)
        if found is None:
            continue
        if isinstance(found[0].rule, Flat):
            raise Misfit(f"has the member {name!r}, which {found[0]} describes as a flat buffer")
        source = Source(name, shape, buffers[0].source.dtype, _outside(buffers[0]))
        family.members.append(Matched(len(family.members), source, *found))
        family.cuts.append([_Cut(by_rank[rank].number, *place) for rank, place in places])


def _members(rule: Flat, buffers: Sequence[Matched], stored: Mapping[str, Sequence[Source]]) -> list[Member]:
    """The members of these buffers in order."""
    listed = buffers[0].source.members
    if any(item.source.members != listed for item in buffers):
        raise Misfit("describes one buffer, but the ranks list different members or shapes")
    if isinstance(rule.order, tuple):
        if listed is None:
            return [(name, _shape_of(name, buffers[0], stored)) for name in rule.order]
        shapes = dict(listed)
        if sorted(shapes) != sorted(rule.order):
            odd = sorted(set(shapes) ^ set(rule.order))
            raise Misfit(f"states an order of other members than the file lists; they differ in {', '.join(odd[:3])}")
        return [(name, shapes[name]) for name in rule.order]
    if listed is None:
        raise Misfit(
            "needs the members of the buffer, which the file does not list; state them: order = [...], or the value of "
            "the file that lists them: members"
        )
    if rule.order == "listed":
        return list(listed)
    return sorted(listed) if rule.order == "sorted" else list(reversed(listed))


def _shape_of(name: str, buffer: Matched, stored: Mapping[str, Sequence[Source]]) -> tuple[int, ...]:
    """The shape of the stored tensor of this name on the same ranks."""
    place = _outside(buffer)
    shapes = {
        source.shape
        for source in stored.get(name, ())
        if all(place.get(axis, index) == index for axis, index in source.place.items())
    }
    if len(shapes) != 1:
        problem = f"has the shapes {', '.join(map(str, map(list, shapes)))}" if shapes else "is not stored"
        raise Misfit(f"needs the shape of member {name!r} from a tensor of this name, but it {problem} there")
    return shapes.pop()


def _layout(
    rule: Flat, numels: Sequence[int], ranks: int
) -> tuple[list[list[tuple[int, tuple[int, int, int]]]], list[int], list[int]]:
    """Where members are: by member, ``(rank, (first, count, position))``; then the size of each rank's buffer.

    The last result is the size of each rank's buffer without the padding at the end.
    """
    places: list[list[tuple[int, tuple[int, int, int]]]] = []
    position = 0
    if rule.each:
        for numel in numels:
            position = _up(position, rule.alignment)
            share = _up(-(-numel // ranks), rule.padding)
            places.append(
                [
                    (rank, (rank * share, min(share, numel - rank * share), position))
                    for rank in range(ranks)
                    if rank * share < numel
                ]
            )
            position += share
        return places, [position] * ranks, [position] * ranks
    begins = []
    for numel in numels:
        begins.append(_up(position, rule.alignment))
        position = begins[-1] + numel
    share = _up(-(-position // ranks), rule.padding)
    for begin, numel in zip(begins, numels, strict=True):
        held = []
        for rank in range(begin // share, -(-(begin + numel) // share)) if share and numel else ():
            first, stop = max(begin, rank * share), min(begin + numel, (rank + 1) * share)
            held.append((rank, (first - begin, stop - first, first - rank * share)))
        places.append(held)
    used = [min(max(position - rank * share, 0), share) for rank in range(ranks)]
    return places, [share] * ranks, used


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _resolve(family: _Family, mesh: Mesh, faults: Faults, drafts: dict[str, Draft]) -> None:
    """Add the global tensors of a family."""
    template = family.rule.template
    assert template is not None
    for member, draft in shape_tensors(family.members, mesh, faults).items():
        name = template.format({**family.captures, MEMBER: member})
        regions = [
            piece for region in draft.regions for cut in family.cuts[region.source] for piece in _pieces(region, cut)
        ]
        if name in drafts:
            detail = f"{family.rule} makes {name!r}, which {drafts[name].origin!r} becomes as well"
            faults.add("rename", draft.origin, detail)
        else:
            drafts[name] = replace(draft, regions=regions)


def _pieces(region: Region, cut: _Cut) -> Iterator[Region]:
    """What a buffer holds of a region of a member."""
    strides = row_major_strides(region.shape)
    position = sum(map(mul, region.within.offsets, strides))
    for box in decompose_strided(cut.first - position, cut.length, region.within.lengths, strides):
        piece = region.held_in(box.shift(region.within.offsets))
        if piece is not None:
            yield piece._replace(source=cut.buffer, start=cut.position - cut.first)
