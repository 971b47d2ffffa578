"""All ranks' tables as one: every tensor, value, alias and section once, and every disagreement named."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ..errors import PlanError
from ..tables import BoxTable, Int64, TensorTable, ragged_positions
from .local_plan import LocalPlan, ValueEntry
from .wire import Bool

__all__ = [
    "PlannedValue",
    "merge_aliases",
    "merge_pinned",
    "merge_sections",
    "merge_shards",
    "merge_tensors",
    "merge_values",
    "ranks_text",
]


@dataclass(frozen=True)
class PlannedValue:
    """One plain value to be written: by ``rank``, whose ``index``-th value it is. ``shared`` values are the same on
    every rank that has them and are written once."""

    section: str
    path: bytes
    rank: int
    shared: bool
    index: int


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


def merge_tensors(plans: Sequence[LocalPlan], sections: list[str]) -> tuple[TensorTable, Int64, list[Int64]]:
    """One table sorted by name, the scope of each tensor, and for each rank the new row of each of its rows.

    Raises ``PlanError`` that lists every tensor of which ranks disagree, and who says what.
    """
    parts = [_Part.of(plan) for plan in plans]
    # Ranks mostly list the same shared tensors; each distinct list is gone through once.
    distinct: dict[object, int] = {}
    for rank, part in enumerate(parts):
        distinct.setdefault(part.key, rank)
    where: dict[str, tuple[int, int]] = {}
    conflicts: set[str] = set()
    for rank in distinct.values():
        tensors = plans[rank].tensors
        for row in parts[rank].shared.tolist():
            known, known_row = where.setdefault(tensors.names[row], (rank, row))
            if known != rank and _facts(plans[known], known_row) != _facts(plans[rank], row):
                conflicts.add(tensors.names[row])
    for rank, part in enumerate(parts):
        for row in part.own.tolist():
            name = plans[rank].tensors.names[row]
            if where.setdefault(name, (rank, row)) != (rank, row) or _facts(plans[rank], row)[3] != rank:
                conflicts.add(name)
    if conflicts:
        raise PlanError(_conflict_text(plans, sorted(conflicts)))
    names = sorted(where)
    merged, scope = _table(
        [(name, _facts(plans[rank], row)) for name in names for rank, row in [where[name]]], sections
    )
    row_of = {name: row for row, name in enumerate(names)}
    shared = {key: _new_rows(plans[rank], parts[rank].shared, row_of) for key, rank in distinct.items()}
    rows: list[Int64] = []
    for plan, part in zip(plans, parts):
        new = np.empty(len(plan.tensors), np.int64)
        new[part.shared] = shared[part.key]
        new[part.own] = _new_rows(plan, part.own, row_of)
        rows.append(new)
    return merged, scope, rows


_Facts = tuple[str, int, tuple[int, ...], int]
"""Section, dtype code, shape and scope of a tensor."""


@dataclass(eq=False)
class _Part:
    """Which rows of one rank's tensors are ``shared`` and which its ``own``; equal shared parts have equal ``key``."""

    shared: Int64
    own: Int64
    key: object

    @classmethod
    def of(cls, plan: LocalPlan) -> _Part:
        tensors, scope = plan.tensors, plan.scopes()
        shared, own = np.flatnonzero(scope < 0), np.flatnonzero(scope >= 0)
        names = tensors.names if len(own) == 0 else [tensors.names[row] for row in shared.tolist()]
        ndim = tensors.ndim[shared]
        shape = tensors.shape[ragged_positions(tensors.starts[shared], ndim)]
        columns = (tensors.section[shared], tensors.dtype[shared], ndim, shape)
        return cls(shared, own, (tuple(names), tuple(tensors.sections), *(column.tobytes() for column in columns)))


def _facts(plan: LocalPlan, row: int) -> _Facts:
    tensors = plan.tensors
    scope = -1 if plan.scope is None else int(plan.scope[row])
    return tensors.section_of(row), int(tensors.dtype[row]), tensors.shape_of(row), scope


def _new_rows(plan: LocalPlan, rows: Int64, row_of: dict[str, int]) -> Int64:
    names = plan.tensors.names
    return np.array([row_of[names[row]] for row in rows.tolist()], np.int64)


def _table(rows: list[tuple[str, _Facts]], sections: list[str]) -> tuple[TensorTable, Int64]:
    codes = {name: code for code, name in enumerate(sections)}
    facts = [(codes[section], dtype, len(shape), scope) for _, (section, dtype, shape, scope) in rows]
    shape = np.array([size for _, (_, _, extent, _) in rows for size in extent], np.int64)
    columns = np.array(facts, np.int64).reshape(-1, 4)
    section, dtype, ndim, scope = (columns[:, i].copy() for i in range(4))
    return TensorTable([name for name, _ in rows], sections, section, dtype, ndim, shape), scope


