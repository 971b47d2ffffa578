"""Options of a manager: when it saves, which checkpoints it keeps, and how it reacts to preemption."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..checkpoint.discovery import BestMode
from ..errors import UsageError
from ..runtime.arguments import ARGUMENTS, Rule, choice, optional, positive_number, whole_number

__all__ = ["BestMode", "Cadence", "Preemption", "PreemptionAction", "Retention"]

PreemptionAction = Literal["exit", "return"]
"""What ``CheckpointManager.save`` does after it saved because of a preemption signal."""

_count = optional(whole_number(1))


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
        _set(self, "every_steps", _count)
        _set(self, "every_minutes", optional(positive_number))
        _set(self, "signals", _signals)


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which checkpoints a ``CheckpointManager`` keeps. A checkpoint is kept if any rule keeps it.

    The checkpoint that was committed last and all milestones (``CheckpointManager.save``) are always kept. Without any
    rule, all checkpoints are kept.

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
            _set(self, name, _count)
        _set(self, "metric", ARGUMENTS["metric"])
        _set(self, "mode", choice(BestMode))
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
        _set(self, "signals", _signals)
        _set(self, "grace_s", ARGUMENTS["grace_s"])
        _set(self, "action", choice(PreemptionAction))


def _set(options: object, name: str, rule: Rule) -> None:
    """Validate a field of a frozen dataclass, and give it the type that the code expects."""
    object.__setattr__(options, name, rule(f"{type(options).__name__}.{name}", getattr(options, name)))


def _signals(name: str, value: Any) -> Sequence[int]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise UsageError(f"{name} must be a list of signals, such as [signal.SIGTERM], not {value!r}")
    return tuple(value)
