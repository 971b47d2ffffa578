"""The argument ``rules`` of the public functions: an object, a file, or the name of a set of this library."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeAlias

from ..checkpoint.location import Location
from ..errors import KeyNotFoundError, UsageError
from ..rules import Rules
from .place import open_parent

__all__ = ["GivenRules", "read_rules", "rules_argument"]

GivenRules: TypeAlias = Rules | str | os.PathLike[str]
"""Rules, the path or URL of a TOML file, or the name of a set of rules that the library contains."""

_MAX_BYTES = 16 << 20


def read_rules(source: str, variables: Mapping[str, int] | None = None) -> Rules:
    """Return the rules of a file or of a set.

    Args:
        source: A path or URL that ends in ``.toml`` or contains a slash, or the name of a set.
        variables: The values of numbers that the rules state as names.

    Returns:
        The rules.

    Raises:
        UsageError: There is no such file.
        RuleError: The rules are not valid, or there is no such set.
        StorageError: The file cannot be read.
    """
    if not source.endswith(".toml") and "/" not in source:
        return Rules.shipped(source, **dict(variables or {}))
    try:
        text = open_parent(Location(source)).get(source.rpartition("/")[2], max_size=_MAX_BYTES)
    except KeyNotFoundError as error:
        raise UsageError(f"there is no file of rules {source}; check the path") from error
    try:
        return Rules.from_toml(text.decode(), variables)
    except UnicodeDecodeError as error:
        raise UsageError(f"{source} is no file of rules: it is not UTF-8 text ({error})") from error


def rules_argument(name: str, value: Any) -> Rules | None:
    """Return the argument ``name`` as rules. Raises as ``read_rules``, and ``UsageError`` for another type."""
    if value is None or isinstance(value, Rules):
        return value
    if isinstance(value, (str, os.PathLike)):
        return read_rules(os.fspath(value))
    raise UsageError(f"{name} must be Rules, the path of a TOML file, or the name of a set of rules, not {value!r:.80}")
