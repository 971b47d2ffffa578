"""vLLM engines that are reached by calls of their methods: of this process, or behind a remote handle."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any

from ....errors import DeadlineError, EngineError, UsageError
from ....runtime.threads import run_daemon
from .answers import METHOD, CollectiveRpc, MissingMethod, PauseMode


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
                kind = MissingMethod if isinstance(error, AttributeError) else EngineError
                raise kind(f"{self.name}: {type(error).__name__}: {error}") from error
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
