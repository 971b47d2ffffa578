"""One operation over the ranks' own store.

Keys are ``<kind>/<number>/<phase>/<rank>``. A reader deletes what only it reads; the last rank to leave an operation
deletes the rest, so a store holds nothing of the operations that are over. Waits are polls: between two looks at the
awaited key a rank looks whether somebody failed, whether a process on its host has ended, and at the clock.
"""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgpack

from ..errors import ControlError, DisagreementError
from .agreement import format_ranks
from .base import Operation
from .failure import FailureRecord
from .line import Line, LineLost
from .outcome import LONGEST_PAUSE_S, ROOT_GRACE_S, Outcome, Reports, left_counter, left_mark
from .socket_streams import SocketStreams
from .streams import Streams

if TYPE_CHECKING:
    from .store import StoreCommunicator

__all__ = ["StoreOperation"]

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.0003
_PAUSE_PER_RANK_S = 25e-6  # more ranks look less often, so that rank 0's store is not kept busy by looks alone
_NOTE_EVERY_S = 1.0  # how often rank 0 writes down for whom it waits


class StoreOperation(Operation):
    """One operation on one rank. A context manager that closes itself."""

    def __init__(self, communicator: StoreCommunicator, kind: str, prefix: str, deadline_s: float) -> None:
        self._communicator = communicator
        self._kind = kind
        self._prefix = prefix
        self._deadline_s = deadline_s
        self._line_or_none: Line | None = None
        self._outcome = Outcome()
        self._reports = Reports(communicator, kind, prefix, self._outcome, self._line)
        self._streams: SocketStreams | None = None
        self._closed = False
        self._keys: list[str] = []
        self._phases: collections.Counter[str] = collections.Counter()

    def __enter__(self) -> StoreOperation:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def rank(self) -> int:
        return self._communicator.rank

    @property
    def world_size(self) -> int:
        return self._communicator.world_size

    def gather(self, phase: str, payload: bytes) -> Sequence[bytes] | None:
        with self._step(phase) as (line, base):
            count = f"{base}/count"
            self._keys.append(count)
            if self.rank != 0:
                self._keys += line.put(f"{base}/{self.rank}", payload)
                line.add(count, 1)
                return None
            others = range(1, self.world_size)
            self._wait(
                phase,
                lambda: line.add(count, 0) >= len(others),
                lambda: [rank for rank in others if not line.has(f"{base}/{rank}")],
            )
            return [payload, *(line.take(f"{base}/{rank}") for rank in others)]

    def scatter(self, phase: str, payloads: Sequence[bytes] | None) -> bytes:
        with self._step(phase) as (line, base):
            if self.rank != 0:
                self._wait_for_root(phase, f"{base}/{self.rank}")
                return line.take(f"{base}/{self.rank}")
            if payloads is None or len(payloads) != self.world_size:
                raise ValueError(f"rank 0 must scatter exactly {self.world_size} payloads in {phase!r}")
            for rank in range(1, self.world_size):
                self._keys += line.put(f"{base}/{rank}", payloads[rank])
            return payloads[0]

    def broadcast(self, phase: str, payload: bytes | None) -> bytes:
        with self._step(phase) as (line, base):
            if self.rank != 0:
                self._wait_for_root(phase, f"{base}/0")
                return line.read(f"{base}/0")[0]
            if payload is None:
                raise ValueError(f"rank 0 must broadcast a payload in {phase!r}")
            self._keys += line.put(f"{base}/0", payload)
            return payload

    def agree(self, phase: str, facts: dict[str, str]) -> None:
        try:
            super().agree(phase, facts)
        except DisagreementError as error:
            self._outcome.keep(error)
            raise

    def fail(self, phase: str, error: BaseException) -> None:
        first = self._report(self._outcome.own(error, phase, self._communicator.here))
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
                standing = self._outcome.settle(self._report(self._outcome.own(error, name, self._communicator.here)))
            if standing is error or not isinstance(error, Exception):
                # An interrupt or exit has been reported, and goes its way.
                raise
            raise standing from (standing.__cause__ or error)

    def check(self) -> None:
        with self._step("check"):
            pass

    def streams(self) -> Streams:
        if self._streams is None:
            with self._step("streams") as (line, _base):
                told = (self._communicator, self._kind, self._prefix, self._deadline_s, self._outcome, line)
                self._streams = SocketStreams(*told)
        return self._streams

    def wait_alone(self, timeout_s: float) -> None:
        try:
            self._communicator.await_leavers(self._line(), self._prefix, time.monotonic() + timeout_s)
        except LineLost:
            _log.debug("the store ended before all ranks had left %s", self._prefix, exc_info=True)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        others_may_be_in = False
        try:
            keys = self._reports.keys + self._keys
            if self._streams is not None:
                keys += self._streams.close()
            line = self._line()
            line.put(left_mark(self._prefix, self.rank), msgpack.packb(keys))
            if line.add(left_counter(self._prefix), 1) == self.world_size:
                self._sweep(line)
            else:
                others_may_be_in = self.rank == 0
        except LineLost:
            _log.debug("left %s after the store had ended", self._prefix, exc_info=True)
        else:
            self._communicator.return_line(line)
        finally:
            self._communicator.has_left(self._prefix, others_may_be_in=others_may_be_in)
            self._line_or_none = None
            self._streams = None
            self._outcome.forget()

    def _sweep(self, line: Line) -> None:
        marks = [left_mark(self._prefix, rank) for rank in range(self.world_size)]
        keys = {key for mark in marks for key in msgpack.unpackb(line.read(mark)[0])}
        # The counter goes last: rank 0 may end its process once it is gone.
        line.delete([*sorted(keys), *marks, self._reports.key, left_counter(self._prefix)])

    def _line(self) -> Line:
        if self._line_or_none is None:
            self._line_or_none = self._communicator.borrow_line()
        return self._line_or_none

    @contextmanager
    def _step(self, phase: str) -> Iterator[tuple[Line, str]]:
        """Enter one exchange: its line and its keys' prefix. The store's end becomes rank 0's failure."""
        if self._outcome.error is not None:
            raise self._outcome.error
        if self._closed:
            raise ControlError(f"this {self._kind} is closed; {phase} cannot begin")
        self._phases[phase] += 1
        repeat = f"~{self._phases[phase]}" if self._phases[phase] > 1 else ""
        try:
            line = self._line()
            self._reports.raise_failure()
            yield line, f"{self._prefix}/{phase}{repeat}"
        except LineLost as error:
            self._reports.raise_root_lost(phase, error)

    def _report(self, record: FailureRecord) -> FailureRecord:
        return record if self._closed else self._reports.report(record)

    def _wait_for_root(self, phase: str, key: str) -> None:
        self._wait(phase, lambda: self._line().has(key), lambda: [0])

    def _wait(self, phase: str, ready: Callable[[], bool], missing: Callable[[], list[int]]) -> None:
        line, start = self._line(), time.monotonic()
        # Rank 0 knows best who is missing, so the others leave the verdict to it for a moment.
        deadline = start + self._deadline_s + (ROOT_GRACE_S if self.rank else 0.0)
        next_note = start + _NOTE_EVERY_S
        longest = max(LONGEST_PAUSE_S, self.world_size * _PAUSE_PER_RANK_S)
        pause = _FIRST_PAUSE_S
        while not ready():
            self._reports.raise_failure()
            self._reports.raise_death(phase, missing)
            now = time.monotonic()
            if now > deadline:
                self._reports.raise_reported(self._deadline_passed(line, phase, missing()))
            if self.rank == 0 and now > next_note:
                next_note = now + _NOTE_EVERY_S
                self._note_waiting(line, phase, missing())
            time.sleep(pause)
            pause = min(pause * 1.5, longest)

    def _note_waiting(self, line: Line, phase: str, ranks: list[int]) -> None:
        key = f"{self._prefix}/waiting"
        self._keys.append(key)
        line.put(key, msgpack.packb([phase, ranks]))

    def _deadline_passed(self, line: Line, phase: str, ranks: list[int]) -> FailureRecord:
        here = self._communicator.here
        message = (
            f"{self._kind}: rank {here.rank} on {here.host} waited {self._deadline_s:g} s in {phase} for "
            f"rank(s) {format_ranks(ranks)} of {self.world_size}"
        )
        if self.rank and line.has(f"{self._prefix}/waiting"):
            root_phase, others = msgpack.unpackb(line.read(f"{self._prefix}/waiting")[0])
            message += f", which itself waits in {root_phase} for rank(s) {format_ranks(others)}"
        message += ". Look at what they were doing then, or give a longer deadline."
        return FailureRecord.of_deadline(message, phase, here)
