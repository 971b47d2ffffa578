"""Put the tensors that ranks stored together: global names, global shapes, and the region of each stored tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, product
from math import prod
from typing import NamedTuple

from ..tensors.dtypes import DType
from ..tensors.geometry import Box
from .compiled import Compiled
from .dims import WHOLE, Atom, Parts, Run, paired, runs
from .faults import Faults, Misfit
from .kinds import Shaped
from .patterns import PART, Captures, PatternError
from .placing import Matched, Mesh, Numbering, ranks_of, unravel
from .resolution import Region

_MAX_SPREAD = 1 << 20  # global tensors of one stored tensor


@dataclass
class Draft:
    """A global tensor. ``origin`` is the name of a stored tensor that it consists of."""

    rule: Compiled
    origin: str
    dtype: DType
    shape: tuple[int, ...]
    regions: list[Region] = field(default_factory=list)


class _Slot(NamedTuple):
    """Which element of its group a stored tensor is: its layer, its part, and the first of the layers in it."""

    stacked: tuple[int, ...]
    part: str
    firsts: tuple[int, ...]


class _Dim(NamedTuple):
    """One dimension: by global part, its global size, and the runs of each rank that divides it."""

    sizes: dict[str, int]
    runs: dict[str, list[list[Run]]]


def shape_tensors(items: Sequence[Matched], mesh: Mesh, faults: Faults) -> dict[str, Draft]:
    """Return the global tensors by name. Adds what is wrong to ``faults``; the result is then incomplete."""
    numbering = Numbering(items, faults)
    groups: dict[tuple[object, ...], tuple[Captures, dict[_Slot, list[Matched]]]] = {}
    for item in items:
        key, captures, slot = _placed(item, numbering)
        groups.setdefault(key, (captures, {}))[1].setdefault(slot, []).append(item)
    shaping = _Shaping(mesh)
    for captures, slots in groups.values():
        first = next(iter(slots.values()))[0]
        try:
            shaping.add(first.rule, captures, slots)
        except Misfit as error:
            faults.add(error.kind, first.source.name, f"{first.rule} {error}")
    return shaping.drafts


def _placed(item: Matched, numbering: Numbering) -> tuple[tuple[object, ...], Captures, _Slot]:
    """The group of a stored tensor, the captures that its global names share, and its place in the group."""
    rule = item.rule
    values = {
        name: value + numbering.first(item, name) if isinstance(value, int) else value
        for name, value in item.captures.items()
    }
    stacked = tuple(int(values[name]) for name in rule.joined)
    slot = _Slot(stacked, str(values.get(PART, WHOLE)), tuple(numbering.first(item, name) for name in rule.spread))
    if rule.template is None:
        return (id(rule), item.source.name), {}, slot
    shared = {name: values[name] for name in rule.template.fields if name in values}
    return (id(rule), *shared.values()), shared, slot


class _Shaping:
    """Adds global tensors to ``drafts``."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.drafts: dict[str, Draft] = {}
        self._dims: dict[tuple[object, ...], _Dim] = {}  # many layers have equal ones

    def add(self, rule: Compiled, captures: Captures, slots: Mapping[_Slot, list[Matched]]) -> None:
        """Add the global tensors of one group of stored tensors."""
        everything = [item for items in slots.values() for item in items]
        dtypes = {str(item.source.dtype) for item in everything}
        if len(dtypes) > 1:
            raise Misfit(f"describes one tensor, but it is stored as {' and '.join(sorted(dtypes))}", "dtype")
        counts = _joined_lengths(rule, slots)
        found: dict[str, tuple[int, ...]] = {}
        for slot, items in slots.items():
            for name, shape, regions in self._tensors(rule, captures, slot, items):
                if found.setdefault(name, shape) != shape:
                    raise Misfit(f"joins tensors of the shapes {list(found[name])} and {list(shape)}")
                self._draft(name, rule, everything[0], (*counts, *shape)).regions.extend(regions)

    def _draft(self, name: str, rule: Compiled, first: Matched, shape: tuple[int, ...]) -> Draft:
        draft = self.drafts.setdefault(name, Draft(rule, first.source.name, first.source.dtype, shape))
        if draft.rule is not rule or draft.origin != first.source.name:
            raise Misfit(f"makes {name!r}, which {draft.origin!r} becomes as well, by {draft.rule}", "rename")
        return draft

    def _tensors(
        self, rule: Compiled, captures: Captures, slot: _Slot, items: Sequence[Matched]
    ) -> Iterator[tuple[str, tuple[int, ...], list[Region]]]:
        """Name, shape without stacked dimensions, and regions of each global tensor of one slot."""
        spread = _spread_lengths(rule, items)
        ranks = ranks_of(rule, items, self.mesh)
        split = {one.dim: number for number, one in enumerate(rule.splits)}
        dims = self._all_dims(rule, slot.part, ranks, split, len(spread))
        for part in rule.parts.names if rule.splits_parts else (WHOLE,):
            names = [part if part in dim.sizes else WHOLE for dim in dims]
            shape = tuple(dim.sizes[name] for dim, name in zip(dims, names, strict=True))
            for numbers in product(*map(range, spread)):
                layers = {name: first + n for name, first, n in zip(rule.spread, slot.firsts, numbers, strict=True)}
                regions = [
                    _region(item, slot.stacked, numbers, choice)
                    for index, copies in ranks.items()
                    for choice in product(
                        *(
                            dim.runs[name][index[split[d]] if d in split else 0]
                            for d, (dim, name) in enumerate(zip(dims, names, strict=True))
                        )
                    )
                    for item in copies
                ]
                yield _name(rule, items[0], {**captures, **layers, PART: part}), shape, regions

    def _all_dims(
        self,
        rule: Compiled,
        part: str,
        ranks: Mapping[tuple[int, ...], Sequence[Matched]],
        split: Mapping[int, int],
        lead: int,
    ) -> list[_Dim]:
        """The dimensions after the ``lead`` first ones, which are layers."""
        shapes = {index: copies[0].source.shape[lead:] for index, copies in ranks.items()}
        ndim = len(next(iter(shapes.values())))
        at = _special_dim(rule)
        for d in [*split, *([] if at is None else [at])]:
            if d >= ndim:
                raise Misfit(f"refers to dimension {d}, found {_shapes(ranks.values())}")
        dims = []
        for d in range(ndim):
            found: dict[int, int] = {}
            for index, copies in ranks.items():
                rank = index[split[d]] if d in split else 0
                if any(
                    found.setdefault(rank, item.source.shape[lead + d]) != item.source.shape[lead + d]
                    for item in copies
                ):
                    raise Misfit(f"needs one size of dimension {d}, found {_shapes(ranks.values())}")
            sizes = tuple(found[rank] for rank in sorted(found))
            try:
                dims.append(self._dim(rule, d == at, sizes, part))
            except Misfit as error:
                raise Misfit(f"{error} (dimension {d})") from None
        return dims

    def _dim(self, rule: Compiled, is_special: bool, found: tuple[int, ...], part: str) -> _Dim:  # noqa: FBT001
        key = (id(rule), is_special, found, part)
        if key not in self._dims:
            self._dims[key] = _dim(rule, found, part) if is_special else _of_parts(Parts(), found)
        return self._dims[key]


