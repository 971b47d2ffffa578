"""Manage the checkpoints of one job: when to save, which to keep, where to resume, and how to exit on preemption."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import msgpack
import torch

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.discovery import (
    EXCEPTION_KEY,
    METRICS_KEY,
    MILESTONE_KEY,
    BestMode,
    CompleteCheckpoint,
    check_is_root,
    find_best,
    find_milestone,
    find_newest,
    folders_of,
    milestone_of,
)
from ..checkpoint.lease import HEARTBEATS_PER_LEASE, Lease, check_holder
from ..checkpoint.location import AnyLocation, Location, Tier
from ..checkpoint.manifest_file import read_manifest
from ..checkpoint.nearest import open_nearest, open_tier
from ..checkpoint.renaming import Rename
from ..checkpoint.rollback import abandon_later
from ..checkpoint.selection import Selection
from ..checkpointer import Checkpointer, session_of
from ..control.base import Operation
from ..control.peers import PeerIdentity
from ..errors import CheckpointError, KeyNotFoundError, StorageError, UnsupportedVersionError, UsageError
from ..loading.options import Cast, LoadOptions, LoadRequest, Strictness
from ..loading.report import LoadReport
from ..runtime import DEFAULT_DEADLINE_S
from ..runtime.arguments import STEP, check_arguments, check_choice, deadline_of, options_of, text_to_store
from ..runtime.waiting import cancelling_requests
from ..saving.handle import SaveHandle
from ..saving.options import SaveOptions, SaveRequest
from .callbacks import CallbackRunner, Callbacks
from .coordinator import EARLIER_SAVES, CoordinationRounds, Decision, SaveCall, SaveCoordinator, agree_on_last_save
from .housekeeping import Committed, Housekeeping, StepNames
from .options import Cadence, ExceptionSave, JobOptions, Preemption, Retention, checked_job
from .resources import ManagerResources
from .signals import SignalWatch
from .tier import TierFolder

_MIN_DEADLINE_S = 1.0  # of a save on preemption, even if the grace period is already over
_LEAST_SILENCE_S = 2.0  # without a reply to a request
_EXIT_S = 3.0  # at the end of a grace period, to give up the lease and to end the process

State: TypeAlias = Mapping[str, Any] | Callable[[], Mapping[str, Any]]

_MOST_NAMES_SHOWN = 3

_LEAVE_ON_SIGTERM = Preemption()

_log = logging.getLogger(__name__)


class CheckpointManager:
    """Saves on a schedule, applies retention rules, resumes from the newest valid checkpoint, and handles preemption.

    Create one manager per root and job, on every rank. Call every method on every rank, from the training thread;
    only ``request_save`` may be called on a single rank and from any thread. Checkpoints are the folders
    ``step-<number>`` of the root (``JobOptions.name_template``); nothing else below the root is touched. A lease on the
    root prevents two jobs from saving there by mistake.

    Nothing is read, written or sent before ``with`` is entered or the first method is called: only then does a manager
    acquire the lease and handle signals.

    Args:
        root: Local path, URL or ``Location`` below which the checkpoints are saved. With a tier, ``resume`` and the
            other searches also find, and prefer, what is in the tier; a new manager continues the uploads of earlier
            jobs from its machine; ``wait`` and ``close`` wait for uploads, and an upload that fails does not disturb
            the training before. On a preemption signal or an exception, uploads that do not end within the grace period
            (``Preemption.grace_s``) are stopped.
        cadence: When saves are due. An int ``n`` is short for ``Cadence(every_steps=n)``. With None, only
            ``save(..., force=True)``, ``request_save`` and preemption save.
        keep: Which checkpoints to keep. An int ``n`` is short for ``Retention(last=n)``; None keeps all. Others are
            removed on rank 0, in a background thread, after a new checkpoint is committed.
        async_save: Whether ``save`` returns once the state is copied.
        save: How to save: ``SaveOptions``, or a mapping of its fields. ``gate`` has no effect if ``async_save`` is
            False.
        load: How ``resume`` loads: ``LoadOptions``, or a mapping of its fields.
        job: How the job runs its saves: ``JobOptions``, or a mapping of its fields.
        callbacks: Functions to call when a save is staged, committed or failed, or a checkpoint is removed.
        preemption: Signals on which all ranks save and exit; by default SIGTERM. None handles no signals.
        on_exception: Save when an exception leaves ``with manager:``, in a checkpoint that ``resume`` ignores. A state,
            or a function that returns it, is short for ``ExceptionSave(state=...)``. The same on all ranks.
        storage_options: Options for the storage backend of a path; a ``Location`` has its own.
        checkpointer: The ``Checkpointer`` to use, if the shared one has the wrong memory budget or communicator.

    Attributes:
        root: The root, as a ``Location``.
        preempted: Whether a preemption signal made all ranks save.

    Raises:
        UsageError: An argument is invalid. When the manager begins: the root is a checkpoint itself, or no handler can
            be installed for a signal.
        RootInUseError: When the manager begins: another job saves below this root.
        StorageError: When the manager begins: the lease could not be written. With a tier, a store that fails delays
            that, and uploads wait for it.
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
        root: AnyLocation,
        *,
        cadence: Cadence | int | None = None,
        keep: Retention | int | None = None,
        async_save: bool = True,
        save: SaveOptions | Mapping[str, Any] | None = None,
        load: LoadOptions | Mapping[str, Any] | None = None,
        job: JobOptions | Mapping[str, Any] | None = None,
        callbacks: Callbacks | None = None,
        preemption: Preemption | None = _LEAVE_ON_SIGTERM,
        on_exception: ExceptionSave | State | None = None,
        storage_options: Mapping[str, Any] | None = None,
        checkpointer: Checkpointer | None = None,
    ) -> None:
        self.root = Location.of(root, storage_options)
        self.preempted = False
        self._session = session_of(checkpointer)
        self._async = async_save
        self._preemption = preemption if preemption is not None else Preemption(signals=())
        self._last_step: int | None = None  # that this rank completed since it started or resumed
        self._highest_step = 0  # of the names below the root, until a save; then its step
        # The first operation reports an invalid value to all ranks, within a deadline that may be invalid, too.
        self._rounds = CoordinationRounds(self._session, deadline_of(job) or DEFAULT_DEADLINE_S)
        self._resources = ManagerResources(self, self.root)
        self._beginning: Operation | None = None
        try:
            check_arguments({"async_save": async_save})
            self._job = checked_job(job)
            self._request = self._checked_request(save)
            self._load_options = options_of(LoadOptions, load, "load")
            if on_exception is not None and not isinstance(on_exception, ExceptionSave):
                on_exception = ExceptionSave(state=on_exception)
            self._exception_save = on_exception
            if not isinstance(callbacks, (Callbacks, type(None))):
                raise UsageError(f"callbacks must be a bytecheckpoint.Callbacks or None, not {callbacks!r}")
            self._names = StepNames(self._job.name_template)
            self._callbacks = CallbackRunner(callbacks or Callbacks())
            if not isinstance(self._preemption, Preemption):
                raise UsageError(f"preemption must be a bytecheckpoint.Preemption or None, not {preemption!r}")
            self._cadence = cadence if isinstance(cadence, Cadence) else Cadence(every_steps=cadence)
            self._retention = keep if isinstance(keep, Retention) else Retention(last=keep)
            self._resources.in_flight.limit = self._job.max_in_flight
            skips = self._job.when_busy == "skip"
            self._coordinator = SaveCoordinator(self._cadence, self._preemption, skip_when_busy=skips)
        except BaseException as error:
            with self._rounds.begin() as op:  # the other ranks raise it when they begin
                op.fail("check", error)
            raise

    def _begin(self) -> None:
        """With the other ranks, acquire the root, install the signal handlers, and continue uploads; only once."""
        if self._beginning is not None:
            return
        held, preemption = self._resources, self._preemption
        op = self._beginning = self._rounds.begin()
        try:
            with op.phase("lease"):
                held.signals = SignalWatch(
                    (*preemption.signals, *self._cadence.signals),
                    grace_s=dict.fromkeys(preemption.signals, preemption.grace_s),
                    is_abandoned=held.is_abandoned,
                )
                # In a single process a round exchanges nothing and costs nothing.
                interval_s = self._job.coordinate_every_s if op.world_size > 1 else 0.0
                self._coordinator.begin(held.signals, interval_s)
                if op.rank == 0:
                    self._acquire_root()
            mark = op.broadcast("lease", held.lease.job if held.lease is not None else None)
            with op.phase("tier"):
                if self.root.tier is not None:
                    held.tier_folder = self._open_tier(self.root.tier, mark)
                    if held.housekeeping is not None:
                        held.housekeeping.pending = held.tier_folder.pending_manifests
            received = op.gather(
                "tier", msgpack.packb(held.tier_folder.pending() if held.tier_folder is not None else {})
            )
            pending: dict[str, bytes] = {}
            for name, manifest in (item for one in received or () for item in msgpack.unpackb(one).items()):
                if held.housekeeping is not None:
                    held.housekeeping.keep_objects(manifest)
                pending.setdefault(name, manifest)
            superfluous: list[str] = []
            if pending and held.housekeeping is not None and held.lease is not None and held.lease.is_acquired:
                held.housekeeping.expect_uploads(pending)
                superfluous = held.housekeeping.superfluous()
            answer = msgpack.packb([pending, superfluous]) if op.rank == 0 else None
            pending, superfluous = msgpack.unpackb(op.broadcast("tier", answer))
            if held.tier_folder is not None:
                uploaded = held.housekeeping.apply if held.housekeeping is not None else lambda: None
                held.tier_folder.begin(pending, superfluous, uploaded)
        except BaseException:
            held.release()
            raise
        finally:
            op.close()

    def _checked_request(self, save: SaveOptions | Mapping[str, Any] | None) -> SaveRequest:
        """Return what all saves have in common."""
        options = options_of(SaveOptions, save, "save")
        if options.deadline_s is None:
            options = replace(options, deadline_s=self._job.deadline_s)
        metadata = dict(self._job.metadata or {})
        for key in (METRICS_KEY, MILESTONE_KEY, EXCEPTION_KEY):
            if key in metadata:
                raise UsageError(f"the metadata key {key!r} is reserved for the manager")
        request = SaveRequest.of(
            options,
            location=self.root,
            metadata=metadata,
            selection=Selection(self._job.include, self._job.exclude),
        )
        return replace(request, gate=request.gate and self._async)

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
        return self._find(partial(find_newest, allow_fresh=allow_fresh))

    def best(self, metric: str | None = None, mode: BestMode | None = None) -> Checkpoint | None:
        """Open the best checkpoint below the root, the same one on all ranks.

        Args:
            metric: The key in the ``metrics`` of ``save``, or in the metadata. By default that of ``keep``.
            mode: ``"min"`` if a lower metric is better, ``"max"`` if a higher one is. By default that of ``keep``.

        Returns:
            The checkpoint, of equal ones that of the latest step; None if no checkpoint has the metric.

        Raises:
            UsageError: There is no metric to compare.
            StorageError: The store failed.
            ControlError: The ranks could not work together.
        """
        metric, mode = metric or self._retention.metric, mode or self._retention.mode
        if not isinstance(metric, str):
            raise UsageError("best needs a metric: pass one, or set Retention.metric")
        check_choice("mode", mode, BestMode)
        return self._find(partial(find_best, metric=metric, mode=mode))

    def milestone(self, name: str) -> Checkpoint | None:
        """Open the checkpoint that was saved as this milestone, the same one on all ranks.

        Args:
            name: The ``milestone`` of ``save``.

        Returns:
            The checkpoint, of several that of the latest step; None if there is none.

        Raises:
            UsageError: The manager is closed.
            StorageError: The store failed.
            ControlError: The ranks could not work together.
        """
        return self._find(partial(find_milestone, name=name))

    def resume(
        self,
        state: Mapping[str, Any],
        *,
        allow_fresh: bool = False,
        strict: bool | Strictness | Mapping[str, bool | Strictness] = True,
        include: Sequence[str] = ("*",),
        exclude: Sequence[str] = (),
        rename: Rename | None = None,
        cast: Cast = "widen",
    ) -> LoadReport | None:
        """Load the newest valid checkpoint into ``state``.

        If saves are asynchronous, background threads then fault in the memory of the first one (see
        ``bytecheckpoint.warmup``).

        With a tier, a checkpoint that is not uploaded and has files on several machines is uploaded first, which may
        take up to half of ``JobOptions.deadline_s``.

        If a checkpoint turns out to be damaged while it is loaded, the damage is logged and the one before it is
        loaded. Only damage makes the manager fall back: a state that does not fit the checkpoint and a checkpoint of
        a newer library are errors.

        Args:
            state: The state to fill in place; this and the following mean the same as in ``bytecheckpoint.load``.
            allow_fresh: Return None if saves were made below the root but none of them is valid.
            strict: Which names may be missing or unexpected.
            include: What to load.
            exclude: What not to load.
            rename: From stored full names to those of the state.
            cast: Which dtype conversions are allowed.

        Returns:
            The report of the load, or None if nothing was ever saved; then ``state`` is unchanged.

        Raises:
            NoValidCheckpointError: Saves were made below the root, but none of them is valid. Tensors of ``state`` may
                already hold values of a damaged checkpoint.
            MismatchError: ``state`` does not fit the checkpoint.
            UnsupportedVersionError: A newer library saved the newest checkpoint.
            BytecheckpointError: Other errors of ``bytecheckpoint.load``.
        """
        self._check_usable()
        self._last_step = None
        self._await_uploads()
        damaged: list[str] = []
        root = Location.of(self.root)
        while True:
            with self._rounds.round(followed_by="load") as op:
                search = partial(find_newest, excluding=damaged, allow_fresh=allow_fresh)
                name = self._agree_on_name(op, search, root)
            if name is None:
                return None
            deadline_s = deadline_of(self._load_options) or self._job.deadline_s
            make_request = partial(
                LoadRequest.of,
                replace(self._load_options, deadline_s=deadline_s),
                source=root.join(name),
                strict=strict,
                selection=Selection(include, exclude),
                rename=rename,
                cast=cast,
            )
            try:
                with self._rounds.reporting(op, "warmup"), self._session.following(op, "load", deadline_s):
                    report = self._session.load(make_request, state, deadline_s=deadline_s)
            except UnsupportedVersionError:
                raise
            except (CheckpointError, KeyNotFoundError) as error:
                _log.error("%s cannot be loaded; trying the one before it: %s", name, error)
                damaged.append(name)
            else:
                _log.info("%s: resumed from %s", self.root, name)
                self._prepare_saves(op, state)
                return report

    def save(
        self,
        step: int,
        state: State,
        *,
        metrics: Mapping[str, float] | None = None,
        milestone: str | None = None,
        force: bool = False,
    ) -> SaveHandle | None:
        """Save ``state`` if a save is due. Call it once per iteration of the training loop, after the training step.

        A step that is lower than that of a checkpoint below the root means that the job has gone back to an earlier
        one: the checkpoints of higher steps are abandoned, so that ``latest`` and ``resume`` ignore them
        (``docs/newest.md``).

        Most calls return None immediately. If a rank does not call ``save`` while the others wait for it, their
        ``DeadlineError`` names that rank.

        Args:
            step: The number of the training step; the same on all ranks.
            state: As in ``bytecheckpoint.save``, or a function that returns it and is called only if a save is made.
            metrics: Numbers that are stored with the checkpoint (those of rank 0) and that ``Retention.metric`` refers
                to.
            milestone: Save now, and keep the checkpoint for ever. ``CheckpointManager.milestone`` finds it by this
                name, which is the same on all ranks. A later save of the step without a milestone keeps the name.
            force: Save now, whatever the cadence, even if this step was saved before or earlier saves are in flight.

        Returns:
            The handle of the save, or None if no save was made.

        Raises:
            UsageError: The manager is closed, or an argument is invalid.
            DisagreementError: The ranks passed different steps.
            RootInUseError: Another job has taken the root over.
            SystemExit: All ranks saved because of a preemption signal, and ``Preemption.action`` is "exit".
            BytecheckpointError: Whatever ``bytecheckpoint.save`` raises. Unless it is a ``CommitUnknownError``, nothing
                was saved; call ``save`` again to continue.

        Warns:
            SaveFailedWarning: An earlier save failed in the background, and no one asked its handle for the outcome.
        """
        self._check_usable()
        self._callbacks.poll()
        step = self._last_step = STEP("step", step)
        is_due = self._coordinator.is_due(step)
        force = force or milestone is not None
        if not self._coordinator.begin_turn(is_due=is_due or force):
            return None
        with ExitStack() as leaving:
            with self._rounds.round(followed_by="save") as op:
                decision = self._coordinate(op, step, metrics, milestone, leaving, is_due=is_due, is_forced=force)
            if not decision.save:
                return None
            is_leaving = decision.preemption_signal != 0
            deadline_s = max(_MIN_DEADLINE_S, decision.grace_s) if is_leaving else self._request.deadline_s
            with self._session.following(op, "save", deadline_s):
                return self._begin_save(step, state, decision.metrics, decision.milestone or None, deadline_s)

    def request_save(self) -> None:
        """Request a save by all ranks in one of the next iterations. May be called on any rank, from any thread."""
        self._coordinator.request()

    def wait(self) -> None:
        """Wait until all saves are committed, and with a tier uploaded.

        Raises:
            BytecheckpointError: The failure of the last save, unless its handle was asked for the outcome, or of an
                upload; on all ranks.
            ControlError: The ranks could not work together. Only the handles know then how the saves ended.
        """
        self._check_usable()
        self._finish_saves()
        if self._resources.tier_folder is not None:
            self._resources.tier_folder.wait()

    def _finish_saves(self) -> None:
        with self._rounds.round() as op, self._ending_saves_on_failure():
            if self._resources.in_flight.finish(op):
                self._coordinator.save_failed()
            # Before the barrier, whose failure says less: the outcome of the save may be unknown.
            with op.phase(EARLIER_SAVES):
                self._session.failures.raise_for(self.root.join(self._names.of(0)))
            op.barrier(EARLIER_SAVES)
        self._callbacks.poll()

    def close(self) -> None:
        """Wait for all saves, then release the lease, the signal handlers and the threads.

        Raises:
            BytecheckpointError: What ``wait`` raises, after everything is released.
        """
        try:
            if self._beginning is not None and not self._resources.is_closed and not self._resources.is_inherited:
                self.wait()
        finally:
            self._resources.release()

    def __enter__(self) -> CheckpointManager:
        self._check_usable()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._resources.is_closed or self._resources.is_inherited:
            self._resources.release()
            return
        try:
            if error is None:
                self.wait()
            else:
                # The other ranks may be elsewhere or gone, so this rank does not wait for them.
                self._rounds.report_failure(error)
                self._save_on(error)
                if self._resources.tier_folder is not None:
                    self._resources.in_flight.drain()
                    self._resources.tier_folder.leave(self._preemption.grace_s)
        except BaseException as failure:
            if error is None:
                self._save_on(failure)
            raise
        finally:
            self._resources.release()

    def _save_on(self, error: BaseException) -> None:
        """Save together with the other ranks, if all leave because of an exception. Logs failures, and never raises."""
        options = self._exception_save
        if options is None or self._beginning is None:
            return
        try:
            # Not counted, because a rank that leaves without an exception does not enter it.
            with self._beginning.follow("last save", deadline_s=options.deadline_s) as op:
                if not isinstance(error, (Exception, KeyboardInterrupt) if options.on_interrupt else Exception):
                    op.fail("training", error)
                    return
                marker = agree_on_last_save(op, self._last_step, error, options.deadline_s)
                step = marker["steps"][0]
                saved = Committed(self._names.on_exception(step), step, is_exception_save=True)
                with self._session.following(op, "save", options.deadline_s):
                    self._save_as(saved, options.state, {EXCEPTION_KEY: marker}, options.deadline_s, is_async=False)
            if op.rank == 0:
                _log.warning("%s: saved %s, which only its path leads to, on %s", self.root, saved.name, marker)
        except BaseException as failure:  # noqa: BLE001 - the original exception is the one to raise
            _log.error("%s: the last save, on the %s, failed: %s", self.root, type(error).__name__, failure)

    def _prepare_saves(self, op: Operation, state: Mapping[str, Any]) -> None:
        """Let background threads fault in the memory of the first asynchronous save while training begins."""
        if not self._async:
            return
        try:
            deadline_s = self._request.deadline_s
            with self._session.following(op, "warmup", deadline_s):
                self._session.warm_up(lambda: self._request, state, slots=1, wait=False, deadline_s=deadline_s)
        except UsageError as error:
            _log.warning("%s: this state can be resumed but not saved: %s", self.root, error)

    def _await_uploads(self) -> None:
        """If the newest checkpoint is on several machines and not uploaded, wait for the rest of its upload."""
        tier_folder = self._resources.tier_folder
        if tier_folder is None:
            return
        with self._rounds.round() as op:
            with op.phase("tier"):
                answer = bytes([tier_folder.lacks_files()]) if op.rank == 0 else None
            is_needed = op.broadcast("tier", answer) != b"\0"
        if is_needed:
            tier_folder.wait_begun(self._job.deadline_s / 2)  # the other ranks wait twice as long
            with self._rounds.round() as op:
                op.barrier("uploaded")

    def _find(self, search: Callable[..., CompleteCheckpoint | None]) -> Checkpoint | None:
        self._check_usable()
        root = Location.of(self.root)
        with self._rounds.round() as op:
            name = self._agree_on_name(op, search, root)
        return None if name is None else self._session.open(root.join(name), deadline_s=self._job.deadline_s)

    def _agree_on_name(
        self, op: Operation, search: Callable[..., CompleteCheckpoint | None], root: Location
    ) -> str | None:
        """Return the name of the checkpoint that ``search`` finds on rank 0, and raise on all ranks what it raises.

        Only rank 0 lists the root, because ranks may see different states of a network file system. If it has waited
        for the store in vain, the other ranks do not wait again.
        """
        response = None
        with op.phase("find"):
            if op.rank == 0:
                found = search(root, deadline_s=self._job.deadline_s)
                response = msgpack.packb([None if found is None else found.name, root.silence.is_silent])
        name: str | None
        name, is_silent = msgpack.unpackb(op.broadcast("found", response))
        root.silence.is_silent |= is_silent
        return name

    def _coordinate(
        self,
        op: Operation,
        step: int,
        metrics: Mapping[str, float] | None,
        milestone: str | None,
        leaving: ExitStack,
        *,
        is_due: bool,
        is_forced: bool,
    ) -> Decision:
        with self._ending_saves_on_failure():
            with op.phase("check"):
                check_arguments({"force": is_forced, "milestone": milestone})
                call = SaveCall(step, is_due, is_forced, _as_floats(metrics), milestone or "")
                if self._resources.lease is not None:
                    self._resources.lease.raise_if_lost()
                is_again = op.rank == 0 and step <= self._highest_step
                known = self._milestone_of(step) if is_again and milestone is None else call.milestone
            in_flight = self._resources.in_flight
            is_busy, is_saving = in_flight.is_full(), in_flight.is_any_running()
            if in_flight.collect(op):
                self._coordinator.save_failed()
            decision = self._coordinator.decide(op, call, is_busy=is_busy, is_saving=is_saving, milestone=known)
            if decision.preemption_signal:
                leaving.enter_context(self._leaving(step, decision.preemption_signal, decision.grace_s))
            if decision.save:
                with op.phase("rollback"):
                    if op.rank == 0:
                        self._abandon_later(step)
                in_flight.wait_for_room(op)
            return decision

    def _milestone_of(self, step: int) -> str:
        """Return the milestone's name of the checkpoint that a save of this step would replace; empty if it is none."""
        self._resources.in_flight.wait_committed()
        try:
            manifest = read_manifest(open_nearest(self.root.join(self._names.of(step)), self._job.deadline_s))
        except (CheckpointError, StorageError):
            return ""
        return milestone_of(manifest) or ""

    def _abandon_later(self, step: int) -> None:
        """If this job has gone back to an earlier step, abandon what was saved after it. On rank 0."""
        names: list[str] = []
        if step < self._highest_step:
            self._resources.in_flight.wait_committed()
            step_of = self._names.step_of
            names = abandon_later(
                self.root,
                step,
                is_earlier=lambda name: (named := step_of(name)) is not None and named <= step,
                deadline_s=self._job.deadline_s,
            )
        self._highest_step = step
        if not names:
            return
        if self._resources.housekeeping is not None:
            self._resources.housekeeping.reorder()
        _log.warning(
            "%s: step %d is saved after steps that are higher, so this job has gone back: %s are abandoned. latest and "
            "resume ignore them; to take that back: bcp rollback %s STEP",
            self.root,
            step,
            ", ".join(names if len(names) <= _MOST_NAMES_SHOWN else [names[0], "...", names[-1]]),
            self.root,
        )

    @contextmanager
    def _ending_saves_on_failure(self) -> Iterator[None]:
        """If the block fails, wait for earlier saves and allow that the step is saved again."""
        try:
            yield
        except BaseException:
            self._coordinator.save_failed()
            self._resources.in_flight.drain()
            raise

    def _begin_save(
        self, step: int, state: State, metrics: Mapping[str, float], milestone: str | None, deadline_s: float
    ) -> SaveHandle:
        self._coordinator.save_began(step)
        metadata: dict[str, Any] = {}
        if metrics:
            metadata[METRICS_KEY] = metrics
        if milestone is not None:
            metadata[MILESTONE_KEY] = milestone
        metric = metrics.get(self._retention.metric or "")
        saved = Committed(self._names.of(step), step, metric, milestone is not None, created=time.time())
        try:
            handle = self._save_as(saved, state, metadata, deadline_s, is_async=self._async)
        except BaseException:
            self._coordinator.save_failed()
            raise
        self._callbacks.follow(handle)
        return handle

    def _save_as(
        self, saved: Committed, state: State, metadata: Mapping[str, Any], deadline_s: float, *, is_async: bool
    ) -> SaveHandle:
        request = replace(
            self._request,
            location=self.root.join(saved.name),
            step=saved.step,
            metadata={**self._request.metadata, **metadata},
            deadline_s=deadline_s,
            gate=self._request.gate and is_async,
        )
        lease, housekeeping, tier_folder = (
            self._resources.lease,
            self._resources.housekeeping,
            self._resources.tier_folder,
        )
        if lease is not None:
            request = replace(request, job=lease.job, guard=lease.check)
        if tier_folder is not None:
            request = replace(request, upload_stop=tier_folder.stop)
            if housekeeping is not None:
                request = replace(request, superfluous=housekeeping.superfluous)
        cleaners = [one for one in (housekeeping, tier_folder) if one is not None]
        for one in cleaners:
            one.expect(saved.name)
        try:
            handle = self._session.save(
                request.checked, _state_factory(state), is_async=is_async, deadline_s=deadline_s
            )
        except BaseException:
            for one in cleaners:
                one.forget(saved.name)
            raise
        self._resources.in_flight.add(handle)
        if housekeeping is not None:
            housekeeping.follow(handle, saved)
        if tier_folder is not None:
            tier_folder.follow(handle, saved.name)
        return handle

    @contextmanager
    def _leaving(self, step: int, number: int, grace_s: float) -> Iterator[None]:
        """On a preemption signal: save in the block, and end all that has begun, within the grace period."""
        _log.warning("%s: received %s; step %d is the last one", self.root, signal.Signals(number).name, step)
        self.preempted = True
        exits, tier_folder = self._preemption.action == "exit", self._resources.tier_folder
        end = time.monotonic() + grace_s
        if self._resources.housekeeping is not None:
            self._resources.housekeeping.leave()
        saving_s = max(grace_s - _EXIT_S, grace_s / 2)
        # Without a tier, a save waits for the store. One that is only slow may have more time than is known here.
        is_bounded = tier_folder is None and grace_s > 0
        silent_s = max(_LEAST_SILENCE_S, saving_s / 2)
        try:
            with cancelling_requests(saving_s, silent_s=silent_s) if is_bounded else nullcontext():
                yield
                self._finish_saves()
            if tier_folder is not None:  # half of what is left: parts in flight end, and the lease
                tier_folder.leave((end - time.monotonic()) / 2)
        finally:
            if exits:  # half of what is left: the process ends, too
                with cancelling_requests(max(_MIN_DEADLINE_S, (end - time.monotonic()) / 2)):
                    self._resources.release()
        if exits:
            raise SystemExit(128 + number)

    def _acquire_root(self) -> None:
        held, backend = self._resources, self.root.open(self._job.deadline_s)
        children: list[str] = []
        try:
            children += check_is_root(backend)
        except StorageError as error:
            if self.root.tier is None:
                raise
            _log.warning("%s cannot be listed; this job begins with what is in the tier: %s", self.root, error)
        if self.root.tier is not None:
            children += open_tier(self.root.tier.path, backend).list_children("")
        steps = (self._names.step_of(name) for name in folders_of(children))
        self._highest_step = max((step for step in steps if step is not None), default=0)
        here = PeerIdentity.of_this_process(0)
        interval_s = self._job.lease_s / HEARTBEATS_PER_LEASE
        held.lease = Lease.acquire(
            backend,
            here,
            interval_s=interval_s,
            is_unwanted=held.finish_if_abandoned,
            is_deferrable=self.root.tier is not None,
        )
        if self.root.tier is None:  # with one, a save fails for reasons of this machine, and asks the store nothing
            held.in_flight.guard = held.lease.check
        held.housekeeping = Housekeeping(
            self.root,
            self._retention,
            held.lease,
            self._session.engine.shared,
            names=self._names,
            deadline_s=self._job.deadline_s,
            keep_exception_saves=self._exception_save.keep if self._exception_save is not None else None,
            on_removed=self._callbacks.removed,
        )

    def _open_tier(self, tier: Tier, job: bytes) -> TierFolder:
        lease, backend = self._resources.lease, self.root.open(self._job.deadline_s)
        return TierFolder(
            self.root,
            tier,
            self._session.engine.uploads,
            self._session.engine.upload_queue,
            self._session.engine.shared,
            self._names,
            deadline_s=self._job.deadline_s,
            job=job,
            guard=lease.check if lease is not None else partial(check_holder, backend, job),
        )

    def _check_usable(self) -> None:
        if self._resources.is_closed:
            raise UsageError("this CheckpointManager is closed; create a new one")
        if self._resources.is_inherited:
            raise UsageError(
                "this CheckpointManager belongs to the process that this one was forked from; use it only there"
            )
        self._begin()


def _as_floats(metrics: Mapping[str, float] | None) -> dict[str, float]:
    """Metrics as plain floats; tensors and arrays of one element are accepted too. Raises ``UsageError``."""
    if not isinstance(metrics, (Mapping, type(None))):
        raise UsageError(f"metrics must be a mapping of names to numbers, not {metrics!r:.80}")
    plain: dict[str, float] = {}
    for name, value in (metrics or {}).items():
        text_to_store("the name of a metric", name)
        try:
            plain[name] = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise UsageError(f"the metric {name!r} is not a number: {value!r:.80}") from error
    return plain


def _state_factory(state: Any) -> Callable[[], Any]:
    # Modules are callable too, but do not return a state.
    if isinstance(state, (Mapping, torch.nn.Module)) or not callable(state):
        return lambda: state
    factory: Callable[[], Any] = state
    return factory
