"""Options of a manager: when it saves, which checkpoints it keeps, and how it reacts to preemption and exceptions."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from ..checkpoint.discovery import BestMode
from ..errors import UsageError
from ..runtime import DEFAULT_DEADLINE_S
from ..runtime.arguments import (
    ARGUMENTS,
    Rule,
    check_arguments,
    choice,
    optional,
    options_of,
    positive_number,
    whole_number,
)

__all__ = ["BestMode", "Cadence", "ExceptionSave", "JobOptions", "Preemption", "PreemptionAction", "Retention"]
__all__ += ["WhenBusy", "checked_job"]

PreemptionAction = Literal["exit", "return"]
"""What ``CheckpointManager.save`` does after it saved because of a preemption signal."""

_count = optional(whole_number(1))


WhenBusy = Literal["wait", "skip"]
"""What happens if a save is due while earlier saves run."""


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """How a ``CheckpointManager`` runs the saves of its job. A mapping of these names to values stands for it.

    Args:
        name_template: The names of the checkpoints' folders; it ends in ``{step}``, with zeros if you like
            (``{step:08d}``).
        metadata: Plain values that are stored with every checkpoint. The keys ``"metrics"``, ``"milestone"`` and
            ``"bytecheckpoint.exception"`` are reserved.
        include: Shell patterns of what every checkpoint stores, as in ``bytecheckpoint.save``.
        exclude: Shell patterns of what no checkpoint stores; applied after ``include``.
        max_in_flight: How many asynchronous saves may run at a time.
        when_busy: What happens if a save is due while ``max_in_flight`` saves run: "wait" for the oldest one, or "skip"
            the new one.
        lease_s: Seconds without a heartbeat after which another job may take the root over.
        coordinate_every_s: About how often, in seconds, ranks exchange signals, requests and clock-based decisions; a
            smaller value reacts faster and costs more small messages.
        deadline_s: Seconds that each wait for another rank, for staging memory or for storage may take, also in saves
            and loads whose options have no ``deadline_s``.

    Example:
        >>> bcp.CheckpointManager("s3://runs/7b", cadence=1000, job=bcp.JobOptions(name_template="checkpoint-{step}"))
    """

    name_template: str = "step-{step}"
    metadata: Mapping[str, Any] | None = None
    include: Sequence[str] = ("*",)
    exclude: Sequence[str] = ()
    max_in_flight: int = 1
    when_busy: WhenBusy = "wait"
    lease_s: float = 15.0
    coordinate_every_s: float = 2.0
    deadline_s: float = DEFAULT_DEADLINE_S


@dataclass(frozen=True, kw_only=True)
class Cadence:
    """When a ``CheckpointManager`` saves. The conditions are independent; any one of them makes a save due.

    Args:
        every_steps: Save when the step is a multiple of this number.
        every_minutes: Save when this many minutes have passed since the last save began, by rank 0's clock.
        continuous: Save whenever no save is running; after one that failed, not before a minute has passed. With
            ``every_steps``, too, save at least at these steps, which wait for a save that is still running. It is for
            asynchronous saves: others would be made at every step.
        signals: Save once when any rank receives one of these signals, such as ``signal.SIGUSR1``.

    Raises:
        UsageError: A value is out of range.

    Example:
        >>> Cadence(every_steps=1000, every_minutes=30)
        >>> Cadence(continuous=True, every_steps=500)
    """

    every_steps: int | None = None
    every_minutes: float | None = None
    continuous: bool = False
    signals: Sequence[int] = ()

    def __post_init__(self) -> None:
        _check(self, every_steps=_count, every_minutes=optional(positive_number), signals=_signals)


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which checkpoints a ``CheckpointManager`` keeps. A checkpoint is kept if any rule keeps it.

    The newest checkpoint (``docs/newest.md``) and all milestones (``CheckpointManager.save``) are always kept. Without
    any rule, all checkpoints are kept.

    Args:
        last: Keep this many of the newest checkpoints. Those that a rollback has abandoned count as the oldest.
        last_hours: Keep the checkpoints that were saved at most this long before the newest one, by the times that are
            stored in them.
        every_steps: Of each so many steps, keep the first checkpoint: that of the multiple of this number, or else the
            next one. None of those before the first multiple, and none that a rollback has abandoned.
        best: Keep this many of the checkpoints with the best ``metric``. Of equal ones, those of later steps are kept.
        metric: The key in the ``metrics`` of ``CheckpointManager.save`` to compare; required with ``best``. Checkpoints
            without this metric, or with NaN, are never among the best.
        mode: ``"min"`` if a lower metric is better, ``"max"`` if a higher one is.

    Raises:
        UsageError: A value is out of range, or only one of ``best`` and ``metric`` is set.

    Example:
        >>> Retention(last=3, every_steps=10_000, best=1, metric="loss")
        >>> Retention(last_hours=48)
    """

    last: int | None = None
    last_hours: float | None = None
    every_steps: int | None = None
    best: int | None = None
    metric: str | None = None
    mode: BestMode = "min"

    def __post_init__(self) -> None:
        _check(self, last=_count, every_steps=_count, best=_count)
        _check(self, last_hours=optional(positive_number), mode=choice(BestMode))
        if (self.best is None) != (self.metric is None):
            raise UsageError("Retention.best and Retention.metric must be set together")


