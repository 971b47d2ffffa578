"""Translate the exceptions of fsspec file systems."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ...errors import AccessDeniedError, KeyExistsError, KeyNotFoundError, StorageError
from ..posix import map_os_error

__all__ = ["map_error", "translated_errors"]


def map_error(error: Exception, action: str, *, reading: bool) -> StorageError:
    """Return the ``StorageError`` that ``error``, raised during ``action``, means.

    File systems raise almost anything: OSErrors with and without errno, errors of their client library, timeouts.
    """
    if isinstance(error, StorageError):
        return error
    if isinstance(error, FileNotFoundError | IsADirectoryError) and reading:
        return KeyNotFoundError(f"{action}: no such object")
    if isinstance(error, FileNotFoundError):
        return StorageError(f"{action}: not found: {error or 'no detail'}; does the bucket or directory exist?")
    if isinstance(error, PermissionError):
        return AccessDeniedError(f"{action}: denied: {error or 'no detail'}; check the credentials")
    if isinstance(error, FileExistsError):
        return KeyExistsError(f"{action}: the key is taken")
    if isinstance(error, NotImplementedError):
        return StorageError(f"{action}: this file system does not support it: {error or 'not implemented'}")
    if isinstance(error, OSError) and error.errno:
        return map_os_error(error, action, absent_is_missing_key=reading)
    return StorageError(f"{action}: {type(error).__name__}: {error}")


@contextmanager
def translated_errors(action: str, *, reading: bool = False) -> Iterator[None]:
    """Translate what the block raises (see ``map_error``)."""
    try:
        yield
    except StorageError:
        raise
    except Exception as error:
        raise map_error(error, action, reading=reading) from error
