"""Engines as a sender sees them: something that carries a request to each of its workers, and can be paused."""

from __future__ import annotations

import json
import queue
import secrets
import threading
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import quote

from ...errors import BytecheckpointError, DeadlineError, EngineError
from .messages import Failure, decode, encode
from .receiver import PROTOCOL

__all__ = ["Budget", "Engine", "HttpEngine", "LocalEngine", "PauseMode", "ask", "ask_all", "failure_of"]

PauseMode = Literal["wait", "abort", "keep"]

_METHOD = "bcp_push"


class Engine(ABC):
    """One inference engine. Answers come one from each worker, always in the same order."""

    name: str

    @abstractmethod
    def call(self, request: str, timeout_s: float) -> list[str]:
        """Have every worker answer ``request``. Raises ``DeadlineError``, ``EngineError`` where no engine is."""

    @abstractmethod
    def pause(self, timeout_s: float) -> None:
        """Stop generating, before weights change."""

    @abstractmethod
    def resume(self, version: int | str | None, timeout_s: float, *, changed: bool) -> None:
        """Go on with ``version``. Where weights have ``changed``, what was cached of others is dropped first."""

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Never raises."""


class HttpEngine(Engine):
    """vLLM's server, with ``VLLM_SERVER_DEV_MODE=1`` and ``--worker-extension-cls
    bytecheckpoint.inference.vllm_worker.WorkerExtension``. Proxies of the environment are not used.

    ``pause`` is what becomes of requests under way when weights change: "wait" until they are answered by the old ones,
    "abort" them, or "keep" them and go on with the new ones, on top of what the old ones have cached for them.
    """

    def __init__(self, url: str, *, pause: PauseMode = "wait") -> None:
        self.name = url.rstrip("/")
        self._pause_mode = pause
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def call(self, request: str, timeout_s: float) -> list[str]:
        # No timeout for vLLM itself: after one, it takes late answers for those of its next request.
        answer = self._post("/collective_rpc", {"method": _METHOD, "args": [request]}, timeout_s)
        results = answer.get("results") if isinstance(answer, dict) else None
        if not isinstance(results, list):
            raise EngineError(f"{self.name} gave no results for {_METHOD}: {answer!s:.200}")
        return [str(result) for result in results]

    def pause(self, timeout_s: float) -> None:
        self._post(f"/pause?mode={quote(self._pause_mode)}", None, timeout_s)

    def resume(self, version: int | str | None, timeout_s: float, *, changed: bool) -> None:
        if changed and self._pause_mode == "keep":
            self._post("/reset_prefix_cache", None, timeout_s)
        if changed and version is not None:
            self._post("/update_weight_version", {"new_version": str(version)}, timeout_s)
        self._post("/resume", None, timeout_s)

    def native(self, step: str, document: Mapping[str, Any], timeout_s: float) -> None:
        """A step of vLLM's own weight transfer."""
        self._post(f"/{step}", document, timeout_s)

    def _post(self, path: str, document: Mapping[str, Any] | None, timeout_s: float) -> Any:
        data = b"" if document is None else json.dumps(document).encode()
        request = urllib.request.Request(self.name + path, data, {"Content-Type": "application/json"}, method="POST")
        try:
            with self._opener.open(request, timeout=timeout_s) as response:
                body = response.read()
        except urllib.error.HTTPError as error:
            with error:
                raise self._refused(path, error.code, error.read()[:2000].decode(errors="replace")) from None
        except TimeoutError:
            raise self._too_late(path, timeout_s) from None
        except (urllib.error.URLError, OSError) as error:
            if isinstance(getattr(error, "reason", None), TimeoutError):
                raise self._too_late(path, timeout_s) from None
            raise EngineError(f"{self.name}{path} cannot be reached: {error}; is the engine up?") from error
        try:
            return json.loads(body) if body else None
        except ValueError as error:
            raise EngineError(f"{self.name}{path} answered with no JSON: {body[:200]!r}") from error

    def _refused(self, path: str, code: int, text: str) -> EngineError:
        hint = ""
        if code == 404:
            hint = "; start vLLM with VLLM_SERVER_DEV_MODE=1"
        elif path == "/collective_rpc":
            hint = (
                "; its log says why. Was it started with --worker-extension-cls "
                "bytecheckpoint.inference.vllm_worker.WorkerExtension, and are all workers alive?"
            )
        return EngineError(f"{self.name}{path} answered {code}: {text}{hint}")

    def _too_late(self, path: str, timeout_s: float) -> DeadlineError:
        return DeadlineError(_late(f"{self.name}{path}", timeout_s))


