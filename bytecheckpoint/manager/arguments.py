"""What the arguments of a manager have to be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from ..errors import StateError
from .housekeeping import METRICS_KEY

__all__ = ["BestMode", "OnPreempt", "check_arguments", "check_metrics"]

BestMode = Literal["min", "max"]
OnPreempt = Literal["exit", "return"]


def check_arguments(
    *,
    max_in_flight: int,
    on_preempt: str,
    best_mode: str,
    keep_best: int | None,
    best_metric: str | None,
    metadata: Mapping[str, Any],
    grace_s: float,
    lease_s: float,
    meet_every_s: float,
) -> None:
    """Raise ``StateError`` where one means nothing."""
    if type(max_in_flight) is not int or max_in_flight < 1:
        raise StateError(f"max_in_flight is a whole number from 1 on, not {max_in_flight!r}")
    for name, value, known in (
        ("on_preempt", on_preempt, get_args(OnPreempt)),
        ("best_mode", best_mode, get_args(BestMode)),
    ):
        if value not in known:
            raise StateError(f"{name} must be one of {', '.join(known)}, not {value!r}")
    for name, seconds in (("grace_s", grace_s), ("lease_s", lease_s), ("meet_every_s", meet_every_s)):
        if not 0 < seconds <= 900:
            raise StateError(f"{name} is a number of seconds up to 900, not {seconds!r}")
    if (keep_best is None) != (best_metric is None):
        raise StateError("keep_best and best_metric go together: how many, and by which of the metrics")
    if METRICS_KEY in metadata:
        raise StateError(f"the metadata's key {METRICS_KEY!r} is for the metrics given to save")


def check_metrics(metrics: Mapping[str, float] | None) -> dict[str, float]:
    """As plain numbers; tensors and arrays of one element are taken too. Raises ``StateError``."""
    plain: dict[str, float] = {}
    for name, value in (metrics or {}).items():
        try:
            plain[str(name)] = float(value)
        except (TypeError, ValueError) as error:
            raise StateError(f"the metric {name!r} is no number: {value!r}") from error
    return plain
