"""Rank 0's part of a join: an engine that was pushed to gives what it serves to the engines of a ``Lead``.

The senders are the workers of that engine. They are told what to write, and asked how it went; no byte of a tensor
passes through here.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Sequence
from typing import Any

import msgpack
import xxhash

from ...control.base import Operation
from ...dtypes import dtype_named
from ...errors import BytecheckpointError, ControlError, DeadlineError, EngineError, MismatchError, StateError
from ...geometry import Box
from .arena_source import HeldType, held_type
from .engines import Budget, Engine, ask, ask_all, failure_of
from .lead import Lead
from .messages import SenderGone, first_cause
from .progress import Progress
from .pushing import Push
from .report import PushReport
from .sender import Sender
from .staging import STREAMED
from .streaming import Stream

__all__ = ["Join"]

_LEASE_S = 60.0  # a holder gives up on who does not ask for so long; an engine's own work may delay its answers
_FIRST_LOOK_S, _LAST_LOOK_S = 0.002, 1.0
_LAST_WORDS_S = 5.0


class Join(Push):
    """On every rank of a job; rank 0's does the work, and the others wait for each stage of it.

    Until it returns, the holder keeps the version, whatever is pushed into it meanwhile.
    """

    def __init__(
        self,
        op: Operation,
        lead: Lead | None,
        sender: Sender,
        strict: bool,
        holder: Engine,
        progress: Progress | None = None,
    ) -> None:
        super().__init__(op, lead, sender, strict, progress)
        self._holder, self._deadline_s = holder, sender.deadline_s
        # It gives up after who drives it has, which says more.
        self._kept_s = 2 * sender.deadline_s
        self._transaction = secrets.token_hex(16)
        self._is_held = False
        self._workers: list[str] = []
        self._held: list[dict[str, list[HeldType]]] = []

    def join(self, version: int | str | None, rename: object) -> PushReport:
        """By default, the version is called as the holder calls it."""
        try:
            with self._stage("describe"):
                self._agree(version, rename)
                version = self._describe(version)
            with self._stage("plan"), self._op.phase("push.plan"):
                if self._lead:
                    self._plan(self._lead)
            with self._stage("prepare"):
                streamed = self._prepare_engines()
            if streamed:
                with self._stage("stream"):
                    said = self._give(version)
            else:
                with self._stage("write"):
                    said = self._give(None)
                self._put_in(said, version)
            return self._report(said, version)
        finally:
            self._let_go()

    def _agree(self, version: int | str | None, rename: object) -> None:
        op = self._op
        with op.phase("push.facts"):
            if rename is not None:
                raise StateError("rename= is for tensors; an engine gives them by the names that it was sent them by")
        # As senders of tensors say it, so that ranks which push something else are found.
        name = "what an engine serves" if version is None else f"what an engine serves, as {version!r}"
        said = op.gather("push.facts", msgpack.packb([b"", b"", name]))
        with op.phase("push.facts"):
            names = sorted({msgpack.unpackb(one)[2] for one in said or ()})
            if len(names) > 1:
                raise StateError(f"ranks push different versions: {', '.join(names)}")

    def _describe(self, version: int | str | None) -> int | str:
        """What the holder has, and what the engines want of it."""
        op = self._op
        with op.phase("push.describe"):
            if self._lead:
                served = self._ask_holder(self._lead)
                version = served if version is None else version
                self._lead.describe(self._strict, self._time)
        found: int | str = msgpack.unpackb(
            op.broadcast("push.described", msgpack.packb(version) if self._lead else None)
        )
        op.is_about(f"push of version {found!r} from {self._holder.name}")
        return found

    def _ask_holder(self, lead: Lead) -> int | str:
        message = {"transaction": self._transaction, "hold_s": self._kept_s}
        self._is_held = True  # by some worker, where another refuses
        answers = ask(self._holder, "held", message, self._time.left)
        versions = [answer["version"] for answer in answers]
        if any(version != versions[0] for version in versions):
            raise StateError(f"workers of {self._holder.name} serve different versions: {versions}; push to it anew")
        self._workers = [answer["receiver"] for answer in answers]
        self._held = [_types(answer["description"], answer["types"]) for answer in answers]
        descriptions = [answer["description"] for answer in answers]
        lead.learn_sources([xxhash.xxh3_128_digest(one) for one in descriptions], descriptions)
        version: int | str = versions[0]
        return version

    def _plan(self, lead: Lead) -> None:
        """Who of the holder's workers writes what. Raises ``MismatchError`` for what it does not have exactly, or has
        to quantise in blocks that no worker has whole."""
        lead.plan(len(self._workers))
        if lead.planned.exchange.needed:
            names = ", ".join(sorted(lead.planned.exchange.grids)[:5])
            raise MismatchError(
                f"engines want tensors quantised, of whose blocks workers of {self._holder.name} have parts: {names}; "
                f"nothing was sent, push from where they come from",
                [("dtype", name, "its blocks are cut between workers") for name in lead.planned.exchange.grids],
            )
        if self._strict:
            self._check_exact(lead)

    def _check_exact(self, lead: Lead) -> None:
        """Engines must get the values that whoever pushed the version would send them. They would not where the holder
        was sent a number in a type of fewer values than they want: in bfloat16, say, of a float32."""
        stored = {name: meta.dtype for name, meta in lead.table.rows}
        faults: dict[str, str] = {}
        for held, writes in zip(self._held, lead.planned.plan.writes, strict=True):
            for write in writes:
                if write.name not in held:
                    continue  # scales, of weights that are held
                given = held_type(held[write.name], write.box)
                if given not in (write.dtype, stored[write.name]):
                    faults[write.name] = f"{write.dtype} is wanted of {stored[write.name]}, it has {given}"
        if faults:
            listed = "\n  ".join(f"{name}: {text}" for name, text in list(faults.items())[:20])
            more = f"\n  and {len(faults) - 20} more" if len(faults) > 20 else ""
            raise MismatchError(
                f"{self._holder.name} does not have the exact values of {len(faults)} tensor(s) any more:\n  {listed}"
                f"{more}\n  nothing was sent; push from where they come from, or take those that it has (strict=False)",
                [("dtype", name, text) for name, text in faults.items()],
            )

    def _prepare_engines(self) -> bool:
        """Whether they put in what comes. One that was restarted meanwhile is asked anew what it wants."""
        with self._op.phase("push.prepare"):
            if self._lead and not self._lead.prepare(self._time):
                self._lead.describe(self._strict, self._time)
                self._plan(self._lead)
                if not self._lead.prepare(self._time):
                    raise ControlError("workers of an engine were restarted twice during one push; push again")
        mode = self._lead.mode.encode() if self._lead else None
        return self._op.broadcast("push.prepared", mode) == STREAMED.encode()

    def _give(self, streamed: int | str | None) -> list[bytes]:
        """Have the holder's workers write; meanwhile the engines put in the version that is ``streamed``. What each
        worker did, as ``Outcome`` has it, packed."""
        outcomes: list[bytes] = []
        with self._op.phase("push.write"):
            if self._lead:
                stream = None if streamed is None else Stream(self._lead, streamed, self._deadline_s)
                try:
                    budget = self._budget()
                    self._begin_all(self._lead, budget)
                    outcomes = self._wait(budget)
                except BytecheckpointError as error:
                    if stream is not None:
                        self._let_go()
                        error.args = (f"{error}\n  {stream.gone_wrong()}",)
                    raise
                if stream is not None:
                    stream.end(None)
        self._op.broadcast("push.written", b"" if self._lead else None)
        return outcomes

    def _let_go(self) -> None:
        """The holder need not keep the version any more."""
        if self._is_held:
            with contextlib.suppress(BytecheckpointError):
                ask_all(self._holder, "let_go", {"transaction": self._transaction}, _LAST_WORDS_S)
        self._is_held = False

    def _begin_all(self, lead: Lead, budget: Budget) -> None:
        self._told.expect(lead.nbytes)
        message = {
            "transaction": self._transaction,
            "receivers": [worker.receiver for worker in lead.planned.workers],
            "assignments": {receiver: lead.assignment(sender, b"") for sender, receiver in enumerate(self._workers)},
            "addresses": {},
            "tcp_only": self._sender.tcp_only,
            "deadline_s": self._kept_s,
            "lease_s": min(_LEASE_S, self._kept_s),
        }
        unreached = self._begin(message, budget)
        if unreached:
            message["addresses"] = lead.listen(unreached, budget)
            unreached = self._begin(message, budget)
        if unreached:
            raise EngineError(f"{self._holder.name} finds no way to {len(unreached)} workers; push again")

    def _begin(self, message: dict[str, Any], budget: Budget) -> set[int]:
        """Targets that some worker does not reach; those workers have not begun."""
        answers = ask(self._holder, "give", message, budget.left)
        return {target for answer in answers for target in answer["unreached"]}

    def _wait(self, budget: Budget) -> list[bytes]:
        pause_s, begin, was_left = _FIRST_LOOK_S, time.monotonic(), False
        while True:
            self._op.check()
            answers = ask_all(self._holder, "given", {"transaction": self._transaction}, budget.left)
            found = [failure_of(self._holder, number, answer) for number, answer in enumerate(answers)]
            errors = [error for error in found if error is not None]
            if errors:
                # Who was left alone is asked once more, as another may have said before that it still went on.
                if was_left or not all(isinstance(error, SenderGone) for error in errors):
                    raise first_cause(errors)
                was_left = True
                continue
            self._told.reached(sum(answer["written"] for answer in answers))
            outcomes = [answer["outcome"] for answer in answers]
            if all(outcome is not None for outcome in outcomes):
                return outcomes
            if budget.over:
                slow, took_s = [n for n, outcome in enumerate(outcomes) if outcome is None], time.monotonic() - begin
                raise DeadlineError(
                    f"workers {slow} of {self._holder.name} were still giving after {took_s:.3g} s; is a worker of an "
                    "engine that joins stopped? nothing was put in"
                )
            time.sleep(min(pause_s, budget.left))
            pause_s = min(1.5 * pause_s, _LAST_LOOK_S)


def _types(description: bytes, types: Sequence[str]) -> dict[str, list[HeldType]]:
    """In which type a worker has which box, by name."""
    _, boxes, _, _ = msgpack.unpackb(description)
    found: dict[str, list[HeldType]] = {}
    for (name, offsets, lengths), dtype in zip(boxes, types, strict=True):
        found.setdefault(name, []).append((Box(tuple(offsets), tuple(lengths)), dtype_named(dtype)))
    return found
