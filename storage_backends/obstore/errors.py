"""What the errors of obstore mean."""

from __future__ import annotations

import asyncio
import re

from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    GenericError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from ...errors import AccessDeniedError, KeyNotFoundError, StorageError, UnansweredError, hide_userinfo

__all__ = ["is_beyond_end", "is_refused", "map_error", "was_repeated"]

_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_REPEATED = re.compile(r", after [1-9]\d* retries")
_XML = re.compile(r"(?s)<\?xml.*?<Code>([^<]*)</Code>(?:\s*<Message>([^<\n]*))?.*")
_QUERY = re.compile(r"(https?://[^\s?]*)\?\S+")
_NO_CONTAINER = ("ContainerNotFound", "NoSuchBucket")
_PASSING = frozenset({408, 429})
_MAX_TEXT = 8000  # of a key, twice, and what follows it


def _text_of(error: BaseException) -> str:
    """Return one line without queries of URLs, which may contain a signature."""
    text = str(error).partition("\n\nDebug source:")[0]
    found = _XML.search(text)
    if found:
        text = f"{text[: found.start()]}{found[1]}{': ' + found[2] if found[2] else ''}"
    return " ".join(_QUERY.sub(r"\1?***", text).split())[:_MAX_TEXT]


def _status_of(error: BaseException) -> int:
    found = _STATUS.search(str(error))
    return int(found[1]) if found else 0


def is_refused(error: BaseException) -> bool:
    """Whether the store has refused a put because of its condition."""
    return isinstance(error, AlreadyExistsError | PreconditionError)


def was_repeated(error: BaseException) -> bool:
    """Whether the request had been sent before, and its reply did not arrive or was an error of the server."""
    return _REPEATED.search(str(error)) is not None


def is_beyond_end(error: BaseException) -> bool:
    """Whether a read began behind the end of the object."""
    return _status_of(error) == 416


def map_error(error: BaseException, action: str, *, reading: bool = False, putting: bool = False) -> StorageError:
    """Return the ``StorageError`` that ``error``, raised during ``action``, means.

    If ``putting`` an object, the store may have stored it, or may still do so, although it did not reply.
    """
    if isinstance(error, StorageError):
        return error
    text = _text_of(error)
    if isinstance(error, BaseError | FileNotFoundError):
        error.args = (text,)  # tracebacks show it
    hide_userinfo(error)
    return _mapped(error, text, action, reading=reading, putting=putting)


def _mapped(error: BaseException, text: str, action: str, *, reading: bool, putting: bool) -> StorageError:
    status = _status_of(error)
    if any(name in text for name in _NO_CONTAINER):
        return StorageError(f"{action}: does the bucket or container exist? {text}")
    if isinstance(error, FileNotFoundError):
        return (
            KeyNotFoundError(f"{action}: no such object") if reading else StorageError(f"{action}: not found: {text}")
        )
    if isinstance(error, PermissionDeniedError | UnauthenticatedError) or status in (401, 403):
        return AccessDeniedError(f"{action}: {text}; check the credentials and their permissions")
    is_answered = 400 <= status < 500 and status not in _PASSING
    if isinstance(error, asyncio.TimeoutError):
        failure = (UnansweredError if putting else StorageError)(f"{action}: {text or 'the store did not answer'}")
    elif isinstance(error, GenericError) and not is_answered:
        failure = (UnansweredError if putting else StorageError)(f"{action}: {text}")
    else:
        return StorageError(f"{action}: {type(error).__name__}: {text}")
    failure.is_late = True
    return failure
