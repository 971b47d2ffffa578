"""The ``agree`` step: the ranks verify that they make the same call, and find out whether an earlier plan is valid.

Each rank looks up the plan under which it saved such a state before. It sends rank 0 a few bytes: that it has a plan,
and a digest of everything that other ranks must not have changed (``planners.contents``). If every rank has the same
plan and nothing changed, rank 0's answer names the attempt, and planning is done. Otherwise each rank sends a summary,
and the ``plan`` step makes a new plan.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack
import xxhash
import zstandard

from ..checkpoint.attempts import attempt_name, new_attempt_id
from ..control.base import Operation
from ..engine.files import FileLayout
from ..engine.merging.merge import MergeWork
from ..errors import DisagreementError, PlanError
from ..planners.balance import Assignment
from ..planners.contents import CONTRIBUTION_BYTES, ContentChecks, ContentComparison
from ..planners.local_plan import LocalPlan, PackedBoxes, pack_boxes
from ..planners.save_plan import SavePlan
from ..runtime.messages import describe_disagreement
from .local_state import LocalState
from .selection import raise_unmatched

# States that one process saves in turn: the models of an RL job, with and without their optimizers.
_MAX_PLANS = 8


@dataclass(frozen=True, eq=False)
class PlannedShare:
    """This rank's share of an earlier save plan, and everything that follows from it without looking at a tensor.

    Attributes:
        plan_id: The same on all ranks that planned together, and different for every plan.
        assignment: What this rank writes.
        checks: How this rank summarizes its contents.
        nbytes: The size of all tensors of the checkpoint in bytes.
        separated: The full names of plain tensors that turned out to differ between ranks.
        order: The order in which the plan lists this rank's shards.
        files: This rank's files, laid out for writing.
        merge: The work for tensors that are stored whole.
        plan: The complete plan, on rank 0.
        comparison: The comparison of contents, on rank 0.
    """

    plan_id: bytes
    assignment: Assignment
    checks: ContentChecks
    nbytes: int
    separated: list[str]
    order: list[int] | None
    files: list[FileLayout]
    merge: MergeWork | None
    plan: SavePlan | None = None
    comparison: ContentComparison | None = None


class PlanCache(OrderedDict[bytes, PlannedShare]):
    """The plans used last, by fingerprint. A cached plan may be used only after all ranks have agreed on it."""

    def find(self, fingerprint: bytes) -> PlannedShare | None:
        """Return the plan that was kept last under this fingerprint."""
        found = self.get(fingerprint)
        if found is not None:
            self.move_to_end(fingerprint)
        return found

    def keep(self, fingerprint: bytes, plan: PlannedShare) -> None:
        """Keep a plan in place of any other with the same fingerprint, or of the one used longest ago."""
        self[fingerprint] = plan
        self.move_to_end(fingerprint)
        while len(self) > _MAX_PLANS:
            self.popitem(last=False)


_KNOWN, _NEW = b"\1", b"\2"  # the first byte of a rank's first message
_REUSE, _PLAN = b"g", b"p"  # the first byte of rank 0's verdict

_MAX_PARTS_BYTES = 1 << 32


def pack_parts(parts: Sequence[object]) -> bytes:
    """Pack what rank 0 needs of a rank, for ``unpack_parts``.

    Names and the boxes of several states of a parameter repeat themselves: a table shrinks to 3%, boxes to 20%.
    """
    return zstandard.compress(msgpack.packb(parts))


def unpack_parts(messages: Sequence[bytes]) -> list[list[Any]]:
    """Unpack what ``pack_parts`` has returned on each rank.

    Raises:
        PlanError: It cannot have returned the bytes.
    """
    decompressor = zstandard.ZstdDecompressor()  # takes longer to create than to unpack a message
    try:
        # zstandard allocates the size that a frame states.
        if any(not 0 <= zstandard.frame_content_size(data) < _MAX_PARTS_BYTES for data in messages):
            raise ValueError("it does not state a plausible size")
        return [msgpack.unpackb(decompressor.decompress(data)) for data in messages]
    except (zstandard.ZstdError, ValueError) as error:
        raise PlanError(f"received a malformed message ({error}); do all ranks run the same version?") from error


@dataclass(frozen=True, eq=False)
class SaveShare:
    """This rank's share of a save, under the name of the attempt."""

    attempt: str
    planned: PlannedShare