@dataclass(frozen=True, kw_only=True)
class Preemption:
    """How a ``CheckpointManager`` reacts to a signal that ends the job.

    When any rank receives one of the signals, all ranks save the same step and wait for the commit.

    Args:
        signals: The signals. Handlers are installed only if the manager begins in the main thread.
        grace_s: Seconds from the signal to the end of the process; the save must finish within this time.
        action: After the save, ``"exit"`` raises ``SystemExit`` with code 128 + signal on all ranks. ``"return"``
            returns from ``save`` and sets ``CheckpointManager.preempted``.

    Raises:
        UsageError: A value is out of range.

    Example:
        >>> Preemption(signals=(signal.SIGTERM, signal.SIGUSR2), grace_s=60, action="return")
    """

    signals: Sequence[int] = (signal.SIGTERM,)
    grace_s: float = 30.0
    action: PreemptionAction = "exit"

    def __post_init__(self) -> None:
        _check(self, signals=_signals, action=choice(PreemptionAction))


@dataclass(frozen=True, kw_only=True)
class ExceptionSave:
    """Whether and how a ``CheckpointManager`` saves when an exception ends the training loop.

    When an exception leaves ``with manager:``, the rank reports it to the others, and waits until all ranks have left
    by an exception, too: their own, or the report, which the next ``manager.save`` raises. Then all ranks save
    ``state`` to the folder ``step-<number>-exception``. If a rank does not come in time, if its process has ended, or
    if the save fails, that is logged and nothing is saved. The original exception is raised in any case.

    The state may be half-way through a step, and ranks may be in different steps. Therefore ``latest``, ``best``,
    ``resume``, ``watch`` and ``Retention`` ignore such a checkpoint. To use it, load it by its path. Its metadata
    states the exception, under the key ``"bytecheckpoint.exception"``.

    Nothing is saved before the first call of ``CheckpointManager.save`` after the start or after ``resume``, for
    ``SystemExit``, which also follows the save on preemption, and if the manager is used without ``with``.

    Args:
        state: What to save, or a function that returns it. The same objects as in ``CheckpointManager.save``.
        deadline_s: Seconds that each wait may take: for the other ranks, for this rank's device, and in the save. The
            exception can be delayed by this time.
        keep: Keep this many of these checkpoints; older ones are removed after a new one is committed.
        on_interrupt: Whether ``KeyboardInterrupt`` counts as an exception.

    Raises:
        UsageError: A value is out of range.

    Example:
        >>> CheckpointManager(root, on_exception=bcp.ExceptionSave(state=state, deadline_s=120))
    """

    state: Mapping[str, Any] | Callable[[], Mapping[str, Any]]
    deadline_s: float = 60.0
    keep: int = 1
    on_interrupt: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.state, Mapping) and not callable(self.state):
            raise UsageError(
                f"ExceptionSave.state must be a mapping such as {{'model': model}}, or a function that returns one, "
                f"not {type(self.state).__name__}"
            )
        _check(self, keep=whole_number(1))


def checked_job(value: JobOptions | Mapping[str, Any] | None) -> JobOptions:
    """Return the options of a job with the types that the code expects. Raises ``UsageError`` if one is invalid."""
    options = options_of(JobOptions, value, "job")
    values = {field.name: getattr(options, field.name) for field in fields(options)}
    job = JobOptions(**check_arguments(values, when_busy=choice(WhenBusy)))
    return job if job.deadline_s else replace(job, deadline_s=DEFAULT_DEADLINE_S)


def _check(options: object, **rules: Rule) -> None:
    """Apply these rules, and those of ``ARGUMENTS``, to the fields of a frozen dataclass."""
    for name, rule in {**ARGUMENTS, **rules}.items():
        if name in vars(options):
            object.__setattr__(options, name, rule(f"{type(options).__name__}.{name}", getattr(options, name)))


def _signals(name: str, value: Any) -> Sequence[int]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise UsageError(f"{name} must be a list of signals, such as [signal.SIGTERM], not {value!r}")
    return tuple(value)
