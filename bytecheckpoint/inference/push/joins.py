"""A join: an engine that was pushed to (the holder) sends its served version to the engines of a ``PushCoordinator``.

The holder's workers are the senders. Rank 0 assigns their writes and polls their status; no tensor bytes pass through
it.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgpack
import xxhash

from ...errors import BytecheckpointError, DeadlineError, MismatchError, StateError
from ...tensors.dtypes import find_dtype
from ...tensors.geometry import Box
from .coordinator import PushCoordinator, StreamApply
from .engines.base import Budget, Engine, ask, ask_all, failures_of
from .messages import SenderLost, check_faults, first_cause
from .peer_source import HeldType, held_type
from .protocol import Push
from .report import PushReport

_FIRST_POLL_S, _LAST_POLL_S = 0.002, 1.0  # short transfers end soon, long ones need few requests
_CLEANUP_S = 5.0


@dataclass
class Join(Push):
    """A join on one rank of a job: the workers of ``holder`` send. Rank 0 does the work; the other ranks wait for each
    stage.

    Until ``run`` returns, the holder keeps the version, whatever is pushed into it. By default, the version has the
    holder's name for it.
    """

    holder: Engine

    def __post_init__(self) -> None:
        super().__post_init__()
        # Longer than the coordinator's deadline: its error names the cause.
        self._hold_s = 2 * self.sender.deadline_s
        self._transaction = secrets.token_hex(16)
        self._has_hold = False
        self._workers: list[str] = []
        self._is_checked = False  # whether all values were finite when they were pushed
        self._held: list[dict[str, list[HeldType]]] = []

    def run(self) -> PushReport:
        try:
            return super().run()
        finally:
            self._release_hold()

    def _describe(self) -> int | str:
        named = "" if self.version is None else f", as {self.version!r}"
        # The same exchange as of other pushes, so that ranks which push something else are found.
        self._exchange_facts(b"", f"what an engine serves{named}")
        version: int | str = self._share("push.describe", self._hold)
        self.op.set_description(f"push of version {version!r} from {self.holder.name}")
        return version

    def _hold(self, coordinator: PushCoordinator) -> int | str:
        """Ask the holder what it holds, and the engines what they request of it. Returns the version."""
        message = {"transaction": self._transaction, "hold_s": self._hold_s}
        self._has_hold = True  # on some workers, even if another one refuses
        answers = ask(self.holder, "hold", message, self.early_budget.left)
        versions = [answer["version"] for answer in answers]
        if any(version != versions[0] for version in versions):
            raise StateError(f"workers of {self.holder.name} serve different versions: {versions}; push to it again")
        self._workers = [answer["receiver"] for answer in answers]
        self._is_checked = all(answer["finite"] for answer in answers)
        self._held = [_types(answer["description"]) for answer in answers]
        descriptions = [answer["description"] for answer in answers]
        coordinator.set_sources([xxhash.xxh3_128_digest(one) for one in descriptions], descriptions)
        coordinator.describe(self.early_budget, strict=self.strict)
        version: int | str = versions[0] if self.version is None else self.version
        return version

    def _plan(self, coordinator: PushCoordinator) -> None:
        """Assign writes to the holder's workers. Raises ``MismatchError`` for values that the holder does not have
        exactly, and for tensors to quantize in blocks that no worker holds completely."""
        coordinator.plan(len(self._workers))
        exchange = coordinator.bound.exchange
        if exchange.split:
            names = ", ".join(sorted(exchange.split)[:5])
            raise MismatchError(
                f"engines request quantized tensors whose blocks are split between workers of {self.holder.name}: "
                f"{names}; nothing was sent, push from their original source",
                [("dtype", name, "its blocks are split between workers") for name in sorted(exchange.split)],
            )
        if self.strict:
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
        check_faults(
            f"{self.holder.name} no longer has the exact values of {len(faults)} tensor(s)",
            [("dtype", name, text) for name, text in faults.items()],
            then="\n  nothing was sent; push from their original source, or accept the values that it has "
            "(strict=False)",
        )

    def _prepare(self) -> bool:
        return bool(self._share("push.prepare", self._prepare_engines))

    def _send(self, version: int | str, *, is_streamed: bool) -> Sequence[bytes]:
        outcomes = self._lead("push.write", lambda leader: self._transfer(leader, version if is_streamed else None))
        self.op.broadcast("push.written", b"" if self.coordinator else None)
        return outcomes or ()

    def _transfer(self, coordinator: PushCoordinator, streamed: int | str | None) -> list[bytes]:
        """Make the holder's workers write, while the engines apply the version that is ``streamed``, if any. Returns
        the packed outcome of each worker."""
        if streamed is not None and coordinator.finite and not self._is_checked:
            # Its workers check chunk by chunk, while the engines load.
            raise StateError(
                f"{self.holder.name} serves a version that was pushed with check_finite=False; nothing was sent. "
                "Stream it with check_finite=False if its values may be NaN or infinite"
            )
        stream = None if streamed is None else StreamApply(coordinator, streamed)
        try:
            budget = self._budget()
            self._begin_all(coordinator, budget)
            outcomes = self._wait(budget)
            if stream is not None:
                stream.end(None)
            return outcomes
        except BytecheckpointError as error:
            if stream is not None:
                self._release_hold()
                stream.explain(error)
            raise

    def _release_hold(self) -> None:
        """Allow the holder to release the version."""
        if self._has_hold:
            with contextlib.suppress(BytecheckpointError):
                ask_all(self.holder, "release_hold", {"transaction": self._transaction}, _CLEANUP_S)
        self._has_hold = False

    def _begin_all(self, coordinator: PushCoordinator, budget: Budget) -> None:
        self.progress.expect(coordinator.bound.nbytes)
        message = {
            "transaction": self._transaction,
            "assignments": dict(zip(self._workers, coordinator.assignments(), strict=True)),
            "tcp_only": self.sender.tcp_only,
            "deadline_s": self._hold_s,
            "finite": coordinator.finite,
        }
        ask(self.holder, "send", message, budget.left)

    def _wait(self, budget: Budget) -> list[bytes]:
        pause_s, begin, is_second_look = _FIRST_POLL_S, time.monotonic(), False
        while True:
            self.op.check()
            answers = ask_all(self.holder, "send_status", {"transaction": self._transaction}, budget.left)
            errors = failures_of(self.holder, answers)
            if errors:
                # Where only consequences are known, ask again: the cause may be newer than its worker's answer.
                if is_second_look or not all(isinstance(error, SenderLost) for error in errors):
                    raise first_cause(errors)
                is_second_look = True
                continue
            self.progress.reach(sum(answer["written"] for answer in answers))
            outcomes = [answer["outcome"] for answer in answers]
            if all(outcome is not None for outcome in outcomes):
                return outcomes
            if budget.is_over:
                slow, took_s = [n for n, outcome in enumerate(outcomes) if outcome is None], time.monotonic() - begin
                raise DeadlineError(
                    f"workers {slow} of {self.holder.name} were still sending after {took_s:.3g} s; is a worker of a "
                    "joining engine stopped? nothing was applied"
                )
            time.sleep(min(pause_s, budget.left))
            pause_s = min(1.5 * pause_s, _LAST_POLL_S)


def _types(description: bytes) -> dict[str, list[HeldType]]:
    """Return the boxes of one worker and their dtypes, by tensor."""
    _, boxes, _, types = msgpack.unpackb(description, use_list=False)
    found: dict[str, list[HeldType]] = {}
    for (name, *box), dtype in zip(boxes, types, strict=True):
        found.setdefault(name, []).append((Box(*box), find_dtype(dtype)))
    return found
