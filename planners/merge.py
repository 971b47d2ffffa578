"""All groups' tables as one: every tensor, value, alias and section once, and every disagreement named."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, starmap

import numpy as np

from ..errors import PlanError
from ..tables import Int64, TensorTable, ragged_positions, ragged_starts
from .plan_groups import PlanGroup
from .wire import Bool

__all__ = [
    "PlannedValue",
    "ValueKey",
    "merge_aliases",
    "merge_pinned",
    "merge_sections",
    "merge_tensors",
    "merge_values",
    "ranks_text",
]

ValueKey = tuple[str, bytes]
"""Section and encoded path of a plain value."""


@dataclass(slots=True)
class PlannedValue:
    """One plain value to be written: by ``rank``, whose ``index``-th value it is. ``shared`` values are the same on
    every rank that has them and are written once."""

    section: str
    path: bytes
    rank: int
    index: int
    shared: bool = True


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 3`` or ``ranks 0-3, 8``, cut short where there are many stretches."""
    stretches: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if stretches and stretches[-1][1] == rank - 1:
            stretches[-1][1] = rank
        else:
            stretches.append([rank, rank])
    parts = [str(a) if a == b else f"{a}-{b}" for a, b in stretches[:8]]
    if len(stretches) > 8:
        parts.append(f"... ({len(set(ranks))} ranks)")
    return ("rank " if len(set(ranks)) == 1 else "ranks ") + ", ".join(parts)


def merge_tensors(
    groups: Sequence[PlanGroup], sections: list[str]
) -> tuple[TensorTable, Int64, list[Int64], list[Int64]]:
    """One table sorted by name, the scope of each tensor (-1, or the one rank that has it), and by group the new row of
    each row of its table (-1 for own tensors) and those of its own tensors, as ``[own tensor, rank]``.

    Raises ``PlanError`` that lists every tensor of which ranks disagree, and who says what.
    """
    shared = [np.flatnonzero(~group.table.own) for group in groups]
    named = [_names(group, rows) for group, rows in zip(groups, shared)]
    ours = [_own_names(group) for group in groups]
    # In the order in which groups list them, which is half sorted.
    distinct = dict.fromkeys(chain.from_iterable(named))
    owned = [name for of_group in ours for names in of_group for name in names]
    clashes = [name for name in owned if name in distinct] if owned else []
    names = sorted([*distinct, *owned])
    if len(owned) > len(set(owned)):
        clashes += [a for a, b in pairwise(names) if a == b]
    if clashes:
        raise PlanError(_conflict_text(groups, sorted(set(clashes))))
    row_of = dict(zip(names, range(len(names))))
    rows = []
    for group, places, own_list in zip(groups, shared, named):
        new = np.full(len(group.table.tensors), -1, np.int64)
        new[places] = np.fromiter(map(row_of.__getitem__, own_list), np.int64, len(own_list))
        rows.append(new)
    own: list[Int64] = []
    for group, of_group in zip(groups, ours):
        places_of = [row_of[name] for of_tensor in of_group for name in of_tensor]
        own.append(np.array(places_of, np.int64).reshape(-1, len(group.ranks)))
    table, conflicts = _table(groups, names, sections, rows, own)
    if conflicts:
        raise PlanError(_conflict_text(groups, conflicts))
    scope = np.full(len(names), -1, np.int64)
    for group, places in zip(groups, own):
        scope[places] = group.ranks
    return table, scope, rows, own


def _names(group: PlanGroup, rows: Int64) -> list[str]:
    names = group.table.tensors.names
    return names if len(rows) == len(names) else [names[row] for row in rows.tolist()]


def _own_names(group: PlanGroup) -> list[list[str]]:
    """What each rank's own tensors are stored under."""
    names, ranks = group.table.tensors.names, group.ranks.tolist()
    return [[f"{names[row]}@{rank}" for rank in ranks] for row in np.flatnonzero(group.table.own).tolist()]


def _table(
    groups: Sequence[PlanGroup], names: list[str], sections: list[str], rows: list[Int64], own: list[Int64]
) -> tuple[TensorTable, list[str]]:
    """The tensors ``names``, and those of which groups disagree."""
    codes = {name: code for code, name in enumerate(sections)}
    facts = np.full((3, len(names)), -1, np.int64)
    odd = np.zeros(len(names), np.bool_)
    told: list[tuple[TensorTable, Int64, Int64]] = []
    for group, new, ours in zip(groups, rows, own):
        tensors = group.table.tensors
        shared, mine = np.flatnonzero(~group.table.own), np.flatnonzero(group.table.own)
        old = np.concatenate((shared, np.repeat(mine, ours.shape[1])))
        at = np.concatenate((new[shared], ours.reshape(-1)))
        section = np.array([codes[name] for name in tensors.sections], np.int64)
        said = np.stack((section[tensors.section[old]], tensors.dtype[old], tensors.ndim[old]))
        fresh = facts[0, at] < 0
        odd[at[~fresh & (facts[:, at] != said).any(axis=0)]] = True
        facts[:, at[fresh]] = said[:, fresh]
        told.append((tensors, old, at))
    section, dtype, ndim = facts
    starts = ragged_starts(ndim)
    shape = np.full(int(starts[-1]), -1, np.int64)
    for tensors, old, at in told:
        same = ~odd[at]
        old, at = old[same], at[same]
        where = ragged_positions(starts[at], ndim[at])
        said = tensors.shape[ragged_positions(tensors.starts[old], ndim[at])]
        fresh = shape[where] < 0
        clash = ~fresh & (shape[where] != said)
        odd[np.repeat(at, ndim[at])[clash]] = True
        shape[where[fresh]] = said[fresh]
    table = TensorTable(names, sections, section.copy(), dtype.copy(), ndim.copy(), shape)
    return table, [names[row] for row in np.flatnonzero(odd).tolist()]