def _special_dim(rule: Compiled) -> int | None:
    """The dimension with parts, groups, widths, padding, pairs or halves."""
    one = rule.rule
    assert isinstance(one, Shaped)
    return one.dim if rule.parts != Parts() or one.padded_from is not None or one.pairs or one.halves else None


def _dim(rule: Compiled, found: tuple[int, ...], part: str) -> _Dim:
    """The dimension that the rule describes, of stored tensors of these sizes. Raises ``Misfit``."""
    assert isinstance(rule.rule, Shaped)
    parts = rule.parts.only(part) if part else rule.parts
    sizes = parts.total_sizes(found)
    wholes: dict[str, list[Atom]] | None = None
    if rule.rule.padded_from is not None:
        if sizes[WHOLE] < rule.rule.padded_from:
            raise Misfit(f"needs at least padded_from = {rule.rule.padded_from}, found {sizes[WHOLE]}")
        wholes = {WHOLE: [Atom(WHOLE, 0, rule.rule.padded_from)]}
    elif rule.rule.halves:
        wholes = {WHOLE: paired(parts.in_order(sizes), rule.rule.halves)}
    elif rule.splits_parts:
        wholes = {name: [Atom(name, 0, size)] for name, size in sizes.items()}
    elif part:
        every = rule.parts.sizes
        joined = every if isinstance(every, Mapping) else dict.fromkeys(every, sizes[part])
        wholes = {WHOLE: rule.parts.in_order(joined)}
    return _of_parts(parts, found, wholes, rule.rule.pairs)


