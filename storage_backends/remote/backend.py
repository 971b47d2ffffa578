"""The backend of remote stores: everything but the requests, which the subclass for each client library sends.

Small objects are one request: a conditional one where the caller asks for it. Large objects are uploads in parts, of
which several are in flight (``PartsWriter``). A read is one ranged request, whose reply is checked against the range
that was asked for. Nothing is looked up before it is read. ``EndpointSession`` repeats requests, and nothing else does.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
from typing_extensions import Buffer

from ...errors import KeyChangedError, KeyExistsError, KeyNotFoundError, StorageError, UnansweredError
from ..base import ObjectReader, ObjectStat, ObjectWriter, StorageBackend
from ..buffers import byte_view, check_max_size, writable_view
from ..keys import check_key
from ..writers import BufferedWriter
from .failures import Meaning, ShortReplyError
from .parts import PartsWriter, Upload
from .session import EndpointSession, Request

_T = TypeVar("_T")
_S = TypeVar("_S", bound=EndpointSession)

SINGLE_PUT_BYTES = 8 << 20
"""The largest object that is buffered in memory and stored with one request."""

_LEAST_S = 0.75  # to find out what became of a put, or why a read was refused, that has taken the whole deadline
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


@dataclass(frozen=True)
class Condition:
    """The condition of a put: ``version`` is that of the object to replace; empty if there must not be one.

    A backend that stores ``mark`` with the object recognizes by it what it has put, if the reply was lost.
    """

    version: str
    mark: str


@dataclass(frozen=True)
class Found:
    """Which bytes of which object are in a reply.

    Attributes:
        start: The first byte.
        end: The end of the bytes.
        size: The size of the object; None if the store does not state it.
        version: The version of the object.
    """

    start: int
    end: int
    size: int | None
    version: str = ""


def content_range(header: str | None, length: int) -> tuple[int, int, int | None]:
    """Return the start and the end of the bytes in a reply of ``length`` bytes, and the size of the object."""
    if header is None:
        return 0, length, length
    found = _CONTENT_RANGE.fullmatch(header)
    if found is None:
        raise ShortReplyError(f"the reply has the range {header!r:.200}")
    return int(found[1]), int(found[2]) + 1, None if found[3] == "*" else int(found[3])


class RemoteBackend(StorageBackend, Generic[_S]):
    """Objects in a remote store. Thread-safe."""

    concurrent_deletes: int = 16

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/") if not url.endswith("://") else url

    @property
    def url(self) -> str:
        return self._url

    @abstractmethod
    def _session(self) -> _S:
        """Return the session for the store. The methods below get it, and run on its event loop."""

    @abstractmethod
    async def _send_put(self, session: _S, key: str, content: memoryview, condition: Condition | None) -> str:
        """Put a small object; return its version, empty if it is unknown."""

    @abstractmethod
    async def _send_read(
        self, session: _S, key: str, start: int, views: Sequence[memoryview], accept: Callable[[Found], None]
    ) -> Buffer | None:
        """Fill ``views``, which are not empty, with the bytes from ``start``, or return these bytes.

        ``accept`` raises if a reply has other bytes than these. Call it before memory is filled.
        """

    @abstractmethod
    async def _send_get(self, session: _S, key: str, check_size: Callable[[int], None]) -> tuple[bytes, str]:
        """Return a whole object and its version. ``check_size`` raises if the object is too large."""

    @abstractmethod
    async def _send_stat(self, session: _S, key: str) -> ObjectStat:
        """Return the size and the version of an object."""

    @abstractmethod
    async def _send_delete(self, session: _S, key: str) -> None:
        """Delete an object; an error if it is missing is ignored."""

    @abstractmethod
    def _upload(self, session: _S, action: str, key: str, size: int) -> Upload:
        """Begin the upload of a large object."""

    async def _marked(self, session: _S, key: str) -> tuple[str | None, str]:
        """Return the mark of an object and its version; no mark by default, and if there is no such object."""
        return None, ""

    def put(self, key: str, data: Buffer, *, if_absent: bool = False, if_version: str = "") -> str:
        check_key(key)
        action, content = self._action("writing", key), memoryview(bytes(byte_view(data)))
        if not if_absent and not if_version:
            return self._put(action, key, content)
        conditions = self.conditions()
        if not (conditions.if_absent if if_absent else conditions.if_version):
            raise StorageError(f"{action}: this store cannot decide whether to put; see conditions()")
        session = self._session()
        return session.run(action, self._put_if(session, action, key, content, if_version))

    def _put(self, action: str, key: str, content: memoryview) -> str:
        session, request = self._session(), Request(action, self.deadline_s, "put", len(content))
        return session.run(action, session.repeat(request, lambda: self._send_put(session, key, content, None)))

    async def _put_if(self, session: _S, action: str, key: str, content: memoryview, version: str) -> str:
        """Put an object if it has this version, or, if that is empty, does not exist.

        Raises ``UnansweredError`` if a try without reply may have put it, and another one has replaced it since then.
        """
        condition, begun = Condition(version, secrets.token_hex(16)), time.monotonic()
        is_open = False

        async def send() -> str:
            nonlocal is_open
            try:
                return await self._send_put(session, key, content, condition)
            except BaseException as error:
                is_open |= isinstance(error, asyncio.CancelledError) or session.explain(error).is_repeatable
                raise

        try:
            return await session.repeat(Request(action, self.deadline_s, "put", len(content)), send)
        except StorageError as error:
            meaning = session.explain(error.__cause__ or error).meaning
            if meaning is not Meaning.REFUSED and not (meaning is Meaning.MISSING and version):
                raise
            # The reply to an earlier try may have been lost, also to one that the client has repeated itself.
            request = Request(action, self._rest_s(begun))
            mark, stored = await session.repeat(request, lambda: self._marked(session, key))
            if mark == condition.mark:
                return stored
            if is_open:
                raise UnansweredError(
                    f"{action}: another program has written the object, before or after a try without reply"
                ) from error
            if version:
                raise KeyChangedError(f"{action}: the object was replaced or deleted") from error
            raise KeyExistsError(f"{action}: the key is taken") from error

    def create(self, key: str, size: int, *, at_most: bool = False) -> ObjectWriter:
        check_key(key)
        action = self._action("writing", key)
        if size <= SINGLE_PUT_BYTES:
            return BufferedWriter(action, size, partial(self._put, action, key))
        session = self._session()
        return PartsWriter(session, action, self._upload(session, action, key, size), size, self.deadline_s)

    def read_into(self, key: str, offset: int, buffer: Buffer) -> None:
        self._read(key, offset, [buffer], "")

    def open_object(self, key: str) -> ObjectReader:
        check_key(key)
        return _Reader(self, key)

    def _read(self, key: str, offset: int, buffers: Sequence[Buffer], version: str) -> tuple[int | None, str]:
        """Fill ``buffers`` from one version of the object, ``version`` if it is not empty; return size and version."""
        check_key(key)
        action, session, begun = self._action("reading", key), self._session(), time.monotonic()
        views = [writable_view(action, buffer) for buffer in buffers]
        views = [view for view in views if len(view)]
        end = offset + sum(map(len, views))
        if offset < 0:
            raise StorageError(f"{action}: the offset is {offset}")
        size: int | None = None

        def check_end(size: int | None) -> None:
            if size is not None and size < end:
                raise StorageError(
                    f"{action}: requested bytes [{offset}, {end}): the object has only {size} bytes; it was cut short "
                    "or replaced"
                )

        def accept(found: Found) -> None:
            nonlocal size, version
            size = found.size if found.size is not None or found.start != offset or found.end >= end else found.end
            check_end(size)
            if (found.start, found.end) != (offset, end):
                shown = f"[{found.start}, {found.end}) of {found.size}"
                raise ShortReplyError(f"requested bytes [{offset}, {end}), the reply has {shown}")
            # Two tries may fill the buffers at the same time.
            if version and found.version != version:
                raise StorageError(f"{action}: the object was replaced while it was being read")
            version = found.version

        if not views:
            # HTTP has no empty range.
            size = self.stat(key).size
            check_end(size)
            return size, version

        async def send() -> Buffer | None:
            content = await self._send_read(session, key, offset, views, accept)
            if content is not None and (count := memoryview(content).nbytes) != end - offset:
                raise ShortReplyError(f"requested {end - offset} bytes, the reply has {count}")
            return content

        request = Request(action, self.deadline_s, "read", end - offset, can_hedge=True)
        try:
            content = session.run(action, session.repeat(request, send))
        except StorageError as error:
            if session.explain(error.__cause__ or error).meaning is Meaning.OUTSIDE:
                # The reply does not state the size.
                check_end(self._stat(action, key, self._rest_s(begun)).size)
            raise
        if content is not None:
            rest = np.frombuffer(byte_view(content), np.uint8)
            for view in views:
                # Without the GIL, which a slice assignment holds.
                np.copyto(np.frombuffer(view, np.uint8), rest[: len(view)])
                rest = rest[len(view) :]
        return size, version

    def get(self, key: str, *, max_size: int | None = None) -> bytes:
        return self.get_versioned(key, max_size=max_size)[0]

    def get_versioned(self, key: str, *, max_size: int | None = None) -> tuple[bytes, str]:
        check_key(key)
        action = self._action("reading", key)
        return self._ask(
            action, lambda session: self._send_get(session, key, partial(check_max_size, action, max_size=max_size))
        )

    def stat(self, key: str) -> ObjectStat:
        check_key(key)
        return self._stat(self._action("looking at", key), key, self.deadline_s)

    def _stat(self, action: str, key: str, deadline_s: float) -> ObjectStat:
        return self._ask(action, lambda session: self._send_stat(session, key), deadline_s)

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(key)
        if keys:
            session = self._session()
            session.run(f"deleting in {self.display_url}", self._delete(session, keys))

    async def _delete(self, session: _S, keys: Sequence[str]) -> None:
        # One request per key: bulk requests report the failures of single keys in a reply with status 200, end at the
        # first key that does not exist, need a checksum that stores disagree on, or are unknown.
        async def delete_one(key: str) -> None:
            request = Request(self._action("deleting", key), self.deadline_s)
            with suppress(KeyNotFoundError):
                await session.repeat(request, lambda: self._send_delete(session, key))

        await self._each(keys, delete_one)

    async def _each(self, items: Sequence[_T], send: Callable[[_T], Coroutine[Any, Any, None]]) -> None:
        """Call ``send`` for each item, several at a time. Raises the first failure when all have been tried."""
        slots = asyncio.Semaphore(self.concurrent_deletes)

        async def send_one(item: _T) -> None:
            async with slots:
                await send(item)

        for result in await asyncio.gather(*map(send_one, items), return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    def _ask(self, action: str, send: Callable[[_S], Coroutine[Any, Any, _T]], deadline_s: float | None = None) -> _T:
        """Return the result of a small request."""
        session, request = self._session(), Request(action, self.deadline_s if deadline_s is None else deadline_s)
        return session.run(action, session.repeat(request, lambda: send(session)))

    def _rest_s(self, begun: float) -> float:
        """Return what remains of the deadline of a call."""
        return max(_LEAST_S, begun + self.deadline_s - time.monotonic())

    def _action(self, verb: str, key: str) -> str:
        return f"{verb} {key!r} in {self.display_url}"


class _Reader(ObjectReader):
    """Reads one version of an object, that of the first read."""

    def __init__(self, backend: RemoteBackend[Any], key: str) -> None:
        self._backend, self._key, self._version = backend, key, ""

    def read(self, offset: int, buffers: Sequence[Buffer]) -> None:
        self.size, version = self._backend._read(self._key, offset, buffers, self._version)
        self._version = self._version or version
