"""Find and end multipart uploads that no writer will complete."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any

from ..base import IncompleteUpload
from .replies import code_of

__all__ = ["abort_all", "uploads_of"]

_CONCURRENT_ABORTS = 16


def uploads_of(pages: Iterator[dict[str, Any]], key_of: Callable[[str], str | None]) -> Iterator[IncompleteUpload]:
    """Yield the uploads in the replies of ``list_multipart_uploads`` for which ``key_of`` returns a key."""
    for page in pages:
        now = _time_of(page)
        for found in page.get("Uploads", ()):
            key, begun = key_of(str(found["Key"])), found.get("Initiated")
            if key is not None:
                age_s = now - begun.timestamp() if isinstance(begun, datetime) else 0.0
                yield IncompleteUpload(key, str(found["UploadId"]), max(0.0, age_s))


def _time_of(reply: dict[str, Any]) -> float:
    """Return the time on the clock of the store, which has also written when uploads began."""
    try:
        return parsedate_to_datetime(reply["ResponseMetadata"]["HTTPHeaders"]["date"]).timestamp()
    except (KeyError, TypeError, ValueError):
        return time.time()


async def abort_all(uploads: Sequence[IncompleteUpload], abort: Callable[[IncompleteUpload], Any]) -> None:
    """Call ``abort`` for each upload, several at a time. Raises the first failure when all have been tried."""
    slots = asyncio.Semaphore(_CONCURRENT_ABORTS)

    async def abort_one(upload: IncompleteUpload) -> None:
        async with slots:
            try:
                await abort(upload)
            except Exception as error:
                if code_of(error) != "NoSuchUpload":
                    raise

    for result in await asyncio.gather(*map(abort_one, uploads), return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
