"""Write a large object in parts, several of them at a time."""

from __future__ import annotations

import asyncio
import logging
import mmap
from concurrent.futures import Future
from typing import Any

import numpy as np
from typing_extensions import Buffer

from ...errors import StorageError
from ..buffers import byte_view
from ..writers import CheckedWriter
from .client import Client
from .replies import storage_error
from .uploads import Upload

__all__ = ["MultipartWriter", "part_bytes_for"]

PART_BYTES = 16 << 20
_MAX_PARTS = 9_000  # S3 accepts 10,000

_log = logging.getLogger(__name__)


def part_bytes_for(size: int) -> int:
    """Return the bytes of each part of an object but the last."""
    return max(PART_BYTES, -(-size // _MAX_PARTS))


class _Part:
    """The first ``length`` bytes of a buffer, and how many of them are missing."""

    def __init__(self, buffer: mmap.mmap, length: int) -> None:
        self.buffer, self.data, self.missing = buffer, memoryview(buffer)[:length], length


class MultipartWriter(CheckedWriter):
    """Sends a part as soon as all its bytes are written, and returns while it is in flight.

    At most ``PARTS_IN_FLIGHT`` parts of the whole process are in flight; ``write`` waits for a slot before it sends
    another. So a caller with a single thread uses all of them. A part's memory is freed when the store has confirmed
    it. The upload begins with the first complete part, and the object appears with ``complete``.
    """

    def __init__(self, client: Client, action: str, address: dict[str, str], size: int, deadline_s: float) -> None:
        super().__init__(action, size)
        self._client, self._deadline_s = client, deadline_s
        self._part_bytes = part_bytes_for(size)
        self._filling: dict[int, _Part] = {}
        self._sent: list[Future[None]] = []
        self._running: set[asyncio.Task[Any]] = set()  # used on the event loop only
        self._tags: dict[int, str] = {}
        self._upload = Upload(client, action, address, deadline_s)
        self._id: asyncio.Future[str] | None = None  # of the upload; used on the event loop only
        client.window.enter()
        self._is_counted = True

    def write(self, offset: int, data: Buffer) -> None:
        view = byte_view(data)
        with self._changed:
            self._admit(offset, len(view))
        while len(view):
            number, start = divmod(offset, self._part_bytes)
            with self._changed:
                part = self._filling.get(number)
            if part is None:
                part = self._begin_part(number, min(self._part_bytes, self._size - offset + start))
            piece = view[: len(part.data) - start]
            # Without the GIL, which a slice assignment holds while it faults in the pages of the buffer.
            np.copyto(np.frombuffer(part.data, np.uint8)[start : start + len(piece)], np.frombuffer(piece, np.uint8))
            view, offset = view[len(piece) :], offset + len(piece)
            with self._changed:
                part.missing -= len(piece)
                is_whole = not part.missing
            if is_whole:
                self._send(number, part)

    def _begin_part(self, number: int, length: int) -> _Part:
        buffer = self._client.window.take_buffer(self._part_bytes, self._deadline_s)
        if buffer is None:
            raise self._stalled()
        try:
            with self._changed:
                self._raise_failure()
                part = self._filling.setdefault(number, _Part(buffer, length))
        except BaseException:
            self._client.window.give_back(buffer)
            raise
        if part.buffer is not buffer:  # another thread was faster
            self._client.window.give_back(buffer)
        return part

    def shrink(self, size: int) -> None:
        super().shrink(size)
        number, length = divmod(size, self._part_bytes)
        part = self._filling.get(number) if length else None
        if part is not None:
            part.missing -= len(part.data) - length
            part.data = part.data[:length]
            if not part.missing:
                self._send(number, part)

    def _send(self, number: int, part: _Part) -> None:
        if not self._client.window.acquire_slot(self._deadline_s, with_buffer=True):
            raise self._stalled()
        with self._changed:
            if self._state != "open":
                self._client.window.release_slot(with_buffer=True)
                self._raise_failure()
            del self._filling[number]
            sent = self._client.start(self._send_part(number, part))
            self._sent.append(sent)
        sent.add_done_callback(self._has_ended)

    def _stalled(self) -> StorageError:
        error = StorageError(f"{self._action}: no part was confirmed within {self._deadline_s:g} s")
        error.is_late = True
        self._fail(error)
        return error

    def _has_ended(self, sent: Future[None]) -> None:
        self._client.window.release_slot(with_buffer=True)
        error = None if sent.cancelled() else sent.exception()
        if isinstance(error, Exception):
            self._fail(storage_error(error, self._action))

    def _fail(self, error: StorageError) -> None:
        with self._changed:
            if self._state == "open":
                self._state, self._failure = "failed", error

    async def _send_part(self, number: int, part: _Part) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            self._tags[number] = await self._upload.send(await self._begun(), number, part.data)
        finally:
            self._client.window.give_back(part.buffer)

    async def _begun(self) -> str:
        """Return the id of the upload, which the first part begins."""
        if self._id is None:
            self._id = asyncio.ensure_future(self._upload.begin())
        return await asyncio.shield(self._id)

    def complete(self) -> None:
        with self._changed:
            if self._state == "open":
                self._written.check_whole()
        for sent in self._sent:
            # Not left to `_has_ended`, which may run after this thread has been woken.
            try:
                sent.result()
            except Exception as error:  # noqa: BLE001 - stores raise anything, and `_raise_failure` raises it
                self._fail(storage_error(error, self._action))
        with self._changed:
            self._raise_failure()
            self._seal()
        self._client.run(self._action, self._complete())
        with self._changed:
            self._state = "complete"
        self._leave()

    async def _complete(self) -> None:
        # Every part by its number: a store accepts a list with gaps, and the object would lack their bytes.
        tags = [self._tags[number] for number in range(-(-self._size // self._part_bytes))]
        await self._upload.complete(await self._begun(), tags)

    def abort(self) -> None:
        with self._changed:
            if not self._withdraw():
                return
        try:
            self._client.run(self._action, self._abort())
        except Exception as error:  # noqa: BLE001 - abort never raises
            _log.warning("%s: could not end the incomplete upload: %s", self._action, error)
        self._leave()

    def __del__(self) -> None:
        # An abandoned writer would keep memory of the window, which all writers share.
        if getattr(self, "_is_counted", False):
            self._leave()

    def _leave(self) -> None:
        self._is_counted = False
        with self._changed:
            self._client.window.forget(len(self._filling))
            self._filling.clear()
        self._client.window.leave()

    async def _abort(self) -> None:
        for task in self._running:
            task.cancel()
        if self._running:
            # A part that arrives after the upload has ended would be kept, and cost money.
            await asyncio.wait(self._running)
        if self._id is None:
            return
        await asyncio.wait([self._id])
        if self._id.exception() is None:
            await self._upload.abort(self._id.result())
