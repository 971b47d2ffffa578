"""vLLM engines that are reached by calls of their methods: of this process, behind a remote handle, or by HTTP.

vLLM's RPC returns only the answers of the first data-parallel replica. Where there are several, each worker sends its
answer over a TCP connection to an endpoint that came with the request.
"""

from __future__ import annotations

import asyncio
import inspect
import socket
import struct
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import closing, suppress
from typing import Any, Literal

from ....control.acceptor import Acceptor, connect
from ....control.connections import Endpoint, at_most, receive, send
from ....errors import DeadlineError, EngineError, UsageError
from ....runtime.threads import run_daemon
from ..transports.base import hosts_of_engine
from .base import Budget, Engine

METHOD = "bcp_push"
"""The method of ``WorkerExtension``."""

REPLICATED = "this engine has replicas"
"""The answer to a request without an endpoint where vLLM would lose answers. The worker did not handle the request."""

PauseMode = Literal["wait", "abort", "keep"]

_HEAD = struct.Struct("!IIQ")  # worker, number of workers, bytes of the answer
_MAX_ANSWER_BYTES = 1 << 28
_ANSWER_S = 60.0  # of silence in the middle of an answer
_LATE_S = 10.0  # for answers after vLLM has returned, which workers sent before


class Answers(Acceptor):
    """Receives the answers of all workers to one request, in any order."""

    def __init__(self) -> None:
        self._found: dict[int, str] = {}
        self._workers = 1
        self._changed = threading.Condition()
        super().__init__(hosts_of_engine())

    def wait(self, name: str, budget: Budget) -> list[str]:
        """Return the answers, by worker, after vLLM has handled the request. Raises ``DeadlineError``."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._found) >= self._workers, min(budget.left, _LATE_S)):
                raise DeadlineError(
                    f"{len(self._found)} of {self._workers} workers of {name} have sent their answer to this host in "
                    f"time; can they reach port {self.endpoint.port} of {', '.join(self.endpoint.addresses)}?"
                )
            return [self._found[number] for number in sorted(self._found)]

    def _serve(self, connection: socket.socket) -> None:
        wait = at_most(_ANSWER_S)
        number, workers, length = _HEAD.unpack(receive(connection, _HEAD.size, wait))
        if length > _MAX_ANSWER_BYTES:
            raise EngineError(f"an answer of {length} bytes is refused")
        text = receive(connection, length, wait).decode()
        with self._changed:
            self._found[number], self._workers = text, workers
            self._changed.notify_all()


def post_answer(where: str, number: int, workers: int, answer: str) -> None:
    """Send a worker's answer to the sender of a request, an endpoint as text. Raises ``EngineError`` when the sender
    cannot be reached."""
    data = answer.encode()
    with connect(Endpoint.of_text(where)) as connection:
        try:
            send(connection, _HEAD.pack(number, workers, len(data)) + data, at_most(_ANSWER_S))
        except OSError as error:
            raise EngineError(f"the connection to the sender broke: {error}") from error


class CollectiveRpc(Engine):
    """A vLLM engine whose workers have the worker extension. Without a ``pause_mode``, its owner generates only before
    and after a push."""

    pause_mode: PauseMode | None
    _is_replicated = False

    @abstractmethod
    def _rpc(self, arguments: Sequence[Any], timeout_s: float) -> list[Any]:
        """Call ``METHOD`` in all workers. Returns the results of the first replica's."""

    @abstractmethod
    def _run(self, method: str, timeout_s: float, *arguments: Any, **options: Any) -> Any:
        """Call a method of the engine."""

    def call(self, request: str, timeout_s: float) -> list[str]:
        budget = Budget(timeout_s)
        if not self._is_replicated:
            found = [str(answer) for answer in self._rpc([request], budget.left)]
            if REPLICATED not in found:
                return found
            self._is_replicated = True
        # Each request has its own listener and key, so late answers to an earlier one are refused.
        with closing(Answers()) as answers:
            self._rpc([request, answers.endpoint.text()], budget.left)
            return answers.wait(self.name, budget)

    def note_pause(self, timeout_s: float, *, left_paused: bool) -> None:
        self.stays_paused = False
        if self.pause_mode is not None and not left_paused:
            self.stays_paused = bool(self._run("is_paused", timeout_s))

    def pause(self, timeout_s: float) -> None:
        if self.pause_mode is None:
            return
        mode = "keep" if self.stays_paused else self.pause_mode  # requests may still end in the owner's pause
        try:
            self._run("pause_generation", timeout_s, mode=mode)
        except DeadlineError as error:
            if mode != "wait":
                raise
            raise DeadlineError(
                f"{self.name} did not pause within {timeout_s:.3g} s: its running requests have not ended, or one of "
                'its workers is stopped; pause="abort" and pause="keep" wait for no request'
            ) from error

    def resume(self, version: int | str | None, timeout_s: float, *, changed: bool) -> None:
        if changed and (self.pause_mode in (None, "keep") or self.stays_paused):  # else, pausing has cleared it
            # Paused requests hold blocks, which are computed again with the new weights.
            options = {} if self.pause_mode is None else {"reset_running_requests": True}
            if self._run("reset_prefix_cache", timeout_s, **options) is False:
                raise EngineError(
                    f"{self.name} did not drop its prefix cache, and would answer with the old weights; has it "
                    "unfinished requests?"
                )
        if version is not None:
            self._run("update_weight_version", timeout_s, str(version))
        if self.pause_mode is not None and not self.stays_paused:
            self._run("resume_generation", timeout_s)