class LocalEngine(Engine):
    """A ``vllm.LLM`` of this process, made with ``worker_extension_cls="bytecheckpoint.inference.vllm_worker.
    WorkerExtension"``. Its user generates before or after a push, not meanwhile."""

    def __init__(self, llm: Any) -> None:
        self.name = "the engine of this process"
        self._llm = llm
        self._waiting_for: threading.Thread | None = None

    def call(self, request: str, timeout_s: float) -> list[str]:
        answers = self._bounded(lambda: self._llm.collective_rpc(_METHOD, args=(request,)), timeout_s)
        return [str(answer) for answer in answers]

    def pause(self, timeout_s: float) -> None:
        """Nothing is under way while its user pushes."""

    def resume(self, version: int | str | None, timeout_s: float, *, changed: bool) -> None:
        if changed:
            self._bounded(self._llm.reset_prefix_cache, timeout_s)

    def native(self, step: str, document: Mapping[str, Any], timeout_s: float) -> None:
        """A step of vLLM's own weight transfer."""
        method = getattr(self._llm, step)
        arguments = (document,) if step == "update_weights" else document.values()
        self._bounded(lambda: method(*arguments), timeout_s)

    def _bounded(self, ask: Any, timeout_s: float) -> Any:
        """``ask()``, which may never return: vLLM waits for a stopped worker for ever."""
        if self._waiting_for is not None and self._waiting_for.is_alive():
            raise EngineError(f"{self.name} has not yet answered an earlier request; is one of its workers stopped?")
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def run() -> None:
            try:
                answers.put((ask(), None))
            except BaseException as error:  # noqa: BLE001 - raised by who waits
                answers.put((None, error))

        # A daemon, as the interpreter must be able to end while a worker is stopped.
        thread = threading.Thread(target=run, name="bcp-push-call", daemon=True)
        thread.start()
        try:
            answer, error = answers.get(timeout=timeout_s)
        except queue.Empty:
            self._waiting_for = thread
            raise DeadlineError(_late(self.name, timeout_s)) from None
        thread.join()
        if error is not None:
            raise EngineError(f"{self.name}: {type(error).__name__}: {error}") from error
        return answer


def _late(who: str, timeout_s: float) -> str:
    return f"{who} did not answer within {timeout_s:.3g} s; is one of its workers stopped?"


def ask_all(engine: Engine, kind: str, message: Mapping[str, Any], timeout_s: float) -> list[dict[str, Any]]:
    """Every worker's answer, failures too. Raises where there is no answer, or one to another request."""
    nonce = secrets.token_hex(8)
    texts = engine.call(encode({**message, "kind": kind, "nonce": nonce, "protocol": PROTOCOL}), timeout_s)
    answers = [decode(text) for text in texts]
    if not answers or any(answer.get("nonce", nonce) != nonce for answer in answers):
        raise EngineError(f"{engine.name}: answers to another request came for {kind!r}; restart the engine")
    return answers


def ask(engine: Engine, kind: str, message: Mapping[str, Any], timeout_s: float) -> list[dict[str, Any]]:
    """Every worker's answer. Raises the first one's failure, naming the worker."""
    answers = ask_all(engine, kind, message, timeout_s)
    for number, answer in enumerate(answers):
        error = failure_of(engine, number, answer)
        if error is not None:
            raise error
    return answers


def failure_of(engine: Engine, number: int, answer: Mapping[str, Any]) -> BytecheckpointError | None:
    """The error that a worker answered with."""
    if "failure" not in answer:
        return None
    where = f"worker {number} of {engine.name} (process {answer['pid']} on {answer['host']})"
    return Failure(**answer["failure"]).error(where)


class Budget:
    """Seconds for a stage of several requests, each getting what is left."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def over(self) -> bool:
        return time.monotonic() >= self._end

    @property
    def left(self) -> float:
        return max(self._end - time.monotonic(), 0.05)
