"""The conformance suite for communicators."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, TypeVar

import pytest

from bytecheckpoint.control.base import Communicator, Operation
from bytecheckpoint.errors import BytecheckpointError, DeadlineError, DisagreementError, MismatchError, RankFailedError
from bytecheckpoint.testing import time_limit

__all__ = ["CommunicatorConformance"]

_T = TypeVar("_T")


class CommunicatorConformance:
    """The conformance suite for communicators, with one thread per rank in one process.

    A subclass defines the fixture ``communicators``, which yields the communicators of all ranks of one job, in the
    order of their ranks. The suite calls each of them from one thread at a time. It checks that messages arrive, that
    every rank raises the same root cause when one rank fails, that waits end at their deadline, and that the next
    operation works after each of these. Tests of ranks whose process ends need processes (see ``RankPool``).

    Attributes:
        large_bytes: Size of the largest message.
        short_deadline_s: Deadline of the tests that wait for a rank that does not come.

    Example:
        >>> class TestMyCommunicator(CommunicatorConformance):
        ...     @pytest.fixture
        ...     def communicators(self):
        ...         yield MyCommunicator.connect_threads(4)
    """

    large_bytes: ClassVar[int] = 9 << 20
    short_deadline_s: ClassVar[float] = 0.5

    @pytest.fixture
    def communicators(self) -> Iterator[Sequence[Communicator]]:
        raise NotImplementedError("a subclass of CommunicatorConformance defines the fixture `communicators`")

    def test_ranks_are_numbered(self, communicators: Sequence[Communicator]) -> None:
        assert [one.rank for one in communicators] == list(range(len(communicators)))
        assert {one.world_size for one in communicators} == {len(communicators)}
        operations = [one.operation("save", deadline_s=time_limit(20)) for one in communicators]
        assert [(one.rank, one.world_size) for one in operations] == [(c.rank, c.world_size) for c in communicators]
        _on_all_ranks(operations, lambda operation: operation.close())

    def test_messages_arrive(self, communicators: Sequence[Communicator]) -> None:
        for _ in range(3):
            _run(communicators, _exchange)

    @pytest.mark.parametrize("size", [0, 1, None])
    def test_messages_of_any_size(self, communicators: Sequence[Communicator], size: int | None) -> None:
        length = self.large_bytes if size is None else size

        def exchange(operation: Operation) -> None:
            message = bytes([operation.rank]) * length
            gathered = operation.gather("gather", message)
            if operation.rank == 0:
                assert gathered == [bytes([rank]) * length for rank in range(operation.world_size)]
            else:
                assert gathered is None
            assert operation.scatter("scatter", gathered) == message
            assert operation.broadcast("broadcast", message if operation.rank == 0 else None) == bytes(length)

        _run(communicators, exchange)

    def test_root_must_provide_messages(self, communicators: Sequence[Communicator]) -> None:
        def misuse(operation: Operation) -> None:
            if operation.rank == 0:
                with pytest.raises(ValueError, match="scatter"):
                    operation.scatter("scatter", [b""] * (operation.world_size + 1))
                with pytest.raises(ValueError, match="broadcast"):
                    operation.broadcast("broadcast", None)

        _run(communicators, misuse)

    def test_barrier_waits_for_every_rank(self, communicators: Sequence[Communicator]) -> None:
        arrived: list[int] = []

        def meet(operation: Operation) -> int:
            arrived.append(operation.rank)
            operation.barrier("first")
            return len(arrived)

        assert set(_run(communicators, meet)) == {len(communicators)}

    def test_agreement(self, communicators: Sequence[Communicator]) -> None:
        _run(communicators, lambda operation: operation.agree("arguments", {"path": "a", "step": "7"}))

    def test_disagreement_is_raised_on_every_rank(self, communicators: Sequence[Communicator]) -> None:
        _needs_several(communicators)
        last = len(communicators) - 1

        def disagree(operation: Operation) -> None:
            operation.agree("arguments", {"path": "b" if operation.rank == last else "a"})

        errors = _errors(communicators, disagree)
        assert {type(error) for error in errors} == {DisagreementError}
        assert all("path" in str(error) for error in errors)
        _run(communicators, _exchange)

    @pytest.mark.parametrize("failing", [0, -1], ids=["first rank", "last rank"])
    def test_library_error_keeps_its_class(self, communicators: Sequence[Communicator], failing: int) -> None:
        failing %= len(communicators)
        errors = _errors(communicators, _failing(failing, lambda: MismatchError("it does not fit")))
        assert {type(error) for error in errors} == {MismatchError}
        assert {str(error) for error in errors} == {"it does not fit"}
        causes = [type(error.__cause__) for rank, error in enumerate(errors) if rank != failing]
        assert causes == [RankFailedError] * (len(communicators) - 1)
        _run(communicators, _exchange)

    @pytest.mark.parametrize("failing", [0, -1], ids=["first rank", "last rank"])
    def test_other_errors_name_the_rank(self, communicators: Sequence[Communicator], failing: int) -> None:
        failing %= len(communicators)
        errors = _errors(communicators, _failing(failing, lambda: ZeroDivisionError("the root cause")))
        if len(communicators) == 1:
            assert type(errors[0]) is ZeroDivisionError
        else:
            assert {type(error) for error in errors} == {RankFailedError}
            assert all("the root cause" in str(error) and f"rank {failing}" in str(error) for error in errors)
            assert isinstance(errors[failing].__cause__, ZeroDivisionError)
        _run(communicators, _exchange)

    def test_failed_operation_stays_failed(self, communicators: Sequence[Communicator]) -> None:
        _needs_several(communicators)

        def fail(operation: Operation) -> None:
            for _ in range(2):
                with pytest.raises(MismatchError):
                    _failing(0, lambda: MismatchError("it does not fit"))(operation)
            with pytest.raises(BytecheckpointError):
                operation.barrier("later")

        _run(communicators, fail)

    def test_check_raises_a_reported_failure(self, communicators: Sequence[Communicator]) -> None:
        _needs_several(communicators)
        limit = time_limit(20)
        ready = threading.Barrier(len(communicators))  # the operation's own barrier might raise the failure

        def watch(operation: Operation) -> None:
            operation.check()
            ready.wait(limit)
            if operation.rank == 0:
                operation.fail("write", MismatchError("it does not fit"))
                return
            waited = threading.Event()
            for _ in range(int(limit / 0.05)):
                try:
                    operation.check()
                except MismatchError:
                    return
                waited.wait(0.05)
            raise AssertionError(f"check() did not raise the failure of rank 0 within {limit} s")

        _run(communicators, watch)
        _run(communicators, _exchange)

    def test_missing_rank_ends_the_wait(self, communicators: Sequence[Communicator]) -> None:
        _needs_several(communicators)
        gave_up = threading.Barrier(len(communicators))

        def wait(operation: Operation) -> None:
            if operation.rank == 1:
                gave_up.wait(time_limit(30))
            with pytest.raises(DeadlineError):
                operation.barrier("written")
            if operation.rank != 1:
                gave_up.wait(time_limit(30))

        _run(communicators, wait, deadline_s=self.short_deadline_s)
        _run(communicators, _exchange)

    def test_kinds_of_operations_are_independent(self, communicators: Sequence[Communicator]) -> None:
        def run(communicator: Communicator) -> None:
            kinds = ["save", "load"] if communicator.rank % 2 else ["load", "save"]
            operations = {kind: communicator.operation(kind, deadline_s=time_limit(20)) for kind in kinds}
            for kind in ("save", "load"):
                message = kind.encode() if communicator.rank == 0 else None
                assert operations[kind].broadcast("kind", message) == kind.encode()
                operations[kind].close()

        _on_all_ranks(communicators, run)

    def test_following_operation(self, communicators: Sequence[Communicator]) -> None:
        def run(operation: Operation) -> None:
            following = operation.follow("save", deadline_s=time_limit(20))
            try:
                _exchange(following)
            finally:
                following.close()

        _run(communicators, run)

    def test_streams(self, communicators: Sequence[Communicator]) -> None:
        """Each rank sends to the next one and receives from the previous one, in pieces of different sizes."""
        _needs_several(communicators)
        content = bytes(range(256)) * 4096

        def forward(operation: Operation) -> None:
            streams = operation.streams()
            assert streams is operation.streams()
            following = (operation.rank + 1) % operation.world_size
            previous = (operation.rank - 1) % operation.world_size
            received = bytearray(len(content))
            with ThreadPoolExecutor(1) as sender:
                parts = [content[:300_000], b"", content[300_000:]]
                sent = [sender.submit(streams.send, following, "channel", part) for part in parts]
                for start in range(0, len(content), 100_000):
                    streams.receive(previous, "channel", memoryview(received)[start : start + 100_000])
                for future in sent:
                    future.result(time_limit(30))
            assert received == content
            operation.barrier("received")

        _run(communicators, forward)

    def test_close_is_repeatable(self, communicators: Sequence[Communicator]) -> None:
        def close(operation: Operation) -> None:
            operation.barrier("done")
            operation.wait_for_others_to_leave(0.0)
            operation.close()
            operation.close()

        _run(communicators, close)
        _run(communicators, _exchange)


def _exchange(operation: Operation) -> None:
    """Every kind of message once."""
    ranks = range(operation.world_size)
    gathered = operation.gather("plan", b"from %d" % operation.rank)
    assert gathered == ([b"from %d" % rank for rank in ranks] if operation.rank == 0 else None)
    messages = [b"for %d" % rank for rank in ranks] if operation.rank == 0 else None
    assert operation.scatter("plan", messages) == b"for %d" % operation.rank
    assert operation.broadcast("plan", b"for all" if operation.rank == 0 else None) == b"for all"
    operation.barrier("done")


def _failing(rank: int, error: Callable[[], BaseException]) -> Callable[[Operation], None]:
    def fail(operation: Operation) -> None:
        with operation.phase("write"):
            if operation.rank == rank:
                raise error()
            operation.barrier("written")

    return fail


def _run(
    communicators: Sequence[Communicator], call: Callable[[Operation], _T], *, deadline_s: float | None = None
) -> list[_T]:
    """Call ``call`` on all ranks within one operation."""

    def run(communicator: Communicator) -> _T:
        operation = communicator.operation("save", deadline_s=time_limit(20) if deadline_s is None else deadline_s)
        try:
            return call(operation)
        finally:
            operation.close()

    return _on_all_ranks(communicators, run)


def _errors(communicators: Sequence[Communicator], call: Callable[[Operation], None]) -> list[BaseException]:
    """The error that ``call`` raises on each rank, in one operation."""

    def catch(operation: Operation) -> BaseException:
        try:
            call(operation)
        except Exception as error:
            return error
        raise AssertionError(f"rank {operation.rank} raised nothing")

    return _run(communicators, catch)


_Each = TypeVar("_Each")


def _on_all_ranks(ranks: Sequence[_Each], call: Callable[[_Each], _T]) -> list[_T]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        futures = [pool.submit(call, one) for one in ranks]
        return [future.result(time_limit(120)) for future in futures]


def _needs_several(communicators: Sequence[Communicator]) -> None:
    if len(communicators) == 1:
        pytest.skip("needs several ranks")
