"""Write a large object in parts, several of them at a time."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future
from typing import Any

from ..writers import Part, PartedWriter
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


class MultipartWriter(PartedWriter):
    """Sends a part as soon as all its bytes are written, and returns while it is in flight.

    A part's memory is freed when the store has confirmed it. The upload begins with the first complete part, and the
    object appears with ``complete``.
    """

    def __init__(self, client: Client, action: str, address: dict[str, str], size: int, deadline_s: float) -> None:
        super().__init__(action, size, deadline_s, part_bytes_for(size), client.window)
        self._client = client
        self._sent: list[Future[None]] = []
        self._running: set[asyncio.Task[Any]] = set()  # used on the event loop only
        self._tags: dict[int, str] = {}
        self._upload = Upload(client, action, address, deadline_s)
        self._id: asyncio.Future[str] | None = None  # of the upload; used on the event loop only

    def _send(self, number: int, part: Part) -> None:
        if not self._window.acquire_slot(self._deadline_s, with_buffer=True):
            raise self._stalled()
        with self._changed:
            if self._state != "open":
                self._window.release_slot(with_buffer=True)
                self._raise_failure()
            del self._filling[number]
            sent = self._client.start(self._send_part(number, part))
            self._sent.append(sent)
        sent.add_done_callback(self._has_ended)

    def _has_ended(self, sent: Future[None]) -> None:
        self._window.release_slot(with_buffer=True)
        error = None if sent.cancelled() else sent.exception()
        if isinstance(error, Exception):
            self._fail(storage_error(error, self._action))

    async def _send_part(self, number: int, part: Part) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            self._tags[number] = await self._upload.send(await self._begun(), number, part.data)
        finally:
            self._window.give_back(part.buffer)

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
