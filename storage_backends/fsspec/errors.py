"""Translate the exceptions of fsspec file systems."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

from ...errors import (
    AccessDeniedError,
    KeyExistsError,
    KeyNotFoundError,
    StorageError,
    UnansweredError,
    hide_userinfo,
)
from ..posix import map_os_error

__all__ = ["map_error", "translated_errors"]

_LOST = frozenset({errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE, errno.ENOTCONN, errno.ESHUTDOWN})
_TRANSPORTS = frozenset({"aiohttp", "azure", "botocore", "google", "httpx", "paramiko", "requests", "urllib3"})
"""Packages whose errors say that there was no reply, unless they have the status of one."""


_JAVA_STACK = re.compile(r"(?:\n|\\n)\s*(?:\t|\\t)at ")  # HDFS appends the stack of its server


def _is_unanswered(error: BaseException | None) -> bool:
    """Whether no reply came, so that the operation may have had an effect, or may still have one."""
    while error is not None:
        if isinstance(error, TimeoutError | ConnectionError | EOFError):
            return True
        if isinstance(error, OSError) and error.errno in _LOST:
            return True
        replied = any(getattr(error, name, None) is not None for name in ("status", "status_code", "code", "response"))
        if type(error).__module__.partition(".")[0] in _TRANSPORTS:
            return not replied
        error = error.__cause__ or error.__context__
    return False


def map_error(error: BaseException, action: str, *, reading: bool, putting: bool = False) -> StorageError:
    """Return the ``StorageError`` that ``error`` means (see ``_mapped``)."""
    hide_userinfo(error)
    mapped = _mapped(error, action, reading=reading, putting=putting)
    mapped.is_late |= isinstance(error, TimeoutError)
    return mapped


def _mapped(error: BaseException, action: str, *, reading: bool, putting: bool) -> StorageError:
    """Return the ``StorageError`` that ``error``, raised during ``action``, means.

    File systems raise almost anything: OSErrors with and without errno, errors of their client library, timeouts. If
    ``putting`` an object, the store may have stored it, or may still do so, although it did not reply.
    """
    if isinstance(error, StorageError):
        return error
    text = _JAVA_STACK.split(str(error), maxsplit=1)[0]
    if putting and _is_unanswered(error):
        return UnansweredError(f"{action}: the store did not reply: {type(error).__name__}: {text}")
    if isinstance(error, FileNotFoundError | IsADirectoryError) and reading:
        return KeyNotFoundError(f"{action}: no such object")
    if isinstance(error, FileNotFoundError):
        return StorageError(f"{action}: not found: {text or 'no detail'}; does the bucket or directory exist?")
    if isinstance(error, PermissionError):
        return AccessDeniedError(f"{action}: denied: {text or 'no detail'}; check the credentials")
    if isinstance(error, FileExistsError):
        return KeyExistsError(f"{action}: the key is taken")
    if isinstance(error, NotImplementedError):
        return StorageError(f"{action}: this file system does not support it: {text or 'not implemented'}")
    if isinstance(error, OSError) and error.errno:
        return map_os_error(error, action, absent_is_missing_key=reading)
    return StorageError(f"{action}: {type(error).__name__}: {text}")


@contextmanager
def translated_errors(action: str, *, reading: bool = False, putting: bool = False) -> Iterator[None]:
    """Translate what the block raises (see ``map_error``)."""
    try:
        yield
    except StorageError:
        raise
    except Exception as error:
        raise map_error(error, action, reading=reading, putting=putting) from error
