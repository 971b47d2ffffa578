"""A push, top to bottom: what is there and what is wanted, who writes what, the bytes, the proof, the change."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import msgpack

from ...control.base import Operation
from ...errors import BytecheckpointError, ControlError, StateError
from .arena import Address
from .engines import Budget
from .lead import Lead
from .planned import Outcome
from .quantizer import Quantizer
from .report import PushReport
from .ring_road import RingRoad, StreamBroken
from .roads import Road, SharedMemory, Tcp
from .sources import Rename, Source, source_of
from .streaming import Stream
from .tcp_wire import TcpAddress
from .writing import Job, unpack_writes, write_all

__all__ = ["SHARE", "Push", "Sender"]

SHARE = 0.7
"""Of the deadline, for who is not a rank: what it is about is then known before the ranks give each other up."""


_log = logging.getLogger(__name__)


class Sender:
    """What a rank keeps from push to push: what it writes where, and mappings of arenas."""

    def __init__(self, deadline_s: float, tcp_only: bool) -> None:
        self.deadline_s, self.tcp_only = deadline_s, tcp_only
        self.plan, self.task = b"", b""
        self.jobs: list[Job] = []
        self._memories: dict[str, SharedMemory] = {}

    @property
    def targets(self) -> list[int]:
        return sorted({place.target for job in self.jobs for place in job.places})

    def shared(self, arenas: Sequence[Address]) -> dict[int, Road]:
        """Roads to those targets that shared memory reaches. Mappings are given up when the worker has given up the
        arena."""
        if self.tcp_only:
            return {}
        current = {address.token for address in arenas}
        for token in [token for token in self._memories if token not in current]:
            self._memories.pop(token).close()
        found: dict[int, Road] = {}
        for target in self.targets:
            token = arenas[target].token
            road = self._memories.get(token) or SharedMemory.open(arenas[target])
            if road is not None:
                found[target] = self._memories[token] = road
        return found

    def close(self) -> None:
        for memory in self._memories.values():
            memory.close()
        self._memories.clear()
        self.jobs, self.plan, self.task = [], b"", b""


class Push:
    """One push on one rank; ``lead`` is there on rank 0."""

    def __init__(self, op: Operation, lead: Lead | None, sender: Sender, strict: bool) -> None:
        self._op, self._lead, self._sender, self._strict = op, lead, sender, strict
        self._seconds: dict[str, float] = {}
        self._time = self._budget()  # of the stages that other ranks wait for in one go

    def run(
        self, what: Any, version: int | str, section: str, framework: str | None, rename: Rename | None
    ) -> PushReport:
        op = self._op
        with self._stage("describe"):
            with op.phase("push.describe"):
                source = source_of(
                    what, section, framework=framework, rank=op.rank, world_size=op.world_size, rename=rename
                )
            plans = self._tell_lead(source, version)
            with op.phase("push.describe"):
                if self._lead:
                    self._lead.describe(self._strict, self._time)
        with self._stage("plan"), op.phase("push.plan"):
            if self._lead:
                self._lead.plan(op.world_size)
        with self._stage("prepare"):
            mine = self._prepare(plans)
        if mine["rings"]:
            said = self._stream(source, mine, version)
        else:
            said = self._write(source, mine)
            self._put_in(said, version)
        return self._report(said, version)

    def _tell_lead(self, source: Source, version: int | str) -> list[bytes]:
        """Rank 0 learns what all senders have; it gets back which plan each has."""
        op = self._op
        said = op.gather("push.facts", msgpack.packb([source.fingerprint(), self._sender.plan, repr(version)]))
        facts = [msgpack.unpackb(one) for one in said or ()]
        fingerprints = [fact[0] for fact in facts]
        ask = b""
        with op.phase("push.facts"):
            if self._lead:
                versions = sorted({fact[2] for fact in facts})
                if len(versions) > 1:
                    raise StateError(f"ranks push different versions: {', '.join(versions)}")
                ask = b"" if self._lead.knows(fingerprints) else b"all"
        if op.broadcast("push.ask", ask if self._lead else None):
            with op.phase("push.sources"):
                description = source.describe()
            descriptions = op.gather("push.sources", description)
            with op.phase("push.sources"):
                if self._lead and descriptions is not None:
                    self._lead.learn_sources(fingerprints, descriptions)
        return [fact[1] for fact in facts]

    def _prepare(self, plans: list[bytes]) -> dict[str, Any]:
        """What this rank has to know of the plan."""
        op, assignments = self._op, None
        with op.phase("push.prepare"):
            if self._lead:
                if not self._lead.prepare(self._time):
                    self._lead.describe(self._strict, self._time)
                    self._lead.plan(op.world_size)
                    if not self._lead.prepare(self._time):
                        raise ControlError("workers of an engine were restarted twice during one push; push again")
                assignments = [self._lead.assignment(rank, plan) for rank, plan in enumerate(plans)]
        mine: dict[str, Any] = msgpack.unpackb(op.scatter("push.assignment", assignments))
        if mine["writes"] is not None:
            self._sender.jobs, self._sender.plan = unpack_writes(mine["writes"]), mine["plan"]
            self._sender.task = mine["task"]
        mine["arenas"] = [Address.from_plain(address) for address in mine["arenas"]]
        return mine

    def _write(self, source: Source, mine: dict[str, Any]) -> Sequence[bytes] | None:
        """What senders did, by rank, on rank 0."""
        op = self._op
        with self._stage("write"), ExitStack() as stack:
            roads = self._open_roads(mine["arenas"], stack)
            quantizer = self._quantizer(source)
            with op.phase("push.write"):
                outcome = write_all(source, self._sender.jobs, quantizer, roads, mine["known"], op.check)
            return op.gather("push.write", msgpack.packb(outcome))

    def _quantizer(self, source: Source) -> Quantizer:
        """It knows the maxima of the blocks that are cut between senders."""
        op = self._op
        with op.phase("push.maxima"):
            quantizer = Quantizer(source, self._sender.task)
            given = quantizer.given()
        if quantizer.exchanges:
            said = op.gather("push.maxima", given)
            merged = None
            with op.phase("push.maxima"):
                if self._lead and said is not None:
                    merged = self._lead.merge_maxima(said)
            told = op.scatter("push.maxima", merged)
            with op.phase("push.maxima"):
                quantizer.take(told)
        return quantizer

    def _open_roads(self, arenas: list[Address], stack: ExitStack) -> dict[int, Road]:
        """A road to every target that this sender writes to: shared memory, or TCP where that does not reach."""
        op, sender = self._op, self._sender
        with op.phase("push.roads"):
            roads = sender.shared(arenas)
        missing = [target for target in sender.targets if target not in roads]
        said = op.gather("push.roads", msgpack.packb(missing))
        addresses: dict[int, Any] = {}
        with op.phase("push.roads"):
            if self._lead and said is not None:
                wanted = {target for one in said for target in msgpack.unpackb(one)}
                if wanted:
                    addresses = self._lead.listen(wanted, self._budget())
        told = op.broadcast("push.addresses", msgpack.packb(addresses) if self._lead else None)
        addresses = msgpack.unpackb(told, strict_map_key=False)
        with op.phase("push.roads"):
            for target in missing:
                road = Tcp(TcpAddress.from_plain(addresses[target]), sender.deadline_s)
                stack.callback(road.close)
                roads[target] = road
        return roads

    def _put_in(self, said: Sequence[bytes] | None, version: int | str) -> None:
        op, time_left = self._op, self._budget()
        outcomes = _outcomes(said)
        with self._stage("verify"), op.phase("push.verify"):
            if self._lead:
                self._lead.verify(outcomes, version, time_left)
        with self._stage("apply"), op.phase("push.apply"):
            if self._lead:
                self._lead.apply(version, time_left)

    def _stream(self, source: Source, mine: dict[str, Any], version: int | str) -> Sequence[bytes] | None:
        """As ``_write``, with the engines putting in what comes. What a worker says of its failure is told by rank 0,
        which knows what is served then."""
        op, stream = self._op, None
        try:
            with self._stage("stream"), ExitStack() as stack:
                roads = self._open_rings(mine, stack)
                quantizer = self._quantizer(source)
                op.gather("push.roads", b"")
                with op.phase("push.write"):
                    if self._lead:
                        stream = Stream(self._lead, version, self._sender.deadline_s)
                    try:
                        outcome: Any = write_all(source, self._sender.jobs, quantizer, roads, mine["known"], op.check)
                    except StreamBroken as error:
                        outcome = [error.late, str(error)]
                said = op.gather("push.write", msgpack.packb(outcome))
                with op.phase("push.apply"):
                    if stream is not None and said is not None:
                        stream.end(_broken(said))
                return said
        except BaseException as error:
            if stream is not None and not stream.has_told:
                after = stream.gone_wrong()
                if isinstance(error, BytecheckpointError):
                    error.args = (f"{error}\n  {after}",)
                else:
                    _log.error("push: %s", after)
            raise

    def _open_rings(self, mine: dict[str, Any], stack: ExitStack) -> dict[int, Road]:
        roads: dict[int, Road] = {}
        with self._op.phase("push.roads"):
            for target in self._sender.targets:
                slots, _, port = mine["rings"][target]
                memory = None if self._sender.tcp_only else mine["arenas"][target]
                road = RingRoad(TcpAddress.from_plain(port), memory, slots, self._sender.deadline_s)
                stack.callback(road.close)
                roads[target] = road
        return roads

    def _report(self, said: Sequence[bytes] | None, version: int | str) -> PushReport:
        op, report = self._op, dict[str, Any]()
        with op.phase("push.report"):
            if self._lead:
                workers, written = self._lead.reports(_outcomes(said))
                total = sum(meta.nbytes for _, meta in self._lead.table.rows)
                report = PushReport(version, self._seconds, workers, written, total, self._lead.mode).plain()
        told = op.broadcast("push.report", msgpack.packb(report) if self._lead else None)
        return PushReport.from_plain(msgpack.unpackb(told))

    def _budget(self) -> Budget:
        return Budget(self._sender.deadline_s)

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - begin


def _outcomes(said: Sequence[bytes] | None) -> list[Outcome]:
    return [Outcome(*msgpack.unpackb(one)) for one in said or ()]


def _broken(said: Sequence[bytes]) -> tuple[bool, str] | None:
    """Of a sender whose stream broke, if there is one: whether its worker was late, and why. One that was comes first:
    where it is only told by another worker that a sender has gone, that is why."""
    found = [(late, text) for late, text in map(msgpack.unpackb, said) if isinstance(late, bool)]
    return max(found, key=lambda one: one[0], default=None)
