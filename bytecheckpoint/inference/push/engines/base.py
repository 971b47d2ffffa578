"""The interface of an inference engine, its targets, and requests to its workers.

A target is a draft model or an adapter next to the engine's model, which has its own receiver. A request for it is the
plain request with the encoded target in front of it, so neither the coordinator nor the receivers handle targets.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ....errors import BytecheckpointError, EngineError, FormatError, StateError
from ..messages import PROTOCOL, decode, encode, error_of

_MIN_WAIT_S = 0.05


class Engine(ABC):
    """One inference engine, as the coordinator of a push reaches it. ``name`` identifies it in errors and reports."""

    name: str
    resumes = True
    """Whether the engine generates after ``resume``, and not only when its owner makes it."""
    stays_paused = False
    """Whether the engine's owner has paused it, so that it stays paused after a push."""

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

    def note_pause(self, timeout_s: float, *, left_paused: bool) -> None:  # noqa: B027 - most engines cannot be asked
        """Set ``stays_paused``.

        Args:
            timeout_s: The limit of the wait, in seconds.
            left_paused: Whether a push has left the engine paused, which this one then ends.

        Raises:
            DeadlineError: The engine did not answer in time.
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
    for error in failures_of(engine, answers):
        raise error
    return answers


def failures_of(engine: Engine, answers: Sequence[Mapping[str, Any]]) -> list[BytecheckpointError]:
    """Return the failures in the answers of an engine's workers."""
    return [
        error_of(answer["failure"], f"worker {number} of {engine.name} (process {answer['pid']} on {answer['host']})")
        for number, answer in enumerate(answers)
        if "failure" in answer
    ]


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


_SEPARATOR = ":"  # not a base64 character


class TargetEngine(Engine):
    """A target of ``engine``, to which all requests go."""

    def __init__(self, engine: Engine, name: str, target: Mapping[str, Any]) -> None:
        self.name, self.resumes = f"{name} of {engine.name}", engine.resumes
        self._engine, self._name, self._plain, self._target = engine, name, dict(target), encode(target)

    def call(self, request: str, timeout_s: float) -> list[str]:
        return self._engine.call(f"{self._target}{_SEPARATOR}{request}", timeout_s)

    def note_pause(self, timeout_s: float, *, left_paused: bool) -> None:
        self._engine.note_pause(timeout_s, left_paused=left_paused)
        self.stays_paused = self._engine.stays_paused

    def pause(self, timeout_s: float) -> None:
        self._engine.pause(timeout_s)

    def resume(self, version: int | str | None, timeout_s: float, *, changed: bool) -> None:
        # The engine's own version is that of its model.
        self._engine.resume(None, timeout_s, changed=changed)

    @property
    def identity(self) -> str:
        return f"{self._name} of {self._engine.identity}"

    @property
    def address(self) -> dict[str, Any] | None:
        address = self._engine.address
        return None if address is None else {**address, "target": [self._name, self._plain]}

    def close(self) -> None:
        self._engine.close()


class DraftEngine(TargetEngine):
    """The draft model of an engine that uses speculative decoding. It is pushed like any model.

    Args:
        engine: A vLLM engine with ``--speculative-config '{"method": "draft_model", ...}'`` and the worker extension.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, "draft model", {"draft": True})


def split_target(text: str) -> tuple[dict[str, Any] | None, str]:
    """Return the target and the request; the target is None for the engine's model. Text with an unreadable target is
    returned unchanged, for the receiver to refuse."""
    target, separator, request = text.partition(_SEPARATOR)
    if not separator:
        return None, text
    try:
        return decode(target), request
    except FormatError:
        return None, text
