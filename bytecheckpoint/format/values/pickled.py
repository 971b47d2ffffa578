"""The only module of the format that uses pickle, for values that the callers of both save and load allow."""

from __future__ import annotations

import pickle
from typing import Any

from ...errors import FormatError, UnserializableError


def pickle_bytes(value: object, where: str) -> bytes:
    """Pickle a value. Raises ``UnserializableError``; ``where`` is the path that it names."""
    try:
        return pickle.dumps(value, protocol=4)
    except Exception as error:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise UnserializableError(
            f"{where} is a {kind}, which is not a plain value, and pickle cannot store it either: {error}"
        ) from error


def unpickle(data: bytes, where: str) -> Any:
    """Unpickle a value, which runs the code that its author chose. Raises ``FormatError``."""
    try:
        return pickle.loads(data)  # noqa: S301 - the caller of load has allowed it
    except Exception as error:
        raise FormatError(f"{where}: its pickle cannot be loaded: {error}") from error
