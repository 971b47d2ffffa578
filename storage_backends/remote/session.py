"""The one layer that sends requests to remote stores, and repeats them: when, and for how long.

The clients' own retries are off, so nothing multiplies. A request gets a time limit from the rates of earlier ones. One
that takes much longer than they did is sent a second time while the first is running (Dean and Barroso, "The Tail at
Scale", CACM 2013), so that a single slow server or connection does not stall a save.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import stat
import statistics
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fsspec.asyn import get_loop
from fsspec.utils import tokenize

from ...errors import StorageError, UnansweredError
from ...runtime.waiting import track_request
from .failures import Failure, Meaning, Secrets, storage_error

_T = TypeVar("_T")
_S = TypeVar("_S", bound="EndpointSession")

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
_MAX_SESSIONS = 8  # jobs that rotate tokens would otherwise keep one for each
_MAX_HEDGED = 0.1  # of all requests: where a whole store is slow, doubling its load does not help
_CREDENTIAL_VARIABLES = ("AWS_", "AZURE_", "GOOGLE_")
_CREDENTIAL_FILES = ("~/.aws/credentials", "~/.config/gcloud/application_default_credentials.json")


@dataclass(frozen=True)
class Request:
    """What is known about a request before it is sent.

    Attributes:
        action: What it is for, for messages: "reading 'k' in s3://b".
        deadline_s: How long all its tries may take together.
        kind: Requests of one kind have similar rates.
        nbytes: The bytes that it transfers.
        can_hedge: Whether two tries may run at the same time.
        try_s: How long one try may take; if it is None, the rates of earlier requests decide.
    """

    action: str
    deadline_s: float
    kind: str = "small"
    nbytes: int = 0
    can_hedge: bool = False
    try_s: float | None = None


class EndpointSession:
    """Sends requests of one endpoint until they succeed. Its coroutines run on fsspec's event loop.

    ``explain`` returns what an error means. If not ``repeats``, every request is sent once, and has the whole deadline.
    No message shows ``secrets``.
    """

    def __init__(
        self, explain: Callable[[BaseException], Failure], *, repeats: bool = True, secrets: Secrets | None = None
    ) -> None:
        self._explain, self._repeats, self._secrets = explain, repeats, secrets or Secrets()
        self._seconds_per_byte: dict[str, deque[float]] = {}
        self._has_answered = False
        self._sent = self._hedged = 0

    def explain(self, error: BaseException) -> Failure:
        """Return what an error means, without secrets."""
        found = self._explain(error)
        return replace(found, text=self._secrets.hide(found.text))

    def start(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Start a coroutine."""
        future = asyncio.run_coroutine_threadsafe(work, get_loop())
        track_request(future)
        return future

    def run(self, action: str, work: Coroutine[Any, Any, _T]) -> _T:
        """Wait for a coroutine. Raises ``StorageError``."""
        future: Future[_T] | None = None
        try:
            future = self.start(work)
            return future.result()
        except StorageError:
            raise
        except Exception as error:  # noqa: BLE001 - what it shows may be a secret
            raise self.error(error, action) from self._secrets.hide_in(error)
        except BaseException:
            if future is not None:
                future.cancel()
            raise

    def error(self, error: BaseException, action: str) -> StorageError:
        """Return the ``StorageError`` that ``error``, raised during ``action``, means."""
        if isinstance(error, StorageError):
            return error
        if isinstance(error, CancelledError):
            return StorageError(f"{action}: it was aborted")
        failure = self.explain(error)
        found = storage_error(failure, action, is_put=True)
        # A client that repeats requests itself may give up just before the deadline.
        found.is_late = isinstance(error, TimeoutError) or failure.meaning is Meaning.UNANSWERED
        return found

    async def repeat(self, request: Request, send: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Return the result of ``send``, and repeat it after errors that may pass.

        Raises:
            StorageError: No try succeeded before the deadline, or repeating it is useless; ``send`` raised the cause.
            UnansweredError: Of a put: the store did not reply to a try, which may still be at work there.
        """
        begun = time.monotonic()
        end = begun + request.deadline_s
        pause, limit, tries, is_open = _FIRST_PAUSE_S, self._limit(request), 0, False
        cause: tuple[BaseException, str] | None = None
        while True:
            tries += 1
            try:
                result = await self._send_once(request, send, min(limit, end - time.monotonic()))
            except StorageError:
                raise
            except Exception as error:  # noqa: BLE001 - what it shows may be a secret
                found = self.explain(error)
                shown = self._secrets.hide_in(error)
                is_unanswered = found.meaning is Meaning.UNANSWERED
                self._has_answered |= not is_unanswered
                is_open |= request.kind == "put" and is_unanswered
                left = end - time.monotonic()
                if not found.is_repeatable:
                    if is_open and found.meaning is Meaning.DENIED:
                        raise UnansweredError(f"{request.action}: {found.text}, after a try without reply") from shown
                    raise storage_error(found, request.action, is_put=request.kind == "put") from shown
                # The last try may have had little time left, which says less than what the store replied before.
                cause = (shown, found.text) if cause is None or not isinstance(error, TimeoutError) else cause
                wait_s = random.uniform(pause / 2, pause)
                is_lost = not self._has_answered and tries >= _TRIES_OF_UNKNOWN_ENDPOINT
                if is_lost or left <= wait_s or not self._repeats:
                    taken = time.monotonic() - begun
                    kind = UnansweredError if is_open else StorageError
                    failure = kind(f"{request.action}: {cause[1]} ({tries} tries in {taken:.1f} s)")
                    failure.is_late = self._repeats or left <= 0
                    raise failure from cause[0]
                _log.info("%s: %s; trying again in %.1f s", request.action, found.text, wait_s)
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
        if request.try_s is not None or not self._repeats:
            return request.try_s or request.deadline_s
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


class Sessions:
    """The sessions of one kind of store in this process, by endpoint, credentials and options. Thread-safe.

    ``explain`` returns what an error means. ``variables`` are the beginnings of the names of environment variables that
    a session depends on.
    """

    def __init__(self, explain: Callable[[BaseException], Failure], *variables: str) -> None:
        self._explain, self._variables = explain, variables
        self._lock = threading.Lock()
        self._sessions: OrderedDict[str, EndpointSession] = OrderedDict()
        self._abandoned: list[EndpointSession] = []
        os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        """Drop a lock that a thread of the parent may have held, and the parent's sessions."""
        self._lock = threading.Lock()
        # Their event loops, sockets and locks belong to the parent. Finalizing them could hang, so keep them alive.
        self._abandoned += self._sessions.values()
        self._sessions.clear()

    def find(self, make: Callable[[], _S], where: str, *options: object) -> _S:
        """Return the session for these options, which ``make`` creates at the first use.

        Raises ``StorageError``, which names the store (``where``).
        """
        try:
            return self._find(make, options)
        except Exception as error:  # noqa: BLE001 - what it shows may be a secret
            secrets = Secrets(options={"": options})
            text = f"opening {where}: {secrets.hide(self._explain(error).text)}"
            raise StorageError(text) from secrets.hide_in(error)

    def _find(self, make: Callable[[], _S], options: tuple[object, ...]) -> _S:
        environment = sorted(item for item in os.environ.items() if item[0].startswith(self._variables))
        token = tokenize(options, environment)
        with self._lock:
            found: Any = self._sessions.pop(token, None) or make()
            self._sessions[token] = found
            if len(self._sessions) > _MAX_SESSIONS:
                self._sessions.popitem(last=False)
            session: _S = found
            return session


def states_of_files(options: Mapping[str, Any]) -> list[tuple[str | int, ...]]:
    """Return the state of each file that may contain credentials of a client with these options.

    Clients read such a file once. When its state changes, create a new one.
    """
    named = [value for name, value in os.environ.items() if name.startswith(_CREDENTIAL_VARIABLES)]
    found: list[tuple[str | int, ...]] = []
    for path in (*map(os.path.expanduser, _CREDENTIAL_FILES), *named, *_strings(options)):
        with suppress(OSError, ValueError):
            state = os.stat(path)
            if stat.S_ISREG(state.st_mode):
                found.append((path, state.st_ino, state.st_mtime_ns, state.st_size))
    return found


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        for one in value.values():
            yield from _strings(one)
    elif isinstance(value, str):
        yield value
