"""Rank 0's part of a push: send requests to engines, plan for all senders, and run the two-phase commit."""

from __future__ import annotations

import logging
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from typing import Any, TypeVar

import msgpack

from ...errors import BytecheckpointError, ControlError, DeadlineError, EngineError, StateError
from ...runtime.threads import Threads, run_daemon
from .commit import EngineCommit
from .engines.base import Budget, Engine, ask, check_awake
from .engines.colocated import ColocatedEngines
from .layout import Holding
from .leases import resolve
from .memory import DOUBLE, STREAMED, Mode
from .messages import Table, first_cause
from .plan import BoundPlan, Known, Worker, merge_descriptions, plan_push
from .quantizer import holdings_of_blocks, plan_exchange
from .report import PushReport, WorkerReport
from .requests import TensorRequest, blocks_by_name, request_tensors
from .transports.group import GroupAddress, GroupBackend, GroupRendezvous

_SLOWEST_BYTES_S = 50e6  # no working worker loads slower; other checks detect a stalled one
_CLEANUP_S, _LATE_S = 5.0, 0.5
_ANSWER_SHARE = 0.3  # of the deadline, after which an engine that has not answered is left out

_log = logging.getLogger(__name__)

E = TypeVar("E")
T = TypeVar("T")


class PushCoordinator:
    """Keeps what engines request, and the plan, from push to push, for as long as both sides stay the same."""

    def __init__(
        self,
        *,
        chunk_bytes: int,
        memory_bytes: int | None,
        deadline_s: float,
        quorum: int | None = None,
        group: GroupBackend | None = None,
        cuda_ipc: bool = False,
    ) -> None:
        self._given: list[Engine] = []
        self._engines: list[Engine] = []  # of the current push
        self._chunk_bytes = chunk_bytes
        self._quorum = quorum
        self._failed: dict[str, str] = {}  # engines that the quorum allows to leave out, and why
        self._memory_bytes, self.deadline_s = memory_bytes, deadline_s
        self._fingerprints: list[bytes] = []
        self._held: dict[str, list[Holding]] = {}
        self.table = Table(())
        self._requests: dict[bytes, tuple[list[Worker], list[TensorRequest]]] = {}
        self._bound_to: Any = None
        self._was_strict = False
        self._cuda_ipc = cuda_ipc
        self._group, self._rendezvous = group, None if group is None else GroupRendezvous(group, deadline_s)
        self._transaction = ""
        self._known_layouts: dict[str, bytes] = {}  # their digests, by receiver
        self._answers: list[dict[str, Any]] = []  # of all workers
        self._by_engine: list[list[dict[str, Any]]] = []
        self.mode: Mode = DOUBLE
        self.finite = True  # whether senders check values
        self.bound: BoundPlan

    def set_engines(self, engines: Sequence[Engine]) -> None:
        self._given = list(engines)
        self._choose(self._given)

    def choose_engines(self, colocated: ColocatedEngines | None) -> bool:
        """Leave out engines that do not answer, if the quorum allows it. Returns whether there are ``colocated`` ones.

        Raises ``StateError`` for colocated engines in a push over a group or by CUDA IPC.
        """
        self._failed = {}
        if colocated is not None:
            if self._group or self._cuda_ipc:
                raise StateError("engines inside the ranks cannot be pushed to over a group or by CUDA IPC")
            self._choose([colocated])
            return True
        answering = self._given
        if self._quorum is not None:
            found = self._try_all("status", Budget(_ANSWER_SHARE * self.deadline_s))
            self._leave_out([one for one in found if isinstance(one, BytecheckpointError)])
            answering = [engine for engine, one in zip(self._given, found, strict=True) if isinstance(one, list)]
        self._choose(answering)
        return False

    def _choose(self, engines: Sequence[Engine]) -> None:
        if engines != self._engines:
            self._requests.clear()
        self._engines = list(engines)

    def _leave_out(self, errors: Sequence[BytecheckpointError]) -> None:
        """Note failed engines. Raises the first cause when too few are left."""
        failed = self._failed | {error.engine: str(error) for error in errors}
        if errors and (self._quorum is None or len(self._given) - len(failed) < self._quorum):
            first = first_cause(errors)
            first.args = ("\n".join(str(error) for error in (first, *(one for one in errors if one is not first))),)
            raise first
        for error in errors:
            _log.warning("push: %s is left out: %s", error.engine, error)
        self._failed = failed

    def has_sources(self, fingerprints: Sequence[bytes]) -> bool:
        """Return whether the senders' descriptions are those of the last push."""
        return self._fingerprints == list(fingerprints)

    def set_sources(self, fingerprints: Sequence[bytes], descriptions: Sequence[bytes]) -> None:
        """Set what the senders hold. Raises ``DisagreementError``."""
        self.table, self._held = merge_descriptions(descriptions)
        self._fingerprints = list(fingerprints)

    def describe(self, budget: Budget, *, strict: bool) -> None:
        """Ask the engines what they request of the senders' table, unless the answer is known.

        Raises ``MismatchError`` for tensors that do not fit.
        """
        table = self.table
        if table.digest in self._requests and (self._was_strict or not strict):
            return
        self._was_strict = strict
        requests = self._on_engines(lambda engine: request_tensors(engine, table, budget, strict=strict))
        blocks_by_name(requests)
        workers = [
            Worker(number, index, answer["receiver"], answer["host"])
            for number, request in enumerate(requests)
            for index, answer in enumerate(request.answers)
        ]
        self._requests = {table.digest: (workers, requests)}

    def plan(self, senders: int) -> None:
        """Plan the push, unless the last plan still fits. Raises ``PlanError`` for elements that no sender holds."""
        workers, requests = self._requests[self.table.digest]
        key = (self._fingerprints, self.table.digest, [worker.receiver for worker in workers])
        if self._bound_to != key:
            parts = [of_worker for request in requests for of_worker in request.parts]
            blocks = blocks_by_name(requests)
            held = holdings_of_blocks(self._held, blocks, senders)
            exchange = plan_exchange(held, self.table, blocks, senders)
            plan = plan_push(parts, held, senders, chunk_bytes=self._chunk_bytes)
            plan = plan.for_group() if self._group else plan
            tables = [request.table.digest for request in requests]
            self.bound, self._bound_to = BoundPlan(plan, workers, tables, blocks, exchange), key

    def prepare(self, budget: Budget, replan: Callable[[], None], *, strict: bool) -> bool:
        """Begin the transaction on every worker, and return whether weights are streamed. When a worker has restarted,
        ask the engines again and ``replan``."""
        if not self._prepare(budget):
            self.describe(budget, strict=strict)
            replan()
            if not self._prepare(budget):
                raise ControlError("workers of an engine were restarted twice during one push; push again")
        return self.mode == STREAMED

    def _prepare(self, budget: Budget) -> bool:
        """Return False when a worker does not know what it requested, or its layout."""
        self._transaction, self._answers, self._by_engine = secrets.token_hex(16), [], []
        workers, layouts = self.bound.workers, self.bound.plan.layouts
        hosts = Counter(worker.host for worker in workers)
        digests = {worker.receiver: layout.digest for worker, layout in zip(workers, layouts, strict=True)}
        is_known, self._known_layouts = self._known_layouts == digests, {}
        message = {
            "layouts": {
                worker.receiver: [layout.digest, None if is_known else layout.packed, self.bound.tables[worker.engine]]
                for worker, layout in zip(workers, layouts, strict=True)
            },
            "memory": self._memory_bytes,
            "sharers": {worker.receiver: hosts[worker.host] for worker in workers},
            "mode": STREAMED if self._group or self._cuda_ipc else "",
            "group": self._group or "",
            "cuda_ipc": self._cuda_ipc,
            "deadline_s": self.deadline_s,
        }
        while True:
            by_engine = self._ask_all("prepare", message, budget)
            answers = [answer for of_engine in by_engine for answer in of_engine]
            is_same = [answer["receiver"] for answer in answers] == list(digests)
            if not is_same or any(answer.get("unknown") for answer in answers):
                self._requests.clear()
                return False
            for engine, of_engine in zip(self._engines, by_engine, strict=True):
                check_awake(engine, of_engine)
            modes = {answer["mode"] for answer in answers}
            if len(modes) == 1:
                break
            message["mode"] = STREAMED  # all workers use one mode, because they change together
        if STREAMED in modes and self._engines != self._plain:
            raise StateError(
                "the engines inside the ranks have no host memory for two versions, and cannot load a stream while "
                "their ranks send it; nothing was changed. Raise memory_bytes of Pusher, or use engines outside of the "
                "ranks"
            )
        self._by_engine, self._answers, self._known_layouts, (self.mode,) = by_engine, answers, digests, modes
        rings = (tuple(answer["ring"]) for answer in answers if "ring" in answer)
        self.bound.place(tuple(rings))
        return True

    def assignments(self) -> list[bytes]:
        """Return the packed assignment of each sender."""
        answers, bound, held = self._answers, self.bound, self._known
        common = {
            "targets": [[answer.get(key) for key in ("arena", "tokens", "endpoint", "ring")] for answer in answers],
            "is_streamed": self.mode == STREAMED,
            "on_device": self._cuda_ipc or self._group == "nccl",
            "is_group": self._group is not None,
        }
        packed = []
        for writes, in_message, task in zip(bound.writes, bound.packed, bound.tasks, strict=True):
            known = [held[place.target][place.chunk] for write in writes for place in write.places]
            packed.append(msgpack.packb({**common, "writes": in_message, "task": task, "known": known}))
        return packed

    @property
    def _known(self) -> list[list[Known]]:
        """The digests that each target has of its chunks already."""
        return [
            [*zip(*(answer[one] or [None] * len(layout.chunks) for one in ("known", "served")), strict=True)]
            for answer, layout in zip(self._answers, self.bound.plan.layouts, strict=True)
        ]

    def group_address(self, senders: Sequence[str]) -> GroupAddress:
        """Return the address of the group for this push. ``senders`` are the names of the groups that they are in."""
        assert self._rendezvous is not None
        workers = [worker.receiver for worker in self.bound.workers]
        return self._rendezvous.address(senders, workers, [answer["group"] for answer in self._answers])

    def join_group(self, address: GroupAddress, budget: Budget) -> None:
        """Make all workers join the group and begin to receive. Returns when the last member has joined."""
        workers = self.bound.workers
        members = {worker.receiver: number for number, worker in enumerate(workers, address.size - len(workers))}
        self._ask_all("join_group", {"address": address, "members": members}, budget)

    def verify(self, digests: Sequence[Sequence[int]], version: int | str, budget: Budget) -> None:
        """First phase of the commit: every worker verifies every chunk. ``digests`` are those of each sender."""
        receivers = [worker.receiver for worker in self.bound.workers]
        by_worker = dict(zip(receivers, self.bound.chunk_digests(digests), strict=True))
        self._ask_all("verify", {"version": version, "chunks": by_worker, "finite": self.finite}, budget)

    def apply(
        self,
        version: int | str,
        budget: Budget,
        request: str = "apply",
        is_abandoned: Callable[[], bool] = lambda: False,
    ) -> None:
        """Second phase of the commit; with the request "stream", both phases, while senders write.

        The engines resume when all of them have loaded the version. When one engine fails, the others are reverted,
        unless the push ``is_abandoned``.
        """
        message = {"version": version, "finite": self.finite}
        self._commit(request, self._engines, self._by_engine, message, budget, is_abandoned)

    def _commit(
        self,
        request: str,
        engines: Sequence[Engine],
        answers: Sequence[Sequence[Mapping[str, Any]]],
        message: Mapping[str, Any],
        budget: Budget,
        is_abandoned: Callable[[], bool] = lambda: False,
    ) -> None:
        """Load on all engines, and resume them together. Reverts all when too few have loaded. ``answers`` are the last
        ones of each engine's workers, which name the transaction."""
        commits = [
            EngineCommit(engine, of_engine, {**message, "transaction": of_engine[0]["transaction"]}, is_abandoned)
            for engine, of_engine in zip(engines, answers, strict=True)
        ]
        failed: list[BytecheckpointError] = []  # in the order of time: later ones may be consequences

        def note(commit: EngineCommit, error: BytecheckpointError | None) -> None:
            if error is not None:
                error.engine = commit.engine.name
                failed.append(error)

        try:
            self._on_all(lambda commit: note(commit, commit.load(request, budget)), commits)
            loaded = [commit for commit in commits if commit.is_loaded]
            if not failed or (self._quorum is not None and len(loaded) >= self._quorum):
                self._on_all(lambda commit: note(commit, commit.finish(budget)), loaded)
            elif is_abandoned():
                for commit in commits:
                    commit.abandon()
            else:
                self._on_all(lambda commit: note(commit, commit.undo(budget)), commits)
        except BaseException:
            is_complete = all(commit.is_loaded for commit in commits)
            for commit in commits:
                commit.interrupt(budget, is_complete=is_complete, is_alone=len(commits) == 1)
            raise
        self._leave_out(failed)

    def report(self, digests: Sequence[Sequence[int]], version: int | str, seconds: dict[str, float]) -> PushReport:
        nbytes, written = self.bound.nbytes_by_fate(digests, self._known, is_broadcast=self._group is not None)
        workers = [
            WorkerReport(self._engines[of.engine].name, of.number, of.host, sum(layout.sizes), *counted)
            for of, layout, counted in zip(self.bound.workers, self.bound.plan.layouts, nbytes, strict=True)
        ]
        total = sum(meta.nbytes for _, meta in self.table.rows)
        return PushReport(version, seconds, workers, written, total, self.mode, self._failed)

    def finish(self, budget: Budget) -> None:
        """End a stream after all senders have finished."""
        self._ask_all("finish", {}, budget)

    def states(self, budget: Budget) -> list[list[dict[str, Any]]]:
        """Return the state of each worker of each engine; nothing of one that fails, if there is a quorum."""
        found = self._try_all("state", budget)
        for one in found:
            if isinstance(one, BytecheckpointError) and self._quorum is None:
                raise one
        return [one if isinstance(one, list) else [] for one in found]

    def ask_engines(self, kind: str, budget: Budget) -> list[list[dict[str, Any]]]:
        """Send a request that belongs to no transaction, and return the answers by engine and worker."""
        return self._on_engines(lambda engine: ask(engine, kind, {}, budget.left), self._plain)

    @property
    def _plain(self) -> list[Engine]:
        """The engines, of colocated ones that of this rank."""
        is_colocated = any(isinstance(engine, ColocatedEngines) for engine in self._engines)
        return self._given if is_colocated else self._engines

    def rollback(self, budget: Budget) -> int | str:
        """Make all engines serve the version before, and return its name. Raises ``StateError`` if a worker does not
        hold it."""
        states = self.ask_engines("state", budget)
        found = [answer["before"] for of_engine in states for answer in of_engine]
        if any(before is None for before in found) or any(before != found[0] for before in found):
            names = ", ".join("none" if before is None else repr(before[0]) for before in found)
            raise StateError(
                f"the workers do not all hold one version before the one that they serve (they hold: {names}); nothing "
                "was changed. Push that version again"
            )
        for engine, of_engine in zip(self._plain, states, strict=True):
            check_awake(engine, of_engine)
        version: int | str = found[0][0]
        self._commit("rollback", self._plain, states, {"version": version}, budget)
        return version

    def resume(self, budget: Budget) -> list[int | str | None]:
        """End a push whose sender is gone, and resume all engines. Returns what they serve."""
        return self._on_engines(lambda engine: resolve(engine, budget.left), self._plain)

    def close(self) -> None:
        if self._rendezvous is not None:
            self._rendezvous.close()
        for engine in self._given:
            engine.close()

    def _try_all(self, kind: str, budget: Budget) -> list[list[dict[str, Any]] | BytecheckpointError]:
        """Ask all engines, and return the answers of each one's workers, or its error."""

        def call(engine: Engine) -> list[dict[str, Any]] | BytecheckpointError:
            try:
                return ask(engine, kind, {}, budget.left)
            except BytecheckpointError as error:
                error.engine = engine.name
                return error

        return self._on_all(call, self._given)

    def _ask_all(self, kind: str, message: dict[str, Any], budget: Budget) -> list[list[dict[str, Any]]]:
        """Send a request of this transaction to all engines, and return the answers by engine and worker."""
        full = {"transaction": self._transaction, **message}
        return self._on_engines(lambda engine: ask(engine, kind, full, budget.left))

    def _on_engines(self, function: Callable[[Engine], T], engines: Sequence[Engine] | None = None) -> list[T]:
        def call(engine: Engine) -> T:
            try:
                return function(engine)
            except BytecheckpointError as error:
                error.engine = engine.name
                raise

        return self._on_all(call, self._engines if engines is None else engines)

    def _on_all(self, function: Callable[[E], T], items: Sequence[E]) -> list[T]:
        """Call ``function`` for all engines, or their commits, at once. Raises the first error after all have
        answered."""
        if len(items) == 1:
            return [function(items[0])]
        with Threads(len(items), thread_name_prefix="bcp-push-engine") as threads:
            return [future.result() for future in [threads.submit(function, item) for item in items]]


