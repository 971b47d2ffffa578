"""What saving and loading need of the other ranks: one small interface.

Messages are bytes (msgpack documents of plain data), never pickle. Every wait has a deadline, and a failure that one
rank reports is raised by every rank. Safe to use from a background thread while the main thread runs collectives of
its own: nothing here touches a process group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager

import msgpack

from ..errors import DisagreementError
from .agreement import describe_disagreement
from .streams import Streams

__all__ = ["Communicator", "Operation"]


class Operation(ABC):
    """One save or load as seen by the ranks: a sequence of named phases that all of them go through in step.

    Any method may raise ``RankFailedError`` (another rank reported a failure or died), ``DeadlineError`` or
    ``DisagreementError``. After one of these the operation is over on every rank; the next operation works.
    """

    @property
    @abstractmethod
    def rank(self) -> int: ...

    @property
    @abstractmethod
    def world_size(self) -> int: ...

    @abstractmethod
    def is_about(self, what: str) -> None:
        """What failures reported from here on say that they are of, such as ``save of s3://runs/7b/step-1000``."""

    @abstractmethod
    def gather(self, phase: str, payload: bytes) -> Sequence[bytes] | None:
        """Rank 0 gets everyone's payload, by rank; the others get None and do not wait for rank 0."""

    @abstractmethod
    def scatter(self, phase: str, payloads: Sequence[bytes] | None) -> bytes:
        """Rank 0 hands each rank its own payload."""

    @abstractmethod
    def broadcast(self, phase: str, payload: bytes | None) -> bytes:
        """Everyone gets rank 0's payload."""

    @abstractmethod
    def fail(self, phase: str, error: BaseException) -> None:
        """Report this rank's failure to all others. Never raises."""

    def agree(self, phase: str, facts: dict[str, str]) -> None:
        """Raise ``DisagreementError`` on every rank unless all bring the same facts; lists who said what."""
        said = self.gather(phase + "/facts", msgpack.packb(facts))
        verdict = None
        if said is not None:
            verdict = describe_disagreement(phase, [msgpack.unpackb(of_rank) for of_rank in said]).encode()
        verdict = self.broadcast(phase + "/verdict", verdict)
        if verdict:
            raise DisagreementError(verdict.decode())

    def barrier(self, phase: str) -> None:
        """Return when every rank has come this far."""
        self.gather(phase + "/in", b"")
        self.broadcast(phase + "/out", b"" if self.rank == 0 else None)

    @abstractmethod
    def phase(self, name: str) -> AbstractContextManager[None]:
        """Run a block; if it raises on this rank, tell the others, and raise the one cause on every rank.

        An error of this library keeps its class: this rank raises it as it is, the others one of the same class and
        message from a ``RankFailedError``. Any other exception becomes a ``RankFailedError`` on every rank, on this one
        raised from the original. A world of one raises the original.
        """

    @abstractmethod
    def check(self) -> None:
        """Raise what another rank has reported by now; returns at once. For long stretches without an exchange."""

    @abstractmethod
    def streams(self) -> Streams:
        """The ranks' streams of bytes, made by the first call and closed with the operation."""

    @abstractmethod
    def follow(self, kind: str, *, deadline_s: float) -> Operation:
        """Begin an operation that follows from this one, which may be over. Ranks meet in it because they met in this
        one, and not by counting: a rank for which this one failed may tell so to those that went on into the next."""

    @abstractmethod
    def wait_alone(self, timeout_s: float) -> None:
        """Rank 0 waits until every other rank has left this operation or ended, at most ``timeout_s``. Never raises."""

    @abstractmethod
    def close(self) -> None:
        """Leave; drop this operation's keys once every rank has left. Never raises."""


class Communicator(ABC):
    """The library's own line between the ranks of one job. Made once per process and set of ranks, then reused."""

    @property
    @abstractmethod
    def rank(self) -> int: ...

    @property
    @abstractmethod
    def world_size(self) -> int: ...

    @abstractmethod
    def operation(self, kind: str, *, deadline_s: float) -> Operation:
        """Begin the next operation. Ranks meet in call order, per communicator, counted apart for each ``kind``."""

    @abstractmethod
    def close(self) -> None: ...
