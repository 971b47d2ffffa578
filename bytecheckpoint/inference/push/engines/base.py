"""The interface of an inference engine, and requests to its workers."""

from __future__ import annotations

import os
import secrets
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

from ....errors import BytecheckpointError, EngineError, StateError
from ..messages import PROTOCOL, Failure, decode, encode

__all__ = ["Budget", "Engine", "Wrapper", "ask", "ask_all", "check_awake", "failure_of"]

_MIN_WAIT_S = 0.05


class Engine(ABC):
    """One inference engine, as the coordinator of a push reaches it. ``name`` identifies it in errors and reports."""

    name: str
    resumes = True
    """Whether the engine generates after ``resume``, and not only when its owner makes it."""

    @abstractmethod
    def call(self, request: str, timeout_s: float) -> list[str]:
        """Pass a request to ``Receiver.answer`` in every worker.

        Args:
            request: Text, without line breaks.
            timeout_s: The limit of the wait, in seconds.

        Returns:
            One response per worker, always in the same order.

        Raises:
            DeadlineError: A worker did not answer in time.
            EngineError: The engine cannot be reached.
        """

    @abstractmethod
    def pause(self, timeout_s: float) -> None:
        """Stop generating, before weights change.

        Args:
            timeout_s: The limit of the wait, in seconds.

        Raises:
            DeadlineError: The engine did not pause in time.
            EngineError: The engine cannot be reached.
        """

    @abstractmethod
    def resume(self, version: int | str | None, timeout_s: float, *, changed: bool) -> None:
        """Continue to generate.

        Args:
            version: The version that the engine serves now, or None if it is unknown or unchanged.
            timeout_s: The limit of the wait, in seconds.
            changed: Whether weights changed; the engine then drops what it cached with the old ones.

        Raises:
            DeadlineError: The engine did not resume in time.
            EngineError: The engine cannot be reached.
        """

    @property
    def identity(self) -> str:
        """Identifies the engine among those of all ranks. One without an address is another one in each process."""
        where = "" if self.address else f" (process {os.getpid()} on {socket.gethostname()})"
        return f"{self.name}{where}"

    @property
    def address(self) -> dict[str, Any] | None:
        """Plain data by which a worker can reach its own engine (``url``, ``pause`` and others, see ``engine_at``).

        None if it cannot. The worker resumes the engine when the sender is killed in the middle of a push.
        """
        return None

    def close(self) -> None:  # noqa: B027 - most engines have nothing to close
        """Release local resources. Never raises."""


class Wrapper(Engine):
    """An engine that is reached, paused and resumed like another one."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.name, self._engine = name, engine

    def pause(self, timeout_s: float) -> None:
        self._engine.pause(timeout_s)

    def resume(self, version: int | str | None, timeout_s: float, *, changed: bool) -> None:
        self._engine.resume(version, timeout_s, changed=changed)

    @property
    def resumes(self) -> bool:  # type: ignore[override]
        return self._engine.resumes

    @property
    def identity(self) -> str:
        return self._engine.identity

    def close(self) -> None:
        self._engine.close()


def ask_all(engine: Engine, kind: str, message: Mapping[str, Any], timeout_s: float) -> list[dict[str, Any]]:
    """Return every worker's answer, including failures. Raises ``EngineError`` for answers to another request."""
    nonce = secrets.token_hex(8)
    texts = engine.call(encode({**message, "kind": kind, "nonce": nonce, "protocol": PROTOCOL}), timeout_s)
    answers = [decode(text) for text in texts]
    if not answers or any(answer.get("nonce", nonce) != nonce for answer in answers):
        raise EngineError(f"{engine.name} returned answers to another request than {kind!r}; restart the engine")
    return answers


def ask(engine: Engine, kind: str, message: Mapping[str, Any], timeout_s: float) -> list[dict[str, Any]]:
    """Return every worker's answer. Raises the first worker's failure, which names the worker."""
    answers = ask_all(engine, kind, message, timeout_s)
    for number, answer in enumerate(answers):
        error = failure_of(engine, number, answer)
        if error is not None:
            raise error
    return answers


def failure_of(engine: Engine, number: int, answer: Mapping[str, Any]) -> BytecheckpointError | None:
    """Return the failure in a worker's answer."""
    if "failure" not in answer:
        return None
    where = f"worker {number} of {engine.name} (process {answer['pid']} on {answer['host']})"
    return Failure(**answer["failure"]).error(where)


def check_awake(engine: Engine, answers: Iterable[Mapping[str, Any]]) -> None:
    """Raise ``StateError`` if resuming the engine would make it access memory that it has released to sleep."""
    asleep = sorted({tag for answer in answers for tag in answer.get("asleep", ())})
    if asleep and engine.resumes:
        raise StateError(
            f"{engine.name} sleeps ({', '.join(asleep)}), and resuming it would make it access memory that is not "
            "mapped; nothing was changed. Call its wake_up first"
        )


class Budget:
    """The seconds of a stage of several requests; each request gets what is ``left``, but a minimum."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._end

    @property
    def left(self) -> float:
        return max(self._end - time.monotonic(), _MIN_WAIT_S)