class StreamApply:
    """Runs the request "stream" on all engines in a thread, while senders write.

    When the coordinator stops waiting for the thread, the push is abandoned: the thread sends no further request,
    because the next push may have begun.
    """

    def __init__(self, coordinator: PushCoordinator, version: int | str) -> None:
        self._coordinator, self._deadline_s = coordinator, coordinator.deadline_s
        self._is_abandoned = threading.Event()
        self._has_reported = False  # whether `end` has raised or returned everything there is to report
        longest = max((layout.nbytes for layout in coordinator.bound.plan.layouts), default=0)
        # Longer than the workers' own deadlines, so that they can report what went wrong.
        budget = Budget(2 * self._deadline_s + longest / _SLOWEST_BYTES_S)
        self._applied = run_daemon(
            lambda: coordinator.apply(version, budget, "stream", self._is_abandoned.is_set), "bcp-push-stream"
        )

    def end(self, broken: tuple[bool, str] | None) -> None:
        """Wait until all engines serve the version, after all senders have finished or a stream has ``broken``
        (whether it was late, and why). Raises what went wrong, with what the engines serve now."""
        is_late, text = broken or (False, "")
        # A worker that made no room in time is unlikely to answer now.
        wait([self._applied], _LATE_S if is_late else _CLEANUP_S if broken else self._deadline_s)
        self._has_reported = True
        is_silent = not self._applied.done()
        if not is_silent:
            self._applied.result()
        if is_silent or broken:
            text = text or f"the engines did not apply the stream within {self._deadline_s:g} s"
            raise (DeadlineError if is_silent else EngineError)(f"{text}\n  {self._state_after_failure(_LATE_S)}")
        self._coordinator.finish(Budget(self._deadline_s))

    def explain(self, error: BaseException) -> None:
        """Add to a sender's failure what the engines serve after it, unless ``end`` has raised that."""
        if self._has_reported:
            return
        after = self._state_after_failure(_CLEANUP_S)
        if isinstance(error, BytecheckpointError):
            error.args = (f"{error}\n  {after}",)
        else:
            _log.error("push: %s", after)

    def _state_after_failure(self, wait_s: float) -> str:
        """Return what the engines serve. Abandons engines that do not answer."""
        wait([self._applied], wait_s)
        if not self._applied.done():
            self._is_abandoned.set()
            return (
                "the engines have not answered since, and are left paused; when their workers answer again, they serve "
                "what is complete, or `bcp push --resume URL` or the next push resumes them"
            )
        error = self._applied.exception()
        return "the engines serve the new version" if error is None else str(error)
