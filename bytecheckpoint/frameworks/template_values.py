"""Give a stored plain value the type of the value in its place: enum members, named tuples, dataclasses and subclasses.

The types of these values are not stored. They come only from the objects of the caller.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import PurePath
from typing import Any

from ..errors import MismatchError

__all__ = ["tuple_like", "value_like"]


def value_like(template: Any, value: Any, where: str) -> Any:
    """The value as the type of ``template`` if that is such a type and the value fits it; otherwise as it is.

    Raises ``MismatchError`` for an enum without the value, and for a dataclass or named tuple with other fields.
    """
    kind = type(template)
    if type(value) is kind:
        if kind in (list, tuple) and len(value) == len(template):
            return kind(
                value_like(old, new, f"{where}.{i}") for i, (old, new) in enumerate(zip(template, value, strict=True))
            )
        if kind is dict:
            return {k: value_like(template.get(k), item, f"{where}.{k}") for k, item in value.items()}
        return value
    if isinstance(template, Enum) and not isinstance(value, Enum):
        try:
            return kind(value)
        except ValueError:
            raise _misfit(where, f"stored as {value!r:.80}, which is no member of {kind.__qualname__}") from None
    if isinstance(template, tuple) and hasattr(kind, "_fields") and type(value) is tuple:
        if len(value) != len(template):
            raise _misfit(where, f"stored with {len(value)} fields, but {kind.__qualname__} has {len(template)}")
        return tuple_like(template, [value_like(*pair, where) for pair in zip(template, value, strict=True)])
    if dataclasses.is_dataclass(template) and not isinstance(template, type) and type(value) is dict:
        return _dataclass_like(template, value, where)
    if isinstance(template, PurePath) and isinstance(value, (str, PurePath)):
        return kind(value)
    for base in (str, int, float):
        if isinstance(template, base) and kind is not bool and type(value) is base and kind.__module__ != "numpy":
            return base.__new__(kind, value)
    return value


def tuple_like(template: Any, items: Sequence[Any]) -> Any:
    """A tuple or named tuple of these items."""
    make = getattr(type(template), "_make", None)
    return tuple(items) if make is None else make(items)


def _dataclass_like(template: Any, value: Mapping[str, Any], where: str) -> Any:
    names = {one.name for one in dataclasses.fields(template)}
    if names != value.keys():
        raise _misfit(
            where, f"stored with the fields {sorted(value)}, but {type(template).__qualname__} has {sorted(names)}"
        )
    made = copy.copy(template)
    for name, item in value.items():
        # Also for a frozen dataclass; no __init__ runs.
        object.__setattr__(made, name, value_like(getattr(template, name, None), item, f"{where}.{name}"))
    return made


def _misfit(where: str, detail: str) -> MismatchError:
    return MismatchError(f"{where}: {detail}", [("value", where, detail)])
