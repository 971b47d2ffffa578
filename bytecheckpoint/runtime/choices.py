"""Validate arguments that must be one of a few strings."""

from __future__ import annotations

from typing import Any, get_args

from ..errors import UsageError

__all__ = ["check_choice"]


def check_choice(name: str, value: object, choices: Any) -> None:
    """Raise ``UsageError`` unless ``value`` is one of the strings of the ``Literal`` type ``choices``."""
    known = get_args(choices)
    if value not in known:
        raise UsageError(f"{name} must be one of {', '.join(known)}, not {value!r}")