@dataclass(frozen=True, eq=False)
class NewPlan:
    """No earlier plan holds. ``summaries`` are by rank, on rank 0; None on the others."""

    local_plan: LocalPlan
    summaries: Sequence[RankSummary] | None


class RankSummary(NamedTuple):
    """What rank 0 needs of a rank to make a new plan.

    The digests of the plan's table and of the contents let rank 0 request each distinct table and each distinct set of
    contents once. ``arguments`` are the packed arguments of the call, ``places`` the rank's coordinates in its meshes,
    ``boxes`` the boxes that other ranks cannot compute, ``unmatched`` the packed arguments that select nothing on it,
    ``replicas`` its term of the sum over declared replicas.
    """

    arguments: bytes
    table_digest: bytes
    contents_digest: bytes
    places: bytes
    boxes: PackedBoxes
    unmatched: bytes
    replicas: bytes

    @classmethod
    def of(cls, local: LocalState, plan: LocalPlan, arguments: Mapping[str, str]) -> RankSummary:
        """Summarise what this rank holds."""
        return cls(
            msgpack.packb(dict(sorted(arguments.items()))),
            xxhash.xxh3_128_digest(plan.packed_table),
            xxhash.xxh3_128_digest(local.contents.tobytes()),
            plan.flat_coordinates().astype("<i4").tobytes(),
            pack_boxes(plan.own_boxes(), plan.table.tensors),
            msgpack.packb(local.unmatched),
            local.declared.checksum().to_bytes(CONTRIBUTION_BYTES, "little"),
        )


def agree(
    op: Operation,
    plans: PlanCache,
    local: LocalState,
    arguments: Mapping[str, str],
    *,
    new_id: Callable[[], bytes] = new_attempt_id,
) -> SaveShare | NewPlan:
    """Find out whether an earlier plan is still valid; if not, send rank 0 what it needs to make a new one.

    Args:
        op: The save among the ranks.
        plans: The plans of earlier saves of this process.
        local: What this rank holds.
        arguments: The arguments that must be equal on all ranks.
        new_id: Returns a new attempt's id.

    Raises:
        DisagreementError: Ranks were called with different arguments. Rank 0 raises it here, the others in ``plan``.
        UsageError: Patterns select nothing on any rank. Raised in the same way.
    """
    known = plans.find(local.fingerprint)
    received = op.gather("agree", _first_message(local, arguments, known))
    verdict = op.broadcast("verdict", None if received is None else _verdict(received, known, new_id))
    if verdict[:1] == _REUSE:
        assert known is not None
        local.separate(known.separated)
        return SaveShare(attempt_name(verdict[1:]), known)
    plan = local.build_plan()
    received = op.gather("summary", pack_parts(RankSummary.of(local, plan, arguments)))
    if received is None:
        return NewPlan(plan, None)
    summaries = [RankSummary(*parts) for parts in unpack_parts(received)]
    if any(summary.arguments != summaries[0].arguments for summary in summaries):
        by_rank = [msgpack.unpackb(summary.arguments) for summary in summaries]
        raise DisagreementError(describe_disagreement("save", by_rank))
    raise_unmatched([msgpack.unpackb(summary.unmatched) for summary in summaries], local.names)
    return NewPlan(plan, summaries)


def _first_message(local: LocalState, arguments: Mapping[str, str], known: PlannedShare | None) -> bytes:
    if known is None:
        return _NEW
    shared = msgpack.packb([known.plan_id, sorted(arguments.items())])
    return _KNOWN + known.checks.summarize(local.contents, shared, local.declared.checksum())


def _verdict(received: Sequence[bytes], known: PlannedShare | None, new_id: Callable[[], bytes]) -> bytes:
    if known is None or known.comparison is None or any(message[:1] != _KNOWN for message in received):
        return _PLAN
    if not known.comparison.is_unchanged([message[1:] for message in received]):
        return _PLAN
    return _REUSE + new_id()
