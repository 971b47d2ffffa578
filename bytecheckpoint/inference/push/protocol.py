"""The protocol of a push on one rank: describe, plan, prepare, write, verify, apply."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import msgpack

from ...control.base import Operation
from ...errors import BytecheckpointError, EngineError, StateError
from .coordinator import PushCoordinator, StreamApply
from .engines.base import Budget
from .quantization.quantizer import Quantizer
from .report import Progress, ProgressReporter, PushReport
from .sources import Rename, Source, source_of
from .transports.base import Transport, word_digest
from .transports.connection import Endpoint
from .transports.cuda_ipc import compute_device
from .transports.group import Group, GroupAddress, GroupBroken, join_group
from .transports.group_transport import GroupTransport
from .transports.shared_memory import ArenaAddress, SharedMemoryTransport
from .transports.tcp import StreamBroken, TcpTransport
from .writing import HOST_FORMAT, ChunkFormat, Job, Outcome, unpack_writes, write_all

__all__ = ["ENGINE_SHARE", "Push", "Sender"]

ENGINE_SHARE = 0.7
"""The share of the deadline for waits on engines, so that their errors are known before the ranks' own deadlines."""


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Assignment:
    """What a sender must know for one push, besides its jobs. ``rings`` is empty unless weights are streamed."""

    arenas: list[ArenaAddress | None]
    tokens: list[str]
    rings: list[Any]
    on_device: bool
    is_group: bool
    known: list[Any]

    @property
    def chunk_format(self) -> ChunkFormat:
        return ChunkFormat(compute_device(), word_digest) if self.on_device else HOST_FORMAT


class Sender:
    """What one rank keeps from push to push: its jobs, its mappings of arenas, and its group."""

    def __init__(self, deadline_s: float, tcp_only: bool) -> None:
        self.deadline_s, self.tcp_only = deadline_s, tcp_only
        self.plan = self.task = b""
        self.jobs: list[Job] = []
        self.group: Group | None = None
        self._mapped: dict[str, SharedMemoryTransport] = {}

    @property
    def targets(self) -> list[int]:
        return sorted({place.target for job in self.jobs for place in job.places})

    @property
    def nbytes(self) -> int:
        """The bytes that this sender writes when no worker holds any of them yet."""
        return sum(job.nbytes for job in self.jobs)

    def take(self, packed: bytes) -> _Assignment:
        """Unpack an assignment, and keep its jobs if they are new."""
        plain = msgpack.unpackb(packed)
        plan, writes, task = (plain.pop(key) for key in ("plan", "writes", "task"))
        if writes is not None:
            self.jobs, self.plan, self.task = unpack_writes(writes), plan, task
        plain["arenas"] = [address and ArenaAddress.from_plain(address) for address in plain["arenas"]]
        return _Assignment(**plain)

    def shared_memory(self, assignment: _Assignment) -> dict[int, Transport]:
        """Return transports to the targets whose arenas this process can map.

        Mappings are kept for as long as the worker keeps the arena: the first write to each page of a new mapping costs
        as much as the copy itself.
        """
        if self.tcp_only:
            return {}
        for token in [token for token in self._mapped if token not in assignment.tokens]:
            self._mapped.pop(token).close()
        found: dict[int, Transport] = {}
        for target in self.targets:
            address = assignment.arenas[target]
            assert address is not None
            transport = self._mapped.get(address.token) or SharedMemoryTransport.open(address)
            if transport is not None:
                found[target] = self._mapped[address.token] = transport
        return found

    def join(self, address: GroupAddress, rank: int) -> Group:
        """Join the group unless this rank is in it already. Raises ``EngineError``."""
        if self.group is None or self.group.name != address.name:
            self.leave()
            self.group = join_group(address, rank)
        return self.group

    def leave(self) -> None:
        group, self.group = self.group, None
        if group is not None:
            group.leave()

    def close(self) -> None:
        self.leave()
        for transport in self._mapped.values():
            transport.close()
        self._mapped.clear()
        self.jobs, self.plan, self.task = [], b"", b""


