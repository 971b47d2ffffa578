"""A join: an engine that was pushed to (the holder) sends its served version to the engines of a ``PushCoordinator``.

The holder's workers are the senders. Rank 0 assigns their writes and polls their status; no tensor bytes pass through
it.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from typing import Any

import msgpack
import xxhash

from ...control.base import Operation
from ...errors import (
    BytecheckpointError,
    DeadlineError,
    EngineError,
    MismatchError,
    StateError,
    UsageError,
)
from ...tensors.dtypes import find_dtype
from ...tensors.geometry import Box
from .coordinator import PushCoordinator, StreamApply
from .engines.base import Budget, Engine, ask, ask_all, failure_of
from .memory import STREAMED
from .messages import SenderLost, first_cause, list_faults
from .peer_source import HeldType, held_type
from .protocol import Push, Sender
from .report import Progress, PushReport
from .writing import Outcome

__all__ = ["Join"]

_LEASE_S = 60.0  # a holder ends a transfer without status requests; an engine's own work may delay its answers
_FIRST_POLL_S, _LAST_POLL_S = 0.002, 1.0  # short transfers end soon, long ones need few requests
_CLEANUP_S = 5.0


class Join(Push):
    """A join on one rank of a job. Rank 0 does the work; the other ranks wait for each stage.

    Until ``join`` returns, the holder keeps the version, whatever is pushed into it.
    """

    def __init__(
        self,
        op: Operation,
        coordinator: PushCoordinator | None,
        sender: Sender,
        strict: bool,
        holder: Engine,
        progress: Progress | None = None,
    ) -> None:
        super().__init__(op, coordinator, sender, strict, progress)
        self._holder, self._deadline_s = holder, sender.deadline_s
        # Longer than the coordinator's deadline: its error names the cause.
        self._hold_s = 2 * sender.deadline_s
        self._transaction = secrets.token_hex(16)
        self._has_hold = False
        self._workers: list[str] = []
        self._held: list[dict[str, list[HeldType]]] = []

    def join(self, version: int | str | None, rename: object) -> PushReport:
        """Run the join. By default, the version has the holder's name for it."""
        try:
            with self._stage("describe"):
                self._agree(version, rename)
                version = self._describe(version)
            with self._stage("plan"), self._op.phase("push.plan"):
                if self._coordinator:
                    self._plan(self._coordinator)
            with self._stage("prepare"):
                is_streamed = self._prepare_engines()
            if is_streamed:
                with self._stage("stream"):
                    outcomes = self._send(version)
            else:
                with self._stage("write"):
                    outcomes = self._send(None)
                self._commit(outcomes, version)
            return self._report(outcomes, version)
        finally:
            self._release_hold()

    def _agree(self, version: int | str | None, rename: object) -> None:
        op = self._op
        with op.phase("push.facts"):
            if rename is not None:
                raise UsageError("rename= applies to tensors; an engine sends them under the names it received")
        # The same message as in `Push`, so that ranks which push something else are found.
        name = "what an engine serves" if version is None else f"what an engine serves, as {version!r}"
        gathered = op.gather("push.facts", msgpack.packb([b"", b"", name]))
        with op.phase("push.facts"):
            names = sorted({msgpack.unpackb(one)[2] for one in gathered or ()})
            if len(names) > 1:
                raise StateError(f"ranks push different versions: {', '.join(names)}")

    def _describe(self, version: int | str | None) -> int | str:
        """Ask the holder what it holds, and the engines what they request of it. Returns the version."""
        op, coordinator = self._op, self._coordinator
        with op.phase("push.describe"):
            if coordinator:
                served = self._hold(coordinator)
                version = served if version is None else version
                coordinator.describe(self._strict, self._early_budget)
        found: int | str = msgpack.unpackb(
            op.broadcast("push.described", msgpack.packb(version) if coordinator else None)
        )
        op.set_description(f"push of version {found!r} from {self._holder.name}")
        return found

    def _hold(self, coordinator: PushCoordinator) -> int | str:
        message = {"transaction": self._transaction, "hold_s": self._hold_s}
        self._has_hold = True  # on some workers, even if another one refuses
        answers = ask(self._holder, "hold", message, self._early_budget.left)
        versions = [answer["version"] for answer in answers]
        if any(version != versions[0] for version in versions):
            raise StateError(f"workers of {self._holder.name} serve different versions: {versions}; push to it again")
        self._workers = [answer["receiver"] for answer in answers]
        self._held = [_types(answer["description"], answer["types"]) for answer in answers]
        descriptions = [answer["description"] for answer in answers]
        coordinator.set_sources([xxhash.xxh3_128_digest(one) for one in descriptions], descriptions)
        version: int | str = versions[0]
        return version

    def _plan(self, coordinator: PushCoordinator) -> None:
        """Assign writes to the holder's workers. Raises ``MismatchError`` for values that the holder does not have
        exactly, and for tensors to quantize in blocks that no worker holds completely."""
        coordinator.plan(len(self._workers))
        exchange = coordinator.bound.exchange
        if exchange.needed:
            names = ", ".join(sorted(exchange.grids)[:5])
            raise MismatchError(
                f"engines request quantized tensors whose blocks are split between workers of {self._holder.name}: "
                f"{names}; nothing was sent, push from their original source",
                [("dtype", name, "its blocks are split between workers") for name in exchange.grids],
            )
        if self._strict:
            self._check_exact(coordinator)

    def _check_exact(self, coordinator: PushCoordinator) -> None:
        """Check that the engines get the values that the original source would send. They would not where the holder
        received a float32 as bfloat16, for example."""
        stored = {name: meta.dtype for name, meta in coordinator.table.rows}
        faults: dict[str, str] = {}
        for held, writes in zip(self._held, coordinator.bound.plan.writes, strict=True):
            for write in writes:
                if write.name not in held:
                    continue  # scales of weights that are held
                found = held_type(held[write.name], write.box)
                if found not in (write.dtype, stored[write.name]):
                    faults[write.name] = f"{write.dtype} is requested of {stored[write.name]}, it has {found}"
        if faults:
            listed = list_faults(f"{name}: {text}" for name, text in faults.items())
            raise MismatchError(
                f"{self._holder.name} no longer has the exact values of {len(faults)} tensor(s):{listed}\n  nothing "
                "was sent; push from their original source, or accept the values that it has (strict=False)",
                [("dtype", name, text) for name, text in faults.items()],
            )

    def _prepare_engines(self) -> bool:
        """Prepare the engines, and return whether weights are streamed into them."""
        coordinator = self._coordinator
        with self._op.phase("push.prepare"):
            if coordinator:
                coordinator.prepare(self._strict, self._early_budget, lambda: self._plan(coordinator))
        mode = coordinator.mode.encode() if coordinator else None
        return self._op.broadcast("push.prepared", mode) == STREAMED.encode()

    def _send(self, streamed: int | str | None) -> list[Outcome]:
        """Make the holder's workers write, while the engines apply the version that is ``streamed``, if any. Returns
        the outcome of each worker on rank 0."""
        outcomes: list[Outcome] = []
        with self._op.phase("push.write"):
            if self._coordinator:
                stream = None if streamed is None else StreamApply(self._coordinator, streamed, self._deadline_s)
                try:
                    budget = self._budget()
                    self._begin_all(self._coordinator, budget)
                    outcomes = [Outcome.unpack(one) for one in self._wait(budget)]
                except BytecheckpointError as error:
                    if stream is not None:
                        self._release_hold()
                        error.args = (f"{error}\n  {stream.state_after_failure()}",)
                    raise
                if stream is not None:
                    stream.end(None)
        self._op.broadcast("push.written", b"" if self._coordinator else None)
        return outcomes

    def _release_hold(self) -> None:
        """Allow the holder to release the version."""
        if self._has_hold:
            with contextlib.suppress(BytecheckpointError):
                ask_all(self._holder, "release_hold", {"transaction": self._transaction}, _CLEANUP_S)
        self._has_hold = False

    def _begin_all(self, coordinator: PushCoordinator, budget: Budget) -> None:
        self._progress.expect(coordinator.assignments.nbytes)
        assignments = {worker: coordinator.assignment(sender, b"") for sender, worker in enumerate(self._workers)}
        message = {
            "transaction": self._transaction,
            "receivers": [worker.receiver for worker in coordinator.bound.workers],
            "assignments": assignments,
            "endpoints": {},
            "tcp_only": self._sender.tcp_only,
            "deadline_s": self._hold_s,
            "lease_s": min(_LEASE_S, self._hold_s),
        }
        unreached = self._begin(message, budget)
        if unreached:
            message["endpoints"] = coordinator.listen(unreached, budget)
            unreached = self._begin(message, budget)
        if unreached:
            raise EngineError(f"{self._holder.name} cannot reach {len(unreached)} workers; push again")

    def _begin(self, message: dict[str, Any], budget: Budget) -> set[int]:
        """Return the targets that some worker cannot reach; these workers have not begun."""
        answers = ask(self._holder, "send", message, budget.left)
        return {target for answer in answers for target in answer["unreached"]}

    def _wait(self, budget: Budget) -> list[bytes]:
        pause_s, begin, is_second_look = _FIRST_POLL_S, time.monotonic(), False
        while True:
            self._op.check()
            answers = ask_all(self._holder, "send_status", {"transaction": self._transaction}, budget.left)
            found = [failure_of(self._holder, number, answer) for number, answer in enumerate(answers)]
            errors = [error for error in found if error is not None]
            if errors:
                # Where only consequences are known, ask once more: the cause may be newer than its worker's answer.
                if is_second_look or not all(isinstance(error, SenderLost) for error in errors):
                    raise first_cause(errors)
                is_second_look = True
                continue
            self._progress.reach(sum(answer["written"] for answer in answers))
            outcomes = [answer["outcome"] for answer in answers]
            if all(outcome is not None for outcome in outcomes):
                return outcomes
            if budget.is_over:
                slow, took_s = [n for n, outcome in enumerate(outcomes) if outcome is None], time.monotonic() - begin
                raise DeadlineError(
                    f"workers {slow} of {self._holder.name} were still sending after {took_s:.3g} s; is a worker of a "
                    "joining engine stopped? nothing was applied"
                )
            time.sleep(min(pause_s, budget.left))
            pause_s = min(1.5 * pause_s, _LAST_POLL_S)


def _types(description: bytes, types: list[str]) -> dict[str, list[HeldType]]:
    """Return the boxes of one worker and their dtypes, by tensor."""
    _, boxes, _, _ = msgpack.unpackb(description)
    found: dict[str, list[HeldType]] = {}
    for (name, offsets, lengths), dtype in zip(boxes, types, strict=True):
        found.setdefault(name, []).append((Box(tuple(offsets), tuple(lengths)), find_dtype(dtype)))
    return found
