"""One operation of a job of several ranks."""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from ..errors import ControlError
from ..runtime.messages import format_ranks
from .base import Operation, Streams
from .messages import WaitStep, pack_branch, unpack_branch
from .network import Network
from .outcome import Outcome
from .router import Router
from .socket_streams import SocketStreams
from .timings import (
    LONGEST_NOTE_INTERVAL_S,
    NOTE_LIFETIME_INTERVALS,
    NOTES_PER_DEADLINE,
    PROBE_ANSWER_S,
    PROBES_PER_DEADLINE,
    ROOT_GRACE_S,
    STEP_GRACE_S,
    WAIT_CHECK_S,
)


class SocketOperation(Operation):
    """One operation on one rank.

    A rank sends its payload to its parent together with those of the ranks below it, and passes on to its children
    what arrives for them (``tree.py``).
    """

    def __init__(
        self, router: Router, network: Network, prefix: str, deadline_s: float, *, is_patient: bool = False
    ) -> None:
        """Enter the operation. ``prefix`` is ``<kind>/<number>``, and for one that follows another
        ``<prefix of the other>/<number>><kind>/0``."""
        self._router, self._network, self._deadline_s, self._is_patient = router, network, deadline_s, is_patient
        self.rank, self.world_size = router.rank, router.tree.world_size
        self._state = router.begin(prefix)
        self._outcome = Outcome(router, self._state, deadline_s)
        self._note_interval_s = min(LONGEST_NOTE_INTERVAL_S, deadline_s / NOTES_PER_DEADLINE)
        self._streams: SocketStreams | None = None
        self._is_closed = False
        self._phases: collections.Counter[str] = collections.Counter()
        self._following = 0

    def set_description(self, text: str) -> None:
        self._state.description = text

    def gather(self, phase: str, payload: bytes) -> Sequence[bytes] | None:
        key, router = self._enter(phase), self._router
        branch = [payload]
        self._wait(phase, key, router.children)
        for child in router.children:
            branch += unpack_branch(router.take_payload(self._state, key, child), len(router.tree.branch(child)))
        if self.rank == 0:
            return branch
        router.send_payload(router.parent, self._state, key, pack_branch(branch))
        router.flush()
        return None

    def scatter(self, phase: str, payloads: Sequence[bytes] | None) -> bytes:
        key, router = self._enter(phase), self._router
        branch = router.tree.branch(self.rank)
        if self.rank != 0:
            payloads = unpack_branch(self._receive(phase, key), len(branch))
        if payloads is None or len(payloads) != len(branch):
            raise ValueError(f"rank 0 must scatter exactly {self.world_size} payloads in {phase!r}")
        for child in router.children:
            of_child = [payloads[rank - self.rank] for rank in router.tree.branch(child)]
            router.send_payload(child, self._state, key, pack_branch(of_child))
        if router.children:
            router.flush()
        return payloads[0]

    def broadcast(self, phase: str, payload: bytes | None) -> bytes:
        key, router = self._enter(phase), self._router
        if self.rank != 0:
            payload = self._receive(phase, key)
        if payload is None:
            raise ValueError(f"rank 0 must broadcast a payload in {phase!r}")
        for child in router.children:
            router.send_payload(child, self._state, key, payload)
        if router.children:
            router.flush()
        return payload

    def fail(self, phase: str, error: BaseException) -> None:
        self._outcome.report_exception(error, phase)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            first = self._outcome.error
            if error is first:
                raise
            if first is None:
                first = self._outcome.report_exception(error, name)
            if first is error or not isinstance(error, Exception):
                # An interrupt or exit has been reported and propagates unchanged.
                raise
            raise first from (first.__cause__ or error)

    def check(self) -> None:
        self._enter("check")

    def host_of(self, rank: int) -> str:
        return self._router.identity(rank).host

    def streams(self) -> Streams:
        if self._streams is None:
            self._enter("streams")
            self._streams = SocketStreams(self._network, self._outcome)
        return self._streams

    def follow(self, kind: str, *, deadline_s: float, is_patient: bool = False) -> SocketOperation:
        self._following += 1
        prefix = f"{self._state.prefix}/{self._following}>{kind}/0"
        return SocketOperation(self._router, self._network, prefix, deadline_s, is_patient=is_patient)

    def wait_for_others_to_leave(self, timeout_s: float) -> None:
        self._router.wait_for_others(self._state, timeout_s)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._streams is not None:
            self._streams.close()
            self._streams = None
        self._router.leave(self._state)
        # The traceback of an error holds the frames of the failed phase, and so everything that they refer to.
        self._outcome.clear()

    def _enter(self, phase: str) -> str:
        """Begin an exchange; return the name of this repetition of it."""
        if self._outcome.error is not None:
            raise self._outcome.error
        if self._is_closed:
            raise ControlError(f"this {self._state.kind} is closed; {phase} cannot begin")
        self._state.phase = phase
        self._outcome.raise_failure()
        self._phases[phase] += 1
        return f"{phase}~{self._phases[phase]}" if self._phases[phase] > 1 else phase

    def _receive(self, phase: str, key: str) -> bytes:
        parent = self._router.parent
        self._wait(phase, key, [parent])
        return self._router.take_payload(self._state, key, parent)

    def _wait(self, phase: str, key: str, senders: list[int]) -> None:
        """Wait until the parent or all children have sent their payload."""
        router, state = self._router, self._state
        is_for_children = senders is router.children
        start = time.monotonic()
        next_note = start + self._note_interval_s
        limit: TimeLimit
        if self._is_patient:
            limit = PatientTimeLimit(self._deadline_s, router, lambda: router.missing(state, key, senders))
        elif is_for_children:
            limit = TimeLimit(self._deadline_s, router, lambda: router.missing(state, key, senders))
        else:
            limit = ParentTimeLimit(self._deadline_s, router)

        def has_changed() -> bool:
            missing = router.missing(state, key, senders)
            return not missing or state.failure is not None or any(router.is_lost(state, peer) for peer in missing)

        while missing := router.missing(state, key, senders):
            self._outcome.raise_failure()
            for peer in missing:
                if router.is_lost(state, peer):
                    self._outcome.raise_record(router.loss_record(state, peer, phase))
            now = time.monotonic()
            if now - start > limit.seconds(now - start):
                self._raise_deadline(phase, missing, now - start, is_for_children=is_for_children)
            if router.children and now > next_note:
                next_note = now + self._note_interval_s
                self._send_note(phase, missing, is_for_children=is_for_children)
            router.wait_until(has_changed, WAIT_CHECK_S)
            router.check_processes(missing)

    def _send_note(self, phase: str, missing: list[int], *, is_for_children: bool) -> None:
        if is_for_children:
            steps = [WaitStep(self.rank, phase, self._late_ranks(missing))]
        else:
            steps = [WaitStep(self.rank, phase, missing), *self._note_of(self._router.parent)]
        self._router.send_note(self._state, phase, steps, to_parent=is_for_children)

    def _late_ranks(self, children: list[int]) -> list[int]:
        """For each child, the ranks that it waits for; the child itself if it has not sent a note."""
        late: list[int] = []
        for child in children:
            late += [rank for step in self._note_of(child) for rank in step.missing] or [child]
        return late

    def _note_of(self, peer: int) -> list[WaitStep]:
        return self._router.note(self._state, peer, NOTE_LIFETIME_INTERVALS * self._note_interval_s)

    def _raise_deadline(self, phase: str, missing: list[int], waited_s: float, *, is_for_children: bool) -> NoReturn:
        if self._is_patient:
            silent = [peer for peer in missing if self._router.silent_s(peer) > self._deadline_s]
            self._outcome.raise_deadline(phase, silent, context=self._router.describe_silence(silent))
        if is_for_children:
            silence = self._router.describe_silence(missing)
            self._outcome.raise_deadline(phase, self._late_ranks(missing), context=silence)
        parent = self._router.parent
        context = [
            f", which itself waits in {step.phase} for rank(s) {format_ranks(step.missing)}"
            for step in self._note_of(parent)
        ]
        context.append(self._router.describe_silence([parent]))
        self._outcome.raise_deadline(phase, missing, waited_s=min(waited_s, self._deadline_s), context="".join(context))