def _conflict_text(plans: Sequence[LocalPlan], names: list[str]) -> str:
    said: dict[str, dict[str, list[int]]] = {name: defaultdict(list) for name in names}
    for rank, plan in enumerate(plans):
        for row, name in enumerate(plan.tensors.names):
            if name in said:
                section, _, _, scope = _facts(plan, row)
                owner = "" if scope < 0 else f", of rank {scope} alone"
                said[name][f"{plan.tensors.meta_of(row)} in section {section!r}{owner}"].append(rank)
    lines = [f"ranks disagree about {len(names)} tensors:"]
    for name, texts in said.items():
        lines.append(f"  {name}: " + "; ".join(f"{text} on {ranks_text(ranks)}" for text, ranks in texts.items()))
    return "\n".join(lines)


def merge_shards(plans: Sequence[LocalPlan], tensors: TensorTable, rows: list[Int64]) -> tuple[BoxTable, Int64, Int64]:
    """All ranks' boxes as one table, with the rank and the local row of each."""
    counts = np.array([len(plan.shards) for plan in plans], np.int64)
    empty = [np.empty(0, np.int64)]
    boxes = BoxTable.from_columns(
        tensors,
        np.concatenate(empty + [new[plan.shards.tensor] for new, plan in zip(rows, plans)]),
        np.concatenate(empty + [plan.shards.offsets for plan in plans]),
        np.concatenate(empty + [plan.shards.lengths for plan in plans]),
    )
    rank = np.repeat(np.arange(len(plans), dtype=np.int64), counts)
    local = np.arange(len(boxes), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    return boxes, rank, local


def merge_pinned(plans: Sequence[LocalPlan], tensors: TensorTable, rows: list[Int64]) -> Bool:
    """Tensors that any rank wants to be written by the lowest rank that has them."""
    pinned = np.zeros(len(tensors), np.bool_)
    for plan, new in zip(plans, rows):
        if plan.pinned is not None:
            pinned[new[plan.pinned]] = True
    return pinned


def merge_sections(plans: Sequence[LocalPlan]) -> list[tuple[str, str]]:
    """Every section with its adapter's kind, by name. Raises ``PlanError`` where ranks name different kinds."""
    return _agreed("section", "adapter", [plan.sections for plan in plans])


def merge_aliases(plans: Sequence[LocalPlan], tensors: TensorTable) -> list[tuple[str, str]]:
    """Every tied name with what it stands for, by name.

    Raises ``PlanError`` for a name that stands for two things, that is a tensor's as well, or for nothing there is.
    """
    aliases = _agreed("alias", "target", [plan.aliases for plan in plans])
    names, tied = set(tensors.names), {name for name, _ in aliases}
    faults = [f"{name}: is a tensor, and an alias of {target} too" for name, target in aliases if name in names]
    faults += [f"{name}: alias of {to}, which no rank has" for name, to in aliases if to not in names | tied]
    if faults:
        raise PlanError("aliases that cannot be:\n  " + "\n  ".join(faults))
    return aliases


def _agreed(what: str, says: str, pairs: Sequence[Sequence[tuple[str, str]]]) -> list[tuple[str, str]]:
    said: dict[str, dict[str, list[int]]] = {}
    for rank, one in enumerate(pairs):
        for name, value in one:
            said.setdefault(name, {}).setdefault(value, []).append(rank)
    faults = [
        f"{what} {name}: " + "; ".join(f"{says} {value!r} on {ranks_text(ranks)}" for value, ranks in values.items())
        for name, values in sorted(said.items())
        if len(values) > 1
    ]
    if faults:
        raise PlanError("ranks disagree:\n  " + "\n  ".join(faults))
    return sorted((name, next(iter(values))) for name, values in said.items())


def merge_values(plans: Sequence[LocalPlan]) -> list[PlannedValue]:
    """Who writes which value, by section, path and rank. Raises ``PlanError`` for a path that one rank has twice."""
    holders: dict[tuple[str, bytes], list[tuple[int, int, ValueEntry]]] = defaultdict(list)
    for rank, plan in enumerate(plans):
        for index, value in enumerate(plan.values):
            holders[value.section, value.path].append((rank, index, value))
    planned: list[PlannedValue] = []
    for (section, path), entries in sorted(holders.items()):
        twice = [b[0] for a, b in pairwise(entries) if a[0] == b[0]]
        if twice:
            raise PlanError(f"section {section!r}: {ranks_text(twice)} holds the value at {path!r} twice")
        shared = len({value.digest for _, _, value in entries}) == 1 and not any(v.per_rank for _, _, v in entries)
        writers = entries[:1] if shared else entries
        planned.extend(PlannedValue(section, path, rank, shared, index) for rank, index, _ in writers)
    return planned
