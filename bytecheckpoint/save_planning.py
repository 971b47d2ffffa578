"""What the ranks settle before a byte is staged: that they make the same call, and who writes what.

Each rank looks for the plan under which it saved such a state before, and tells rank 0 a few bytes: that it has one,
and a digest of all that must not have changed on the others' side (``planners.contents``). Where every rank has the
same plan and nothing changed, rank 0's answer names the attempt and that is all. Otherwise they plan anew.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack
import numpy as np
import xxhash

from .control.agreement import describe_disagreement
from .control.base import Operation
from .engine.file_layout import FileLayout
from .engine.merging.merge import MergeWork
from .engine.writing.commit import attempt_name, new_attempt_id
from .errors import DisagreementError, PlanError
from .local_state import LocalState
from .planners import (
    CONTENT_BYTES,
    Assignment,
    CachedPlan,
    Comparison,
    ContentChecks,
    GatherShare,
    Held,
    PlanCache,
    PlanGroup,
    PlanTable,
    SavePlan,
    compare_contents,
    pack_boxes,
    plan_gather,
    plan_groups,
    unpack_boxes,
)
from .version import HEADER_METADATA

__all__ = ["Agreed", "PlanningDesk", "Plans", "Settled", "Told", "agree", "settle"]

Plans = PlanCache[FileLayout, MergeWork]

# What a rank tells first: one of these, with _BUSY added where it would have to wait for staging memory.
_KNOWN, _NEW, _BUSY = 1, 2, 4
_PLAN_ID_BYTES = 16
# What it answers while there is no plan.
ASK, SEPARATE, SHARE = "ask", "separate", "share"
_MAX_ROUNDS = 5  # a question for tables and contents, names to separate, a question for the new tables, a share
# What rank 0 answers.
_GO, _PLAN, _SKIP = b"g", b"p", b"s"


@dataclass(frozen=True)
class Settled:
    """This rank's share of a save, under the name of its attempt; ``plan`` is all of it, on rank 0 alone.

    ``files`` are the layouts of the tensor files it writes on its own, ``merge`` what it does for those that ranks
    write together. ``nbytes`` are of all tensors of all ranks. ``is_cached``: nothing was planned, an earlier save's
    plan still holds.
    """

    attempt: str
    nbytes: int
    assignment: Assignment
    files: list[FileLayout]
    merge: MergeWork | None
    plan: SavePlan | None
    is_cached: bool


@dataclass(frozen=True)
class Agreed:
    """All ranks make the same call. ``settled`` where an earlier plan still holds; else ``told`` is what rank 0 plans
    from. ``skip``: some rank would have had to wait, and nothing is to be saved."""

    settled: Settled | None = None
    told: list[Told] | None = None
    skip: bool = False


class Told(NamedTuple):
    """What a rank brings to rank 0 to plan anew: the arguments of its call (packed), digests of what other ranks may
    have alike, its places in meshes, and boxes that only it knows of."""

    facts: bytes
    table: bytes
    contents: bytes
    places: bytes
    boxes: bytes

    @classmethod
    def of(cls, local: LocalState, facts: Mapping[str, str]) -> Told:
        plan = local.plan
        return cls(
            msgpack.packb(dict(sorted(facts.items()))),
            xxhash.xxh3_128_digest(local.table),
            xxhash.xxh3_128_digest(local.contents.tobytes()),
            plan.places().astype("<i4").tobytes(),
            pack_boxes(plan.own_boxes()),
        )


def agree(
    op: Operation, plans: Plans, local: LocalState, facts: Mapping[str, str], *, busy: bool = False, job: bytes = b""
) -> Agreed:
    """Find out together whether an earlier plan still holds; where not, tell rank 0 all it needs, and let it compare.

    ``facts`` are what every rank must have been called with alike. ``busy``: this rank would have to wait for staging
    memory and asks all to skip the save. ``job`` marks the attempt. A ``DisagreementError`` is raised by rank 0, and by
    the others when they wait for its plan.
    """
    known = plans.find(local.fingerprint)
    heard = op.gather("agree", _first_word(local, facts, known, busy))
    answer = op.broadcast("verdict", None if heard is None else _verdict(heard, known, job))
    if answer[:1] == _SKIP:
        return Agreed(skip=True)
    if answer[:1] == _GO:
        assert known is not None
        local.follow(known.separated, known.order)
        attempt = attempt_name(answer[1:])
        share = known.assignment, known.files, known.merge
        return Agreed(Settled(attempt, known.nbytes, *share, known.plan, is_cached=True))
    heard = op.gather("tell", msgpack.packb(Told.of(local, facts)))
    if heard is None:
        return Agreed()
    told = [Told(*msgpack.unpackb(one)) for one in heard]
    if any(one.facts != told[0].facts for one in told):
        raise DisagreementError(describe_disagreement("save", [msgpack.unpackb(one.facts) for one in told]))
    return Agreed(told=told)


def _first_word(
    local: LocalState, facts: Mapping[str, str], known: CachedPlan[FileLayout, MergeWork] | None, busy: bool
) -> bytes:
    flag = (_NEW if known is None else _KNOWN) | (_BUSY if busy else 0)
    if known is None:
        return bytes([flag])
    everywhere = msgpack.packb([known.plan_id, sorted(facts.items())])
    return bytes([flag]) + known.checks.tell(local.contents, everywhere)


def _verdict(heard: Sequence[bytes], known: CachedPlan[FileLayout, MergeWork] | None, job: bytes) -> bytes:
    if any(one[0] & _BUSY for one in heard):
        return _SKIP
    if known is None or known.comparison is None or any(one[0] != _KNOWN for one in heard):
        return _PLAN
    return _GO + new_attempt_id(job) if known.comparison.holds([one[1:] for one in heard]) else _PLAN


def settle(op: Operation, plans: Plans, local: LocalState, agreed: Agreed, *, job: bytes = b"") -> Settled:
    """Unless an earlier plan holds, rank 0 plans, and hands each rank its share. It asks one rank of each kind for what
    all of them have alike. Where plain tensors of trees turn out to be no replicas of each other, each rank first makes
    them its own and says so."""
    if agreed.settled is not None:
        return agreed.settled
    desk = None if agreed.told is None else PlanningDesk(local, agreed.told, job)
    separated: list[str] = []
    for _ in range(_MAX_ROUNDS):
        kind, *answer = msgpack.unpackb(op.scatter("plan", None if desk is None else desk.answers()))
        if kind == SHARE:
            break
        if kind == ASK:
            wants_table, wants_contents = answer
            word: list[Any] = [local.table if wants_table else b"", local.contents.tobytes() if wants_contents else b""]
        else:
            (separated,) = answer
            local.separate(separated)
            word = [*Told.of(local, {})]
        heard = op.gather("more", msgpack.packb(word))
        if desk is not None and heard is not None:
            desk.hear([msgpack.unpackb(one) for one in heard])
    else:
        raise PlanError(f"rank 0 had no plan after {_MAX_ROUNDS} questions")
    attempt_id, plan_id, nbytes, told, share, checks = answer
    assignment = Assignment.from_bytes(told, local.plan)
    files = local.lay_out(assignment)
    merge = None
    if share:
        merge = MergeWork.of(GatherShare.from_bytes(share, local.plan, op.world_size), local.plan, HEADER_METADATA)
    plan = None if desk is None else desk.plan
    if plan_id:
        own_checks = ContentChecks.from_bytes(checks, op.rank, op.world_size, len(local.contents))
        comparison = None if desk is None else desk.comparison
        known = CachedPlan(
            plan_id, assignment, own_checks, nbytes, separated, local.order, files, plan, comparison, merge
        )
        plans.keep(local.fingerprint, known)
    return Settled(attempt_name(attempt_id), nbytes, assignment, files, merge, plan, is_cached=False)


class PlanningDesk:
    """Where rank 0 plans: it ``answers`` all ranks, and ``hear``s what they say to that, until the answer is a plan."""

    def __init__(self, local: LocalState, told: Sequence[Told], job: bytes = b"") -> None:
        self._local, self._told, self._job = local, list(told), job
        self._tables = {told[0].table: local.plan.table()}
        self._contents = {told[0].contents: local.contents}
        self._asked: list[tuple[bool, bool]] = []
        self._has_separated = False
        self.plan: SavePlan | None = None
        self.comparison: Comparison | None = None

    def answers(self) -> list[bytes]:
        """What each rank is told: what to tell in turn, or names to separate first, or its share."""
        self._asked = self._questions()
        if any(table or contents for table, contents in self._asked):
            return [msgpack.packb([ASK, *one]) for one in self._asked]
        if self.comparison is None:
            held = [
                Held(table.compared_items(), np.array(ranks), [self._contents[self._told[r].contents] for r in ranks])
                for table, ranks in self._kinds()
            ]
            self.comparison = compare_contents(held, len(self._told))
            names = sorted(name for name in self.comparison.differing if isinstance(name, str))
            if names:
                return [msgpack.packb([SEPARATE, names])] * len(self._told)
        return self._shares(self.comparison)

    def hear(self, words: Sequence[list[Any]]) -> None:
        """What the ranks say to the last answers."""
        if not any(table or contents for table, contents in self._asked):
            self._told = [Told(*word) for word in words]
            self._tables[self._told[0].table] = self._local.plan.table()
            return
        for (wants_table, wants_contents), told, (table, contents) in zip(self._asked, self._told, words):
            if wants_table:
                _prove(told.table, table)
                self._tables[told.table] = PlanTable.from_bytes(table)
            if wants_contents:
                _prove(told.contents, contents)
                self._contents[told.contents] = np.frombuffer(contents, np.uint8).reshape(-1, CONTENT_BYTES)

    def _questions(self) -> list[tuple[bool, bool]]:
        """Of each kind, the first rank that has it is asked."""
        tables, contents = set(self._tables), set(self._contents)
        asked = []
        for one in self._told:
            asked.append((one.table not in tables, one.contents not in contents))
            tables.add(one.table)
            contents.add(one.contents)
        return asked

    def _kinds(self) -> list[tuple[PlanTable, list[int]]]:
        """The ranks of each table."""
        ranks: dict[bytes, list[int]] = {}
        for rank, one in enumerate(self._told):
            ranks.setdefault(one.table, []).append(rank)
        return [(self._tables[table], members) for table, members in ranks.items()]

    def _shares(self, comparison: Comparison) -> list[bytes]:
        groups = [
            PlanGroup.of(
                table,
                ranks,
                [np.frombuffer(self._told[rank].places, "<i4") for rank in ranks],
                *unpack_boxes([self._told[rank].boxes for rank in ranks], table.tensors),
            )
            for table, ranks in self._kinds()
        ]
        differing = {key for key in comparison.differing if isinstance(key, tuple)}
        plan = plan_groups(groups, differing, world_size=len(self._told))
        gather = plan_gather(plan, self._local.layout, world_size=len(self._told))
        self.plan = plan if gather is None else gather.stored
        by_rank = plan if gather is None else gather
        plan_id = secrets.token_bytes(_PLAN_ID_BYTES) if comparison.is_cacheable else b""
        attempt_id = new_attempt_id(self._job)
        nbytes = sum(file.data_size for file in self.plan.files)
        return [
            msgpack.packb(
                [
                    SHARE,
                    attempt_id,
                    plan_id,
                    nbytes,
                    by_rank.assignment_bytes(rank),
                    b"" if gather is None else gather.share(rank).to_bytes(),
                    checks,
                ]
            )
            for rank, checks in enumerate(comparison.checks())
        ]


def _prove(digest: bytes, told: bytes) -> None:
    if xxhash.xxh3_128_digest(told) != digest:
        raise PlanError("a rank told something else than it had announced")
