"""One operation over the ranks' own stores.

Keys are ``<kind>/<number>/<phase>/<rank>``. Each rank hands its payload to its parent's store; whoever has children
hands on what is theirs as one message (``tree.py``). A reader deletes what only it reads; the rest goes when all have
left (``departure.py``), so a store holds nothing of the operations that are over.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgpack

from ..errors import ControlError, DeadlineError, DisagreementError
from .base import Operation
from .departure import await_leavers, leave
from .failure import FailureRecord
from .line import LineLost
from .outcome import LATE_S, OperationContext
from .reports import Reports
from .socket_streams import SocketStreams
from .streams import Streams
from .waiting import Waiting

if TYPE_CHECKING:
    from .store import StoreCommunicator

__all__ = ["StoreOperation"]

_log = logging.getLogger(__name__)


class StoreOperation(Operation):
    """One operation on one rank. A context manager that closes itself."""

    def __init__(self, communicator: StoreCommunicator, context: OperationContext) -> None:
        self._communicator, self._context = communicator, context
        self._tree, self._prefix = communicator.tree, context.prefix
        self._children = communicator.children
        self._outcome = context.outcome
        self._reports = Reports(context)
        self._waiting = Waiting(context, self._reports)
        self._streams: SocketStreams | None = None
        self._closed = False
        self._keys_above: list[str] = []
        self._keys_below: list[str] = []
        self._phases: collections.Counter[str] = collections.Counter()

    def __enter__(self) -> StoreOperation:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def is_about(self, what: str) -> None:
        self._context.about = what

    @property
    def rank(self) -> int:
        return self._communicator.rank

    @property
    def world_size(self) -> int:
        return self._communicator.world_size

    def gather(self, phase: str, payload: bytes) -> Sequence[bytes] | None:
        with self._step(phase) as base:
            branch = [payload, *self._collect(phase, base)]
            if self.rank == 0:
                return branch
            line, count = self._context.above(), f"{base}/count"
            self._keys_above.append(count)
            self._keys_above += line.put(f"{base}/{self.rank}", _as_one(branch))
            line.add(count, 1)
            return None

    def scatter(self, phase: str, payloads: Sequence[bytes] | None) -> bytes:
        with self._step(phase) as base:
            if self.rank != 0:
                key, line = f"{base}/{self.rank}", self._context.above()
                self._waiting.for_parent(phase, lambda: line.has(key))
                payloads = _apart(line.take(key), len(self._tree.branch(self.rank)))
            if payloads is None or len(payloads) != len(self._tree.branch(self.rank)):
                raise ValueError(f"rank 0 must scatter exactly {self.world_size} payloads in {phase!r}")
            for child in self._children:
                theirs = [payloads[rank - self.rank] for rank in self._tree.branch(child)]
                self._keys_below += self._context.below().put(f"{base}/{child}", _as_one(theirs))
            return payloads[0]

    def broadcast(self, phase: str, payload: bytes | None) -> bytes:
        with self._step(phase) as base:
            key = f"{base}/0"
            if self.rank != 0:
                line = self._context.above()
                self._waiting.for_parent(phase, lambda: line.has(key))
                payload = line.read(key)[0]
            if payload is None:
                raise ValueError(f"rank 0 must broadcast a payload in {phase!r}")
            if self._children:
                self._keys_below += self._context.below().put(key, payload)
            return payload

    def agree(self, phase: str, facts: dict[str, str]) -> None:
        try:
            super().agree(phase, facts)
        except DisagreementError as error:
            self._outcome.keep(error)
            raise

    def fail(self, phase: str, error: BaseException) -> None:
        first = self._report(self._own(error, phase), error)
        self._outcome.settle(first)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if error is self._outcome.error:
                raise
            standing = self._outcome.error
            if standing is None:
                standing = self._outcome.settle(self._report(self._own(error, name), error))
            if standing is error or not isinstance(error, Exception):
                # An interrupt or exit has been reported, and goes its way.
                raise
            raise standing from (standing.__cause__ or error)

    def check(self) -> None:
        with self._step("check"):
            pass

    def streams(self) -> Streams:
        if self._streams is None:
            with self._step("streams"):
                self._streams = SocketStreams(self._context)
        return self._streams

    def follow(self, kind: str, *, deadline_s: float) -> StoreOperation:
        self._phases[">"] += 1
        return self._communicator.begin(kind, f"{self._prefix}>{self._phases['>']}", deadline_s)

    def wait_alone(self, timeout_s: float) -> None:
        try:
            await_leavers(self._context.above(), self._prefix, self._tree, self._communicator.watch, timeout_s)
        except LineLost:
            _log.debug("the store ended before all ranks had left %s", self._prefix, exc_info=True)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        above = self._reports.keys + self._waiting.keys_above + self._keys_above
        below = self._reports.keys_below + self._waiting.keys_below + self._keys_below
        others_may_be_in = False
        try:
            if self._streams is not None:
                above += self._streams.close()
            # The operation is done with, and whoever called it waits.
            self._context.hurry(LATE_S)
            others_may_be_in = leave(self._context, above, below)
        except LineLost:
            _log.debug("left %s after the store had ended", self._prefix, exc_info=True)
        finally:
            self._context.give_lines_back()
            self._communicator.has_left(self._prefix, above, others_may_be_in=others_may_be_in)
            self._streams = None
            self._outcome.forget()

    def _collect(self, phase: str, base: str) -> Iterator[bytes]:
        """What all below this rank have handed in, in their order."""
        if not self._children:
            return
        line, count = self._context.below(), f"{base}/count"
        self._keys_below.append(count)
        self._waiting.for_children(
            phase,
            lambda: line.add(count, 0) >= len(self._children),
            lambda: [child for child in self._children if not line.has(f"{base}/{child}")],
        )
        for child in self._children:
            yield from _apart(line.take(f"{base}/{child}"), len(self._tree.branch(child)))

    @contextmanager
    def _step(self, phase: str) -> Iterator[str]:
        """Enter one exchange: its keys' prefix. A store's end becomes its rank's failure."""
        if self._outcome.error is not None:
            raise self._outcome.error
        if self._closed:
            raise ControlError(f"this {self._context.kind} is closed; {phase} cannot begin")
        self._phases[phase] += 1
        repeat = f"~{self._phases[phase]}" if self._phases[phase] > 1 else ""
        self._context.phase = phase
        try:
            self._context.above().be_patient(self._context.deadline_s)
            self._reports.raise_failure()
            yield f"{self._prefix}/{phase}{repeat}"
        except LineLost as error:
            self._reports.raise_store_lost(phase, error)

    def _own(self, error: BaseException, phase: str) -> FailureRecord:
        return self._outcome.own(error, phase, self._communicator.here, self._context.about)

    def _report(self, record: FailureRecord, error: BaseException) -> FailureRecord:
        # Who is late in one operation does not answer in the next one either, and the time to tell is over.
        is_late = isinstance(error, DeadlineError) or isinstance(error.__cause__, DeadlineError)
        return record if self._closed else self._reports.report(record, is_late=is_late)


def _as_one(branch: Sequence[bytes]) -> bytes:
    """One message of what is for, or from, a rank and all below it."""
    message: bytes = branch[0] if len(branch) == 1 else msgpack.packb(branch)
    return message


def _apart(message: bytes, count: int) -> Sequence[bytes]:
    """The messages that were made one; ``count`` is how many."""
    if count == 1:
        return [message]
    payloads: list[bytes] = msgpack.unpackb(message)
    return payloads
