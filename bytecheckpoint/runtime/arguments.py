"""Validate the arguments of the public functions, the manager and the command line: one rule per name, in one table.

A rule returns the argument as the type that the code expects (a numpy integer as an ``int``), or raises ``UsageError``.
"""

from __future__ import annotations

import difflib
import math
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, get_args

import numpy as np

from ..errors import UsageError

if TYPE_CHECKING:
    import torch

_T = TypeVar("_T")

Rule: TypeAlias = Callable[[str, Any], Any]
"""A function of an argument's name and value."""

_MIN_CHUNK_SIZE, _MAX_CHUNK_SIZE = 64, 1 << 30  # bytes; a checksum has eight
_MAX_DEADLINE_S = 31 * 86_400.0
_MAX_DEPTH = 100  # of containers in an argument; those that are stored are refused at a smaller one
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


def text_to_store(name: str, value: Any) -> str:
    """The rule of a name that a checkpoint stores."""
    if not isinstance(value, str) or not value:
        raise UsageError(f"{name} must be a string that is not empty, not {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{name} cannot be stored as UTF-8: {value!r}") from error
    return value


def _path(name: str, value: Any) -> str:
    if not isinstance(value, (str, os.PathLike)) or not isinstance(text := os.fspath(value), str) or not text:
        raise UsageError(f"{name} must be a path, not {value!r}")
    return text


def _mapping(name: str, value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        # Its text may contain credentials.
        raise UsageError(f"{name} must be a mapping, not of type {type(value).__name__}")
    return {key: _own(item) for key, item in value.items()}


def _own(value: Any, depth: int = 0) -> Any:
    """Copy containers, because the caller may change them after the call that was passed them."""
    if depth > _MAX_DEPTH:
        return value
    if isinstance(value, dict):
        return {key: _own(item, depth + 1) for key, item in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(_own(item, depth + 1) for item in value)
    return bytes(value) if isinstance(value, bytearray) else value


def _keywords(name: str, value: Any) -> dict[str, Any]:
    found = _mapping(name, value)
    if not all(isinstance(key, str) for key in found):
        raise UsageError(f"{name} must have names as keys, not {[key for key in found if not isinstance(key, str)]}")
    return found


def _renaming(name: str, value: Any) -> Any:
    if value is None or (callable(value) and not isinstance(value, Mapping)):
        return value
    if not isinstance(value, Mapping):
        raise UsageError(f"{name} must be a mapping of names to names, or a function, not {value!r}")
    for pair in value.items():
        if not all(isinstance(one, str) for one in pair):
            raise UsageError(f"{name} must map names to names, not {pair[0]!r} to {pair[1]!r}")
        if "." not in pair[0] or pair[0].endswith(".") != pair[1].endswith("."):
            raise UsageError(
                f"{name} must map full names ('model.weight') to full names, or beginnings of names that end in a dot "
                f"('ema.') to others, not {pair[0]!r} to {pair[1]!r}"
            )
    return value


def _device(name: str, value: Any) -> torch.device:
    import torch  # not above: commands that only list files need no torch

    try:
        device = torch.device(value)
        torch.empty(0, dtype=torch.uint8, device=device)
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
    "continuous": _flag,
    "coordinate_every_s": _seconds(_MAX_INTERVAL_S),
    "deadline_s": optional(_seconds(_MAX_DEADLINE_S)),
    "device": optional(_device),
    "force": _flag,
    "framework": optional(_text),
    "gate": _flag,
    "grace_s": _seconds(_MAX_INTERVAL_S),
    "lease_s": _seconds(_MAX_INTERVAL_S),
    "max_in_flight": whole_number(1),
    "metadata": _mapping,
    "metric": optional(text_to_store),
    "milestone": optional(text_to_store),
    "on_interrupt": _flag,
    "overwrite": _flag,
    "path": _path,
    "poll_s": _seconds(_MAX_INTERVAL_S),
    "rename": _renaming,
    "slots": whole_number(0),
    "step": optional(STEP),
    "storage_options": _keywords,
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


def options_of(
    kind: type[_T], value: _T | Mapping[str, Any] | None, name: str = "options", *, used: Sequence[str] = ()
) -> _T:
    """Return the argument ``name`` as an object of options.

    Args:
        kind: The dataclass of the options.
        value: An object of this class, a mapping of its fields' names to values, or None for the defaults.
        name: The argument.
        used: The fields that have an effect, if not all have: others must have their defaults.

    Returns:
        The options. Their values are not checked.

    Raises:
        UsageError: It is something else, has keys that are no options, or options that have no effect.
    """
    options = value if isinstance(value, kind) else _from_mapping(kind, value, name)
    idle = [field.name for field in fields(kind) if field.name not in (used or field.name)]  # type: ignore[arg-type]
    idle = [one for one in idle if getattr(options, one) != getattr(kind(), one)]
    if idle:
        raise UsageError(f"{', '.join(idle)} of {name} would have no effect here; only {', '.join(used)} have one")
    return options


def _from_mapping(kind: type[_T], value: Any, name: str) -> _T:
    if value is not None and not isinstance(value, Mapping):
        raise UsageError(f"{name} must be a {kind.__name__} or a mapping of its options, not {value!r:.80}")
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    unknown = [str(key) for key in value or () if key not in known]
    if unknown:
        similar = {key: difflib.get_close_matches(key, known, n=1) for key in unknown}
        listed = (f"{key!r}" + (f" (did you mean {found[0]!r}?)" if found else "") for key, found in similar.items())
        raise UsageError(f"{name} has no {', '.join(listed)}; {kind.__name__} has {', '.join(known)}")
    return kind(**(value or {}))


def deadline_of(options: object) -> Any:
    """Return the ``deadline_s`` of an object or a mapping of options, which need not be valid; None if it has none."""
    return options.get("deadline_s") if isinstance(options, Mapping) else getattr(options, "deadline_s", None)
