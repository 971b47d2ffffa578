"""Merge the tables of all groups: every tensor, value, alias and section once; ranks that disagree are an error."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np

from ..errors import PlanError
from ..runtime.messages import ranks_text
from ..tensors.tables import Int64, TensorTable, ragged_positions, ragged_starts
from .local_plan import ValueKey
from .plan_groups import PlanGroup
from .wire import Bool


@dataclass(eq=False)
class PlannedValues:
    """The plain values to write, sorted by section, path and rank.

    Attributes:
        keys: Section and path of each value.
        rank: The rank that writes it.
        index: Its row in that rank's values.
        shared: Whether it is equal on every rank that holds it, and so written once.
    """

    keys: list[ValueKey]
    rank: Int64
    index: Int64
    shared: Bool

    def __len__(self) -> int:
        return len(self.keys)

    @classmethod
    def none(cls) -> PlannedValues:
        """Return no values.

        Returns:
            An empty table.
        """
        nothing: Int64 = np.empty(0, np.int64)
        return cls([], nothing, nothing, nothing.astype(np.bool_))


def merge_tensors(
    groups: Sequence[PlanGroup], sections: list[str]
) -> tuple[TensorTable, Int64, list[Int64], list[Int64]]:
    """Merge the tensors of all groups into one table.

    Returns the table, sorted by name; the scope of each tensor (-1, or the rank that alone has it); by group, the new
    row of each row of its table (-1 for own tensors); and by group, the new rows of its own tensors as ``[own tensor,
    rank]``. Raises ``PlanError`` that lists every tensor on which ranks disagree, with the ranks and their
    descriptions.
    """
    shared = [np.flatnonzero(~group.table.own) for group in groups]
    named = [_names(group, rows) for group, rows in zip(groups, shared, strict=True)]
    own_names = [_own_names(group) for group in groups]
    known, numbers = _numbered(named)
    owned = [name for of_group in own_names for names in of_group for name in names]
    clashes = [name for name in owned if name in known]
    # The order in which groups list them is nearly sorted, which makes sorting fast.
    listed = [*known, *owned]
    order = sorted(range(len(listed)), key=listed.__getitem__)
    names = list(map(listed.__getitem__, order))
    if len(owned) > len(set(owned)):
        clashes += [a for a, b in pairwise(names) if a == b]
    if clashes:
        raise PlanError(_conflict_text(groups, sorted(set(clashes))))
    row_of: Int64 = np.empty(len(listed), np.int64)
    row_of[order] = np.arange(len(listed))
    rows: list[Int64] = []
    own: list[Int64] = []
    at = len(known)
    for group, places, number, of_group in zip(groups, shared, numbers, own_names, strict=True):
        new = np.full(len(group.table.tensors), -1, np.int64)
        new[places] = row_of[number]
        rows.append(new)
        stop = at + len(of_group) * len(group.ranks)
        own.append(row_of[at:stop].reshape(-1, len(group.ranks)))
        at = stop
    table, conflicts = _table(groups, names, sections, rows, own)
    if conflicts:
        raise PlanError(_conflict_text(groups, conflicts))
    scope = np.full(len(names), -1, np.int64)
    for group, places in zip(groups, own, strict=True):
        scope[places] = group.ranks
    return table, scope, rows, own


def _numbered(named: Sequence[list[str]]) -> tuple[dict[str, int], list[Int64]]:
    """Number every name in the order in which groups list it first, and return the numbers of each group's names."""
    number_of: dict[str, int] = {}
    numbers = []
    for names in named:
        after = range(len(number_of), len(number_of) + len(names))
        if number_of.keys().isdisjoint(names):
            number_of.update(zip(names, after, strict=True))
            numbers.append(np.array(after, np.int64))
            continue
        for name in names:
            number_of.setdefault(name, len(number_of))
        numbers.append(np.fromiter(map(number_of.__getitem__, names), np.int64, len(names)))
    return number_of, numbers


