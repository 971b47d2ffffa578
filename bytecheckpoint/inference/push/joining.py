"""Rank 0's part of a join: an engine that was pushed to gives what it serves to the engines of a ``Lead``.

The senders are the workers of that engine. They are told what to write, and asked how it went; no byte of a tensor
passes through here.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Sequence
from types import NoneType
from typing import Any

import msgpack
import xxhash

from ...control.base import Operation
from ...dtypes import dtype_named
from ...errors import BytecheckpointError, ControlError, DeadlineError, EngineError, MismatchError, StateError
from ...geometry import Box
from .arena_source import HeldType, held_type
from .engines import Budget, Engine, ask, ask_all
from .lead import Lead

__all__ = ["Join"]

_LEASE_S = 60.0  # a holder gives up on who does not ask for so long; an engine's own work may delay its answers
_FIRST_LOOK_S, _LAST_LOOK_S = 0.002, 1.0
_LAST_WORDS_S = 5.0


class Join:
    """On every rank of a job; rank 0's does the work, and the others wait for each stage of it.

    From ``describe`` to ``let_go``, the holder keeps the version, whatever is pushed into it meanwhile.
    """

    def __init__(self, op: Operation, holder: Engine, lead: Lead, deadline_s: float, strict: bool) -> None:
        self._op, self._holder, self._lead, self._deadline_s = op, holder, lead, deadline_s
        self._strict, self._is_lead = strict, op.rank == 0
        self._transaction = secrets.token_hex(16)
        self._workers: list[str] = []
        self._held: list[dict[str, list[HeldType]]] = []
        self._planned: Any = None

    def describe(self, version: int | str | None, rename: object, budget: Budget) -> int | str:
        """What the holder has and the lead's engines want. The version's name: by default what the holder calls it."""
        op = self._op
        with op.phase("push.facts"):
            if rename is not None:
                raise StateError("rename= is for tensors; an engine gives them by the names that it was sent them by")
            if not isinstance(version, (int, str, NoneType)):
                raise StateError(f"a version is a number or a text, not {version!r}")
        # As senders of tensors say it, so that ranks which push something else are found.
        name = "what an engine serves" if version is None else f"what an engine serves, as {version!r}"
        said = op.gather("push.facts", msgpack.packb([b"", b"", name]))
        with op.phase("push.facts"):
            names = sorted({msgpack.unpackb(one)[2] for one in said or ()})
            if len(names) > 1:
                raise StateError(f"ranks push different versions: {', '.join(names)}")
        with op.phase("push.describe"):
            if self._is_lead:
                served = self._ask_holder(budget)
                version = served if version is None else version
                self._lead.describe(self._strict, budget)
        version = msgpack.unpackb(op.broadcast("push.described", msgpack.packb(version) if self._is_lead else None))
        op.is_about(f"push of version {version!r} from {self._holder.name}")
        assert version is not None
        return version

    def _ask_holder(self, budget: Budget) -> int | str:
        if not self._lead.has_engines:
            raise StateError("rank 0 has no engine to push to; give Pusher its engines there")
        message = {"transaction": self._transaction, "hold_s": self._deadline_s}
        answers = ask(self._holder, "held", message, budget.left)
        versions = [answer["version"] for answer in answers]
        if any(version != versions[0] for version in versions):
            raise StateError(f"workers of {self._holder.name} serve different versions: {versions}; push to it anew")
        self._workers = [answer["receiver"] for answer in answers]
        self._held = [_types(answer["description"], answer["types"]) for answer in answers]
        descriptions = [answer["description"] for answer in answers]
        self._lead.learn_sources([xxhash.xxh3_128_digest(one) for one in descriptions], descriptions)
        version: int | str = versions[0]
        return version

    def plan(self) -> None:
        """Who of the holder's workers writes what. Raises ``MismatchError`` for what it does not have exactly."""
        with self._op.phase("push.plan"):
            if self._is_lead:
                self._plan()

    def _plan(self) -> None:
        self._planned = self._lead.plan(len(self._workers))
        if self._strict:
            self._check_exact()

    def _check_exact(self) -> None:
        """Engines must get the values that whoever pushed the version would send them. They would not where the holder
        was sent a number in a type of fewer values than they want: in bfloat16, say, of a float32."""
        stored = {name: meta.dtype for name, meta in self._lead.table.rows}
        faults: dict[str, str] = {}
        for held, writes in zip(self._held, self._planned.plan.writes, strict=True):
            for write in writes:
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

    def prepare(self, budget: Budget) -> Any:
        """The plan that engines are prepared for; one that was restarted meanwhile is asked anew what it wants."""
        op = self._op
        with op.phase("push.prepare"):
            if self._is_lead and not self._lead.prepare(self._planned, budget):
                self._lead.describe(self._strict, budget)
                self._plan()
                if not self._lead.prepare(self._planned, budget):
                    raise ControlError("workers of an engine were restarted twice during one push; push again")
        op.broadcast("push.prepared", b"" if self._is_lead else None)
        return self._planned

    def give(self, tcp_only: bool, budget: Budget) -> list[bytes]:
        """Have the holder's workers write. What each did, as ``Outcome`` has it, packed."""
        outcomes: list[bytes] = []
        with self._op.phase("push.write"):
            if self._is_lead:
                self._begin_all(tcp_only, budget)
                outcomes = self._wait(budget)
        self._op.broadcast("push.written", b"" if self._is_lead else None)
        return outcomes

    def let_go(self) -> None:
        """The holder need not keep the version any more. Never raises."""
        if self._workers:
            with contextlib.suppress(BytecheckpointError):
                ask_all(self._holder, "let_go", {"transaction": self._transaction}, _LAST_WORDS_S)

    def _begin_all(self, tcp_only: bool, budget: Budget) -> None:
        message = {
            "transaction": self._transaction,
            "receivers": [worker.receiver for worker in self._planned.workers],
            "assignments": {
                receiver: self._lead.assignment(self._planned, sender, has_plan=False)
                for sender, receiver in enumerate(self._workers)
            },
            "addresses": {},
            "tcp_only": tcp_only,
            "deadline_s": self._deadline_s,
            "lease_s": min(_LEASE_S, self._deadline_s),
        }
        unreached = self._begin(message, budget)
        if unreached:
            message["addresses"] = self._lead.listen(unreached, self._planned, self._deadline_s, budget)
            unreached = self._begin(message, budget)
        if unreached:
            raise EngineError(f"{self._holder.name} finds no way to {len(unreached)} workers; push again")

    def _begin(self, message: dict[str, Any], budget: Budget) -> set[int]:
        """Targets that some worker does not reach; those workers have not begun."""
        answers = ask(self._holder, "give", message, budget.left)
        return {target for answer in answers for target in answer["unreached"]}

    def _wait(self, budget: Budget) -> list[bytes]:
        pause_s, begin = _FIRST_LOOK_S, time.monotonic()
        while True:
            self._op.check()
            answers = ask(self._holder, "given", {"transaction": self._transaction}, budget.left)
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
