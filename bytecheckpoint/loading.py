"""The load protocol, top to bottom.

check      the state and the rules mean something
open       rank 0 reads the manifest; every rank decodes and proves the same bytes
describe   adapters say where everything goes; meta tensors get memory
plan       wanted boxes x stored boxes; every fault of every rank is found here, before any tensor changes
read       ranged reads, verified, into place; what ranks want alike is read by one of them and passed on
apply      plain values and newly made optimizer state, only when every rank has all its bytes
report     what was loaded, left, cast, and how many bytes it took
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgpack
import torch

from . import trace
from .catalog import Catalog
from .collector import paused
from .control.base import Operation
from .destinations import Destination
from .engine.reading.passing_on import SharedJob, pass_on
from .engine.reading.reader import Reader, ReadPart
from .engine.resources import Engine
from .engine.writing.commit import decode_manifest, read_manifest_bytes
from .errors import MismatchError, PlanError
from .manifest import Manifest
from .matching import Fault, Rules, dtype_fault, mismatch_error
from .planners import plan_load
from .read_sharing import ReadSharing, answer_offers
from .sections import Section, check_state, resolve_sections
from .shards import Path, SectionTarget, Shard
from .storage_backends.base import StorageBackend
from .tables import BoxTable
from .values import path_name

__all__ = ["LoadOptions", "LoadReport", "load"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadOptions:
    """What the caller chose. ``deadline_s`` bounds every single wait for another rank."""

    framework: str | None = None
    rules: Rules = field(default_factory=Rules)
    per_rank: str = "error"
    allow_pickle: bool = False
    verify: bool = True
    device: torch.device | None = None
    deadline_s: float = 600.0
    share_reads: str = "auto"


@dataclass
class LoadReport:
    """What a load did, as this rank saw it. Names are full (``<section>.<name>``).

    ``missing`` and ``unexpected`` were tolerated by the strictness asked for; ``lazy`` lists optimizer state that the
    saved run had not created; ``cast`` maps a name to ``(stored dtype, dtype in memory)``; ``notes`` are remarks of
    adapters. Byte counts are this rank's: ``bytes_read`` from storage, ``bytes_received`` from other ranks that had
    read them (as elements of the dtypes in memory), ``bytes_wanted`` as they are stored.
    """

    url: str
    step: int | None
    metadata: Mapping[str, Any]
    saved_world_size: int
    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    lazy: list[str] = field(default_factory=list)
    cast: dict[str, tuple[str, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    bytes_read: int = 0
    bytes_received: int = 0
    bytes_wanted: int = 0
    timings: trace.Timings = field(default_factory=lambda: trace.Timings("load"))

    def __str__(self) -> str:
        counts = {what: len(getattr(self, what)) for what in ("missing", "unexpected", "lazy", "cast", "notes")}
        parts = [f"{len(self.loaded)} loaded", *(f"{count} {what}" for what, count in counts.items() if count)]
        received = f" and {self.bytes_received} received" if self.bytes_received else ""
        return (
            f"{self.url} (step {self.step}): {', '.join(parts)}; "
            f"{self.bytes_read} bytes read{received} for {self.bytes_wanted}"
        )


def load(
    engine: Engine,
    backend: StorageBackend,
    op: Operation,
    state: Mapping[str, Any],
    options: LoadOptions,
) -> LoadReport:
    """Run the protocol on this rank, and close ``op``, this load among the ranks. Raises what any rank raised."""
    job = _LoadJob(engine, backend, op, state, options)
    try:
        return job.run()
    except BaseException:
        job.put_back()
        raise
    finally:
        op.close()


@dataclass
class _Wants:
    """Everything this rank asks for, and what is wrong with it."""

    shards: list[Shard] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)  # manifest tensor row of each shard
    names: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)


@dataclass
class _Reads:
    """What this rank reads, for itself ``alone`` and for what is ``shared``, and what is to be settled after."""

    reader: Reader
    shared: list[SharedJob]
    alone: list[ReadPart]
    destinations: list[Destination]


class _LoadJob:
    def __init__(
        self, engine: Engine, backend: StorageBackend, op: Operation, state: Mapping[str, Any], options: LoadOptions
    ) -> None:
        self._engine, self._backend, self._op, self._state, self._options = engine, backend, op, state, options
        self._rules = options.rules
        self._sharing = ReadSharing(options.share_reads, options.verify, op.rank)
        self.timings = trace.Timings("load", op.rank, backend.url)
        self._prepared: Sequence[Section] = ()  # their targets were made, and nothing was loaded into them yet

    def run(self) -> LoadReport:
        with self._step("check"):
            sections = self._check()
        with self._step("open"):
            manifest = self._open()
            report = self._new_report(manifest)
            catalog = Catalog(
                self._backend, manifest, self._rules, self._op.rank, self._op.world_size, self._options.allow_pickle
            )
        with paused(), self._step("describe"):
            targets = self._describe(sections, catalog)
        with paused(), self._step("plan"):
            wants = self._match(targets, catalog, report)
            mismatch = self._agree_on_faults(wants, catalog, report)
            reads = self._plan(manifest, wants if mismatch is None else _Wants(), report)
        if mismatch is not None:
            # Every rank has the same verdict; reporting it to the others as a failure would only lose its details.
            raise mismatch
        self._prepared = ()
        with self._step("read"):
            self._read(reads, report)
            self._op.barrier("read")
        with self._step("apply"):
            for section, target in targets:
                target.apply(catalog.stored(section.name).values)
        with self._step("report"):
            report.notes += [note for section, _ in targets[:1] for note in section.context.notes]
            # No rank goes on with what it loaded while another fails to apply it.
            self._op.barrier("report")
            _log.info("%s (%s)", report, self.timings)
        return report

    def put_back(self) -> None:
        """After a failure: take back what was done to make room, unless bytes have come already. Never raises."""
        for section in self._prepared:
            for step in reversed(section.context.undo):
                try:
                    step()
                except Exception:  # noqa: BLE001 - the load's own error is the one to raise
                    _log.warning("section %s: its targets could not be put back", section.name, exc_info=True)

    # -- the steps -----------------------------------------------------------------------------------------------

    def _check(self) -> list[Section]:
        self._engine.check_usable()
        check_state(self._state)
        self._rules.check(self._state)
        self._sharing.check()
        self._op.agree("agree", {"path": self._backend.url, "sections": ", ".join(sorted(self._state))})
        return resolve_sections(
            self._state,
            framework=self._options.framework,
            rank=self._op.rank,
            world_size=self._op.world_size,
            allow_pickle=self._options.allow_pickle,
            device=self._options.device,
        )

    def _open(self) -> Manifest:
        data = self._op.broadcast("manifest", read_manifest_bytes(self._backend) if self._op.rank == 0 else None)
        return decode_manifest(data, self._backend.url)

    def _new_report(self, manifest: Manifest) -> LoadReport:
        return LoadReport(
            self._backend.url, manifest.step, manifest.metadata, manifest.world_size, timings=self.timings
        )

    def _describe(self, sections: Sequence[Section], catalog: Catalog) -> list[tuple[Section, SectionTarget]]:
        targets = []
        self._prepared = sections
        for section in sections:
            policies = section.adapter.per_rank_policies(section.obj)
            stored = catalog.open_section(section.name, policies, self._options.per_rank)
            targets.append((section, section.adapter.target(section.obj, section.context, stored)))
        return targets

    def _match(self, targets: Sequence[tuple[Section, SectionTarget]], catalog: Catalog, report: LoadReport) -> _Wants:
        wants = _Wants(faults=list(catalog.faults))
        for section, target in targets:
            if not catalog.has(section.name):
                if self._rules.selects_some_of(section.name):
                    report.missing.append(section.name)
                continue
            rows = self._match_tensors(section.name, target, catalog, wants, report)
            for shard in target.shards:
                if shard.fqn in rows:
                    wants.shards.append(shard)
                    wants.rows.append(rows[shard.fqn])
                    wants.names.append(f"{section.name}.{shard.fqn}")
            self._match_values(section.name, target, catalog, wants, report)
        return wants

    def _match_tensors(
        self, section: str, target: SectionTarget, catalog: Catalog, wants: _Wants, report: LoadReport
    ) -> dict[str, int]:
        """Manifest rows of the tensors that will be loaded, by the target's names."""
        rows: dict[str, int] = {}
        metas = catalog.stored(section).metas
        for fqn, meta in target.metas.items():
            full = f"{section}.{fqn}"
            if not self._rules.selects(full) or catalog.skips(section, fqn):
                continue
            row = catalog.row(section, fqn)
            if row is None:
                self._missing(section, fqn, full, target, wants, report)
                continue
            stored = metas[fqn]
            if stored.shape != meta.shape:
                wants.faults.append(("shape", full, f"stored {list(stored.shape)}, wanted {list(meta.shape)}"))
            elif (why := dtype_fault(stored, meta, self._rules.cast)) is not None:
                wants.faults.append(("dtype", full, why))
            else:
                rows[fqn] = row
                report.loaded.append(full)
                if stored.dtype != meta.dtype:
                    report.cast[full] = (stored.dtype.name, meta.dtype.name)
        claimed = [*target.metas, *target.aliases]
        if self._rules.strictness(section) != "exact":
            claimed += [name for name in target.ignorable if isinstance(name, str)]
        catalog.claim_tensors(section, claimed)
        return rows

    def _match_values(
        self, section: str, target: SectionTarget, catalog: Catalog, wants: _Wants, report: LoadReport
    ) -> None:
        stored = catalog.stored(section).values
        for path in target.wanted_values:
            full = f"{section}.{path_name(path)}"
            if not self._rules.selects(full) or catalog.skips(section, path):
                continue
            if path in stored:
                report.loaded.append(full)
            else:
                self._missing(section, path, full, target, wants, report)
        claimed = set(target.wanted_values)
        if self._rules.strictness(section) != "exact":
            claimed |= {path for path in target.ignorable if not isinstance(path, str)}
        catalog.claim_values(section, claimed)

    def _missing(
        self, section: str, name: str | Path, full: str, target: SectionTarget, wants: _Wants, report: LoadReport
    ) -> None:
        strictness = self._rules.strictness(section)
        if name in target.optional and strictness != "exact":
            report.lazy.append(full)
        elif strictness == "lenient":
            report.missing.append(full)
        else:
            wants.faults.append(("missing", full, ""))

    def _agree_on_faults(self, wants: _Wants, catalog: Catalog, report: LoadReport) -> MismatchError | None:
        """One error for all ranks. What is stored but wanted by none is known only when all have spoken."""
        asked = []
        if self._op.world_size > 1:
            asked = [(row, shard.box, shard.tensor.dtype) for row, shard in zip(wants.rows, wants.shards)]
        offer = self._sharing.offer(catalog.manifest, asked)
        said = self._op.gather("claims", msgpack.packb([wants.faults, offer, *catalog.claims()]))
        verdict = None
        if said is not None:
            parts = [msgpack.unpackb(part) for part in said]
            faults = sorted({tuple(fault) for part in parts for fault in part[0]})
            unexpected = catalog.unclaimed([part[2:] for part in parts])
            shared = answer_offers(self._backend, catalog.manifest, [part[1] for part in parts])
            verdict = msgpack.packb([faults, unexpected, shared])
        faults, unexpected, shared = msgpack.unpackb(self._op.broadcast("verdict", verdict), strict_map_key=False)
        self._sharing.take_answer(shared)
        for section, full in unexpected:
            if self._rules.strictness(section) == "lenient":
                report.unexpected.append(full)
            else:
                faults.append(("unexpected", full, ""))
        if not faults:
            return None
        return mismatch_error(self._backend.url, [tuple(fault) for fault in faults], catalog.names())

    def _plan(self, manifest: Manifest, wants: _Wants, report: LoadReport) -> _Reads:
        destinations = [Destination(shard) for shard in wants.shards]
        wanted = BoxTable.build([(row, shard.box) for row, shard in zip(wants.rows, wants.shards)])
        try:
            plan = plan_load(manifest.tensors, manifest.shards, wanted)
        except PlanError as error:
            raise PlanError(f"{self._backend.url}: {error}") from error
        report.bytes_wanted = int(plan.boxes.nbytes(manifest.tensors).sum())
        reader = Reader(
            self._backend,
            manifest,
            self._engine.io,
            verify=self._options.verify,
            ring=self._engine.ring,
            timings=self.timings,
        )
        memory = [destination.memory for destination in destinations]
        shared, alone = self._sharing.split(reader, plan, [shard.box for shard in wants.shards], memory)
        return _Reads(reader, shared, alone, destinations)

    def _read(self, reads: _Reads, report: LoadReport) -> None:
        reader = reads.reader
        if reads.shared:
            alone = partial(reader.read, reads.alone)
            verify, timings = self._options.verify, self.timings
            report.bytes_received = pass_on(self._op, reads.shared, [alone], verify=verify, timings=timings)
        else:
            reader.read(reads.alone)
        for destination in reads.destinations:
            destination.settle()
        report.bytes_read = reader.stats.read
        self.timings.count("read", reader.stats.read)

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        with self._op.phase(name), self.timings.step(name):
            yield