class TimeLimit:
    """How long a rank waits for its children, which it probes meanwhile."""

    def __init__(self, deadline_s: float, router: Router, missing: Callable[[], list[int]]) -> None:
        self.deadline_s = deadline_s
        self._router, self._missing = router, missing
        self._probe_at_s = deadline_s / 2
        self._has_probed = False

    def seconds(self, waited_s: float) -> float:
        """Return the limit, of which ``waited_s`` has passed."""
        if not self._has_probed and waited_s >= self._probe_at_s:
            self._has_probed = True
            for peer in self._missing():
                self._router.probe(peer)
        return self.deadline_s


class ParentTimeLimit(TimeLimit):
    """How long a rank waits for its parent.

    It waits longer than the deadline, so that the parent decides which rank is late, but only for a parent whose
    process answers a probe. A parent that has not answered since an earlier wait must answer at once.
    """

    def __init__(self, deadline_s: float, router: Router) -> None:
        super().__init__(deadline_s, router, lambda: [router.parent])
        self._was_silent = router.is_silent(router.parent)
        if self._was_silent:
            self._probe_at_s = 0.0

    def seconds(self, waited_s: float) -> float:
        super().seconds(waited_s)
        router = self._router
        if self._has_probed and router.is_silent(router.parent):
            return min(self.deadline_s, PROBE_ANSWER_S) if self._was_silent else self.deadline_s
        return self.deadline_s + ROOT_GRACE_S + (router.tree.depth(router.rank) - 1) * STEP_GRACE_S


class PatientTimeLimit(TimeLimit):
    """How long a rank waits for others that may be busy for any time: until one has not answered a probe."""

    def __init__(self, deadline_s: float, router: Router, missing: Callable[[], list[int]]) -> None:
        super().__init__(deadline_s, router, missing)
        self._probe_at_s = 0.0

    def seconds(self, waited_s: float) -> float:
        router, peers = self._router, self._missing()
        if any(router.silent_s(peer) > self.deadline_s for peer in peers):
            return 0.0
        if waited_s >= self._probe_at_s:
            self._probe_at_s = waited_s + self.deadline_s / PROBES_PER_DEADLINE
            for peer in peers:
                router.probe(peer)
        return math.inf
