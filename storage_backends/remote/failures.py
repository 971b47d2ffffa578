"""What the errors of requests mean. Every client library has its own errors; each backend maps them to these."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from ...errors import AccessDeniedError, KeyExistsError, KeyNotFoundError, StorageError, StorageFullError


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