class RpcEngine(CollectiveRpc):
    """A ``vllm.LLM`` or ``AsyncLLM`` behind a handle, such as a Ray actor.

    It has no lease: after the sender is killed while weights change, an ``AsyncLLM`` stays paused until the next push
    or ``Pusher.resume``.

    Args:
        call: ``call(method, *arguments, **options)`` runs this method of the engine and returns its result.
        name: Identifies the engine in errors and reports.
        pause: For an ``AsyncLLM``, as for ``HttpEngine``. None for an ``LLM``; its owner generates before or after a
            push, not during one.
        identity: What only this engine has, such as the id of its actor, so that several ranks may pass it. By default,
            an engine that another rank passes is another one, and refused.

    Example:
        >>> def call(method, *arguments, **options):
        ...     return ray.get(getattr(actor, method).remote(*arguments, **options))
        >>> engine = RpcEngine(call, name="actor 0")   # actor = ray.remote(vllm.LLM).remote(...)
    """

    def __init__(
        self, call: Callable[..., Any], *, name: str, pause: PauseMode | None = None, identity: str | None = None
    ) -> None:
        self.name = name
        self._identity, self.resumes = identity, pause is not None
        self._call, self.pause_mode = call, pause
        self._pending: Future[Any] | None = None

    @property
    def identity(self) -> str:
        return super().identity if self._identity is None else self._identity

    def _rpc(self, arguments: Sequence[Any], timeout_s: float) -> list[Any]:
        return list(self._run("collective_rpc", timeout_s, METHOD, args=tuple(arguments)))

    def _run(self, method: str, timeout_s: float, *arguments: Any, **options: Any) -> Any:
        """Call a method that may never return: vLLM waits for a stopped worker without a bound."""
        if self._pending is not None and not wait([self._pending], timeout_s).done:
            raise EngineError(f"{self.name} has not answered an earlier request yet; is one of its workers stopped?")
        self._pending = run_daemon(lambda: self._call(method, *arguments, **options), "bcp-push-call")
        if not wait([self._pending], timeout_s).done:
            raise DeadlineError(f"{self.name} did not answer within {timeout_s:.3g} s; is one of its workers stopped?")
        ended, self._pending = self._pending, None  # an error would keep the memory of its frames
        error = ended.exception()  # an interrupt of this thread is none of the engine's
        try:
            if error is not None:
                raise EngineError(f"{self.name}: {type(error).__name__}: {error}") from error
            return ended.result()
        finally:
            del error, ended


class LocalEngine(RpcEngine):
    """A ``vllm.LLM`` or ``AsyncLLM`` of this process.

    Args:
        llm: An ``LLM``, which must not generate during a push, or an ``AsyncLLM``. Made with
            ``worker_extension_cls="bytecheckpoint.inference.vllm.worker.WorkerExtension"``.
        pause: For an ``AsyncLLM``, as for ``HttpEngine``.
        loop: The event loop in which the ``AsyncLLM`` runs, by default the one that runs now. Push in another thread
            (``await asyncio.to_thread(pusher.push, model)``), because the loop must run during a push.

    Raises:
        UsageError: An ``AsyncLLM`` without a loop.
    """

    def __init__(self, llm: Any, *, pause: PauseMode = "wait", loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        if inspect.iscoroutinefunction(llm.collective_rpc):
            with suppress(RuntimeError):
                loop = loop or asyncio.get_running_loop()
            if loop is None:
                raise UsageError("an AsyncLLM is called in its event loop; pass loop=, or create this engine there")
            self._loop = loop
        self._llm = llm
        name = "the engine of this process"
        super().__init__(self._call_local, name=name, pause=None if self._loop is None else pause)

    def call(self, request: str, timeout_s: float) -> list[str]:
        with suppress(RuntimeError):
            if self._loop is not None and asyncio.get_running_loop() is self._loop:
                raise UsageError("a push blocks the event loop that the engine needs; call it by asyncio.to_thread")
        return super().call(request, timeout_s)

    def _call_local(self, method: str, *arguments: Any, **options: Any) -> Any:
        found = getattr(self._llm, method)(*arguments, **options)
        return found if self._loop is None else asyncio.run_coroutine_threadsafe(found, self._loop).result()
