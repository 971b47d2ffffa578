"""The body of a reply to ``get_object``, and whether the reply is what was asked for."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

from ...errors import StorageError
from .direct import DirectReply
from .replies import ShortReplyError

__all__ = ["StreamedBody", "body_of", "check_range", "too_short"]

_READ_CHUNK = 1 << 20
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


def body_of(reply: dict[str, Any]) -> DirectReply | StreamedBody:
    """Return the body of a reply. Its ``aclose`` closes the connection instead of reading the rest."""
    raw = getattr(reply["Body"], "raw_stream", None)
    return raw if isinstance(raw, DirectReply) else StreamedBody(reply["Body"])


class StreamedBody:
    """A body that the event loop reads: see ``Connections.attach``."""

    def __init__(self, body: Any) -> None:
        self._body = body

    async def _pieces(self) -> AsyncIterator[bytes]:
        while piece := await self._body.read(_READ_CHUNK):
            yield piece

    async def read(self) -> bytes:
        """Return the whole body."""
        return b"".join([piece async for piece in self._pieces()])

    async def fill(self, views: Sequence[memoryview]) -> None:
        """Fill ``views``. Raises ``ShortReplyError`` if the body has another length than all of them."""
        count, done = sum(map(len, views)), 0
        targets = iter(views)
        target = next(targets)
        async for piece in self._pieces():
            rest = memoryview(piece)
            done += len(rest)
            if done > count:
                break
            while len(rest):
                if not len(target):
                    target = next(targets)
                taken = rest[: len(target)]
                target[: len(taken)] = taken
                target, rest = target[len(taken) :], rest[len(taken) :]
        if done != count:
            raise ShortReplyError(f"requested {count} bytes, the reply has {done}")

    async def aclose(self) -> None:
        """Close the connection if the body was not read completely."""
        with suppress(Exception):
            self._body.close()


def check_range(reply: dict[str, Any], action: str, start: int, end: int) -> int:
    """Return the size of the object.

    Raises ``StorageError`` if it ends before ``end``, and ``ShortReplyError`` if the reply has other bytes.
    """
    length = int(reply["ContentLength"])
    found = _CONTENT_RANGE.fullmatch(str(reply.get("ContentRange", f"bytes 0-{length - 1}/{length}")))
    first, last, size = map(int, found.groups()) if found else (-1, -1, end)
    if size < end:
        raise too_short(action, start, end, size)
    if (first, last + 1) != (start, end):
        raise ShortReplyError(f"requested bytes [{start}, {end}), the reply has [{first}, {last + 1}) of {size}")
    return size


def too_short(action: str, start: int, end: int, size: int) -> StorageError:
    """Return the error for a range that ends behind the object."""
    return StorageError(
        f"{action}: requested bytes [{start}, {end}): the object has only {size} bytes; it was cut short or replaced"
    )
