"""The protocol of a push on one rank: describe, plan, prepare, write, verify, apply."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import msgpack

from ...checkpoint.renaming import unmatched_renames
from ...control.base import Operation
from ...errors import StateError
from ...runtime.threads import Threads
from ...telemetry.trace import Timings
from .coordinator import PushCoordinator, StreamApply
from .engines.base import Budget
from .engines.colocated import ColocatedEngines
from .messages import check_faults, pack
from .quantizer import Quantizer
from .report import ProgressReporter, PushReport
from .sender import Sender
from .sources import PushSource
from .transports.base import Transport, TransportBroken
from .transports.group import Group, GroupAddress
from .transports.group_transport import GroupTransport

T = TypeVar("T")
Transports = Mapping[int, Transport]  # by target

ENGINE_SHARE = 0.7
"""The share of the deadline for waits on engines, so that their errors are known before the ranks' own deadlines."""


@dataclass
class Push:
    """One push on one rank, which sends the tensors of its source. Rank 0 has a ``coordinator``. ``version`` is the
    caller's, or None for that of the source on rank 0."""

    op: Operation
    coordinator: PushCoordinator | None
    sender: Sender
    version: int | str | None
    strict: bool
    progress: ProgressReporter
    engines: Sequence[str]  # the identities of the engines that this rank was given
    own: ColocatedEngines | None  # if it is one that only this rank may reach
    make_source: Callable[[], PushSource]
    what: str  # is pushed, the same on all ranks

    def __post_init__(self) -> None:
        self._colocated: ColocatedEngines | None = None
        self._timings = Timings("push", self.op.rank)
        self.early_budget = self._budget()  # for the stages before the first byte moves, during which other ranks wait

    def run(self) -> PushReport:
        """Run all stages."""
        with ExitStack() as stack:
            with self._stage("describe"):
                version = self._describe(stack)
            with self._stage("plan"):
                self._lead("push.plan", self._plan)
            with self._stage("prepare"):
                is_streamed = self._prepare()
            with self._stage("stream" if is_streamed else "write"):
                digests = [msgpack.unpackb(one)[1] for one in self._send(version, is_streamed=is_streamed)]
        if not is_streamed:
            budget = self._budget()
            with self._stage("verify"):
                self._lead("push.verify", lambda leader: leader.verify(digests, version, budget))
            with self._stage("apply"):
                self._lead("push.apply", lambda leader: leader.apply(version, budget))
        report = self._share(
            "push.report", lambda leader: leader.report(digests, version, self._timings.seconds).plain()
        )
        return PushReport.from_plain(report)

    def _describe(self, stack: ExitStack) -> int | str:
        """Find out what the senders hold, until the ``stack`` ends, and what the engines request of it. Returns the
        version."""
        op = self.op
        with op.phase("push.describe"):
            self._source = stack.enter_context(closing(self.make_source()))
        fingerprints = self._exchange_facts()
        if self._share("push.ask", lambda leader: not leader.has_sources(fingerprints)):
            with op.phase("push.sources"):
                description = self._source.describe()
            descriptions = op.gather("push.sources", description) or ()
            self._lead("push.sources", lambda leader: leader.set_sources(fingerprints, descriptions))
        self._lead("push.describe", lambda leader: leader.describe(self.early_budget, strict=self.strict))
        version: int | str | None = self.version
        if version is None:
            version = self._share("push.version", lambda _: self._source.version)
            op.set_description(f"push of version {version!r}")
        assert version is not None
        return version

    def _exchange_facts(self) -> list[bytes]:
        """Choose the engines, and return the fingerprint of each rank on rank 0. Raises ``StateError`` when ranks push
        different versions, and ``MismatchError`` if something of a rename is unmatched, or a pattern unused, on all
        ranks."""
        source = self._source
        names = [list(source.unmatched), list(source.unused)]
        own = [source.fingerprint(), self.what, self.engines, *names, self.own is not None]
        gathered = self.op.gather("push.facts", msgpack.packb(own))
        facts = [msgpack.unpackb(one) for one in gathered or ()]
        is_colocated = all(fact[5] for fact in facts) and any(fact[2] != self.engines for fact in facts)
        with self.op.phase("push.facts"):
            distinct = sorted({pushed for _, pushed, *_ in facts})
            if len(distinct) > 1:
                raise StateError(f"ranks push different versions: {', '.join(distinct)}")
            for rank, (_, _, engines, *_) in enumerate(facts):
                unknown = [engine for engine in engines if engine not in self.engines]
                if unknown and not is_colocated:
                    raise StateError(
                        f"rank {rank} passed engines that rank 0 did not pass: {', '.join(unknown)}; only rank 0 sends "
                        "requests to engines, so pass all of them there. It reaches an engine inside another process "
                        "only as a server (HttpEngine), by a handle with identity= (RpcEngine), or if every rank "
                        "passes one engine of its process (LocalEngine)"
                    )
            columns = [[set(fact[at]) for fact in facts] for at in (3, 4)]
            useless, unused = (sorted(set.intersection(*each)) if each else [] for each in columns)
            if useless:
                raise unmatched_renames("the state of this push", useless)
            check_faults(
                "exclude has patterns that match nothing; nothing was sent",
                [("pattern", pattern, "it matches no full name") for pattern in unused],
            )
        if self._share("push.engines", lambda leader: leader.choose_engines(self.own if is_colocated else None)):
            assert self.own is not None
            self._colocated, self.own.op = self.own, self.op
        return [fingerprint for fingerprint, *_ in facts]

    def _plan(self, coordinator: PushCoordinator) -> None:
        coordinator.plan(self.op.world_size)
        if self.strict:
            self._source.check_exact(coordinator.bound.plan.writes[0])

    def _lead(self, phase: str, step: Callable[[PushCoordinator], T]) -> T | None:
        """Run a step of rank 0 as a phase of all ranks. Returns its result on rank 0."""
        with self.op.phase(phase):
            if self.coordinator is not None:
                found = step(self.coordinator)
                if self._colocated is not None:
                    self._colocated.dismiss()
                return found
            if self._colocated is not None:
                self._colocated.serve()
            return None

    def _share(self, phase: str, step: Callable[[PushCoordinator], Any]) -> Any:
        """Run a step of rank 0, and return its result, which is plain data, on every rank."""
        found = self._lead(phase, step)
        packed = self.op.broadcast(phase, msgpack.packb(found) if self.coordinator else None)
        return msgpack.unpackb(packed, strict_map_key=False)

    def _budget(self) -> Budget:
        return Budget(self.sender.deadline_s)

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        self.progress.begin(name)
        with self._timings.step(name):
            yield

    def _prepare(self) -> bool:
        """Prepare the engines, and return whether weights are streamed into them."""
        self._lead(
            "push.prepare",
            lambda leader: leader.prepare(self.early_budget, lambda: self._plan(leader), strict=self.strict),
        )
        packed = self._lead("push.prepare", lambda leader: leader.assignments())
        self.sender.take(self.op.scatter("push.assignment", packed))
        return self.sender.assignment.is_streamed

    def _send(self, version: int | str, *, is_streamed: bool) -> Sequence[bytes]:
        """Write to arenas, or to ring buffers while the engines load. Returns the packed outcomes of the senders on
        rank 0.

        Rank 0 raises a worker's failure in a stream, because it can add what the engines serve after it.
        """
        op, stream = self.op, None
        try:
            with ExitStack() as stack:
                transports = opened = self._open_transports(stack)
                quantizer = self._quantizer()
                if is_streamed:
                    with op.phase("push.check"):
                        if self.sender.finite and not self._source.checked_late:
                            # Now, and not when an engine has loaded the first of them.
                            self.sender.write(quantizer, {}, op.check, lambda nbytes: None)
                    if self.sender.assignment.is_group:
                        transports = self._group_transports(opened)
                    op.gather("push.transports", b"")
                nbytes = sum(write.nbytes_of_places for write in self.sender.writes)
                self.progress.begin("stream" if is_streamed else "write", nbytes)
                with op.phase("push.write"):
                    if is_streamed and self.coordinator:
                        stream = StreamApply(self.coordinator, version)
                    message = self._write(quantizer, transports, opened)
                gathered = op.gather("push.write", message) or ()
                if is_streamed:
                    with op.phase("push.apply"):
                        self._end_stream(gathered, opened, stream)
                return gathered
        except BaseException as error:
            self.sender.group.leave()  # other members may be waiting for this one
            if stream is not None:
                stream.explain(error)
            raise

    def _end_stream(self, gathered: Sequence[bytes], rings: Transports, stream: StreamApply | None) -> None:
        broken = _first_broken(gathered)
        if self.sender.assignment.is_group:
            for ring in rings.values():
                with suppress(TransportBroken):  # the engine reports the cause
                    # A sender that ends from now on is not missed; one that has failed already is.
                    ring.finish() if broken is None else ring.interrupt()
        if stream is not None:
            stream.end(broken)

    def _write(self, quantizer: Quantizer, transports: Transports, opened: Transports) -> bytes:
        """Return for rank 0, packed: None and the digests of the chunks, or the failure of the stream."""
        outcome: list[Any]
        try:
            outcome = [None, self.sender.write(quantizer, transports, self.op.check, self.progress.add)]
        except TransportBroken as error:
            self.sender.group.leave()
            for one in opened.values():
                one.interrupt()  # makes the workers that still wait notice
            outcome = [error.is_late, str(error)]
        return pack(outcome)

    def _quantizer(self) -> Quantizer:
        """Return a quantizer that has the maxima of this sender's blocks."""
        op = self.op
        with op.phase("push.maxima"):
            quantizer = Quantizer(self._source, self.sender.task)
            maxima = quantizer.partial_maxima()
        if quantizer.exchanges:
            gathered = op.gather("push.maxima", maxima) or ()
            merged = self._lead("push.maxima", lambda leader: leader.bound.exchange.merge(gathered))
            maxima = op.scatter("push.maxima", merged)
        with op.phase("push.maxima"):
            quantizer.set_maxima(maxima)
        return quantizer

    def _open_transports(self, stack: ExitStack) -> Transports:
        """Open a transport to every target of this sender.

        With a group, chunks do not use them: rank 0 connects to all workers, and both ends notice each other's failure.
        """
        targets = {place.target for write in self.sender.writes for place in write.places}
        if self.sender.assignment.is_group:
            targets = set(range(len(self.sender.assignment.targets))) if self.coordinator else set()
        with self.op.phase("push.transports"):
            return self.sender.open(targets, stack)

    def _join_group(self) -> Group:
        op, sender, coordinator = self.op, self.sender, self.coordinator
        gathered = op.gather("push.group", sender.group.name.encode())
        names = [name.decode() for name in gathered or ()]
        address = GroupAddress(*self._share("push.group", lambda leader: leader.group_address(names)))
        with op.phase("push.group"), Threads(1, thread_name_prefix="bcp-push-join") as threads:
            workers = threads.submit(coordinator.join_group, address, self._budget()) if coordinator else None
            try:
                return sender.group.join(address, op.rank)
            finally:
                if workers is not None:
                    workers.result()  # raises the cause where a worker failed

    def _group_transports(self, rings: Transports) -> Transports:
        group = self._join_group()

        def check() -> None:
            self.op.check()
            for ring in rings.values():
                ring.check()

        transport = GroupTransport(group, self.op.world_size, self.sender.writes, check)
        return dict.fromkeys(range(len(self.sender.assignment.targets)), transport)


def _first_broken(gathered: Sequence[bytes]) -> tuple[bool, str] | None:
    """Return the failure of a sender's stream, if there is one: whether it was late, and why. A late one comes first,
    because other workers fail only in consequence."""
    found = [(is_late, text) for is_late, text in map(msgpack.unpackb, gathered) if is_late is not None]
    return max(found, key=lambda one: one[0], default=None)
