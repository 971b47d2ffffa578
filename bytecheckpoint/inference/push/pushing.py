"""A push, top to bottom: what is there and what is wanted, who writes what, the bytes, the proof, the change."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import msgpack

from ...control.base import Operation
from ...errors import BytecheckpointError, ControlError, EngineError, StateError
from .arena import Address
from .engines import Budget
from .group import Group, GroupAddress, GroupBroken
from .group_sending import send_all
from .lead import Lead
from .planned import Outcome
from .progress import Progress, Telling
from .quantizer import Quantizer
from .report import PushReport
from .ring_road import RingRoad, StreamBroken
from .roads import Road, Tcp
from .sender import Sender
from .sources import Rename, Source, source_of
from .steps import Turn
from .streaming import Stream
from .tcp_wire import TcpAddress
from .writing import unpack_writes, write_all

__all__ = ["SHARE", "Push"]

SHARE = 0.7
"""Of the deadline, for who is not a rank: what it is about is then known before the ranks give each other up."""


_log = logging.getLogger(__name__)


class Push:
    """One push on one rank; ``lead`` is there on rank 0."""

    def __init__(
        self, op: Operation, lead: Lead | None, sender: Sender, strict: bool, progress: Progress | None = None
    ) -> None:
        self._op, self._lead, self._sender, self._strict = op, lead, sender, strict
        self._told = Telling(progress)
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
        mine["arenas"] = [address and Address.from_plain(address) for address in mine["arenas"]]
        return mine

    def _write(self, source: Source, mine: dict[str, Any]) -> Sequence[bytes] | None:
        """What senders did, by rank, on rank 0."""
        op = self._op
        with self._stage("write"), ExitStack() as stack:
            roads = self._open_roads(mine["arenas"], mine["tokens"], stack)
            quantizer = self._quantizer(source)
            self._told.expect(self._sender.nbytes)
            with op.phase("push.write"):
                outcome = write_all(
                    source, self._sender.jobs, quantizer, roads, mine["known"], op.check, wrote=self._told.wrote
                )
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

    def _open_roads(self, arenas: list[Address], there: list[str], stack: ExitStack) -> dict[int, Road]:
        """A road to every target that this sender writes to: shared memory, or TCP where that does not reach."""
        op, sender = self._op, self._sender
        with op.phase("push.roads"):
            roads = sender.shared(arenas, there)
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
                rings = self._open_rings(mine, stack)
                quantizer = self._quantizer(source)
                making = self._sender.making(mine["on_device"])
                group = self._join_group() if mine["turns"] is not None else None
                op.gather("push.roads", b"")
                self._told.expect(self._sender.nbytes)
                with op.phase("push.write"):
                    if self._lead:
                        stream = Stream(self._lead, version, self._sender.deadline_s)
                    try:
                        if group is not None:
                            outcome: Any = self._send_by(group, source, quantizer, mine["turns"], rings)
                        else:
                            jobs, known = self._sender.jobs, mine["known"]
                            told = self._told.wrote
                            outcome = write_all(source, jobs, quantizer, rings, known, op.check, making, told)
                    except (StreamBroken, GroupBroken) as error:
                        outcome = [error.late, str(error)]
                        self._sender.leave()
                        for ring in rings.values():
                            ring.interrupt()  # whoever still waits for others hears of it
                said = op.gather("push.write", msgpack.packb(outcome))
                with op.phase("push.apply"):
                    if group is not None and said is not None and _broken(said) is None:
                        for ring in rings.values():
                            with suppress(StreamBroken):  # the engine tells more
                                ring.finish()  # no sender that ends from now on is missed
                    if stream is not None and said is not None:
                        stream.end(_broken(said))
                return said
        except BaseException as error:
            self._sender.leave()  # others may be in the middle of a step
            if stream is not None and not stream.has_told:
                after = stream.gone_wrong()
                if isinstance(error, BytecheckpointError):
                    error.args = (f"{error}\n  {after}",)
                else:
                    _log.error("push: %s", after)
            raise

    def _join_group(self) -> Group:
        op, sender, address = self._op, self._sender, b""
        said = op.gather("push.group", b"" if sender.group is None else sender.group.name.encode())
        with op.phase("push.group"):
            if self._lead and said is not None:
                address = msgpack.packb(self._lead.group_address([name.decode() for name in said]).plain())
        told = GroupAddress.from_plain(msgpack.unpackb(op.broadcast("push.group", address if self._lead else None)))
        with op.phase("push.group"), ThreadPoolExecutor(1, thread_name_prefix="bcp-push-join") as threads:
            asked = threads.submit(self._lead.have_join, told, self._budget()) if self._lead else None
            try:
                group = sender.join(told, op.rank)
            except EngineError:
                if asked is not None:
                    asked.result()  # knows more, where it was a worker
                raise
            if asked is not None:
                asked.result()
        return group

    def _send_by(
        self, group: Group, source: Source, quantizer: Quantizer, turns: list[list[int]], rings: dict[int, RingRoad]
    ) -> Any:
        op = self._op

        def check() -> None:
            op.check()
            for ring in rings.values():
                ring.check()

        jobs = self._sender.jobs
        turned = [Turn(*turn) for turn in turns]
        return send_all(source, jobs, turned, quantizer, group, op.world_size, check, self._told.wrote)

    def _open_rings(self, mine: dict[str, Any], stack: ExitStack) -> dict[int, RingRoad]:
        """Those of the workers that this sender writes to. By a group nothing is written there: rank 0 hears from all
        workers, and they from it, what goes wrong."""
        roads: dict[int, RingRoad] = {}
        targets: Sequence[int] = self._sender.targets
        if mine["turns"] is not None:
            targets = range(len(mine["rings"])) if self._lead else ()
        with self._op.phase("push.roads"):
            for target in targets:
                slots, _, port = mine["rings"][target]
                memory = None if self._sender.tcp_only else mine["arenas"][target]
                road = RingRoad(
                    TcpAddress.from_plain(port), memory, slots, self._sender.deadline_s, on_device=mine["on_device"]
                )
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
        self._told.begin(name)
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - begin


def _outcomes(said: Sequence[bytes] | None) -> list[Outcome]:
    return [Outcome(*msgpack.unpackb(one)) for one in said or ()]


def _broken(said: Sequence[bytes]) -> tuple[bool, str] | None:
    """Of a sender whose stream broke, if there is one: whether its worker was late, and why. One that was comes first:
    where it is only told by another worker that a sender has gone, that is why."""
    found = [(late, text) for late, text in map(msgpack.unpackb, said) if isinstance(late, bool)]
    return max(found, key=lambda one: one[0], default=None)
