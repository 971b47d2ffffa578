"""The checkpoints of one job below one root: when, where, which to keep, which to resume from, and how to leave."""

from __future__ import annotations

import logging
import os
import signal
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, TypeAlias

import torch

from ..at_exit import before_exit
from ..checkpoint import Checkpoint
from ..checkpointer import Checkpointer, default_checkpointer
from ..control.base import Operation
from ..control.peers import PeerIdentity
from ..errors import CheckpointError, KeyNotFoundError, StateError, UnsupportedVersionError
from ..handle import SaveHandle
from ..loading import LoadReport
from ..planners import Layout
from ..save_options import SaveOptions, WhenBusy
from ..storage_backends import join, open_backend
from .agenda import Agenda, Verdict
from .arguments import BestMode, OnPreempt, check_arguments, check_metrics
from .cadence import Cadence
from .housekeeping import METRICS_KEY, STEP_NAME, Housekeeping
from .in_flight import SavesInFlight
from .lease import Lease
from .meetings import Meetings
from .retention import Retention
from .signals import SignalWatch

__all__ = ["CheckpointManager"]

_LEAST_GRACE_S = 1.0

State: TypeAlias = Mapping[str, Any] | Callable[[], Mapping[str, Any]]

_log = logging.getLogger(__name__)


class CheckpointManager:
    """Saves when it is due, keeps what is to be kept, resumes from the newest checkpoint that holds, and leaves in good
    order when the job is told to.

        with bcp.CheckpointManager("s3://runs/7b", every_steps=1000, every_minutes=30, keep_last=3) as manager:
            report = manager.resume(state)
            for step in range(extra["step"], steps):
                train()
                manager.save(step + 1, state)

    Every method is to be called on every rank, from the thread that trains; ``request_save`` alone on any, from any
    thread. Checkpoints are the folders ``step-<number>`` of the root; nothing else there is touched.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: int | None = None,
        best_metric: str | None = None,
        best_mode: BestMode = "min",
        async_save: bool = True,
        max_in_flight: int = 1,
        when_busy: WhenBusy = "wait",
        preempt_signals: Iterable[int] = (signal.SIGTERM,),
        save_signals: Iterable[int] = (),
        grace_s: float = 30.0,
        on_preempt: OnPreempt = "exit",
        framework: str | None = None,
        layout: Layout = "shards",
        gate: bool = False,
        allow_pickle: bool = False,
        metadata: Mapping[str, Any] | None = None,
        deadline_s: float = 600.0,
        lease_s: float = 15.0,
        meet_every_s: float = 2.0,
        storage_options: Mapping[str, Any] | None = None,
        checkpointer: Checkpointer | None = None,
    ) -> None:
        """Takes the lease of ``root``, so that no other job saves there by mistake.

        *When.* A save is due every ``every_steps`` steps, and ``every_minutes`` minutes after the last one began by
        rank 0's clock; and when a rank gets one of ``save_signals`` or somebody calls ``request_save``. At most
        ``max_in_flight`` are under way; one that is due then waits for the oldest, or with ``when_busy="skip"`` is
        left out.

        *Which stay.* The last ``keep_last``, all whose step is a multiple of ``keep_every``, and the ``keep_best`` by
        the metric ``best_metric``; all, where none of these is given. Others are removed after the commit of a new one,
        which itself always stays.

        *Leaving.* When any rank gets one of ``preempt_signals`` (handlers are put in place by the main thread), all
        ranks save the same step, within ``grace_s`` seconds from the signal, and ``save`` raises ``SystemExit`` with
        128 + signal on all of them; with ``on_preempt="return"`` it returns, and ``preempted`` is true.

        ``lease_s``: a job that gives no sign of life for so long has lost its lease. ``meet_every_s``: how often the
        ranks ask each other, at the least, whether a signal came or a save is wanted. ``metadata`` is stored with every
        checkpoint. ``checkpointer`` brings a memory budget, or ranks, of its own. All else as in ``save``.

        Raises ``RootInUseError`` where another job saves below the root, ``StateError`` for arguments that mean
        nothing, and what ``save`` raises of storage and ranks.
        """
        self.root = os.fspath(root)
        self.preempted = False
        self._pid = os.getpid()
        self._checkpointer = checkpointer if checkpointer is not None else default_checkpointer()
        self._ranks = Meetings(self._checkpointer, deadline_s)
        self._storage_options = dict(storage_options or {})
        self._deadline_s, self._async, self._exits = deadline_s, async_save, on_preempt == "exit"
        self._metadata = dict(metadata or {})
        self._options = SaveOptions(
            framework, allow_pickle=allow_pickle, deadline_s=deadline_s, layout=layout, gate=gate and async_save
        )
        self._in_flight = SavesInFlight(max_in_flight)
        self._signals = SignalWatch(())
        self._lease: Lease | None = None
        self._housekeeping: Housekeeping | None = None
        self._closed = False
        op = self._ranks.operation()
        try:
            with op.phase("lease"):
                check_arguments(
                    max_in_flight=max_in_flight,
                    on_preempt=on_preempt,
                    best_mode=best_mode,
                    keep_best=keep_best,
                    best_metric=best_metric,
                    metadata=self._metadata,
                    grace_s=grace_s,
                    lease_s=lease_s,
                    meet_every_s=meet_every_s,
                )
                replace(self._options, when_busy=when_busy, metadata=self._metadata).check()
                cadence = Cadence(every_steps, every_minutes, time.monotonic())
                retention = Retention(keep_last, keep_every, keep_best, best_mode == "min")
                leaving, saving = tuple(preempt_signals), tuple(save_signals)
                self._signals = SignalWatch((*leaving, *saving))
                self._agenda = Agenda(
                    cadence,
                    self._signals,
                    preempt_signals=leaving,
                    save_signals=saving,
                    grace_s=grace_s,
                    skips_when_busy=when_busy == "skip",
                    # One process asks nobody, which costs nothing.
                    meet_every_s=meet_every_s if op.world_size > 1 else 0.0,
                )
                if op.rank == 0:
                    self._take_root(retention, best_metric, lease_s)
            op.barrier("lease")
        except BaseException:
            self._let_go()
            raise
        finally:
            op.close()
        before_exit(partial(_finish, weakref.ref(self)))

    # -- resuming ------------------------------------------------------------------------------------------------

    def latest(self, *, allow_fresh: bool = False) -> Checkpoint | None:
        """The newest checkpoint below the root that holds, the same on all ranks; None where nothing was ever saved.

        As ``bytecheckpoint.latest``, but that rank 0 alone looks. Raises ``NoValidCheckpointError`` where there are
        traces of saves and no checkpoint that holds, unless ``allow_fresh``.
        """
        with self._ranks.meeting() as op:
            name = self._ranks.newest(op, self.root, (), allow_fresh, self._storage_options)
        if name is None:
            return None
        return self._checkpointer.open(join(self.root, name), storage_options=self._storage_options)

    def resume(self, state: Mapping[str, Any], *, allow_fresh: bool = False, **options: Any) -> LoadReport | None:
        """Load the newest checkpoint that holds into ``state``; None, and ``state`` as it was, where nothing was ever
        saved.

        Where bytes of it turn out to be damaged while it is loaded, that is logged and the one before is loaded. A
        state that does not fit the checkpoint is a ``MismatchError``, a checkpoint of a newer library an
        ``UnsupportedVersionError``, and no reason to take an older one. ``options``
        are those of ``bytecheckpoint.load``. Raises as ``latest`` and ``load``; after a ``NoValidCheckpointError``,
        tensors may hold values of a damaged checkpoint.
        """
        damaged: list[str] = []
        while True:
            with self._ranks.meeting("load") as op:
                name = self._ranks.newest(op, self.root, damaged, allow_fresh, self._storage_options)
            if name is None:
                return None
            try:
                with self._checkpointer.following(op, "load", self._deadline_s):
                    report = self._checkpointer.load(
                        join(self.root, name),
                        state,
                        deadline_s=self._deadline_s,
                        storage_options=self._storage_options,
                        **options,
                    )
            except UnsupportedVersionError:
                raise
            except (CheckpointError, KeyNotFoundError) as error:
                _log.error("%s cannot be loaded, the one before is tried: %s", name, error)
                damaged.append(name)
            else:
                _log.info("%s: resumed from %s", self.root, name)
                return report

    # -- saving --------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        state: State,
        *,
        metrics: Mapping[str, float] | None = None,
        force: bool = False,
    ) -> SaveHandle | None:
        """Save ``state`` as ``step`` if that is due, or with ``force``. Call it once at every turn of the training
        loop, after the step; most calls return None at once.

        ``state`` may be a function that makes it, called only for a save. ``metrics`` are stored with the checkpoint
        (rank 0's); ``keep_best`` goes by them. Every ``meet_every_s``, and where a save is due, the ranks ask each
        other whether one is wanted or a signal came; a rank that does not come is named by a ``DeadlineError``.

        Raises what an earlier save failed with in the background, on every rank, and then saves nothing: call it
        again to go on. Raises ``DisagreementError`` where ranks are at different steps, ``RootInUseError`` where
        another job has taken the root, ``SystemExit`` when it is time to leave, and what ``bytecheckpoint.save``
        raises.
        """
        if self._closed:
            raise StateError("this CheckpointManager was closed; make a new one")
        is_due = force or self._agenda.is_due(step)
        if not self._agenda.must_meet(is_due):
            return None
        with self._ranks.meeting("save") as op:
            verdict, plain_metrics = self._meet(op, step, is_due, metrics)
        handle = None
        if verdict.save:
            deadline_s = max(_LEAST_GRACE_S, verdict.grace_s) if verdict.leaving else self._deadline_s
            with self._checkpointer.following(op, "save", deadline_s):
                handle = self._begin(step, state, plain_metrics, deadline_s)
        if verdict.leaving:
            self._leave(step, verdict.leaving)
        return handle

    def request_save(self) -> None:
        """Ask for a save at one of the next turns, on all ranks. From any rank and thread."""
        self._agenda.request()

    def wait(self) -> None:
        """Until all saves are committed. Raises, on every rank, what any of them failed with."""
        with self._ranks.meeting() as op, self._settling():
            self._in_flight.finish(op)

    def close(self) -> None:
        """Wait for all saves, then give lease, signals and threads back. Raises what a save failed with, once all is
        given back."""
        if self._closed:
            return
        try:
            self.wait()
        finally:
            self._let_go()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            # The others may be elsewhere, or gone: nothing is asked of them.
            if not self._closed:
                self._ranks.tell(error)
            self._let_go()

    # -- what the ranks settle -------------------------------------------------------------------------------------

    def _meet(
        self, op: Operation, step: int, is_due: bool, metrics: Mapping[str, float] | None
    ) -> tuple[Verdict, dict[str, float]]:
        with self._settling():
            with op.phase("check"):
                plain_metrics = check_metrics(metrics)
                if self._lease is not None:
                    self._lease.raise_if_lost()
            is_busy = self._in_flight.is_full()
            self._in_flight.settle(op)
            verdict = self._agenda.meet(op, step, is_due, is_busy)
            if verdict.save:
                self._in_flight.make_room(op)
            return verdict, plain_metrics

    @contextmanager
    def _settling(self) -> Iterator[None]:
        """What the ranks settle of earlier saves. Where that fails, the step may be saved once more."""
        try:
            yield
        except BaseException:
            self._agenda.failed()
            self._in_flight.drain()
            raise

    # -- one save ------------------------------------------------------------------------------------------------

    def _begin(self, step: int, state: State, metrics: Mapping[str, float], deadline_s: float) -> SaveHandle:
        self._agenda.began(step)
        metadata = {**self._metadata, METRICS_KEY: metrics} if metrics else self._metadata
        options = replace(self._options, step=step, metadata=metadata, deadline_s=deadline_s)
        if self._lease is not None:
            options = replace(options, job=self._lease.job, guard=self._lease.check)
        name = STEP_NAME.format(step)
        if self._housekeeping is not None:
            self._housekeeping.expect(name)
        url = join(self.root, name)
        try:
            handle = self._checkpointer.save_with(
                url, _maker(state), options, async_save=self._async, storage_options=self._storage_options
            )
        except BaseException:
            self._agenda.failed()
            if self._housekeeping is not None:
                self._housekeeping.forget(name)
            raise
        self._in_flight.add(handle)
        if self._housekeeping is not None:
            self._housekeeping.follow(handle, name, step, metrics)
        return handle

    def _leave(self, step: int, number: int) -> None:
        _log.warning("%s: leaving at step %d, on %s", self.root, step, signal.Signals(number).name)
        self.preempted = True
        try:
            self.wait()
        finally:
            if self._exits:
                self._let_go()
        if self._exits:
            raise SystemExit(128 + number)

    # -- what is held --------------------------------------------------------------------------------------------

    def _take_root(self, retention: Retention, metric: str | None, lease_s: float) -> None:
        backend = open_backend(self.root, **self._storage_options)
        self._lease = Lease.acquire(backend, PeerIdentity.of_this_process(0), interval_s=lease_s / 3)
        self._housekeeping = Housekeeping(self.root, self._storage_options, retention, metric, self._lease.job)

    def _let_go(self) -> None:
        """Wait for this rank's part of all saves, log what failed, and give everything back. Asks nothing of others."""
        if self._closed:
            return
        self._closed = True
        self._in_flight.drain()
        if self._housekeeping is not None:
            self._housekeeping.close()
        if self._lease is not None:
            self._lease.close()
        self._signals.close()


def _maker(state: Any) -> Callable[[], Any]:
    # Modules can be called too, and make no state.
    if isinstance(state, (Mapping, torch.nn.Module)) or not callable(state):
        return lambda: state
    make: Callable[[], Any] = state
    return make


def _finish(manager: weakref.ref[CheckpointManager]) -> None:
    alive = manager()
    # A forked child runs this too where multiprocessing ends it; saves, lease and threads are its parent's.
    if alive is not None and alive._pid == os.getpid():
        alive._let_go()
