"""Validate the arguments of the public functions, the manager and the command line: one rule per name, in one table.

A rule returns the argument as the type that the code expects (a numpy integer as an ``int``), or raises ``UsageError``.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, get_args

import numpy as np
import torch

from ..errors import UsageError

__all__ = ["ARGUMENTS", "STEP", "Rule", "check_arguments", "check_choice", "choice", "optional", "positive_number"]
__all__ += ["whole_number"]

Rule: TypeAlias = Callable[[str, Any], Any]
"""A function of an argument's name and value."""

_MIN_CHUNK_SIZE, _MAX_CHUNK_SIZE = 64, 1 << 30  # bytes; a checksum has eight
_MAX_DEADLINE_S = 31 * 86_400.0
_MAX_INTERVAL_S = 900.0  # a limit against values in milliseconds


def whole_number(minimum: int, maximum: int | None = None) -> Rule:
    """Accept anything with ``__index__`` but booleans."""

    def check(name: str, value: Any) -> int:
        try:
            number = operator.index(value)
        except TypeError:
            number = minimum - 1
        if isinstance(value, (bool, np.bool_)) or number < minimum or (maximum is not None and number > maximum):
            limits = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
            raise UsageError(f"{name} must be a whole number {limits}, not {value!r}")
        return number

    return check


def _seconds(maximum: float) -> Rule:
    """Accept a number of seconds above 0."""

    def check(name: str, value: Any) -> float:
        is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
        if not is_number or math.isnan(value) or not 0 < value <= maximum:
            raise UsageError(f"{name} must be a number of seconds between 0 and {maximum:g}, not {value!r}")
        return float(value)

    return check


def _flag(name: str, value: Any) -> bool:
    """Accept True and False."""
    if not isinstance(value, (bool, np.bool_)):
        raise UsageError(f"{name} must be True or False, not {value!r}")
    return bool(value)


def positive_number(name: str, value: Any) -> float:
    """Accept a finite number above 0."""
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not value > 0:
        raise UsageError(f"{name} must be a positive number, not {value!r}")
    return float(value)


def choice(choices: Any) -> Rule:
    """Accept the strings of the ``Literal`` type ``choices``."""

    def check(name: str, value: Any) -> Any:
        check_choice(name, value, choices)
        return value

    return check


def check_choice(name: str, value: object, choices: Any) -> None:
    """Raise ``UsageError`` unless ``value`` is one of the strings of the ``Literal`` type ``choices``."""
    known = get_args(choices)
    if not isinstance(value, str) or value not in known:
        raise UsageError(f"{name} must be one of {', '.join(known)}, not {value!r}")


def optional(rule: Rule) -> Rule:
    """Accept None too."""
    return lambda name, value: None if value is None else rule(name, value)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{name} must be a string, not {value!r}")
    return value


def _path(name: str, value: Any) -> str:
    if not isinstance(value, (str, os.PathLike)) or not isinstance(text := os.fspath(value), str) or not text:
        raise UsageError(f"{name} must be a path, not {value!r}")
    return text


def _mapping(name: str, value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UsageError(f"{name} must be a mapping, not {value!r}")
    return dict(value)


def _renaming(name: str, value: Any) -> Any:
    if value is None or (callable(value) and not isinstance(value, Mapping)):
        return value
    if not isinstance(value, Mapping):
        raise UsageError(f"{name} must be a mapping of names to names, or a function, not {value!r}")
    for pair in value.items():
        if not all(isinstance(one, str) for one in pair):
            raise UsageError(f"{name} must map names to names, not {pair[0]!r} to {pair[1]!r}")
    return value


def _device(name: str, value: Any) -> torch.device:
    try:
        device = torch.device(value)
        torch.empty(0, device=device)
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        raise UsageError(f"{name} must be a device of this process, not {value!r}: {error}") from error
    if device.type == "meta":
        raise UsageError(f"{name} must be a device that holds data, not {value!r}")
    return device


STEP = whole_number(0, (1 << 63) - 1)
"""The rule of a step that is required."""

ARGUMENTS: Mapping[str, Rule] = {
    "allow_fresh": _flag,
    "allow_pickle": _flag,
    "async_save": _flag,
    "base": optional(_path),
    "codec": optional(_text),
    "chunk_size": optional(whole_number(_MIN_CHUNK_SIZE, _MAX_CHUNK_SIZE)),
    "coordinate_every_s": _seconds(_MAX_INTERVAL_S),
    "deadline_s": _seconds(_MAX_DEADLINE_S),
    "device": optional(_device),
    "force": _flag,
    "framework": optional(_text),
    "gate": _flag,
    "grace_s": _seconds(_MAX_INTERVAL_S),
    "keep_staged": whole_number(1),
    "lease_s": _seconds(_MAX_INTERVAL_S),
    "max_in_flight": whole_number(1),
    "metadata": _mapping,
    "metric": optional(_text),
    "milestone": optional(_text),
    "on_interrupt": _flag,
    "poll_s": _seconds(_MAX_INTERVAL_S),
    "rename": _renaming,
    "slots": whole_number(0),
    "step": optional(STEP),
    "staging": optional(_path),
    "storage_options": _mapping,
    "upload_rate": optional(positive_number),
    "timeout_s": optional(_seconds(_MAX_DEADLINE_S)),
    "trainable_only": _flag,
    "verify": _flag,
}
"""The rule of each argument, under the name that it has everywhere."""


def check_arguments(arguments: Mapping[str, Any], **rules: Rule) -> dict[str, Any]:
    """Apply the rule of each argument that has one, in ``rules`` or in ``ARGUMENTS``.

    Args:
        arguments: Values by name.
        **rules: Rules that need a type of a higher layer.

    Returns:
        The arguments as the types that the code expects.

    Raises:
        UsageError: An argument is invalid.
    """
    known = {**ARGUMENTS, **rules}
    return {name: known[name](name, value) if name in known else value for name, value in arguments.items()}
