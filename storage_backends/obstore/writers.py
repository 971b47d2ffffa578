"""Write a large object in parts, several of them at a time."""

from __future__ import annotations

import logging
import mmap
import threading
import weakref
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import numpy as np
import obstore

from ...errors import StorageError
from ..window import PARTS_IN_FLIGHT, Window
from ..writers import Part, PartedWriter
from .client import Client

__all__ = ["StreamWriter"]

PART_BYTES = 16 << 20
_MAX_PARTS = 9_000  # GCS accepts 10,000
_ABORT_S = 1.0  # where the caller has waited for the deadline already

_log = logging.getLogger(__name__)


class StreamWriter(PartedWriter):
    """Passes parts to one of obstore's writers, in order, as soon as they and all before them are whole.

    obstore sends them from this memory, several at a time. It does not report that the store has confirmed one, but
    drops the part's array then, which frees the slot and the memory in the window. The last part, if it is shorter than
    the others, stays here until ``complete``, because obstore would hold it without sending it.
    """

    def __init__(self, client: Client, action: str, path: str, size: int, deadline_s: float) -> None:
        super().__init__(action, size, deadline_s, max(PART_BYTES, -(-size // _MAX_PARTS)), client.window)
        self._client = client
        self._whole: dict[int, Part] = {}
        self._next = 0
        self._passing = threading.Lock()  # held by the thread that passes parts on
        self._call: Future[Any] | None = None
        self._file: Any = obstore.open_writer_async(
            client.store, path, buffer_size=self._part_bytes, max_concurrency=PARTS_IN_FLIGHT
        )

    def _send(self, number: int, part: Part) -> None:
        with self._changed:
            self._raise_failure()
            self._whole[number] = self._filling.pop(number)
        if len(part.data) == self._part_bytes:
            self._pass_on()

    def _pass_on(self) -> None:
        with self._passing:
            while True:
                with self._changed:
                    self._raise_failure()
                    part = self._whole.get(self._next)
                if part is None:
                    return
                if not self._window.acquire_slot(self._deadline_s, with_buffer=True):
                    raise self._stalled()
                with self._changed:
                    if self._state != "open":
                        self._window.release_slot(with_buffer=True)
                        self._raise_failure()
                    del self._whole[self._next]
                    self._next += 1
                self._write(part)

    def _write(self, part: Part) -> None:
        content = np.frombuffer(part.data, np.uint8)
        weakref.finalize(content, _has_ended, self._window, part.buffer).atexit = False
        # Only obstore may keep it, and not a frame of this call that an exception refers to.
        handed = [content]
        del content

        async def write() -> None:
            await self._file.write(handed.pop())

        with self._changed:
            self._raise_failure()
            self._call = call = self._client.start(write, self._deadline_s)
        try:
            self._client.wait(self._action, call)
        except StorageError as error:
            self._fail(error)
            raise

    def complete(self) -> None:
        with self._changed:
            self._raise_failure()
            self._written.check_whole()
        self._pass_on()
        with self._changed:
            self._raise_failure()
            self._seal()
        self._client.run(self._action, self._close, self._deadline_s)
        with self._changed:
            self._state = "complete"
        self._leave()

    async def _close(self) -> None:
        await self._file.close()

    def abort(self) -> None:
        with self._changed:
            if not self._withdraw():
                return
            call = self._call
        if call is not None:
            call.cancel()
        try:
            self._client.run(self._action, self._end, _ABORT_S)
        except Exception as error:  # noqa: BLE001 - abort never raises
            _log.warning("%s: could not end the incomplete upload: %s", self._action, error)
        self._leave()

    async def _end(self) -> None:
        with suppress(OSError):  # it is closed, or the store has no such upload
            await self._file.__aexit__(StorageError, None, None)

    def _leave(self) -> None:
        with self._changed:
            self._filling |= self._whole
            self._whole.clear()
        super()._leave()


def _has_ended(window: Window, buffer: mmap.mmap) -> None:
    """Called when obstore has dropped a part, by the thread that does."""
    window.give_back(buffer)
    window.release_slot(with_buffer=True)
