"""The one layer that repeats requests: what may be repeated, when, and for how long.

The client's own retries are off, so nothing multiplies. A request gets a time limit from the rates of earlier ones. One
that takes much longer than they did is sent a second time while the first is running (Dean and Barroso, "The Tail at
Scale", CACM 2013), so that a single slow server or connection does not stall a save.
"""

from __future__ import annotations

import asyncio
import logging
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from ...errors import StorageError, UnansweredError, hide_userinfo
from .replies import describe, is_denied, is_repeatable, is_unanswered

__all__ = ["Request", "Retries"]

_T = TypeVar("_T")

_log = logging.getLogger(__name__)

_MIN_LIMIT_S = 10.0
_LIMIT_FACTOR = 4
_SLOWEST = 1e6  # bytes per second that are assumed before anything was measured
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.1, 5.0
_TRIES_OF_UNKNOWN_ENDPOINT = 3  # a wrong address fails in a second, not after the whole deadline
_SAMPLES = 64
_MIN_SAMPLE_BYTES = 1 << 20  # the time of a smaller request is latency, and its rate would allow a large one hours
_HEDGE_FACTOR = 3
_HEDGE_AFTER_S = 1.0
_HEDGE_SAMPLES = 8
_MAX_HEDGED = 0.1  # of all requests: where a whole store is slow, doubling its load does not help


@dataclass(frozen=True)
class Request:
    """What is known about a request before it is sent.

    Attributes:
        action: What it is for, for messages: "reading 'k' in s3://b".
        deadline_s: How long all its tries may take together.
        kind: Requests of one kind have similar rates.
        nbytes: The bytes that it transfers.
        can_hedge: Whether two tries may run at the same time.
    """

    action: str
    deadline_s: float
    kind: str = "small"
    nbytes: int = 0
    can_hedge: bool = False


class Retries:
    """Sends requests until they succeed. Used on one event loop only; shared by all that talk to one endpoint."""

    def __init__(self) -> None:
        self._seconds_per_byte: dict[str, deque[float]] = {}
        self._has_answered = False
        self._sent = self._hedged = 0

    async def run(self, request: Request, send: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Return the result of ``send``, and repeat it after errors that may pass.

        Raises:
            StorageError: No try succeeded before the deadline.
            UnansweredError: The same, of a put, and the store did not reply to a try, which may still be at work there.
            Exception: What ``send`` raised, if repeating it is useless.
        """
        begun = time.monotonic()
        end = begun + request.deadline_s
        pause, limit, tries, is_open = _FIRST_PAUSE_S, self._limit(request), 0, False
        cause: Exception | None = None
        while True:
            tries += 1
            try:
                result = await self._send_once(request, send, min(limit, end - time.monotonic()))
            except Exception as error:
                hide_userinfo(error)
                self._has_answered |= not is_unanswered(error)
                is_open |= request.kind == "put" and is_unanswered(error)
                if not is_repeatable(error):
                    if is_open and is_denied(error):
                        raise UnansweredError(
                            f"{request.action}: {describe(error)}, after a try without reply"
                        ) from error
                    raise
                # The last try may have had little time left, which says less than what the store replied before.
                cause = error if cause is None or not isinstance(error, TimeoutError) else cause
                left = end - time.monotonic()
                wait_s = random.uniform(pause / 2, pause)
                is_lost = not self._has_answered and tries >= _TRIES_OF_UNKNOWN_ENDPOINT
                if is_lost or left <= wait_s:
                    taken = time.monotonic() - begun
                    kind = UnansweredError if is_open else StorageError
                    failure = kind(f"{request.action}: {describe(cause)} ({tries} tries in {taken:.1f} s)")
                    failure.is_late = True
                    raise failure from cause
                _log.info("%s: %s; trying again in %.1f s", request.action, describe(error), wait_s)
                await asyncio.sleep(wait_s)
                pause = min(2 * pause, _MAX_PAUSE_S)
                if isinstance(error, TimeoutError):
                    limit *= 2
            else:
                self._has_answered = True
                return result

    async def _send_once(self, request: Request, send: Callable[[], Coroutine[Any, Any, _T]], limit_s: float) -> _T:
        self._sent += 1
        begun = time.monotonic()
        tasks = {asyncio.create_task(send())}
        try:
            hedge_s = self._hedge_delay(request)
            if hedge_s is not None and hedge_s < limit_s:
                done, _ = await asyncio.wait(tasks, timeout=hedge_s)
                if not done:
                    self._hedged += 1
                    _log.info("%s: slower than %d earlier ones; sending it again", request.action, _HEDGE_FACTOR)
                    tasks.add(asyncio.create_task(send()))
            result = await _first_success(tasks, begun + limit_s)
        finally:
            for task in tasks:
                task.cancel()
            for task in tasks:
                # Until a cancelled request has ended, it uses the caller's memory.
                with suppress(asyncio.CancelledError, Exception):
                    await task
        if request.nbytes:
            samples = self._seconds_per_byte.setdefault(request.kind, deque(maxlen=_SAMPLES))
            samples.append((time.monotonic() - begun) / max(request.nbytes, _MIN_SAMPLE_BYTES))
        return result

    def _limit(self, request: Request) -> float:
        samples = self._seconds_per_byte.get(request.kind)
        expected = request.nbytes * (statistics.median(samples) if samples else 1 / _SLOWEST)
        return max(_MIN_LIMIT_S, _LIMIT_FACTOR * expected)

    def _hedge_delay(self, request: Request) -> float | None:
        samples = self._seconds_per_byte.get(request.kind, ())
        if not request.can_hedge or len(samples) < _HEDGE_SAMPLES or self._hedged >= _MAX_HEDGED * self._sent:
            return None
        return max(_HEDGE_AFTER_S, _HEDGE_FACTOR * request.nbytes * statistics.median(samples))


async def _first_success(tasks: set[asyncio.Task[_T]], end: float) -> _T:
    """Return the first result; raise the last failure once all have failed, and ``TimeoutError`` at ``end``."""
    pending, failure = set(tasks), None
    while pending:
        done, pending = await asyncio.wait(
            pending, timeout=max(0.0, end - time.monotonic()), return_when=asyncio.FIRST_COMPLETED
        )
        if not done:
            raise TimeoutError("the store did not answer in time")
        for task in done:
            failure = task.exception()
            if failure is None:
                return task.result()
    assert failure is not None
    raise failure