def _names(group: PlanGroup, rows: Int64) -> list[str]:
    names = group.table.tensors.names
    return names if len(rows) == len(names) else [names[row] for row in rows.tolist()]


def _own_names(group: PlanGroup) -> list[list[str]]:
    """The names under which each rank's own tensors are stored."""
    names, ranks = group.table.tensors.names, group.ranks.tolist()
    return [[f"{names[row]}@{rank}" for rank in ranks] for row in np.flatnonzero(group.table.own).tolist()]


def _table(
    groups: Sequence[PlanGroup], names: list[str], sections: list[str], rows: list[Int64], own: list[Int64]
) -> tuple[TensorTable, list[str]]:
    """Return the table of the tensors ``names``, and the names on which groups disagree."""
    codes = {name: code for code, name in enumerate(sections)}
    facts = np.full((3, len(names)), -1, np.int64)
    conflicting = np.zeros(len(names), np.bool_)
    sources: list[tuple[TensorTable, Int64, Int64]] = []
    for group, new, own_names in zip(groups, rows, own, strict=True):
        tensors = group.table.tensors
        shared, own_rows = np.flatnonzero(~group.table.own), np.flatnonzero(group.table.own)
        old = np.concatenate((shared, np.repeat(own_rows, own_names.shape[1])))
        at = np.concatenate((new[shared], own_names.reshape(-1)))
        section = np.array([codes[name] for name in tensors.sections], np.int64)
        claims = np.stack((section[tensors.section[old]], tensors.dtype[old], tensors.ndim[old]))
        fresh = facts[0, at] < 0
        conflicting[at[~fresh & (facts[:, at] != claims).any(axis=0)]] = True
        facts[:, at[fresh]] = claims[:, fresh]
        sources.append((tensors, old, at))
    section, dtype, ndim = facts
    starts = ragged_starts(ndim)
    shape = np.full(int(starts[-1]), -1, np.int64)
    for tensors, old, at in sources:
        same = ~conflicting[at]
        old, at = old[same], at[same]
        where = ragged_positions(starts[at], ndim[at])
        claims = tensors.shape[ragged_positions(tensors.starts[old], ndim[at])]
        fresh = shape[where] < 0
        clash = ~fresh & (shape[where] != claims)
        conflicting[np.repeat(at, ndim[at])[clash]] = True
        shape[where[fresh]] = claims[fresh]
    table = TensorTable(names, sections, section.copy(), dtype.copy(), ndim.copy(), shape)
    return table, [names[row] for row in np.flatnonzero(conflicting).tolist()]


def _conflict_text(groups: Sequence[PlanGroup], names: list[str]) -> str:
    claims: dict[str, dict[str, list[int]]] = {name: defaultdict(list) for name in names}
    for group in groups:
        tensors = group.table.tensors
        for row, name in enumerate(tensors.names):
            text = f"{tensors.meta_of(row)} in section {tensors.section_of(row)!r}" if name in claims else ""
            if group.table.own[row]:
                for rank in group.ranks.tolist():
                    full = f"{name}@{rank}"
                    if full in claims:
                        text = f"{tensors.meta_of(row)} in section {tensors.section_of(row)!r}"
                        claims[full][f"{text}, of rank {rank} alone"].append(rank)
            elif text:
                claims[name][text] += group.ranks.tolist()
    lines = [f"ranks describe {len(names)} tensors differently:"]
    for name, texts in claims.items():
        lines.append(f"  {name}: " + "; ".join(f"{text} on {ranks_text(ranks)}" for text, ranks in texts.items()))
    return "\n".join(lines)


def merge_pinned(groups: Sequence[PlanGroup], tensors: TensorTable, rows: Sequence[Int64]) -> Bool:
    """By tensor, whether any rank requires the lowest holder to write it. A rank writes its own tensors in any case."""
    pinned = np.zeros(len(tensors), np.bool_)
    for group, new in zip(groups, rows, strict=True):
        pinned[new[group.table.pinned & ~group.table.own]] = True
    return pinned