class Push:
    """One push on one rank. Rank 0 has a ``coordinator``."""

    def __init__(
        self,
        op: Operation,
        coordinator: PushCoordinator | None,
        sender: Sender,
        strict: bool,
        progress: Progress | None = None,
    ) -> None:
        self._op, self._coordinator, self._sender, self._strict = op, coordinator, sender, strict
        self._progress = ProgressReporter(progress)
        self._seconds: dict[str, float] = {}
        self._early_budget = self._budget()  # for the stages before the first byte moves, during which other ranks wait

    def run(
        self, what: Any, version: int | str, section: str, framework: str | None, rename: Rename | None
    ) -> PushReport:
        op = self._op
        with self._stage("describe"):
            with op.phase("push.describe"):
                source = source_of(
                    what, section, framework=framework, rank=op.rank, world_size=op.world_size, rename=rename
                )
            plans = self._collect_sources(source, version)
            with op.phase("push.describe"):
                if self._coordinator:
                    self._coordinator.describe(self._strict, self._early_budget)
        with self._stage("plan"), op.phase("push.plan"):
            if self._coordinator:
                self._coordinator.plan(op.world_size)
        with self._stage("prepare"):
            assignment = self._prepare(plans)
        if assignment.rings:
            outcomes = self._stream(source, assignment, version)
        else:
            outcomes = self._write(source, assignment)
            self._commit(outcomes, version)
        return self._report(outcomes, version)

    def _collect_sources(self, source: Source, version: int | str) -> list[bytes]:
        """Give rank 0 the description of every sender, where it changed. Returns the plan digests of all senders."""
        op = self._op
        gathered = op.gather("push.facts", msgpack.packb([source.fingerprint(), self._sender.plan, repr(version)]))
        facts = [msgpack.unpackb(one) for one in gathered or ()]
        fingerprints = [fact[0] for fact in facts]
        needed = b""
        with op.phase("push.facts"):
            if self._coordinator:
                _check_same_version(fact[2] for fact in facts)
                needed = b"" if self._coordinator.has_sources(fingerprints) else b"all"
        if op.broadcast("push.ask", needed if self._coordinator else None):
            with op.phase("push.sources"):
                description = source.describe()
            descriptions = op.gather("push.sources", description)
            with op.phase("push.sources"):
                if self._coordinator and descriptions is not None:
                    self._coordinator.set_sources(fingerprints, descriptions)
        return [fact[1] for fact in facts]

    def _prepare(self, plans: list[bytes]) -> _Assignment:
        op, coordinator, packed = self._op, self._coordinator, None
        with op.phase("push.prepare"):
            if coordinator:
                coordinator.prepare(self._strict, self._early_budget, lambda: coordinator.plan(op.world_size))
                packed = [coordinator.assignment(rank, plan) for rank, plan in enumerate(plans)]
        return self._sender.take(op.scatter("push.assignment", packed))

    def _write(self, source: Source, assignment: _Assignment) -> list[Outcome]:
        """Write to arenas. Returns the outcomes of all senders on rank 0."""
        op = self._op
        with self._stage("write"), ExitStack() as stack:
            transports = self._open_arenas(assignment, stack)
            quantizer = self._quantizer(source)
            self._progress.expect(self._sender.nbytes)
            with op.phase("push.write"):
                outcome = write_all(
                    source,
                    self._sender.jobs,
                    quantizer,
                    transports,
                    assignment.known,
                    op.check,
                    on_written=self._progress.add,
                )
            return _outcomes(op.gather("push.write", outcome.packed()))

    def _quantizer(self, source: Source) -> Quantizer:
        """Return a quantizer that has the maxima of the blocks that are split between senders."""
        op = self._op
        with op.phase("push.maxima"):
            quantizer = Quantizer(source, self._sender.task)
            partial = quantizer.partial_maxima()
        if quantizer.exchanges:
            gathered = op.gather("push.maxima", partial)
            merged = None
            with op.phase("push.maxima"):
                if self._coordinator and gathered is not None:
                    merged = self._coordinator.bound.exchange.merge(gathered)
            received = op.scatter("push.maxima", merged)
            with op.phase("push.maxima"):
                quantizer.set_maxima(received)
        return quantizer

    def _open_arenas(self, assignment: _Assignment, stack: ExitStack) -> dict[int, Transport]:
        """Open a transport to every target of this sender: shared memory, or TCP where the arena cannot be mapped."""
        op, sender = self._op, self._sender
        with op.phase("push.transports"):
            transports = sender.shared_memory(assignment)
        missing = [target for target in sender.targets if target not in transports]
        gathered = op.gather("push.transports", msgpack.packb(missing))
        endpoints: dict[int, Any] = {}
        with op.phase("push.transports"):
            if self._coordinator and gathered is not None:
                targets = {target for one in gathered for target in msgpack.unpackb(one)}
                if targets:
                    endpoints = self._coordinator.listen(targets, self._budget())
        packed = op.broadcast("push.endpoints", msgpack.packb(endpoints) if self._coordinator else None)
        endpoints = msgpack.unpackb(packed, strict_map_key=False)
        with op.phase("push.transports"):
            for target in missing:
                transport = TcpTransport(Endpoint.from_plain(endpoints[target]), sender.deadline_s)
                stack.callback(transport.close)
                transports[target] = transport
        return transports

    def _commit(self, outcomes: list[Outcome], version: int | str) -> None:
        op, budget = self._op, self._budget()
        with self._stage("verify"), op.phase("push.verify"):
            if self._coordinator:
                self._coordinator.verify(outcomes, version, budget)
        with self._stage("apply"), op.phase("push.apply"):
            if self._coordinator:
                self._coordinator.apply(version, budget)

    def _stream(self, source: Source, assignment: _Assignment, version: int | str) -> list[Outcome]:
        """Write to ring buffers while the engines load. Returns the outcomes of all senders on rank 0.

        Rank 0 raises a worker's failure, because it can add what the engines serve after it.
        """
        op, stream = self._op, None
        try:
            with self._stage("stream"), ExitStack() as stack:
                rings = self._open_rings(assignment, stack)
                quantizer = self._quantizer(source)
                transports: dict[int, Transport] = dict(rings)
                if assignment.is_group:
                    group = self._join_group()
                    transports = self._group_transports(group, rings, len(assignment.rings))
                op.gather("push.transports", b"")
                self._progress.expect(self._sender.nbytes)
                with op.phase("push.write"):
                    if self._coordinator:
                        stream = StreamApply(self._coordinator, version, self._sender.deadline_s)
                    message = self._write_stream(source, assignment, quantizer, transports, rings)
                gathered = op.gather("push.write", message)
                with op.phase("push.apply"):
                    broken = _first_broken(gathered or ())
                    if assignment.is_group and gathered is not None and broken is None:
                        for ring in rings.values():
                            with suppress(StreamBroken):  # the engine reports the cause
                                ring.finish()  # a sender that ends from now on is not missed
                    if stream is not None and gathered is not None:
                        stream.end(broken)
                return _outcomes(gathered)
        except BaseException as error:
            self._sender.leave()  # other members may be waiting for this one
            if stream is not None and not stream.has_reported:
                after = stream.state_after_failure()
                if isinstance(error, BytecheckpointError):
                    error.args = (f"{error}\n  {after}",)
                else:
                    _log.error("push: %s", after)
            raise

    def _write_stream(
        self,
        source: Source,
        assignment: _Assignment,
        quantizer: Quantizer,
        transports: dict[int, Transport],
        rings: dict[int, TcpTransport],
    ) -> bytes:
        """Return the packed outcome, or the packed failure of the stream, for rank 0."""
        try:
            return write_all(
                source,
                self._sender.jobs,
                quantizer,
                transports,
                assignment.known,
                self._op.check,
                assignment.chunk_format,
                self._progress.add,
            ).packed()
        except (StreamBroken, GroupBroken) as error:
            self._sender.leave()
            for ring in rings.values():
                ring.interrupt()  # makes the workers that still wait notice
            packed: bytes = msgpack.packb([error.is_late, str(error)])
            return packed

    def _join_group(self) -> Group:
        op, sender, packed = self._op, self._sender, b""
        gathered = op.gather("push.group", b"" if sender.group is None else sender.group.name.encode())
        with op.phase("push.group"):
            if self._coordinator and gathered is not None:
                names = [name.decode() for name in gathered]
                packed = msgpack.packb(self._coordinator.group_address(names).plain())
        packed = op.broadcast("push.group", packed if self._coordinator else None)
        address = GroupAddress.from_plain(msgpack.unpackb(packed))
        with op.phase("push.group"), ThreadPoolExecutor(1, thread_name_prefix="bcp-push-join") as threads:
            workers = (
                threads.submit(self._coordinator.join_group, address, self._budget()) if self._coordinator else None
            )
            try:
                group = sender.join(address, op.rank)
            except EngineError:
                if workers is not None:
                    workers.result()  # raises the cause where a worker failed
                raise
            if workers is not None:
                workers.result()
        return group

    def _group_transports(self, group: Group, rings: dict[int, TcpTransport], targets: int) -> dict[int, Transport]:
        def check() -> None:
            self._op.check()
            for ring in rings.values():
                ring.check()

        first_places = [(job.places[0].target, job.places[0].chunk) for job in self._sender.jobs]
        return dict.fromkeys(range(targets), GroupTransport(group, self._op.world_size, first_places, check))

    def _open_rings(self, assignment: _Assignment, stack: ExitStack) -> dict[int, TcpTransport]:
        """Open transports to the ring buffers of this sender's targets.

        With a group, chunks do not use them: rank 0 connects to all workers, and both ends notice each other's failure.
        """
        found: dict[int, TcpTransport] = {}
        targets: Sequence[int] = self._sender.targets
        if assignment.is_group:
            targets = range(len(assignment.rings)) if self._coordinator else ()
        with self._op.phase("push.transports"):
            for target in targets:
                slots, _, endpoint = assignment.rings[target]
                found[target] = TcpTransport(
                    Endpoint.from_plain(endpoint),
                    self._sender.deadline_s,
                    slots=slots,
                    memory=None if self._sender.tcp_only else assignment.arenas[target],
                    on_device=assignment.on_device,
                )
                stack.callback(found[target].close)
        return found

    def _report(self, outcomes: list[Outcome], version: int | str) -> PushReport:
        op, report = self._op, dict[str, Any]()
        with op.phase("push.report"):
            if self._coordinator:
                report = self._coordinator.report(outcomes, version, self._seconds).plain()
        packed = op.broadcast("push.report", msgpack.packb(report) if self._coordinator else None)
        return PushReport.from_plain(msgpack.unpackb(packed))

    def _budget(self) -> Budget:
        return Budget(self._sender.deadline_s)

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        self._progress.begin(name)
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - begin


def _check_same_version(versions: Iterator[str]) -> None:
    distinct = sorted(set(versions))
    if len(distinct) > 1:
        raise StateError(f"ranks push different versions: {', '.join(distinct)}")


def _outcomes(gathered: Sequence[bytes] | None) -> list[Outcome]:
    return [Outcome.unpack(one) for one in gathered or ()]


def _first_broken(gathered: Sequence[bytes]) -> tuple[bool, str] | None:
    """Return the failure of a sender's stream, if there is one: whether it was late, and why. A late one comes first,
    because other workers fail only in consequence."""
    found = [(is_late, text) for is_late, text in map(msgpack.unpackb, gathered) if isinstance(is_late, bool)]
    return max(found, key=lambda one: one[0], default=None)
