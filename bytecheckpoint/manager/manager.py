"""Manage the checkpoints of one job: when to save, which to keep, where to resume, and how to exit on preemption."""

from __future__ import annotations

import logging
import os
import signal
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import msgpack
import torch

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.discovery import find_newest
from ..checkpointer import Checkpointer, default_checkpointer
from ..control.base import Operation
from ..control.peers import PeerIdentity
from ..errors import CheckpointError, KeyNotFoundError, UnsupportedVersionError, UsageError
from ..load.report import LoadReport
from ..planners import Layout
from ..runtime.exit import before_exit
from ..runtime.limits import DEFAULT_DEADLINE_S
from ..save.handle import SaveHandle
from ..save.options import SaveOptions, WhenBusy
from ..storage_backends import join, open_backend
from .coordinator import CoordinationRounds, Decision, SaveCoordinator, SavesInFlight
from .housekeeping import METRICS_KEY, STEP_NAME, Housekeeping
from .lease import HEARTBEATS_PER_LEASE, Lease
from .options import Cadence, Preemption, Retention, check_seconds, check_whole_number
from .signals import SignalWatch

__all__ = ["CheckpointManager"]

_MIN_DEADLINE_S = 1.0  # of a save on preemption, even if the grace period is already over

State: TypeAlias = Mapping[str, Any] | Callable[[], Mapping[str, Any]]

_LEAVE_ON_SIGTERM = Preemption()

_log = logging.getLogger(__name__)