def merge_sections(groups: Sequence[PlanGroup]) -> list[tuple[str, str]]:
    """Every section with its adapter's kind, by name. Raises ``PlanError`` if ranks name different kinds."""
    return _agreed("section", "adapter", groups, [group.table.sections for group in groups])


def merge_aliases(groups: Sequence[PlanGroup], tensors: TensorTable) -> list[tuple[str, str]]:
    """Every alias with its target, by name.

    Raises ``PlanError`` for an alias with two targets, one that is also a tensor, and one whose target does not exist.
    """
    aliases = _agreed("alias", "target", groups, [group.table.aliases for group in groups])
    if not aliases:
        return aliases
    names, tied = set(tensors.names), {name for name, _ in aliases}
    faults = [f"{name} is a tensor and also an alias of {target}" for name, target in aliases if name in names]
    faults += [f"{name} is an alias of {to}, which no rank has" for name, to in aliases if to not in names | tied]
    if faults:
        raise PlanError("invalid aliases:\n  " + "\n  ".join(faults))
    return aliases


def _agreed(
    what: str, value_name: str, groups: Sequence[PlanGroup], pairs: Sequence[Sequence[tuple[str, str]]]
) -> list[tuple[str, str]]:
    claims: dict[str, dict[str, list[int]]] = {}
    for group, one in zip(groups, pairs, strict=True):
        for name, value in one:
            claims.setdefault(name, {}).setdefault(value, []).extend(group.ranks.tolist())
    faults = [
        f"{what} {name}: "
        + "; ".join(f"{value_name} {value!r} on {ranks_text(ranks)}" for value, ranks in values.items())
        for name, values in sorted(claims.items())
        if len(values) > 1
    ]
    if faults:
        raise PlanError("ranks disagree:\n  " + "\n  ".join(faults))
    return sorted((name, next(iter(values))) for name, values in claims.items())


def merge_values(groups: Sequence[PlanGroup], differing: Collection[ValueKey]) -> PlannedValues:
    """Plan which rank writes which value. ``differing`` are the keys that are not equal on all their holders."""
    lowest_first = sorted(groups, key=lambda group: int(group.ranks[0]))
    tables = [group.table.values for group in lowest_first]
    keys = list(chain.from_iterable(values.keys() for values in tables))
    distinct = sorted(dict.fromkeys(keys))
    number_of = dict(zip(distinct, range(len(distinct)), strict=True))
    number = np.fromiter(map(number_of.__getitem__, keys), np.int64, len(keys))
    counts = np.array([len(values) for values in tables], np.int64)
    group = np.repeat(np.arange(len(tables)), counts)
    index = ragged_positions(np.zeros_like(counts), counts)
    separate = np.zeros(len(distinct), np.bool_)
    separate[[number_of[key] for key in differing if key in number_of]] = True
    for_each = np.concatenate([np.empty(0, np.bool_), *(values.per_rank for values in tables)])
    separate[number[for_each]] = True
    # The lowest rank of the first group that has a value writes it for all.
    _, first = np.unique(number, return_index=True)
    first = first[~separate[number[first]]]
    each = np.flatnonzero(separate[number])
    holders = [lowest_first[which].ranks for which in group[each].tolist()]
    times = np.array([len(ranks) for ranks in holders], np.int64)
    lowest = np.array([int(one.ranks[0]) for one in lowest_first], np.int64)
    row = np.concatenate((first, np.repeat(each, times)))
    rank = np.concatenate([lowest[group[first]], *holders])
    order = np.lexsort((rank, number[row]))
    row, rank = row[order], rank[order]
    written = number[row]
    return PlannedValues(list(map(distinct.__getitem__, written.tolist())), rank, index[row], ~separate[written])