def _of_parts(
    parts: Parts, found: tuple[int, ...], wholes: Mapping[str, list[Atom]] | None = None, pairs: int = 0
) -> _Dim:
    """A dimension of stored tensors of these sizes; ``wholes`` are the global ones, otherwise one with all parts."""
    sizes = parts.total_sizes(found)
    held = [paired(atoms, pairs) if pairs else atoms for atoms in parts.held(found, sizes)]
    wholes = wholes or {WHOLE: parts.in_order(sizes)}
    lengths = {name: sum(atom.length for atom in atoms) for name, atoms in wholes.items()}
    return _Dim(lengths, {name: [runs(atoms, whole) for atoms in held] for name, whole in wholes.items()})


def _joined_lengths(rule: Compiled, slots: Iterable[_Slot]) -> tuple[int, ...]:
    """The lengths of the stacked dimensions, if no layer and no part is missing."""
    found = {(slot.stacked, slot.part) for slot in slots}
    counts = tuple(max(numbers) + 1 for numbers in zip(*(stacked for stacked, _ in found), strict=True))
    names = rule.parts.names if rule.joins_parts else (WHOLE,)
    if len(found) < prod(counts) * len(names):
        every = ((unravel(n, counts), part) for n in count() for part in names)
        numbers, part = next(one for one in every if one not in found)
        texts = [f"{name} = {number}" for name, number in zip(rule.joined, numbers, strict=True)]
        texts += [f"part = {part}"] if part else []
        raise Misfit(f"joins tensors, but the one of {', '.join(texts)} is missing", "rank")
    return counts


def _spread_lengths(rule: Compiled, items: Sequence[Matched]) -> tuple[int, ...]:
    """The lengths of the dimensions of the stored tensors that are layers."""
    lead = len(rule.spread)
    ndims = {len(item.source.shape) for item in items}
    leads = {item.source.shape[:lead] for item in items}
    if len(ndims) > 1 or len(leads) > 1 or min(ndims) < lead:
        needed = f"equal lengths of the dimensions {', '.join(rule.spread)}" if lead else "equally many dimensions"
        raise Misfit(f"needs {needed}, found {_shapes([items])}")
    (lengths,) = leads
    if max(prod(lengths), *lengths, 0) > _MAX_SPREAD:
        raise Misfit(f"would make {prod(lengths)} tensors of one, found {_shapes([items])}")
    return lengths


def _name(rule: Compiled, item: Matched, values: Captures) -> str:
    if rule.template is None:
        return item.source.name
    try:
        return rule.template.format(values)
    except PatternError as error:
        raise Misfit(str(error), "rename") from None


def _region(item: Matched, stacked: tuple[int, ...], numbers: tuple[int, ...], choice: Sequence[Run]) -> Region:
    lengths = tuple(run.length for run in choice)
    box = Box.unchecked((*stacked, *(run.start for run in choice)), (*(1 for _ in stacked), *lengths))
    within = Box.unchecked((*numbers, *(run.local for run in choice)), (*(1 for _ in numbers), *lengths))
    return Region(box, item.number, within, item.source.shape)


def _shapes(groups: Iterable[Sequence[Matched]]) -> str:
    shapes = list(dict.fromkeys(str(list(item.source.shape)) for items in groups for item in items))
    return " and ".join(shapes[:4]) + (" and others" if len(shapes) > 4 else "")