class CheckpointManager:
    """Saves on a schedule, applies retention rules, resumes from the newest valid checkpoint, and handles preemption.

    Create one manager per root and job, on every rank. Call every method on every rank, from the training thread;
    only ``request_save`` may be called on a single rank and from any thread. Checkpoints are the folders
    ``step-<number>`` of the root; nothing else below the root is touched. A lease on the root prevents two jobs from
    saving there by mistake.

    Args:
        root: Local path or URL below which the checkpoints are saved.
        cadence: When saves are due. An int ``n`` is short for ``Cadence(every_steps=n)``. With None, only
            ``save(..., force=True)``, ``request_save`` and preemption save.
        keep: Which checkpoints to keep. An int ``n`` is short for ``Retention(last=n)``; None keeps all. Others are
            removed on rank 0, in a background thread, after a new checkpoint is committed.
        preemption: Signals on which all ranks save and exit; by default SIGTERM. None handles no signals.
        async_save: Whether ``save`` returns once the state is copied. The other save options mean the same as in
            ``bytecheckpoint.save``.
        max_in_flight: How many asynchronous saves may run at a time.
        when_busy: What happens if a save is due while ``max_in_flight`` saves run: "wait" for the oldest one, or
            "skip" the new one.
        framework: As in ``bytecheckpoint.save``.
        layout: As in ``bytecheckpoint.save``.
        gate: As in ``bytecheckpoint.save``; ignored if ``async_save`` is False.
        allow_pickle: As in ``bytecheckpoint.save``.
        metadata: Plain values that are stored with every checkpoint. The key ``"metrics"`` is reserved.
        deadline_s: Seconds that each wait for another rank, for staging memory or for storage may take.
        lease_s: Seconds without a heartbeat after which another job may take the root over.
        coordinate_every_s: About how often, in seconds, ranks exchange signals, requests and clock-based decisions;
            a smaller value reacts faster and costs more small messages.
        storage_options: Options for the storage backend, such as credentials.
        checkpointer: The ``Checkpointer`` to use, if the shared one has the wrong memory budget or communicator.

    Attributes:
        root: The root, as a string.
        preempted: Whether a preemption signal made all ranks save.

    Raises:
        UsageError: An argument is invalid.
        RootInUseError: Another job saves below this root.
        StorageError: The lease could not be written.
        ControlError: The ranks could not work together.

    Example:
        >>> cadence = bcp.Cadence(every_steps=1000, every_minutes=30)
        >>> with bcp.CheckpointManager("s3://runs/7b", cadence=cadence, keep=3) as manager:
        ...     manager.resume(state)
        ...     for step in range(extra["step"] + 1, steps + 1):
        ...         train_step()
        ...         extra["step"] = step
        ...         manager.save(step, state)
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        cadence: Cadence | int | None = None,
        keep: Retention | int | None = None,
        preemption: Preemption | None = _LEAVE_ON_SIGTERM,
        async_save: bool = True,
        max_in_flight: int = 1,
        when_busy: WhenBusy = "wait",
        framework: str | None = None,
        layout: Layout = "shards",
        gate: bool = False,
        allow_pickle: bool = False,
        metadata: Mapping[str, Any] | None = None,
        deadline_s: float = DEFAULT_DEADLINE_S,
        lease_s: float = 15.0,
        coordinate_every_s: float = 2.0,
        storage_options: Mapping[str, Any] | None = None,
        checkpointer: Checkpointer | None = None,
    ) -> None:
        self.root = os.fspath(root)
        self.preempted = False
        self._pid = os.getpid()
        self._checkpointer = checkpointer if checkpointer is not None else default_checkpointer()
        self._rounds = CoordinationRounds(self._checkpointer, deadline_s)
        self._storage_options = dict(storage_options or {})
        self._deadline_s, self._async = deadline_s, async_save
        self._preemption = preemption if preemption is not None else Preemption(signals=())
        self._metadata = dict(metadata or {})
        self._options = SaveOptions(
            framework=framework,
            allow_pickle=allow_pickle,
            deadline_s=deadline_s,
            layout=layout,
            gate=gate and async_save,
        )
        self._in_flight = SavesInFlight(max_in_flight)
        self._signals = SignalWatch(())
        self._lease: Lease | None = None
        self._housekeeping: Housekeeping | None = None
        self._closed = False
        op = self._rounds.begin()
        try:
            with op.phase("lease"):
                check_whole_number("max_in_flight", max_in_flight)
                check_seconds("lease_s", lease_s)
                check_seconds("coordinate_every_s", coordinate_every_s)
                if METRICS_KEY in self._metadata:
                    raise UsageError(f"the metadata key {METRICS_KEY!r} is reserved for the metrics passed to save")
                replace(self._options, when_busy=when_busy, metadata=self._metadata).check()
                cadence = cadence if isinstance(cadence, Cadence) else Cadence(every_steps=cadence)
                retention = keep if isinstance(keep, Retention) else Retention(last=keep)
                self._signals = SignalWatch((*self._preemption.signals, *cadence.signals))
                self._coordinator = SaveCoordinator(
                    cadence,
                    self._preemption,
                    self._signals,
                    skip_when_busy=when_busy == "skip",
                    # In a single process a round exchanges nothing and costs nothing.
                    interval_s=coordinate_every_s if op.world_size > 1 else 0.0,
                )
                if op.rank == 0:
                    self._acquire_root(retention, lease_s)
            op.barrier("lease")
        except BaseException:
            self._release()
            raise
        finally:
            op.close()
        before_exit(partial(_release_at_exit, weakref.ref(self)))

    def latest(self, *, allow_fresh: bool = False) -> Checkpoint | None:
        """Open the newest valid checkpoint below the root, the same one on all ranks.

        Like ``bytecheckpoint.latest``, except that only rank 0 searches.

        Args:
            allow_fresh: Return None if saves were made below the root but none of them is valid.

        Returns:
            The checkpoint, or None if nothing was ever saved.

        Raises:
            NoValidCheckpointError: Saves were made below the root, but none of them is valid.
            StorageError: The store failed.
            ControlError: The ranks could not work together.
        """
        with self._rounds.round() as op:
            name = self._find_newest(op, (), allow_fresh=allow_fresh)
        if name is None:
            return None
        return self._checkpointer.open(join(self.root, name), storage_options=self._storage_options)

    def resume(self, state: Mapping[str, Any], *, allow_fresh: bool = False, **options: Any) -> LoadReport | None:
        """Load the newest valid checkpoint into ``state``.

        If a checkpoint turns out to be damaged while it is loaded, the damage is logged and the one before it is
        loaded. Only damage makes the manager fall back: a state that does not fit the checkpoint and a checkpoint of
        a newer library are errors.

        Args:
            state: The state to fill in place, as in ``bytecheckpoint.load``.
            allow_fresh: Return None if saves were made below the root but none of them is valid.
            **options: Options of ``bytecheckpoint.load``.

        Returns:
            The report of the load, or None if nothing was ever saved; then ``state`` is unchanged.

        Raises:
            NoValidCheckpointError: Saves were made below the root, but none of them is valid. Tensors of ``state`` may
                already hold values of a damaged checkpoint.
            MismatchError: ``state`` does not fit the checkpoint.
            UnsupportedVersionError: A newer library saved the newest checkpoint.
            BytecheckpointError: Other errors of ``bytecheckpoint.load``.
        """
        damaged: list[str] = []
        while True:
            with self._rounds.round(followed_by="load") as op:
                name = self._find_newest(op, damaged, allow_fresh=allow_fresh)
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
                _log.error("%s cannot be loaded; trying the one before it: %s", name, error)
                damaged.append(name)
            else:
                _log.info("%s: resumed from %s", self.root, name)
                return report

    def save(
        self,
        step: int,
        state: State,
        *,
        metrics: Mapping[str, float] | None = None,
        force: bool = False,
    ) -> SaveHandle | None:
        """Save ``state`` if a save is due. Call it once per iteration of the training loop, after the training step.

        Most calls return None immediately. If a rank does not call ``save`` while the others wait for it, their
        ``DeadlineError`` names that rank.

        Args:
            step: The number of the training step; the same on all ranks.
            state: As in ``bytecheckpoint.save``, or a function that returns it and is called only if a save is made.
            metrics: Numbers that are stored with the checkpoint (those of rank 0) and that ``Retention.metric`` refers
                to.
            force: Save now, whatever the cadence. A step that was already saved is not saved again.

        Returns:
            The handle of the save, or None if no save was made.

        Raises:
            UsageError: The manager is closed, or an argument is invalid.
            DisagreementError: The ranks passed different steps.
            RootInUseError: Another job has taken the root over.
            SystemExit: All ranks saved because of a preemption signal, and ``Preemption.action`` is "exit".
            BytecheckpointError: Whatever ``bytecheckpoint.save`` raises, and on all ranks the failure of an earlier
                save in the background. Nothing was saved; call ``save`` again to continue.
        """
        if self._closed:
            raise UsageError("this CheckpointManager is closed; create a new one")
        is_due = force or self._coordinator.is_due(step)
        if not self._coordinator.begin_turn(is_due=is_due):
            return None
        with self._rounds.round(followed_by="save") as op:
            decision, plain_metrics = self._coordinate(op, step, metrics, is_due=is_due)
        handle = None
        if decision.save:
            is_leaving = decision.preemption_signal != 0
            deadline_s = max(_MIN_DEADLINE_S, decision.grace_s) if is_leaving else self._deadline_s
            with self._checkpointer.following(op, "save", deadline_s):
                handle = self._begin_save(step, state, plain_metrics, deadline_s)
        if decision.preemption_signal:
            self._leave(step, decision.preemption_signal)
        return handle

    def request_save(self) -> None:
        """Request a save by all ranks in one of the next iterations. May be called on any rank, from any thread."""
        self._coordinator.request()

    def wait(self) -> None:
        """Wait until all saves are committed.

        Raises:
            BytecheckpointError: The failure of a save, on all ranks.
        """
        with self._rounds.round() as op, self._settling():
            self._in_flight.finish(op)

    def close(self) -> None:
        """Wait for all saves, then release the lease, the signal handlers and the threads.

        Raises:
            BytecheckpointError: The failure of a save, after everything is released.
        """
        if self._closed:
            return
        try:
            self.wait()
        finally:
            self._release()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:
            # The other ranks may be elsewhere or gone, so this rank does not wait for them.
            if not self._closed:
                self._rounds.report_failure(error)
            self._release()

    def _find_newest(self, op: Operation, excluded: Sequence[str], *, allow_fresh: bool) -> str | None:
        """Return the name of the newest valid checkpoint, the same on all ranks. Raises like ``find_newest``.

        Only rank 0 lists the root, because ranks may see different states of a network file system.
        """
        response = None
        with op.phase("find"):
            if op.rank == 0:
                found = find_newest(
                    self.root, excluding=excluded, allow_fresh=allow_fresh, storage_options=self._storage_options
                )
                response = msgpack.packb(None if found is None else found.name)
        name: str | None = msgpack.unpackb(op.broadcast("found", response))
        return name

    def _coordinate(
        self, op: Operation, step: int, metrics: Mapping[str, float] | None, *, is_due: bool
    ) -> tuple[Decision, dict[str, float]]:
        with self._settling():
            with op.phase("check"):
                plain_metrics = _as_floats(metrics)
                if self._lease is not None:
                    self._lease.raise_if_lost()
            is_busy = self._in_flight.is_full()
            self._in_flight.settle(op)
            decision = self._coordinator.decide(op, step, is_due=is_due, is_busy=is_busy)
            if decision.save:
                self._in_flight.wait_for_room(op)
            return decision, plain_metrics

    @contextmanager
    def _settling(self) -> Iterator[None]:
        """If the block fails, forget earlier saves and allow that the step is saved again."""
        try:
            yield
        except BaseException:
            self._coordinator.save_failed()
            self._in_flight.drain()
            raise

    def _begin_save(self, step: int, state: State, metrics: Mapping[str, float], deadline_s: float) -> SaveHandle:
        self._coordinator.save_began(step)
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
                url, _state_factory(state), options, async_save=self._async, storage_options=self._storage_options
            )
        except BaseException:
            self._coordinator.save_failed()
            if self._housekeeping is not None:
                self._housekeeping.forget(name)
            raise
        self._in_flight.add(handle)
        if self._housekeeping is not None:
            self._housekeeping.follow(handle, name, step, metrics)
        return handle

    def _leave(self, step: int, number: int) -> None:
        _log.warning("%s: received %s; step %d is the last one", self.root, signal.Signals(number).name, step)
        self.preempted = True
        exits = self._preemption.action == "exit"
        try:
            self.wait()
        finally:
            if exits:
                self._release()
        if exits:
            raise SystemExit(128 + number)

    def _acquire_root(self, retention: Retention, lease_s: float) -> None:
        backend = open_backend(self.root, **self._storage_options)
        here = PeerIdentity.of_this_process(0)
        self._lease = Lease.acquire(backend, here, interval_s=lease_s / HEARTBEATS_PER_LEASE)
        self._housekeeping = Housekeeping(self.root, self._storage_options, retention, self._lease.job)

    def _release(self) -> None:
        """Wait for this rank's part of all saves, log failures, and release everything. Does not wait for others."""
        if self._closed:
            return
        self._closed = True
        self._in_flight.drain()
        if self._housekeeping is not None:
            self._housekeeping.close()
        if self._lease is not None:
            self._lease.close()
        self._signals.close()


def _as_floats(metrics: Mapping[str, float] | None) -> dict[str, float]:
    """Metrics as plain floats; tensors and arrays of one element are accepted too. Raises ``UsageError``."""
    plain: dict[str, float] = {}
    for name, value in (metrics or {}).items():
        try:
            plain[str(name)] = float(value)
        except (TypeError, ValueError) as error:
            raise UsageError(f"the metric {name!r} is not a number: {value!r}") from error
    return plain


def _state_factory(state: Any) -> Callable[[], Any]:
    # Modules are callable too, but do not return a state.
    if isinstance(state, (Mapping, torch.nn.Module)) or not callable(state):
        return lambda: state
    factory: Callable[[], Any] = state
    return factory


def _release_at_exit(manager: weakref.ref[CheckpointManager]) -> None:
    alive = manager()
    # multiprocessing runs this also at the end of a forked child, whose saves, lease and threads are its parent's.
    if alive is not None and alive._pid == os.getpid():
        alive._release()
