"""A push, top to bottom: what is there and what is wanted, who writes what, the bytes, the proof, the change."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import msgpack

from ...checkpoint import Checkpoint
from ...checkpointer import DEADLINE_S
from ...control import current_communicator
from ...control.base import Communicator, Operation
from ...errors import ControlError, StateError
from .arena import Address
from .engines import Budget, Engine
from .lead import Lead, Outcome
from .planning import CHUNK_BYTES
from .quantizer import Quantizer
from .report import PushReport
from .roads import Road, SharedMemory, Tcp
from .sources import Rename, Source, source_of
from .tcp_wire import TcpAddress
from .writing import Job, unpack_writes, write_all

__all__ = ["Pusher"]

# An engine is given up before the other ranks give up rank 0, so that all raise what it is about.
_SHARE = 0.7


class Pusher:
    """Pushes weights into running inference engines. Made on every rank of the training job, used by all in step.

    ``engines`` matters on rank 0 only, which alone talks to them. ``deadline_s`` bounds each wait. ``tcp_only`` keeps
    senders from using shared memory with workers of their host. What engines want, the plan, and what workers hold are
    remembered from push to push; where anything changes, or a worker was restarted, it is found out anew.
    """

    def __init__(
        self,
        engines: Engine | Sequence[Engine] | None = None,
        *,
        deadline_s: float = DEADLINE_S,
        chunk_bytes: int = CHUNK_BYTES,
        tcp_only: bool = False,
        communicator: Communicator | None = None,
    ) -> None:
        given = [engines] if isinstance(engines, Engine) else list(engines or ())
        self._deadline_s, self._tcp_only, self._communicator = deadline_s, tcp_only, communicator
        self._lead = Lead(given, chunk_bytes)
        self._has_engines = bool(given)
        self._plan = b""
        self._jobs: list[Job] = []
        self._task = b""
        self._memories: dict[str, SharedMemory] = {}
        self._version: int | str | None = None

    def push(
        self,
        what: Any,
        *,
        version: int | str | None = None,
        section: str = "model",
        framework: str | None = None,
        rename: Rename | None = None,
        strict: bool = True,
    ) -> PushReport:
        """Make every engine serve ``what``: a module, a state as for ``bytecheckpoint.save``, or an opened checkpoint.

        ``version`` is what engines call it: by default a checkpoint's step, else one more than the last. ``rename``
        turns the names of the state into those that the engine's model loads. With ``strict``, every element of every
        parameter of an engine must get something, and an engine must take all of a tensor or nothing. Returns when
        every engine serves it.

        Where it raises, on any rank, every engine serves the version before, and the next push works; where one cannot,
        the error says so, and the engine is left paused. Raises ``MismatchError`` or ``PlanError`` where the
        engine's model and the state do not fit, ``CorruptionError`` for bytes that did not arrive, ``EngineError`` for
        an engine that fails, ``DeadlineError`` for one that does not answer, ``ControlError`` for ranks that fail.
        """
        ranks = self._communicator or current_communicator(deadline_s=self._deadline_s)
        op = ranks.operation("push", deadline_s=self._deadline_s)
        try:
            one = _Push(self, op, strict)
            report = one.run(what, version, section, framework, rename)
            self._version = report.version
            return report
        finally:
            op.close()

    def state(self) -> list[list[dict[str, Any]]]:
        """By engine and worker: ``version`` served (None: what it started with), ``torn`` where that is none, whether
        the way back is ``intact``, ``digest`` of the version, and ``bytes`` of memory. On rank 0 only."""
        answers = self._lead.tell("state", Budget(self._deadline_s))
        kept = ("version", "torn", "intact", "digest", "bytes")
        return [[{key: answer[key] for key in kept} for answer in of_engine] for of_engine in answers]

    def release(self) -> None:
        """Have the workers give back the memory of pushes. They go on serving; the next push sends everything. On rank
        0 only."""
        self._lead.tell("release", Budget(self._deadline_s))

    def close(self) -> None:
        """Give this rank's memory back. Engines go on serving what they serve."""
        for memory in self._memories.values():
            memory.close()
        self._memories.clear()
        self._jobs, self._plan, self._task = [], b"", b""
        self._lead.close()

    def __enter__(self) -> Pusher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Push:
    """One push on one rank."""

    def __init__(self, pusher: Pusher, op: Operation, strict: bool) -> None:
        self._pusher, self._op, self._lead, self._strict = pusher, op, pusher._lead, strict
        self._is_lead = op.rank == 0
        self._seconds: dict[str, float] = {}
        self._time = self._budget()  # of the stages that other ranks wait for in one go

    def run(
        self, what: Any, version: int | str | None, section: str, framework: str | None, rename: Rename | None
    ) -> PushReport:
        op = self._op
        with self._stage("describe"):
            with op.phase("push.describe"):
                if self._is_lead and not self._pusher._has_engines:
                    raise StateError("rank 0 has no engine to push to; give Pusher its engines there")
                source = source_of(
                    what, section, framework=framework, rank=op.rank, world_size=op.world_size, rename=rename
                )
                version = self._named(version, what)
                op.is_about(f"push of version {version!r}")
            plans = self._tell_lead(source, version)
            with op.phase("push.describe"):
                if self._is_lead:
                    self._lead.describe(self._strict, self._time)
        with self._stage("plan"), op.phase("push.plan"):
            planned = self._lead.plan(op.world_size) if self._is_lead else None
        with self._stage("prepare"):
            planned, known, arenas = self._prepare(planned, plans)
        with self._stage("write"), ExitStack() as stack:
            roads = self._open_roads(arenas, planned, stack)
            quantizer = self._quantizer(source, planned)
            with op.phase("push.write"):
                digests, became = write_all(source, self._pusher._jobs, quantizer, roads, known, op.check)
            said = op.gather("push.write", msgpack.packb([digests, became]))
        return self._finish(planned, said, version)

    def _named(self, version: int | str | None, what: Any) -> int | str:
        if isinstance(version, (int, str)):
            return version
        if version is not None:
            raise StateError(f"a version is a number or a text, not {version!r}")
        if isinstance(what, Checkpoint) and what.step is not None:
            return what.step
        last = self._pusher._version
        if isinstance(last, str):
            raise StateError(f"after version {last!r} the next one needs a name; give version=")
        return 0 if last is None else last + 1

    def _tell_lead(self, source: Source, version: int | str) -> list[bytes]:
        """Rank 0 learns what all senders have; it gets back which plan each has."""
        op = self._op
        said = op.gather("push.facts", msgpack.packb([source.fingerprint(), self._pusher._plan, repr(version)]))
        facts = [msgpack.unpackb(one) for one in said or ()]
        fingerprints = [fact[0] for fact in facts]
        ask = b""
        with op.phase("push.facts"):
            if self._is_lead:
                versions = sorted({fact[2] for fact in facts})
                if len(versions) > 1:
                    raise StateError(f"ranks push different versions: {', '.join(versions)}")
                ask = b"" if self._lead.knows(fingerprints) else b"all"
        if op.broadcast("push.ask", ask if self._is_lead else None):
            with op.phase("push.sources"):
                description = source.describe()
            descriptions = op.gather("push.sources", description)
            with op.phase("push.sources"):
                if descriptions is not None:
                    self._lead.learn_sources(fingerprints, descriptions)
        return [fact[1] for fact in facts]

    def _prepare(self, planned: Any, plans: list[bytes]) -> tuple[Any, list[Any], list[Address]]:
        op, assignments = self._op, None
        with op.phase("push.prepare"):
            if self._is_lead:
                if not self._lead.prepare(planned, self._time):
                    self._lead.describe(self._strict, self._time)
                    planned = self._lead.plan(op.world_size)
                    if not self._lead.prepare(planned, self._time):
                        raise ControlError("workers of an engine were restarted twice during one push; push again")
                assignments = [
                    self._lead.assignment(planned, rank, plan == planned.digest) for rank, plan in enumerate(plans)
                ]
        mine = msgpack.unpackb(op.scatter("push.assignment", assignments))
        if mine["writes"] is not None:
            self._pusher._jobs, self._pusher._plan = unpack_writes(mine["writes"]), mine["plan"]
            self._pusher._task = mine["task"]
        return planned, mine["known"], [Address.from_plain(address) for address in mine["arenas"]]

    def _quantizer(self, source: Source, planned: Any) -> Quantizer:
        """It knows the maxima of the blocks that are cut between senders."""
        op = self._op
        with op.phase("push.maxima"):
            quantizer = Quantizer(source, self._pusher._task)
            given = quantizer.given()
        if quantizer.exchanges:
            said = op.gather("push.maxima", given)
            merged = None
            with op.phase("push.maxima"):
                if said is not None:
                    merged = self._lead.merge_maxima(planned, said)
            told = op.scatter("push.maxima", merged)
            with op.phase("push.maxima"):
                quantizer.take(told)
        return quantizer

    def _open_roads(self, arenas: list[Address], planned: Any, stack: ExitStack) -> dict[int, Road]:
        """A road to every target that this sender writes to: shared memory, or TCP where that does not reach."""
        op, pusher = self._op, self._pusher
        targets = sorted({target for job in pusher._jobs for target, _ in job.places})
        roads: dict[int, Road] = {}
        with op.phase("push.roads"):
            if not pusher._tcp_only:
                roads |= self._shared(arenas, targets)
        missing = op.gather("push.roads", msgpack.packb([target for target in targets if target not in roads]))
        addresses: dict[int, Any] = {}
        with op.phase("push.roads"):
            if missing is not None:
                wanted = {target for one in missing for target in msgpack.unpackb(one)}
                if wanted:
                    addresses = self._lead.listen(wanted, planned, pusher._deadline_s, self._budget())
        told = op.broadcast("push.addresses", msgpack.packb(addresses) if self._is_lead else None)
        addresses = msgpack.unpackb(told, strict_map_key=False)
        with op.phase("push.roads"):
            for target in targets:
                if target not in roads:
                    road = Tcp(TcpAddress.from_plain(addresses[target]), _SHARE * pusher._deadline_s)
                    stack.callback(road.close)
                    roads[target] = road
        return roads

    def _shared(self, arenas: list[Address], targets: Sequence[int]) -> dict[int, Road]:
        """Mappings are kept from push to push, and given up when the worker has given up the arena."""
        kept = self._pusher._memories
        current = {address.token for address in arenas}
        for token in [token for token in kept if token not in current]:
            kept.pop(token).close()
        found: dict[int, Road] = {}
        for target in targets:
            token = arenas[target].token
            road = kept.get(token) or SharedMemory.open(arenas[target])
            if road is not None:
                found[target] = kept[token] = road
        return found

    def _finish(self, planned: Any, said: Sequence[bytes] | None, version: int | str) -> PushReport:
        op, lead = self._op, self._lead
        report: dict[str, Any] = {}
        self._time = self._budget()
        outcomes = [Outcome(*msgpack.unpackb(one)) for one in said or ()]
        with self._stage("verify"), op.phase("push.verify"):
            if self._is_lead:
                lead.verify(planned, outcomes, version, self._time)
        with self._stage("apply"), op.phase("push.apply"):
            if self._is_lead:
                lead.apply(version, self._time)
        if self._is_lead:
            workers, written = lead.reports(planned, outcomes)
            total = sum(meta.nbytes for _, meta in planned.table.rows)
            report = PushReport(version, self._seconds, workers, written, total).plain()
        told = op.broadcast("push.report", msgpack.packb(report) if self._is_lead else None)
        return PushReport.from_plain(msgpack.unpackb(told))

    def _budget(self) -> Budget:
        return Budget(_SHARE * self._pusher._deadline_s)

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - begin