def _conflict_text(groups: Sequence[PlanGroup], names: list[str]) -> str:
    said: dict[str, dict[str, list[int]]] = {name: defaultdict(list) for name in names}
    for group in groups:
        tensors = group.table.tensors
        for row, name in enumerate(tensors.names):
            text = f"{tensors.meta_of(row)} in section {tensors.section_of(row)!r}" if name in said else ""
            if group.table.own[row]:
                for rank in group.ranks.tolist():
                    full = f"{name}@{rank}"
                    if full in said:
                        text = f"{tensors.meta_of(row)} in section {tensors.section_of(row)!r}"
                        said[full][f"{text}, of rank {rank} alone"].append(rank)
            elif text:
                said[name][text] += group.ranks.tolist()
    lines = [f"ranks disagree about {len(names)} tensors:"]
    for name, texts in said.items():
        lines.append(f"  {name}: " + "; ".join(f"{text} on {ranks_text(ranks)}" for text, ranks in texts.items()))
    return "\n".join(lines)


def merge_pinned(groups: Sequence[PlanGroup], tensors: TensorTable, rows: Sequence[Int64]) -> Bool:
    """Tensors that any rank wants to be written by the lowest rank that has them. A rank's own it writes anyway."""
    pinned = np.zeros(len(tensors), np.bool_)
    for group, new in zip(groups, rows):
        pinned[new[group.table.pinned & ~group.table.own]] = True
    return pinned


def merge_sections(groups: Sequence[PlanGroup]) -> list[tuple[str, str]]:
    """Every section with its adapter's kind, by name. Raises ``PlanError`` where ranks name different kinds."""
    return _agreed("section", "adapter", groups, [group.table.sections for group in groups])


def merge_aliases(groups: Sequence[PlanGroup], tensors: TensorTable) -> list[tuple[str, str]]:
    """Every tied name with what it stands for, by name.

    Raises ``PlanError`` for a name that stands for two things, that is a tensor's as well, or for nothing there is.
    """
    aliases = _agreed("alias", "target", groups, [group.table.aliases for group in groups])
    if not aliases:
        return aliases
    names, tied = set(tensors.names), {name for name, _ in aliases}
    faults = [f"{name}: is a tensor, and an alias of {target} too" for name, target in aliases if name in names]
    faults += [f"{name}: alias of {to}, which no rank has" for name, to in aliases if to not in names | tied]
    if faults:
        raise PlanError("aliases that cannot be:\n  " + "\n  ".join(faults))
    return aliases


def _agreed(
    what: str, says: str, groups: Sequence[PlanGroup], pairs: Sequence[Sequence[tuple[str, str]]]
) -> list[tuple[str, str]]:
    said: dict[str, dict[str, list[int]]] = {}
    for group, one in zip(groups, pairs):
        for name, value in one:
            said.setdefault(name, {}).setdefault(value, []).extend(group.ranks.tolist())
    faults = [
        f"{what} {name}: " + "; ".join(f"{says} {value!r} on {ranks_text(ranks)}" for value, ranks in values.items())
        for name, values in sorted(said.items())
        if len(values) > 1
    ]
    if faults:
        raise PlanError("ranks disagree:\n  " + "\n  ".join(faults))
    return sorted((name, next(iter(values))) for name, values in said.items())


def merge_values(groups: Sequence[PlanGroup], differing: Collection[ValueKey]) -> list[PlannedValue]:
    """Who writes which value, by section, path and rank. ``differing`` are those of which holders have different ones.

    Raises ``PlanError`` for a path that one rank has twice.
    """
    shared: dict[ValueKey, tuple[int, int]] = {}
    apart: set[ValueKey] = set(differing)
    lowest_first = sorted(groups, key=lambda group: int(group.ranks[0]))
    for group in lowest_first:
        rank, before = int(group.ranks[0]), len(shared)
        keys = [(section, path) for section, path, _ in group.table.values]
        apart.update(key for key, value in zip(keys, group.table.values) if value.per_rank)
        for index, key in enumerate(keys):
            shared.setdefault(key, (rank, index))
        if len(shared) - before < len(keys) and len(set(keys)) != len(keys):
            twice = sorted(key for key, count in Counter(keys).items() if count > 1)
            where = f"section {twice[0][0]!r}: {ranks_text(group.ranks.tolist())}"
            raise PlanError(f"{where} holds the value at {twice[0][1]!r} twice")
    rows = [(*key, *writer, True) for key, writer in shared.items() if key not in apart]
    for group in lowest_first if apart else ():
        mine = [(index, value[:2]) for index, value in enumerate(group.table.values) if value[:2] in apart]
        rows += [(*key, rank, index, False) for rank in group.ranks.tolist() for index, key in mine]
    rows.sort()
    return list(starmap(PlannedValue, rows))
