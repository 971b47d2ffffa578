"""Interfaces of the control plane: what a save or a load needs from the other ranks.

Messages are bytes (msgpack documents of plain data) and never pickle. Every wait has a deadline. When one rank reports
a failure, every rank raises it. No method uses a process group, so a background thread may call them while the main
thread runs collectives. A job of one process has the communicator at the end of this file.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Self

import msgpack

from ..errors import DisagreementError
from ..runtime.messages import describe_disagreement
from .connections import Buffer


class Streams(ABC):
    """One ordered byte stream per channel, sender and receiver, for payloads that are too large to pass through rank 0.

    Nothing frames the bytes: both sides compute from their plans how many bytes arrive in which order. Thread-safe,
    but each channel belongs to one thread at a time, per direction and peer. A send may block until the receiver
    reads. Streams belong to their operation: they raise what ``Operation``'s exchanges raise, after which the operation
    has failed on all ranks, and they are closed with it.
    """

    @abstractmethod
    def send(self, to: int, channel: str, data: Buffer) -> None:
        """Send bytes to a rank; return when the operating system has accepted all of them.

        Args:
            to: The receiver's rank.
            channel: Names the stream on both sides.
            data: The bytes; the caller may reuse the buffer afterwards.

        Raises:
            ControlError: The operation failed.
            ValueError: ``to`` is this rank or no rank of the job.
        """

    @abstractmethod
    def receive(self, source: int, channel: str, into: Buffer) -> None:
        """Fill a buffer with the next bytes of a stream.

        Args:
            source: The sender's rank.
            channel: Names the stream on both sides.
            into: A writable buffer; it is filled completely.

        Raises:
            ControlError: The operation failed.
            ValueError: ``source`` is this rank or no rank of the job.
        """


class Operation(ABC):
    """One save or load across all ranks: a sequence of named phases that every rank runs in the same order.

    Any exchange may raise ``RankFailedError`` (another rank reported a failure or its process ended), ``DeadlineError``
    or ``DisagreementError``. The operation has then failed on every rank, and each further exchange raises the same
    error. The next operation works. Use an operation from one thread at a time; only ``streams`` may be used by several
    threads at once, and ``fail`` by another thread: an exchange that waits then raises. Use it as a context manager, or
    call ``close``.

    Example:
        >>> with communicator.operation("save", deadline_s=60) as operation:
        ...     plans = operation.gather("plan", local_plan)
        ...     share = operation.scatter("plan", make_shares(plans) if operation.rank == 0 else None)
        ...     with operation.phase("write"):
        ...         write(share)
        ...     operation.barrier("written")
    """

    rank: int
    """This process's rank, from 0."""

    world_size: int
    """The number of ranks."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @abstractmethod
    def set_description(self, text: str) -> None:
        """Describe the operation in the failures that this rank reports from now on.

        Args:
            text: For example ``save of s3://runs/7b/step-1000``.
        """

    @abstractmethod
    def gather(self, phase: str, payload: bytes) -> Sequence[bytes] | None:
        """Send one payload from each rank to rank 0.

        Args:
            phase: Names the exchange in errors. Every rank passes the same name.
            payload: This rank's message.

        Returns:
            All payloads, indexed by rank, on rank 0. None on the other ranks, which do not wait for rank 0.

        Raises:
            ControlError: The operation failed; see the class.
        """

    @abstractmethod
    def scatter(self, phase: str, payloads: Sequence[bytes] | None) -> bytes:
        """Send each rank its own payload from rank 0.

        Args:
            phase: Names the exchange in errors. Every rank passes the same name.
            payloads: One message per rank on rank 0; ignored on the other ranks.

        Returns:
            The payload of this rank.

        Raises:
            ControlError: The operation failed; see the class.
            ValueError: Rank 0 passed a different number of payloads than there are ranks.
        """

    @abstractmethod
    def broadcast(self, phase: str, payload: bytes | None) -> bytes:
        """Send one payload from rank 0 to every rank.

        Args:
            phase: Names the exchange in errors. Every rank passes the same name.
            payload: The message on rank 0; ignored on the other ranks.

        Returns:
            The payload of rank 0.

        Raises:
            ControlError: The operation failed; see the class.
            ValueError: Rank 0 passed None.
        """

    @abstractmethod
    def fail(self, phase: str, error: BaseException) -> None:
        """Report a failure of this rank to all others. Never raises.

        Args:
            phase: The phase in which this rank failed.
            error: Any exception. Only text travels: it need not be picklable.
        """

    def agree(self, phase: str, facts: dict[str, str]) -> None:
        """Check that every rank passes the same facts.

        Args:
            phase: Names the exchange in errors. Every rank passes the same name.
            facts: Names and values to compare.

        Raises:
            DisagreementError: Some fact differs, on every rank. The message lists each value and its ranks.
            ControlError: The operation failed; see the class.
        """
        gathered = self.gather(phase + "/facts", msgpack.packb(facts))
        with self.phase(phase):
            if gathered is not None and (text := describe_disagreement(phase, [*map(msgpack.unpackb, gathered)])):
                raise DisagreementError(text)
        self.broadcast(phase + "/verdict", b"" if self.rank == 0 else None)

    def barrier(self, phase: str) -> None:
        """Return once every rank has entered this barrier.

        Args:
            phase: Names the exchange in errors. Every rank passes the same name.

        Raises:
            ControlError: The operation failed; see the class.
        """
        self.gather(phase + "/in", b"")
        self.broadcast(phase + "/out", b"" if self.rank == 0 else None)

    @abstractmethod
    def phase(self, name: str) -> AbstractContextManager[None]:
        """Run a block; if it raises on this rank, report the error and raise one cause on every rank.

        An error of this library keeps its class: this rank raises it unchanged, and the others raise one of the same
        class and message, with a ``RankFailedError`` as its cause. Any other exception becomes a ``RankFailedError``
        on every rank; on this one, the original is its cause. A ``KeyboardInterrupt`` or ``SystemExit`` is reported
        and propagates unchanged. In a world of one, every exception propagates unchanged.

        Args:
            name: The phase that the failure names.

        Returns:
            A context manager.
        """

    @abstractmethod
    def check(self) -> None:
        """Raise a failure that another rank has reported. Returns at once; for long stretches without an exchange.

        Raises:
            ControlError: The operation failed; see the class.
        """

    @abstractmethod
    def host_of(self, rank: int) -> str:
        """Return the name of the host of a rank, for messages."""

    @abstractmethod
    def streams(self) -> Streams:
        """Return the byte streams between the ranks. The operation closes them.

        Returns:
            The same object on each call.

        Raises:
            ControlError: The operation failed; see the class.
        """

    @abstractmethod
    def follow(self, kind: str, *, deadline_s: float, is_patient: bool = False) -> Operation:
        """Begin an operation that continues this one, which may be closed.

        All ranks of this operation take part. They match by this operation and not by a count, so a rank for which
        this operation failed can still report that to the ranks that went on to the next.

        Args:
            kind: As for ``Communicator.operation``.
            deadline_s: As for ``Communicator.operation``.
            is_patient: Wait for ranks that may be busy for any time, such as with transfers that have limits of
                their own, as long as their processes answer. ``deadline_s`` then limits how long one may be silent.

        Returns:
            The new operation.
        """

    @abstractmethod
    def wait_for_others_to_leave(self, timeout_s: float) -> None:
        """On rank 0, wait until every other rank has closed this operation or ended. Never raises.

        Args:
            timeout_s: Give up after this many seconds.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave the operation and release what it holds on this rank. Never raises; may be called twice."""


class Communicator(ABC):
    """The connection between the ranks of one job. Made once per process and set of ranks, then reused. Thread-safe."""

    rank: int
    """This process's rank, from 0."""

    world_size: int
    """The number of ranks."""

    @abstractmethod
    def operation(self, kind: str, *, deadline_s: float) -> Operation:
        """Begin the next operation of a kind. Never raises and does not wait for other ranks.

        The n-th operation of a kind on one rank is the n-th operation of that kind on every rank.

        Args:
            kind: For example ``save``.
            deadline_s: Limit of each single wait for other ranks, in seconds.

        Returns:
            The operation; the caller closes it.
        """

    @abstractmethod
    def close(self) -> None:
        """Release threads and connections. Waits a few seconds at most for ranks that are still in an operation."""


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
