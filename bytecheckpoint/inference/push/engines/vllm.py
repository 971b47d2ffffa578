"""vLLM engines: a server over HTTP, an ``LLM`` of this process, and both over vLLM's own weight transfer.

vLLM's weight transfer (``--weight-transfer-config '{"backend": "bcp"}'``) carries requests to its workers by
``update_weights``, but returns no answers. Each worker sends its answer over a TCP connection to an endpoint that came
with the request.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import struct
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Literal
from urllib.parse import quote

from ....errors import DeadlineError, EngineError
from ..daemon import run_daemon
from ..transports.connection import (
    NONCE_BYTES,
    Endpoint,
    authenticate_client,
    connect,
    local_addresses,
    receive,
)
from .base import Budget, Engine

__all__ = ["HttpEngine", "LocalEngine", "NativeEngine", "PauseMode", "post_answer"]

PauseMode = Literal["wait", "abort", "keep"]

_METHOD = "bcp_push"
_HEAD = struct.Struct("!IIQ")  # worker, number of workers, bytes of the answer
_MAX_ANSWER_BYTES = 1 << 30
_POLL_S = 0.1


class HttpEngine(Engine):
    """A vLLM server.

    Start it with ``VLLM_SERVER_DEV_MODE=1`` and ``--worker-extension-cls
    bytecheckpoint.inference.vllm.worker.WorkerExtension``. Proxy settings of the environment are ignored.

    Args:
        url: The address of the server.
        pause: What happens to running requests when weights change. "wait" finishes them with the old weights, "abort"
            aborts them, and "keep" continues them with the new weights and the KV cache of the old ones.
    """

    _extension = "bytecheckpoint.inference.vllm.worker.WorkerExtension"

    def __init__(self, url: str, *, pause: PauseMode = "wait") -> None:
        self.name = url.rstrip("/")
        self._pause_mode = pause
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def call(self, request: str, timeout_s: float) -> list[str]:
        # vLLM gets no timeout: after one, it would take late answers for those of its next request.
        answer = self._post("/collective_rpc", {"method": _METHOD, "args": [request]}, timeout_s)
        results = answer.get("results") if isinstance(answer, dict) else None
        if not isinstance(results, list):
            raise EngineError(f"{self.name} returned no results for {_METHOD}: {answer!s:.200}")
        return [str(result) for result in results]

    def pause(self, timeout_s: float) -> None:
        self._post(f"/pause?mode={quote(self._pause_mode)}", None, timeout_s)

    def resume(self, version: int | str | None, timeout_s: float, *, changed: bool) -> None:
        if changed and self._pause_mode == "keep":
            self._post("/reset_prefix_cache", None, timeout_s)
        if changed and version is not None:
            self._post("/update_weight_version", {"new_version": str(version)}, timeout_s)
        self._post("/resume", None, timeout_s)

    def transfer_step(self, step: str, document: Mapping[str, Any], timeout_s: float) -> None:
        """Run a step of vLLM's own weight transfer.

        Args:
            step: The name of the step.
            document: Its arguments.
            timeout_s: The limit of the wait, in seconds.

        Raises:
            DeadlineError: vLLM did not answer in time.
            EngineError: The step failed.
        """
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
        except (urllib.error.URLError, OSError) as error:
            if isinstance(error, TimeoutError) or isinstance(getattr(error, "reason", None), TimeoutError):
                raise _late(f"{self.name}{path}", timeout_s) from None
            raise EngineError(f"{self.name}{path} cannot be reached: {error}; is the engine up?") from error
        try:
            return json.loads(body) if body else None
        except ValueError as error:
            raise EngineError(f"{self.name}{path} did not answer with JSON: {body[:200]!r}") from error

    def _refused(self, path: str, code: int, text: str) -> EngineError:
        hint = ""
        if code == 404:
            hint = "; start vLLM with VLLM_SERVER_DEV_MODE=1"
        elif path == "/collective_rpc":
            hint = (
                f"; see its log for the reason. Was it started with --worker-extension-cls {self._extension}, and are "
                "all workers alive?"
            )
        return EngineError(f"{self.name}{path} answered {code}: {text}{hint}")


class LocalEngine(Engine):
    """A ``vllm.LLM`` of this process. The caller generates before or after a push, not during one.

    Args:
        llm: The ``LLM``, made with ``worker_extension_cls="bytecheckpoint.inference.vllm.worker.WorkerExtension"``.
    """

    def __init__(self, llm: Any) -> None:
        self.name = "the engine of this process"
        self._llm = llm
        self._pending: Future[Any] | None = None

    def call(self, request: str, timeout_s: float) -> list[str]:
        answers = self._bounded(lambda: self._llm.collective_rpc(_METHOD, args=(request,)), timeout_s)
        return [str(answer) for answer in answers]

    def pause(self, timeout_s: float) -> None:
        return  # no request runs during a push

    def resume(self, version: int | str | None, timeout_s: float, *, changed: bool) -> None:
        if changed:
            self._bounded(self._llm.reset_prefix_cache, timeout_s)

    def transfer_step(self, step: str, document: Mapping[str, Any], timeout_s: float) -> None:
        """Run a step of vLLM's own weight transfer.

        Args:
            step: The name of the step.
            document: Its arguments.
            timeout_s: The limit of the wait, in seconds.

        Raises:
            DeadlineError: vLLM did not answer in time.
            EngineError: The step failed.
        """
        method = getattr(self._llm, step)
        arguments = (document,) if step == "update_weights" else document.values()
        self._bounded(lambda: method(*arguments), timeout_s)

    def _bounded(self, function: Callable[[], Any], timeout_s: float) -> Any:
        """Call a function that may never return: vLLM waits for a stopped worker without a bound."""
        if self._pending is not None and not self._pending.done():
            raise EngineError(f"{self.name} has not answered an earlier request yet; is one of its workers stopped?")
        self._pending = run_daemon(function, "bcp-push-call")
        if not wait([self._pending], timeout_s).done:
            raise _late(self.name, timeout_s)
        try:
            return self._pending.result()
        except BaseException as error:
            raise EngineError(f"{self.name}: {type(error).__name__}: {error}") from error
        finally:
            self._pending = None  # an error would keep the memory of its frames


def _late(name: str, timeout_s: float) -> DeadlineError:
    return DeadlineError(f"{name} did not answer within {timeout_s:.3g} s; is one of its workers stopped?")


class NativeEngine(Engine):
    """A vLLM engine with the weight transfer backend "bcp" and no worker extension. Each push sets vLLM's own version
    of the weights.

    Args:
        engine: The engine, over HTTP or of this process.
    """

    def __init__(self, engine: HttpEngine | LocalEngine) -> None:
        self.name = engine.name
        self._engine = engine
        self._listener = socket.create_server(("", 0))

    def call(self, request: str, timeout_s: float) -> list[str]:
        budget = Budget(timeout_s)
        # A late answer to an earlier request has another key, and is refused.
        key = secrets.token_bytes(NONCE_BYTES)
        # The endpoint comes with each request, since several senders may use one engine in turn.
        info = {
            "request": request,
            "hosts": list(local_addresses()),
            "port": self._listener.getsockname()[1],
            "key": key.hex(),
        }
        # Answers arrive while vLLM still handles the request.
        has_failed = threading.Event()
        with ThreadPoolExecutor(1, thread_name_prefix="bcp-push-answers") as thread:
            answers = thread.submit(self._collect, key, budget, has_failed)
            try:
                # One session per request: a session that a dead sender leaves open would block the next one.
                self._engine.transfer_step("start_weight_update", {}, budget.left)
                self._engine.transfer_step("update_weights", {"update_info": info}, budget.left)
                self._engine.transfer_step("finish_weight_update", {"weight_version": None}, budget.left)
            except BaseException:
                has_failed.set()
                raise
            return answers.result()

    def pause(self, timeout_s: float) -> None:
        self._engine.pause(timeout_s)

    def resume(self, version: int | str | None, timeout_s: float, *, changed: bool) -> None:
        budget = Budget(timeout_s)
        if changed and version is not None:
            self._engine.transfer_step("start_weight_update", {}, budget.left)
            self._engine.transfer_step("finish_weight_update", {"weight_version": str(version)}, budget.left)
        self._engine.resume(None, budget.left, changed=changed)

    def close(self) -> None:
        self._listener.close()

    def _collect(self, key: bytes, budget: Budget, has_failed: threading.Event) -> list[str]:
        """Return the answers of all workers, by number, or an incomplete list after a failure."""
        found: dict[int, str] = {}
        workers = 1
        self._listener.settimeout(_POLL_S)
        while len(found) < workers and not has_failed.is_set():
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                if not budget.is_over:
                    continue
                raise DeadlineError(
                    f"{len(found)} of {workers} workers of {self.name} have sent their answer to this host in time; "
                    f"can they reach its port {self._listener.getsockname()[1]}?"
                ) from None
            with connection, contextlib.suppress(OSError, EngineError):
                connection.settimeout(budget.left)
                authenticate_client(connection, key)
                number, workers, length = _HEAD.unpack(receive(connection, _HEAD.size))
                if length > _MAX_ANSWER_BYTES:
                    raise EngineError(f"an answer of {length} bytes is refused")
                found[number] = receive(connection, length).decode()
        return [found[number] for number in sorted(found)]


def post_answer(hosts: Sequence[str], port: int, key: str, number: int, workers: int, answer: str) -> None:
    """Send a worker's answer to the sender of a request. Raises ``EngineError`` when the sender cannot be reached."""
    connection, where = connect(Endpoint(tuple(hosts), port, bytes.fromhex(key)))
    data = answer.encode()
    with connection:
        try:
            connection.sendall(_HEAD.pack(number, workers, len(data)) + data)
        except OSError as error:
            raise EngineError(f"the connection to the sender at {where} broke: {error}") from error
