"""The protocol of a load, from top to bottom.

check      validate the state and the options, and find an adapter for each section
open       rank 0 reads the manifest; every rank validates it and reads the plain values of its sections
describe   adapters list the memory to fill, and give meta tensors memory
plan       requested boxes x stored boxes; all faults of all ranks become one error before any tensor changes
read       ranged reads into place, verified chunk by chunk; one rank reads what several ranks need and forwards it
apply      plain values and newly created optimizer state, once every rank has all of its bytes
report     what was loaded, left unchanged and cast, and the bytes it took
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import xxhash

from ..control.base import Operation
from ..engine.resources import IOEngine
from ..foreign.opening import Location
from ..frameworks.sections import Section, check_state, resolve_sections, undone_on_failure
from ..runtime.gc_pause import paused
from ..telemetry.trace import Timings
from ..tensors.shards import Path
from .agreement import Verdict, agree
from .matching import Match, Target, match_targets
from .options import LoadOptions
from .reads import ReadCounts, ShardReads, plan_shard_reads, read_shards
from .report import LoadReport, make_report
from .shared_reads.negotiation import make_offer
from .stored import OpenCheckpoint, SectionReader

__all__ = ["load"]

_log = logging.getLogger(__name__)
_P = ParamSpec("_P")
_T = TypeVar("_T")


def load(
    engine: IOEngine, location: Location, op: Operation, state: Mapping[str, Any], options: LoadOptions
) -> LoadReport:
    """Load ``state`` on this rank, and close ``op``. Every rank raises the same error."""
    call = _Load(engine, location, op, state, options, Timings("load", op.rank, location.backend.url))
    with closing(op):
        sections = call.step("check", _check)
        with paused(), undone_on_failure(sections):
            checkpoint = call.step("open", _open, sections)
            targets = call.step("describe", _describe, sections, checkpoint)
            plan = call.step("plan", _plan, checkpoint, targets)
            plan.verdict.raise_mismatch()  # outside the step, whose report to other ranks would lose the faults' list
        counts = call.step("read", _read, plan)
        call.step("apply", _apply, targets)
        return call.step("report", _report, checkpoint, targets, plan, counts)


@dataclass(frozen=True)
class _Load:
    """One call of ``load``."""

    engine: IOEngine
    location: Location
    op: Operation
    state: Mapping[str, Any]
    options: LoadOptions
    timings: Timings

    @property
    def url(self) -> str:
        return self.location.backend.url

    def step(self, name: str, run: Callable[Concatenate[_Load, _P], _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run and time one step. An error in it becomes the error of all ranks."""
        with self.op.phase(name), self.timings.step(name):
            return run(self, *args, **kwargs)


@dataclass(frozen=True)
class _Plan:
    match: Match
    verdict: Verdict
    reads: ShardReads


def _check(call: _Load) -> list[Section]:
    op, options = call.op, call.options
    call.engine.check_usable()
    check_state(call.state)
    options.check(call.state)
    facts = {"path": call.url, "sections": ", ".join(sorted(call.state))}
    if call.location.rules is not None:
        facts["rules"] = xxhash.xxh3_128_hexdigest(call.location.rules.to_toml().encode())
    op.agree("agree", facts)
    return resolve_sections(
        call.state,
        framework=options.framework,
        rank=op.rank,
        world_size=op.world_size,
        allow_pickle=options.allow_pickle,
        device=options.device,
    )


def _open(call: _Load, sections: Sequence[Section]) -> OpenCheckpoint:
    op, location = call.op, call.location
    index = location.decode(op.broadcast("manifest", location.read() if op.rank == 0 else None))
    reader = SectionReader(index, call.options, rank=op.rank, world_size=op.world_size)
    opened = {s.name: reader.open(s.name, s.adapter.per_rank_policies(s.obj)) for s in sections}
    return OpenCheckpoint(index, reader.names, opened, reader.listed)


def _describe(call: _Load, sections: Sequence[Section], checkpoint: OpenCheckpoint) -> list[Target]:
    targets = []
    for section in sections:
        stored = checkpoint.sections[section.name]
        with section.naming("its state_dict() or its structure"):
            target = section.adapter.target(section.obj, section.context, stored.contents)
        targets.append(Target(section, stored, target))
    return targets


def _plan(call: _Load, checkpoint: OpenCheckpoint, targets: Sequence[Target]) -> _Plan:
    op, options, manifest = call.op, call.options, checkpoint.manifest
    match = match_targets(checkpoint, targets, options)
    requests = match.requests if op.world_size > 1 else []
    index = checkpoint.index
    offer = make_offer(manifest, requests, options.share_reads, verify=options.verify, rank=op.rank)
    verdict = agree(op, index.backend, checkpoint, options, targets, match=match, offer=offer)
    accepted = match if verdict.mismatch is None else Match()
    reader = index.reader(call.engine, verify=options.verify, timings=call.timings)
    return _Plan(match, verdict, plan_shard_reads(reader, accepted.rows, accepted.shards, offer, verdict.shared_reads))


def _read(call: _Load, plan: _Plan) -> ReadCounts:
    counts = read_shards(call.op, plan.reads)
    call.timings.count("read", counts.read)
    call.op.barrier("read")  # no rank applies values before every rank has all of its bytes
    return counts


def _apply(call: _Load, targets: Sequence[Target]) -> None:
    for one in targets:
        with one.section.naming("its load_state_dict()"):
            one.target.apply(one.stored.contents.values)
        # The function may refer to the target: this cycle would keep the state alive until it is collected.
        one.target.apply = _apply_nothing


def _apply_nothing(values: Mapping[Path, Any]) -> None:
    """Replaces the function of a target that was applied."""


def _report(
    call: _Load, checkpoint: OpenCheckpoint, targets: Sequence[Target], plan: _Plan, counts: ReadCounts
) -> LoadReport:
    context = targets[0].section.context  # all sections share its notes and its record of what was resumed
    url, unexpected = call.url, plan.verdict.unexpected
    notes = [*context.notes, *checkpoint.index.backend.remarks()]
    report = make_report(url, checkpoint.manifest, plan.match, unexpected, notes, context.resumed, counts, call.timings)
    call.op.barrier("report")  # no rank continues while another fails to apply what it loaded
    _log.info("%s (%s)", report, call.timings)
    return report
