"""One load on one rank: the steps of the protocol."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import xxhash

from ..checkpoint.index import Index
from ..control.base import Operation
from ..engine.resources import IOEngine
from ..errors import without_userinfo
from ..foreign.opening import CheckpointSource
from ..frameworks.sections import Section, check_state, resolve_sections
from ..runtime.messages import listed
from ..telemetry.trace import Timings
from ..tensors.shards import Path
from .agreement import Verdict, agree
from .matching import Match, Target, match_targets
from .options import LoadRequest
from .reads import ReadCounts, ShardReads, plan_shard_reads, read_shards
from .report import LoadReport
from .shared_reads.negotiation import make_offer
from .stored import OpenCheckpoint, SectionReader

_MOST_NAMES_SHOWN = 3

_log = logging.getLogger(__name__)
_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass(frozen=True)
class PreparedLoad:
    """What a load will do, or the error of all ranks."""

    match: Match
    verdict: Verdict
    reads: ShardReads


class LoadRun:
    """What the steps of one load share. ``source`` is where the checkpoint is, or one that is open on all ranks."""

    def __init__(self, engine: IOEngine, source: CheckpointSource | Index, op: Operation, options: LoadRequest) -> None:
        self.engine, self.source, self.op, self.options = engine, source, op, options
        self.url = source.backend.url
        self.timings = Timings("load", op.rank, self.url)

    def step(self, run: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run the step of the protocol that has the name of ``run``: time it, and report a failure to all ranks."""
        with self.op.phase(run.__name__), self.timings.step(run.__name__):
            return run(*args, **kwargs)

    def check(self, state: Mapping[str, Any]) -> list[Section]:
        """Validate the call, and find an adapter for each section."""
        op, options = self.op, self.options
        self.engine.check_usable()
        check_state(state)
        options.check(state)
        facts = {"path": self.url, "sections": ", ".join(sorted(state))}
        if isinstance(self.source, Index):
            facts["open checkpoint"] = f"{self.source.system} {self.source.manifest.attempt or self.source.url}"
        if options.rules is not None:
            facts["rules"] = xxhash.xxh3_128_hexdigest(options.rules.to_toml().encode())
        op.agree("agree", facts)
        return resolve_sections(
            state,
            framework=options.framework,
            rank=op.rank,
            world_size=op.world_size,
            allow_pickle=options.allow_pickle,
            device=options.device,
        )

    def open(self, sections: Sequence[Section]) -> OpenCheckpoint:
        """Read what is stored of the sections."""
        op, source = self.op, self.source
        if isinstance(source, Index):
            index = source
        else:
            index = source.decode(op.broadcast("manifest", source.read() if op.rank == 0 else None))
        index = index.renamed(self.options.rename)
        reader = SectionReader(index, self.options, rank=op.rank, world_size=op.world_size)
        opened = {s.name: reader.open(s.name, s.adapter.per_rank_policies(s.obj)) for s in sections}
        return OpenCheckpoint(index, opened, reader.listed)

    def describe(self, sections: Sequence[Section], checkpoint: OpenCheckpoint) -> list[Target]:
        """List the memory to fill."""
        targets = []
        for section in sections:
            stored = checkpoint.sections[section.name]
            if section.name in self.options.optional and not stored.is_stored and not stored.faults:
                section.context.notes.append(f"{section.name} is not stored, and stays unchanged")
                continue
            with section.naming("its state_dict() or its structure"):
                target = section.adapter.target(section.obj, section.context, stored.contents)
            targets.append(Target(section, stored, target))
        return targets

    def plan(self, checkpoint: OpenCheckpoint, targets: Sequence[Target]) -> PreparedLoad:
        """Match names, agree on the faults of all ranks, and plan the reads."""
        op, options, manifest = self.op, self.options, checkpoint.manifest
        match = match_targets(checkpoint, targets, options)
        requests = match.requests if op.world_size > 1 else []
        index = checkpoint.index
        offer = make_offer(manifest, requests, options.share_reads, verify=options.verify, rank=op.rank)
        verdict = agree(op, index.data, checkpoint, options, targets, match=match, offer=offer)
        accepted = match if verdict.mismatch is None else Match()
        reader = index.reader(self.engine, verify=options.verify, timings=self.timings)
        reads = plan_shard_reads(reader, accepted.rows, accepted.shards, offer, verdict.shared_reads)
        return PreparedLoad(match, verdict, reads)

    def read(self, plan: PreparedLoad) -> ReadCounts:
        """Fill every tensor on every rank."""
        counts = read_shards(self.op, plan.reads)
        self.timings.count("read", counts.read)
        self.op.barrier("read")  # no rank applies values before every rank has all of its bytes
        return counts

    def apply(self, targets: Sequence[Target]) -> None:
        """Set plain values and newly created state."""
        for one in targets:
            with one.section.naming("its load_state_dict()"):
                one.target.apply(one.stored.contents.values)
            # The function may refer to the target: this cycle would keep the state alive until it is collected.
            one.target.apply = _apply_nothing

    def report(
        self, checkpoint: OpenCheckpoint, sections: Sequence[Section], plan: PreparedLoad, counts: ReadCounts
    ) -> LoadReport:
        """Describe what was loaded."""
        context = sections[0].context  # all sections share its notes and its record of what was resumed
        manifest, match = checkpoint.manifest, plan.match
        report = LoadReport(
            url=self.url,
            step=manifest.step,
            metadata=manifest.metadata,
            saved_world_size=manifest.world_size,
            loaded=match.loaded,
            missing=match.missing,
            unexpected=plan.verdict.unexpected,
            lazy=match.lazy,
            left_out=match.left_out,
            mismatched=match.mismatched,
            resized=match.resized,
            sources=match.sources,
            cast=match.cast,
            resumed=context.resumed,
            notes=[*context.notes, *checkpoint.index.data.remarks()],
            bytes_read=counts.read,
            bytes_unchecked=counts.unchecked,
            bytes_received=counts.received,
            bytes_requested=counts.requested,
            over_reads=counts.over_reads,
            timings=self.timings,
        )
        self.op.barrier("report")  # no rank continues while another fails to apply what it loaded
        _log.info("%s (%s)", report, self.timings)
        if self.op.rank == 0 and counts.over_reads:  # what the other ranks read is similar
            read, requested = (sum(column) for column in zip(*counts.over_reads.values(), strict=True))
            _log.warning(
                "%s: each rank reads far more bytes of %s than it needs (rank 0: %d for %d), because it loads small "
                "pieces of what is stored, such as columns of rows. With LoadOptions(share_reads='always'), ranks read "
                "these bytes once, and exchange the pieces",
                without_userinfo(self.url),
                listed(sorted(counts.over_reads), _MOST_NAMES_SHOWN),
                read,
                requested,
            )
        return report


def _apply_nothing(values: Mapping[Path, Any]) -> None:
    """Replaces the function of a target that was applied."""
