"""What the errors of requests mean."""

from __future__ import annotations

from typing import Any

import aiohttp
from botocore.exceptions import (
    ConnectionError as BotoConnectionError,
)
from botocore.exceptions import (
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    ResponseStreamingError,
)
from botocore.parsers import ResponseParserError

from ...errors import (
    AccessDeniedError,
    KeyNotFoundError,
    StorageError,
    StorageFullError,
    hide_userinfo,
    without_userinfo,
)

__all__ = [
    "ShortReplyError",
    "code_of",
    "describe",
    "is_denied",
    "is_missing",
    "is_repeatable",
    "is_unanswered",
    "storage_error",
]

_UNANSWERED = (
    TimeoutError,
    ConnectionError,
    BotoConnectionError,
    HTTPClientError,
    IncompleteReadError,
    aiohttp.ClientError,
    ResponseStreamingError,
)
_PASSING_CODES = frozenset(
    {
        "BadDigest",
        "ConditionalRequestConflict",
        "IncompleteBody",
        "InternalError",
        "OperationAborted",
        "RequestTimeout",
        "ServiceUnavailable",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "XAmzContentChecksumMismatch",
        "XAmzContentSHA256Mismatch",
    }
)
_PASSING_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
_MISSING_CODES = frozenset({"404", "NoSuchKey", "NotFound"})
_DENIED_CODES = frozenset(
    {
        "401",
        "403",
        "AccessDenied",
        "AllAccessDisabled",
        "ExpiredToken",
        "ExpiredTokenException",
        "InvalidAccessKeyId",
        "InvalidToken",
        "RequestTimeTooSkewed",
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
    }
)
_HINTS = {
    "ExpiredToken": "the credentials have expired; provide new ones",
    "NoSuchBucket": "the bucket does not exist; create it, or correct the URL",
    "PermanentRedirect": "the bucket is in another region or at another endpoint; set the region or endpoint_url",
    "RequestTimeTooSkewed": "the clock of this machine differs from the store's; correct it",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key, or a proxy changed the request",
}
_HINTS["301"] = _HINTS["PermanentRedirect"]


class ShortReplyError(Exception):
    """A reply has other bytes than the request asked for."""


def _reply(error: BaseException) -> dict[str, Any] | None:
    """Return the store's reply. s3fs translates the client's error, and keeps it as the cause."""
    for one in (error, error.__cause__):
        found = getattr(one, "response", None)
        if isinstance(found, dict):
            return found
    return None


def code_of(error: BaseException) -> str:
    """Return the code of the store's reply, such as "NoSuchKey"; empty if there was no reply."""
    reply = _reply(error)
    return "" if reply is None else str(reply.get("Error", {}).get("Code", ""))


def is_missing(error: BaseException) -> bool:
    """Whether there is no such object."""
    return code_of(error) in _MISSING_CODES


def is_denied(error: BaseException) -> bool:
    """Whether the credentials do not allow the request."""
    return code_of(error) in _DENIED_CODES


def is_unanswered(error: BaseException) -> bool:
    """Whether no complete reply came: the request may or may not have had an effect."""
    return _reply(error) is None and isinstance(error, _UNANSWERED)


def is_repeatable(error: BaseException) -> bool:
    """Whether the same request may succeed later."""
    reply = _reply(error)
    if reply is None:
        return isinstance(error, (*_UNANSWERED, ShortReplyError, ResponseParserError))
    status = reply.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status in _PASSING_STATUSES or code_of(error) in _PASSING_CODES


def describe(error: BaseException) -> str:
    """Return one line about an error: its code and what the store says, or its type and text."""
    reply = _reply(error)
    if isinstance(error, RecursionError):  # of botocore, which asks for the region by a request that is redirected too
        return f"the store redirects every request ({_HINTS['PermanentRedirect']})"
    if reply is None:
        return without_userinfo(f"{type(error).__name__}: {error}") if str(error) else type(error).__name__
    code, message = code_of(error), str(reply.get("Error", {}).get("Message", ""))
    hint = _HINTS.get(code, "")
    return f"the store replied {code}{': ' + message if message else ''}{' (' + hint + ')' if hint else ''}"


def storage_error(error: Exception, action: str) -> StorageError:
    """Return the ``StorageError`` that ``error``, raised during ``action``, means."""
    hide_userinfo(error)
    if isinstance(error, StorageError):
        return error
    code = code_of(error)
    if is_missing(error):
        return KeyNotFoundError(f"{action}: no such object")
    if code == "NoSuchUpload":
        return KeyNotFoundError(f"{action}: {describe(error)}")
    if is_denied(error):
        return AccessDeniedError(f"{action}: {describe(error)}; check the credentials and their permissions")
    if code in ("QuotaExceeded", "EntityTooLarge") or code == "507":
        return StorageFullError(f"{action}: {describe(error)}")
    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        return AccessDeniedError(
            f"{action}: no credentials were found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, name a profile, or "
            "pass key= and secret= (anon=True for public buckets)"
        )
    return StorageError(f"{action}: {describe(error)}")
