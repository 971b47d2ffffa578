"""Options of a manager: when it saves, which checkpoints it keeps, and how it reacts to preemption."""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..errors import UsageError
from ..runtime.choices import check_choice

__all__ = ["BestMode", "Cadence", "Preemption", "PreemptionAction", "Retention", "check_seconds", "check_whole_number"]

BestMode = Literal["min", "max"]
"""Whether the best checkpoint has the lowest or the highest metric."""

PreemptionAction = Literal["exit", "return"]
"""What ``CheckpointManager.save`` does after it saved because of a preemption signal."""

_MAX_SECONDS = 900.0  # a limit against values in milliseconds


@dataclass(frozen=True, kw_only=True)
class Cadence:
    """When a ``CheckpointManager`` saves. The conditions are independent; any one of them makes a save due.

    Args:
        every_steps: Save when the step is a multiple of this number.
        every_minutes: Save when this many minutes have passed since the last save began, by rank 0's clock.
        signals: Save once when any rank receives one of these signals, such as ``signal.SIGUSR1``.

    Raises:
        UsageError: A value is out of range.

    Example:
        >>> Cadence(every_steps=1000, every_minutes=30)
    """

    every_steps: int | None = None
    every_minutes: float | None = None
    signals: Sequence[int] = ()

    def __post_init__(self) -> None:
        check_whole_number("Cadence.every_steps", self.every_steps)
        if self.every_minutes is not None and not self.every_minutes > 0:
            raise UsageError(f"Cadence.every_minutes must be a positive number, not {self.every_minutes!r}")


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which checkpoints a ``CheckpointManager`` keeps. A checkpoint is kept if any rule keeps it.

    The checkpoint that was committed last is always kept. Without any rule, all checkpoints are kept.

    Args:
        last: Keep this many of the checkpoints that were committed last.
        every_steps: Keep all checkpoints whose step is a multiple of this number.
        best: Keep this many of the checkpoints with the best ``metric``. Of equal ones, those of later steps are kept.
        metric: The key in the ``metrics`` of ``CheckpointManager.save`` to compare; required with ``best``. Checkpoints
            without this metric, or with NaN, are never among the best.
        mode: ``"min"`` if a lower metric is better, ``"max"`` if a higher one is.

    Raises:
        UsageError: A value is out of range, or only one of ``best`` and ``metric`` is set.

    Example:
        >>> Retention(last=3, every_steps=10_000, best=1, metric="loss")
    """

    last: int | None = None
    every_steps: int | None = None
    best: int | None = None
    metric: str | None = None
    mode: BestMode = "min"

    def __post_init__(self) -> None:
        for name in ("last", "every_steps", "best"):
            check_whole_number(f"Retention.{name}", getattr(self, name))
        check_choice("Retention.mode", self.mode, BestMode)
        if (self.best is None) != (self.metric is None):
            raise UsageError("Retention.best and Retention.metric must be set together")


@dataclass(frozen=True, kw_only=True)
class Preemption:
    """How a ``CheckpointManager`` reacts to a signal that ends the job.

    When any rank receives one of the signals, all ranks save the same step and wait for the commit.

    Args:
        signals: The signals. Handlers are installed only if the manager is created in the main thread.
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
        check_seconds("Preemption.grace_s", self.grace_s)
        check_choice("Preemption.action", self.action, PreemptionAction)


def check_whole_number(name: str, value: object) -> None:
    """Raise ``UsageError`` unless ``value`` is None or an int of at least 1."""
    if value is not None and (type(value) is not int or value < 1):
        raise UsageError(f"{name} must be a whole number of at least 1, not {value!r}")


def check_seconds(name: str, value: float) -> None:
    """Raise ``UsageError`` unless ``value`` is a plausible number of seconds."""
    if not isinstance(value, (int, float)) or math.isnan(value) or not 0 < value <= _MAX_SECONDS:
        raise UsageError(f"{name} must be a number of seconds between 0 and {_MAX_SECONDS:g}, not {value!r}")
