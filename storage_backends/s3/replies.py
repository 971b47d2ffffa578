"""What the errors of s3fs and the replies of S3 mean."""

from __future__ import annotations

from typing import Any

import aiohttp
from botocore import exceptions as botocore_errors
from botocore.parsers import ResponseParserError

from ...errors import without_userinfo
from ..remote.failures import Failure, Meaning, common_failure

_UNANSWERED = (
    TimeoutError,
    ConnectionError,
    botocore_errors.ConnectionError,
    botocore_errors.HTTPClientError,
    botocore_errors.IncompleteReadError,
    botocore_errors.ResponseStreamingError,
    aiohttp.ClientError,
)
_PASSING_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
_MISSING_CODES = frozenset({"404", "NoSuchKey", "NotFound"})
_CODES = {
    Meaning.MISSING: "NoSuchUpload",
    Meaning.REFUSED: "412 PreconditionFailed",
    Meaning.OUTSIDE: "416 InvalidRange",
    Meaning.FULL: "507 QuotaExceeded EntityTooLarge",
    Meaning.BUSY: """BadDigest ConditionalRequestConflict IncompleteBody InternalError OperationAborted RequestTimeout
        ServiceUnavailable SlowDown Throttling ThrottlingException XAmzContentChecksumMismatch
        XAmzContentSHA256Mismatch""",
    Meaning.DENIED: """401 403 AccessDenied AllAccessDisabled ExpiredToken ExpiredTokenException InvalidAccessKeyId
        InvalidToken RequestTimeTooSkewed SignatureDoesNotMatch TokenRefreshRequired""",
}
_MEANINGS = {code: meaning for meaning, codes in _CODES.items() for code in codes.split()}
_HINTS = {
    "ExpiredToken": "the credentials have expired; provide new ones",
    "NoSuchBucket": "the bucket does not exist; create it, or correct the URL",
    "PermanentRedirect": "the bucket is in another region or at another endpoint; set the region or endpoint_url",
    "RequestTimeTooSkewed": "the clock of this machine differs from the store's; correct it",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key, or a proxy changed the request",
}
_HINTS["301"] = _HINTS["PermanentRedirect"]


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


def explain(error: BaseException) -> Failure:
    """Return what an error of a request means."""
    reply = _reply(error)
    if reply is None:
        return _explain_silence(error)
    code, message = code_of(error), str(reply.get("Error", {}).get("Message", ""))
    if code in _MISSING_CODES:
        return Failure(Meaning.MISSING, "no such object")
    hint = _HINTS.get(code, "")
    text = f"the store replied {code}{': ' + message if message else ''}{' (' + hint + ')' if hint else ''}"
    status = reply.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return Failure(_MEANINGS.get(code, Meaning.BUSY if status in _PASSING_STATUSES else Meaning.OTHER), text)


def _explain_silence(error: BaseException) -> Failure:
    """Return what an error means that has no reply of the store."""
    if isinstance(error, RecursionError):  # of botocore, which asks for the region by a request that is redirected too
        return Failure(Meaning.OTHER, f"the store redirects every request ({_HINTS['PermanentRedirect']})")
    if isinstance(error, botocore_errors.NoCredentialsError | botocore_errors.PartialCredentialsError):
        return Failure(
            Meaning.DENIED,
            "no credentials were found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, name a profile, or pass key= "
            "and secret= (anon=True for public buckets)",
        )
    found = common_failure(error)
    meaning = Meaning.UNANSWERED if isinstance(error, _UNANSWERED) else found.meaning
    return Failure(Meaning.BUSY if isinstance(error, ResponseParserError) else meaning, without_userinfo(found.text))
