"""What fsspec file systems raise, as members of the errors tree."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from ..errors import AccessDeniedError, KeyExistsError, KeyNotFoundError, StorageError
from .posix import map_os_error

__all__ = ["map_error", "mapped", "redact"]

_T = TypeVar("_T")

_PASSWORD = re.compile(r"(?<=://)[^/@\s]+@")


def redact(url: str) -> str:
    """``url`` without the user and password that some schemes carry; for messages."""
    return _PASSWORD.sub("***@", url)


def map_error(error: Exception, action: str, *, reading: bool) -> StorageError:
    """``error``, raised by some file system during ``action``. Implementations raise nearly anything: OSErrors with and
    without errno, their client library's own errors, timeouts."""
    if isinstance(error, StorageError):
        return error
    if isinstance(error, FileNotFoundError | IsADirectoryError) and reading:
        return KeyNotFoundError(f"{action}: no such object")
    if isinstance(error, FileNotFoundError):
        return StorageError(f"{action}: not found: {error or 'no detail'}; does the bucket or directory exist?")
    if isinstance(error, PermissionError):
        return AccessDeniedError(f"{action}: denied: {error or 'no detail'}; check the credentials and what they allow")
    if isinstance(error, FileExistsError):
        return KeyExistsError(f"{action}: the key is taken")
    if isinstance(error, NotImplementedError):
        return StorageError(f"{action}: this file system cannot do that: {error or 'not implemented'}")
    if isinstance(error, OSError) and error.errno:
        return map_os_error(error, action, absent_is_missing_key=reading)
    return StorageError(f"{action}: {type(error).__name__}: {error}")


def mapped(action: str, function: Callable[[], _T], *, reading: bool = False) -> _T:
    """What ``function`` returns; what it raises as a member of the errors tree."""
    try:
        return function()
    except Exception as error:
        raise map_error(error, action, reading=reading) from error
