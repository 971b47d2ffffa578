"""The communicator of a job of one process."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from .base import Communicator, Operation, Streams
from .connections import Buffer


class NoStreams(Streams):
    """The streams of a job of one process, which has no peers."""

    def send(self, to: int, channel: str, data: Buffer) -> None:
        raise ValueError(f"cannot send to rank {to}: this is a job of one process")

    def receive(self, source: int, channel: str, into: Buffer) -> None:
        raise ValueError(f"cannot receive from rank {source}: this is a job of one process")


class SingleOperation(Operation):
    """Complete every exchange at once and let exceptions propagate unchanged."""

    rank, world_size = 0, 1

    def set_description(self, text: str) -> None:
        """Do nothing: no failure is reported."""

    def gather(self, phase: str, payload: bytes) -> Sequence[bytes]:
        return [payload]

    def scatter(self, phase: str, payloads: Sequence[bytes] | None) -> bytes:
        if payloads is None or len(payloads) != 1:
            raise ValueError(f"scatter {phase!r} in a job of one process needs exactly one payload")
        return payloads[0]

    def broadcast(self, phase: str, payload: bytes | None) -> bytes:
        if payload is None:
            raise ValueError(f"broadcast {phase!r} in a job of one process needs a payload")
        return payload

    def fail(self, phase: str, error: BaseException) -> None:
        return

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        yield

    def check(self) -> None:
        """Do nothing: there is no other rank."""

    def host_of(self, rank: int) -> str:
        return socket.gethostname()

    def streams(self) -> Streams:
        return NoStreams()

    def follow(self, kind: str, *, deadline_s: float, is_patient: bool = False) -> SingleOperation:
        return SingleOperation()

    def wait_for_others_to_leave(self, timeout_s: float) -> None:
        """Do nothing: there is no other rank."""

    def close(self) -> None:
        return


class SingleProcess(Communicator):
    """A world of one rank."""

    rank, world_size = 0, 1

    def operation(self, kind: str, *, deadline_s: float) -> SingleOperation:
        return SingleOperation()

    def close(self) -> None:
        return
