"""All of one rank's shared reads at once: rings, scattered frames, and beside them what it reads for itself alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from typing import Protocol

from ...control.base import Operation
from ...trace import Timings
from .ring_exchange import RingJob, RingMember
from .scatter_exchange import ScatterJob, ScatterMember

__all__ = ["SharedJob", "pass_on"]

SharedJob = RingJob | ScatterJob

_READERS = 2  # batches being read at a time, so that the disk has work while one is hashed


class _Member(Protocol):
    """This rank's part in one job."""

    def work(self) -> Iterator[Callable[[], None]]:
        """Tasks that wait for each other and for other ranks: each needs a thread."""

    def reads(self) -> Iterator[Callable[[], None]]:
        """Tasks that wait for nobody, in order."""

    def stop(self) -> None:
        """End the waits of ``work`` for ``reads`` that will not come."""

    @property
    def received(self) -> int:
        """Bytes from other ranks so far."""


def pass_on(
    op: Operation, jobs: Sequence[SharedJob], alone: Sequence[Callable[[], None]], *, verify: bool, timings: Timings
) -> int:
    """Fill everything that the jobs carry, and run ``alone``, this rank's other reads, beside that; bytes received.

    To be called inside a phase, on all ranks of the jobs. Raises what reading raises, ``CorruptionError`` where a
    piece was damaged on its way, and the one cause on all ranks where one failed.
    """
    with ThreadPoolExecutor(_READERS, thread_name_prefix="bcp-share-read") as readers:
        members = [_member(op, job, readers, timings, verify=verify) for job in jobs]
        work = [task for member in members for task in member.work()]
        with ThreadPoolExecutor(max(len(work), 1), thread_name_prefix="bcp-share") as links:
            futures: list[Future[None]] = []
            try:
                futures += [links.submit(task) for task in work]
                futures += [readers.submit(task) for member in members for task in member.reads()]
                futures += [readers.submit(task) for task in alone]
                for future in as_completed(futures):
                    future.result()
            except BaseException as error:
                # Threads that wait for other ranks, here and there, learn of it from the report.
                op.fail("read", error)
                for member in members:
                    member.stop()
                for future in futures:
                    future.cancel()
                raise
    return sum(member.received for member in members)


def _member(op: Operation, job: SharedJob, readers: Executor, timings: Timings, *, verify: bool) -> _Member:
    if isinstance(job, RingJob):
        return RingMember(op.streams(), op.rank, job, verify, timings)
    return ScatterMember(op.streams(), op.rank, job, readers, timings, verify=verify)
