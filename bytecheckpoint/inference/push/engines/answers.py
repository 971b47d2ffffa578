"""Answers of all workers of a vLLM engine.

vLLM's RPC returns only the answers of the first data-parallel replica. Where there are several, each worker sends its
answer over a TCP connection to an endpoint that came with the request.
"""

from __future__ import annotations

import socket
import struct
import threading
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import closing, suppress
from typing import Any, Literal

from ....control.connections import Endpoint, at_most, receive, send
from ....errors import DeadlineError, EngineError
from ..transports.acceptor import Acceptor, connect
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
        super().__init__()

    @property
    def where(self) -> dict[str, Any]:
        """The arguments of ``post_answer`` in the workers, as plain data."""
        hosts, port, key = self.endpoint
        return {"hosts": list(hosts), "port": port, "key": key.hex()}

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


def post_answer(hosts: Sequence[str], port: int, key: str, number: int, workers: int, answer: str) -> None:
    """Send a worker's answer to the sender of a request. Raises ``EngineError`` when the sender cannot be reached."""
    data = answer.encode()
    with connect(Endpoint(hosts, port, bytes.fromhex(key))) as connection:
        try:
            send(connection, _HEAD.pack(number, workers, len(data)) + data, at_most(_ANSWER_S))
        except OSError as error:
            raise EngineError(f"the connection to the sender broke: {error}") from error


class MissingMethod(EngineError):
    """The engine has no such method, or its server no such endpoint."""


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
            self._rpc([request, answers.where], budget.left)
            return answers.wait(self.name, budget)

    def pause(self, timeout_s: float) -> None:
        if self.pause_mode is None:
            return
        try:
            self._run("pause_generation", timeout_s, mode=self.pause_mode)
        except DeadlineError as error:
            if self.pause_mode != "wait":
                raise
            raise DeadlineError(
                f"{self.name} did not pause within {timeout_s:.3g} s: its running requests have not ended, or one of "
                'its workers is stopped; pause="abort" and pause="keep" wait for no request'
            ) from error

    def resume(self, version: int | str | None, timeout_s: float, *, changed: bool) -> None:
        if changed and self.pause_mode in (None, "keep"):  # in other modes, pausing has cleared it
            # Paused requests hold blocks, which are computed again with the new weights.
            options = {} if self.pause_mode is None else {"reset_running_requests": True}
            if self._run("reset_prefix_cache", timeout_s, **options) is False:
                raise EngineError(
                    f"{self.name} did not drop its prefix cache, and would answer with the old weights; has it "
                    "unfinished requests?"
                )
        if version is not None:
            with suppress(MissingMethod):  # old releases have no versions of weights
                self._run("update_weight_version", timeout_s, str(version))
        if self.pause_mode is not None:
            self._run("resume_generation", timeout_s)
