"""Name attempt directories, and remove those of failed saves.

Each try at a save writes into a directory with a new name, so that no byte of a committed checkpoint is overwritten.
"""

from __future__ import annotations

import calendar
import logging
import re
import secrets
import time

from ..errors import StorageError
from ..storage_backends.base import StorageBackend

__all__ = [
    "ATTEMPT_PREFIX",
    "JOB_MARK_BYTES",
    "PIN_PREFIX",
    "attempt_name",
    "attempt_time",
    "is_old",
    "job_mark_of",
    "new_attempt",
    "new_attempt_id",
    "remove_attempt",
]

ATTEMPT_PREFIX = "attempt-"
"""The name of every attempt's directory begins with this."""

PIN_PREFIX = "pin-"
"""The name of every pin (``checkpoint.references``) begins with this; the name of an attempt follows."""

JOB_MARK_BYTES = 4
"""Length of the mark that a job with a lease puts into the names of its attempts."""

_LONGEST_SAVE_S = 24 * 3600.0

# The first byte of an attempt's id. Times need only the seven bytes after it.
_WITHOUT_JOB_MARK, _WITH_JOB_MARK = 0, 1
_TIME = "%Y%m%dT%H%M%SZ"
_JOB_MARK = re.compile(f"[0-9a-f]{{{2 * JOB_MARK_BYTES}}}")

_log = logging.getLogger(__name__)


def new_attempt() -> str:
    """Return a directory name that no other attempt uses: the time, for people, and 64 random bits."""
    return attempt_name(new_attempt_id())


def new_attempt_id(job_mark: bytes = b"") -> bytes:
    """Return a new id of 16 bytes. One rank makes it; every rank derives the same name from it (``attempt_name``).

    ``job_mark`` (``JOB_MARK_BYTES`` long) identifies the job that saves, if it holds a lease (``manager.lease``).
    """
    kind = _WITH_JOB_MARK if job_mark else _WITHOUT_JOB_MARK
    return bytes([kind]) + int(time.time()).to_bytes(7, "big") + job_mark + secrets.token_bytes(8 - len(job_mark))


def attempt_name(attempt_id: bytes) -> str:
    """Return the directory name for an id that ``new_attempt_id`` made."""
    when = time.strftime(_TIME, time.gmtime(int.from_bytes(attempt_id[1:8], "big")))
    ids = attempt_id[8:]
    parts = [ids[:JOB_MARK_BYTES], ids[JOB_MARK_BYTES:]] if attempt_id[0] == _WITH_JOB_MARK else [ids]
    return ATTEMPT_PREFIX + "-".join([when, *(part.hex() for part in parts)])


def job_mark_of(attempt: str) -> bytes:
    """Return the job mark in an attempt's name, or no bytes if a job without a lease made the attempt."""
    parts = attempt.removeprefix(ATTEMPT_PREFIX).split("-")
    return bytes.fromhex(parts[1]) if len(parts) == 3 and _JOB_MARK.fullmatch(parts[1]) else b""


def attempt_time(attempt: str) -> float | None:
    """Return when an attempt began, in seconds since the epoch by its writer's clock; None if its name has no time."""
    when = attempt.removeprefix(ATTEMPT_PREFIX).partition("-")[0]
    try:
        return calendar.timegm(time.strptime(when, _TIME))
    except ValueError:
        return None


def is_old(attempt: str) -> bool:
    """Return whether an attempt began more than 24 hours ago, so that whatever it left was left by a killed process."""
    begun = attempt_time(attempt)
    return begun is not None and time.time() - begun > _LONGEST_SAVE_S


def remove_attempt(backend: StorageBackend, attempt: str) -> bool:
    """Delete all files of a failed attempt, and what its killed ranks have begun. Logs a failure and never raises.

    Returns false if the store does not answer.
    """
    try:
        backend.abort_incomplete([*backend.incomplete(f"{attempt}/")])
        backend.delete([stat.key for stat in backend.list(f"{attempt}/")])
    except StorageError as error:
        _log.warning(
            "%s: cannot remove the failed attempt %s; its files remain: %s", backend.display_url, attempt, error
        )
        return not error.is_late
    return True
