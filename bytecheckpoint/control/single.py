"""The communicator of a job of one process: nothing to wait for, nobody to tell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from .base import Communicator, Operation
from .streams import NoStreams, Streams

__all__ = ["SingleOperation", "SingleProcess"]


class SingleOperation(Operation):
    """Every phase is done at once, and an exception goes through as it is."""

    @property
    def rank(self) -> int:
        return 0

    @property
    def world_size(self) -> int:
        return 1

    def is_about(self, what: str) -> None:
        """Errors go through as they are."""

    def gather(self, phase: str, payload: bytes) -> Sequence[bytes]:
        return [payload]

    def scatter(self, phase: str, payloads: Sequence[bytes] | None) -> bytes:
        if payloads is None or len(payloads) != 1:
            raise ValueError(f"scatter {phase!r} in one process takes exactly one payload")
        return payloads[0]

    def broadcast(self, phase: str, payload: bytes | None) -> bytes:
        if payload is None:
            raise ValueError(f"broadcast {phase!r} in one process needs the payload")
        return payload

    def fail(self, phase: str, error: BaseException) -> None:
        return

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        yield

    def check(self) -> None:
        """There is no other rank."""

    def streams(self) -> Streams:
        return NoStreams()

    def follow(self, kind: str, *, deadline_s: float) -> SingleOperation:
        return SingleOperation()

    def wait_alone(self, timeout_s: float) -> None:
        """There is no other rank."""

    def close(self) -> None:
        return


class SingleProcess(Communicator):
    """World of one, without a store."""

    @property
    def rank(self) -> int:
        return 0

    @property
    def world_size(self) -> int:
        return 1

    def operation(self, kind: str, *, deadline_s: float) -> SingleOperation:
        return SingleOperation()

    def close(self) -> None:
        return
