"""Name attempt directories, and remove those of failed saves.

Each try at a save writes into a directory with a new name, so that no byte of a committed checkpoint is overwritten.
"""

from __future__ import annotations

import calendar
import logging
import re
import secrets
import time
from collections.abc import Iterable

from ..errors import StorageError
from ..storage_backends.base import StorageBackend

ATTEMPT_PREFIX = "attempt-"
"""The name of every attempt's directory begins with this."""

JOB_MARK_BYTES = 4
"""Length of the mark that a job with a lease puts into the names of its attempts."""

_LONGEST_SAVE_S = 24 * 3600.0

# The first byte of an attempt's id. Times need only the seven bytes after it.
_WITHOUT_JOB_MARK, _WITH_JOB_MARK, _STAGED = 0, 1, 2
_TIME = "%Y%m%dT%H%M%SZ"
_STAGED_END = "-staged"
_NAME = re.compile(
    rf"{ATTEMPT_PREFIX}[^-]+-(?:(?P<job>[0-9a-f]{{{2 * JOB_MARK_BYTES}}})-)?(?P<id>[0-9a-f]+)"
    rf"(?P<staged>{_STAGED_END})?(?:-copy-.*)?"
)

_log = logging.getLogger(__name__)


def new_attempt() -> str:
    """Return a directory name that no other attempt uses: the time, for people, and 64 random bits."""
    return attempt_name(new_attempt_id())


def new_attempt_id(job_mark: bytes = b"", *, is_staged: bool = False) -> bytes:
    """Return a new id of 16 bytes. One rank makes it; every rank derives the same name from it (``attempt_name``).

    ``job_mark`` (``JOB_MARK_BYTES`` long) identifies the job that saves, if it holds a lease (``checkpoint.lease``).
    What is staged may still be uploaded after the job has ended.
    """
    kind = (_STAGED if is_staged else _WITH_JOB_MARK) if job_mark else _WITHOUT_JOB_MARK
    return bytes([kind]) + int(time.time()).to_bytes(7, "big") + job_mark + secrets.token_bytes(8 - len(job_mark))


def attempt_name(attempt_id: bytes) -> str:
    """Return the directory name for an id that ``new_attempt_id`` made."""
    when = time.strftime(_TIME, time.gmtime(int.from_bytes(attempt_id[1:8], "big")))
    ids = attempt_id[8:]
    parts = [ids] if attempt_id[0] == _WITHOUT_JOB_MARK else [ids[:JOB_MARK_BYTES], ids[JOB_MARK_BYTES:]]
    end = _STAGED_END if attempt_id[0] == _STAGED else ""
    return ATTEMPT_PREFIX + "-".join([when, *(part.hex() for part in parts)]) + end


def attempts_among(children: Iterable[str]) -> list[str]:
    """Return the attempts among the children of a folder, as ``StorageBackend.list_children`` names them."""
    return [child[:-1] for child in children if child.startswith(ATTEMPT_PREFIX) and child.endswith("/")]


def copy_of_attempt(attempt: str) -> str:
    """Return a new directory name for a copy that begins now. It belongs to no job, and contains the same bits."""
    now, own = time.strftime(_TIME, time.gmtime()), secrets.token_hex(4)
    return f"{ATTEMPT_PREFIX}{now}-{_bits(attempt)}-copy-{own}"


def is_copy_of(one: str, other: str) -> bool:
    """Return whether two attempts are the same, or copies of one another."""
    return one == other or _bits(one) == _bits(other) != ""


def _bits(attempt: str) -> str:
    found = _NAME.fullmatch(attempt)
    return (found["job"] or "") + found["id"] if found else attempt.removeprefix(ATTEMPT_PREFIX)


def job_mark_of(attempt: str, *, also_staged: bool = False) -> bytes:
    """Return the job mark in an attempt's name; no bytes if a job without a lease made it, or it is staged."""
    found = _NAME.fullmatch(attempt)
    if found is None or not found["job"] or (found["staged"] and not also_staged):
        return b""
    return bytes.fromhex(found["job"])


def attempt_time(attempt: str) -> float | None:
    """Return when an attempt began, in seconds since the epoch by its writer's clock; None if its name has no time."""
    when = attempt.removeprefix(ATTEMPT_PREFIX).partition("-")[0]
    try:
        return calendar.timegm(time.strptime(when, _TIME))
    except ValueError:
        return None


def has_expired(attempt: str) -> bool:
    """Return whether an attempt began more than 24 hours ago: no save in progress is expected to be so old."""
    begun = attempt_time(attempt)
    return begun is not None and time.time() - begun > _LONGEST_SAVE_S


def remove_attempt(backend: StorageBackend, attempt: str) -> None:
    """Delete all files of a failed attempt, and what its killed ranks have begun. Logs a failure and never raises."""
    try:
        backend.abort_incomplete([*backend.incomplete(f"{attempt}/")])
        backend.delete([stat.key for stat in backend.list(f"{attempt}/")])
    except StorageError as error:
        _log.warning(
            "%s: cannot remove the failed attempt %s; its files remain: %s", backend.display_url, attempt, error
        )
