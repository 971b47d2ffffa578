"""What the errors of requests mean. Every client library has its own errors; each backend maps them to these.

Their texts may repeat credentials, which messages and tracebacks must not show (``Secrets``).
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any
from urllib.parse import quote, unquote

from ...errors import (
    AccessDeniedError,
    KeyExistsError,
    KeyNotFoundError,
    StorageError,
    StorageFullError,
    without_userinfo,
)

_USERINFO = re.compile(r"://([^/\s@:]*):([^/\s]*)@")
_SECRET_NAME = re.compile(
    r"secret|token|passw|key|credential|sas|signature|authorization|connection_string|header", re.IGNORECASE
)
_SECRET_VARIABLE = re.compile(r"SECRET|TOKEN|PASSW|_KEY\b|_KEY_|CREDENTIAL")
_SHORTEST_SECRET = 4  # to hide shorter ones would make texts unreadable
_HIDDEN = "***"


class Secrets:
    """The credentials with which a store was opened, and those in the environment, to be hidden in texts."""

    def __init__(self, url: str = "", options: Mapping[str, Any] | None = None) -> None:
        self._given = {form for one in _passwords(url) for form in _forms(one)}
        self._given |= {form for one in _options(options or {}) for form in _forms(one)}

    def hide(self, text: str) -> str:
        """Return a text without them."""
        shown = without_userinfo(text)
        named = (value for name, value in os.environ.items() if _SECRET_VARIABLE.search(name) and "/" not in value[:1])
        for secret in sorted({*self._given, *named}, key=len, reverse=True):
            if len(secret) >= _SHORTEST_SECRET:
                shown = shown.replace(secret, _HIDDEN)
        return shown

    def hide_in(self, error: BaseException) -> BaseException:
        """Return the error; if it, or what it was raised from, shows one of them, another error with its text alone.

        Tracebacks show them, and errors of client libraries keep them in other attributes.
        """
        chain: list[BaseException] = [error]
        for one in chain:
            if self.hide(f"{one!r} {one}") != f"{one!r} {one}":
                return Exception(self.hide(f"{type(error).__name__}: {error}"))
            following = (one.__cause__, one.__context__)
            chain += [other for other in following if other is not None and other not in chain]
        return error


def _passwords(text: str) -> Iterator[str]:
    for user, password in _USERINFO.findall(text):
        yield password
        yield f"{unquote(user)}:{unquote(password)}"


def _options(value: Any, *, is_secret: bool = False) -> Iterator[str]:
    """Yield the secrets in options: those with the name of one, and passwords in URLs."""
    if isinstance(value, Mapping):
        for name, one in value.items():
            yield from _options(one, is_secret=is_secret or bool(_SECRET_NAME.search(str(name))))
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _options(one, is_secret=is_secret)
    elif isinstance(value, (str, bytes)):
        text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
        yield from _passwords(text)
        if is_secret:
            yield text
            yield from (part.partition("=")[2] for part in text.split(";"))  # of a connection string


def _forms(secret: str) -> set[str]:
    """Return the forms in which a client library may repeat a secret."""
    encoded = base64.b64encode(secret.encode()).decode()
    return {secret, unquote(secret), quote(secret), quote(secret, safe=""), repr(secret)[1:-1], encoded}


class Meaning(Enum):
    """What an error means for the request that has failed."""

    MISSING = auto()
    """There is no such object or upload."""
    DENIED = auto()
    """The credentials do not allow it."""
    FULL = auto()
    """The store has no space left."""
    REFUSED = auto()
    """The condition of a put is not met."""
    OUTSIDE = auto()
    """A read may end behind the object."""
    BUSY = auto()
    """The store has replied that it failed; the same request may succeed later."""
    UNANSWERED = auto()
    """No complete reply came: the request may or may not have had an effect, and may succeed later."""
    OTHER = auto()
    """To send the same request again is useless."""


@dataclass(frozen=True)
class Failure:
    """What an error means, and what it says on one line."""

    meaning: Meaning
    text: str

    @property
    def is_repeatable(self) -> bool:
        """Whether the same request may succeed later."""
        return self.meaning in (Meaning.BUSY, Meaning.UNANSWERED)


class ShortReplyError(Exception):
    """A reply has other bytes than the request asked for. The next one may be right."""


class OutOfRangeError(Exception):
    """The store refused a range of an object, or replied with fewer bytes: the object may end before."""


def common_failure(error: BaseException) -> Failure:
    """Return what an error means that is not of a client library."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, TimeoutError):
        text = str(error) or "the store did not answer in time"
    if isinstance(error, ShortReplyError):
        return Failure(Meaning.BUSY, str(error))
    if isinstance(error, OutOfRangeError):
        return Failure(Meaning.OUTSIDE, str(error))
    return Failure(Meaning.UNANSWERED if isinstance(error, TimeoutError | ConnectionError) else Meaning.OTHER, text)


def storage_error(failure: Failure, action: str, *, is_put: bool = False) -> StorageError:
    """Return the ``StorageError`` for a request, made for ``action``, that is not repeated."""
    text = f"{action}: {failure.text}"
    match failure.meaning:
        case Meaning.MISSING if is_put:  # a missing bucket is no missing key
            return StorageError(f"{text}; does the bucket or directory exist?")
        case Meaning.MISSING:
            return KeyNotFoundError(text)
        case Meaning.DENIED:
            return AccessDeniedError(f"{text}; check the credentials and their permissions")
        case Meaning.FULL:
            return StorageFullError(text)
        case Meaning.REFUSED:
            return KeyExistsError(f"{action}: the key is taken")
    return StorageError(text)
