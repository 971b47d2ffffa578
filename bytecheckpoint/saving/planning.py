"""The ``plan`` step: rank 0 plans the save and sends each rank its share.

Rank 0 requests each distinct table and each distinct set of contents from one rank that has it. If plain tensors of
trees turn out not to be replicas, the ranks first mark them as their own and send new summaries. If declared replicas
have diverged, all ranks send their digests, and rank 0 reports the tensors.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from operator import xor
from typing import Any

import msgpack
import numpy as np

from ..checkpoint.attempts import attempt_name, new_attempt_id
from ..control.base import Operation
from ..engine.merging.merge import MergeWork
from ..errors import PlanError
from ..planners.balance import Assignment
from ..planners.contents import DIGEST_BYTES, ContentChecks, ContentComparison, HeldContents, compare_contents
from ..planners.gather_plan import Layout, plan_gather
from ..planners.gather_share import GatherShare
from ..planners.local_plan import LocalPlan, PlanTable, unpack_boxes
from ..planners.plan_groups import PlanGroup
from ..planners.save_plan import SavePlan, plan_groups
from ..version import HEADER_METADATA
from .agreement import NewPlan, PlanCache, PlannedShare, RankSummary, SaveShare, pack_parts, unpack_parts
from .local_state import LocalState
from .replicas import Contents, find_diverged, replica_error

_log = logging.getLogger(__name__)

_PLAN_ID_BYTES = 16
_MAX_ROUNDS = 6  # digests, tables and contents, names to separate, new tables, shares; one more than can occur

# What rank 0 sends a rank: a request for its table or contents, or for digests of its declared replicas, names to
# separate, or its share.
_SEND, _SEND_DIGESTS, _SEPARATE, _SHARE = "send", "digests", "separate", "share"


def plan_save(
    op: Operation, plans: PlanCache, local: LocalState, new: NewPlan, new_id: Callable[[], bytes] = new_attempt_id
) -> SaveShare:
    """Make a new plan and return this rank's share of it. All ranks call it.

    Raises:
        PlanError: The ranks' states do not fit together.
        ReplicaMismatchError: Replicas differ.
        DisagreementError: Ranks were called with different arguments.
    """
    local_plan = new.local_plan
    negotiation = None if new.summaries is None else PlanNegotiation(local, local_plan, new.summaries, new_id)
    separated: list[str] = []
    for _ in range(_MAX_ROUNDS):
        kind, *content = msgpack.unpackb(op.scatter("plan", None if negotiation is None else negotiation.messages()))
        if kind == _SHARE:
            break
        if kind == _SEND:
            table, contents = content
            reply: list[Any] = [
                local_plan.packed_table if table else b"",
                local.contents.tobytes() if contents else b"",
            ]
        elif kind == _SEND_DIGESTS:
            reply = [local.declared.pack()]
        else:
            (separated,) = content
            local.separate(separated)
            local_plan = local.build_plan()
            reply = [*RankSummary.of(local, local_plan, {})]
        received = op.gather("reply", pack_parts(reply))
        if negotiation is not None and received is not None:
            negotiation.receive(unpack_parts(received), local_plan.table)
    else:
        raise PlanError(f"rank 0 had no plan after {_MAX_ROUNDS} rounds of messages")
    attempt_id, plan_id, nbytes, assignment_bytes, gather_bytes, checks = content
    assignment = Assignment.from_bytes(assignment_bytes)
    merge = None
    if gather_bytes:
        merge = MergeWork.of(GatherShare.from_bytes(gather_bytes), local_plan, HEADER_METADATA)
    content_checks = ContentChecks.from_bytes(checks, op.rank, op.world_size)
    files = local.lay_out(assignment, local_plan.order)
    planned = PlannedShare(plan_id, assignment, content_checks, nbytes, separated, local_plan.order, files, merge)
    if negotiation is not None:
        planned = replace(planned, plan=negotiation.plan, comparison=negotiation.comparison)
    if plan_id:
        plans.keep(local.fingerprint, planned)
    return SaveShare(attempt_name(attempt_id), planned)


class PlanNegotiation:
    """Rank 0's side of planning: ``messages`` to all ranks, then ``receive`` their replies, until all have a share."""

    def __init__(
        self, local: LocalState, local_plan: LocalPlan, summaries: Sequence[RankSummary], new_id: Callable[[], bytes]
    ) -> None:
        self._layout: Layout = local.layout
        self._new_id = new_id
        self._summaries = list(summaries)
        self._tables = {summaries[0].table_digest: local_plan.table}
        self._contents = {summaries[0].contents_digest: local.contents}
        self._requests: list[tuple[bool, bool]] = []  # by rank, whether it sends its table, and its contents
        self._asks_for_digests = False
        self._declared_must_match = local.declared.must_match
        self._compares_declared = reduce(xor, (int.from_bytes(one.replicas, "little") for one in summaries)) != 0
        self.plan: SavePlan | None = None
        self.comparison: ContentComparison | None = None

    def messages(self) -> list[bytes]:
        """Return the next message to each rank: a request, names to separate, or the rank's share.

        Raises:
            PlanError: The ranks' states do not fit together.
            ReplicaMismatchError: Unproven replicas differ.
        """
        self._asks_for_digests, self._compares_declared = self._compares_declared, False
        if self._asks_for_digests:
            return [msgpack.packb([_SEND_DIGESTS])] * len(self._summaries)
        self._requests = self._missing()
        if any(map(any, self._requests)):
            return [msgpack.packb([_SEND, *request]) for request in self._requests]
        if self.comparison is None:
            contents = [self._contents[summary.contents_digest] for summary in self._summaries]
            tables = self._ranks_by_table()
            held = [
                HeldContents(table.compared_items(), np.array(ranks), [contents[rank] for rank in ranks])
                for table, ranks in tables
            ]
            self.comparison = compare_contents(held, len(self._summaries))
            names = sorted(name for name in self.comparison.differing if isinstance(name, str))
            if differing := self._must_match().intersection(names):
                raise replica_error(_contents_by_rank(tables, held, differing), are_declared=False)
            if names:
                return [msgpack.packb([_SEPARATE, names])] * len(self._summaries)
        return self._shares(self.comparison)

    def receive(self, replies: Sequence[list[Any]], own_table: PlanTable) -> None:
        """Take the ranks' replies to the last messages. ``own_table`` is rank 0's, as it is now.

        Raises:
            ReplicaMismatchError: Declared replicas differ, and the save is asked to check them.
        """
        if self._asks_for_digests:
            if diverged := find_diverged([packed for (packed,) in replies]):
                error = replica_error(diverged, are_declared=True)
                if self._declared_must_match:
                    raise error
                _log.warning("%s", error)
            return
        if not any(map(any, self._requests)):
            self._summaries = [RankSummary(*reply) for reply in replies]
            self._tables[self._summaries[0].table_digest] = own_table
            return
        for summary, (table, contents) in zip(self._summaries, replies, strict=True):
            if summary.table_digest not in self._tables:
                self._tables[summary.table_digest] = PlanTable.from_bytes(table)
            if summary.contents_digest not in self._contents:
                digests = np.frombuffer(contents, np.uint8).reshape(-1, DIGEST_BYTES)
                self._contents[summary.contents_digest] = digests

    def _missing(self) -> list[tuple[bool, bool]]:
        """Request each unknown table and each unknown set of contents from the first rank that has it."""
        tables, contents = set(self._tables), set(self._contents)
        requests = []
        for summary in self._summaries:
            requests.append((summary.table_digest not in tables, summary.contents_digest not in contents))
            tables.add(summary.table_digest)
            contents.add(summary.contents_digest)
        return requests

    def _must_match(self) -> set[str]:
        """Return the names of the tensors whose holders must have equal contents."""
        tables = self._tables.values()
        return {table.tensors.names[row] for table in tables for row in np.flatnonzero(table.must_match).tolist()}

    def _ranks_by_table(self) -> list[tuple[PlanTable, list[int]]]:
        ranks: dict[bytes, list[int]] = {}
        for rank, summary in enumerate(self._summaries):
            ranks.setdefault(summary.table_digest, []).append(rank)
        return [(self._tables[digest], members) for digest, members in ranks.items()]

    def _shares(self, comparison: ContentComparison) -> list[bytes]:
        groups = [
            PlanGroup.of(
                table,
                ranks,
                [np.frombuffer(self._summaries[rank].places, "<i4") for rank in ranks],
                *unpack_boxes([self._summaries[rank].boxes for rank in ranks], table.tensors),
            )
            for table, ranks in self._ranks_by_table()
        ]
        world_size = len(self._summaries)
        differing = {key for key in comparison.differing if isinstance(key, tuple)}
        plan = plan_groups(groups, differing, world_size=world_size)
        gather = plan_gather(plan, self._layout, world_size=world_size)
        self.plan = plan if gather is None else gather.stored
        assignments = plan if gather is None else gather
        plan_id = secrets.token_bytes(_PLAN_ID_BYTES) if comparison.is_cacheable else b""
        attempt_id = self._new_id()
        nbytes = sum(file.data_size for file in self.plan.files)
        shares = []
        for rank, checks in enumerate(comparison.checks()):
            gather_bytes = b"" if gather is None else gather.share(rank).to_bytes()
            share = [attempt_id, plan_id, nbytes, assignments.assignment_bytes(rank), gather_bytes, checks]
            shares.append(msgpack.packb([_SHARE, *share]))
        return shares


def _contents_by_rank(
    tables: Sequence[tuple[PlanTable, list[int]]], held: Sequence[HeldContents], names: set[str]
) -> Contents:
    found: Contents = {}
    for (table, _), one in zip(tables, held, strict=True):
        metas = {name: str(table.tensors.meta_of(row)) for row, name in enumerate(table.tensors.names) if name in names}
        for item, key in enumerate(one.keys):
            if isinstance(key, str) and key in names:
                for rank, contents in zip(one.ranks.tolist(), one.contents, strict=True):
                    content = (metas[key], contents[item].tobytes())
                    found.setdefault(key, {}).setdefault(content, []).append(rank)
    return found
