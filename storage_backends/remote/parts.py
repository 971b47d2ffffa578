"""Large objects in parts: how many are in flight, their memory, and the writer that fills and sends them."""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, ClassVar

import numpy as np
from typing_extensions import Buffer

from ...errors import StorageError
from ..buffers import byte_view
from ..writers import CheckedWriter
from .session import EndpointSession

PARTS_IN_FLIGHT = 8
PART_BYTES = 16 << 20
_FILLING = 2  # buffers that are being filled, in addition to those in flight: one for each open file of a save
_MAX_PARTS = 9_000  # S3 and GCS accept 10,000

_log = logging.getLogger(__name__)


def part_bytes_for(size: int) -> int:
    """Return the bytes of each part of an object but the last."""
    return max(PART_BYTES, -(-size // _MAX_PARTS))


class UploadWindow:
    """Slots and buffers for the parts of all writers of a process. Thread-safe.

    Buffers are reused while there is a writer, because filling fresh memory costs several times as much as a copy into
    memory that is in use. They are mapped, on huge pages, and not allocated: an allocator would keep their memory.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._writers = self._in_flight = self._taken = self._sent = 0
        self._idle: list[mmap.mmap] = []

    def enter(self) -> None:
        """Count a writer."""
        with self._changed:
            self._writers += 1

    def leave(self) -> None:
        """Forget a writer. The last one frees the memory."""
        with self._changed:
            self._writers -= 1
            if not self._writers:
                self._idle.clear()

    def take_buffer(self, nbytes: int, timeout_s: float) -> mmap.mmap | None:
        """Return a buffer, and wait before while there are many and parts in flight will release some.

        A caller whose parts are all incomplete does not wait, so that it can write them in any order. Returns None if
        none became free in time.
        """
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._taken < PARTS_IN_FLIGHT + _FILLING or not self._sent, timeout=timeout_s
            ):
                return None
            self._taken += 1
            for at, buffer in enumerate(self._idle):
                if len(buffer) == nbytes:
                    return self._idle.pop(at)
        fresh = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(AttributeError, OSError):  # not on every system
            fresh.madvise(mmap.MADV_HUGEPAGE)
        return fresh

    def give_back(self, buffer: mmap.mmap) -> None:
        """Take back a buffer that nothing uses any more."""
        with self._changed:
            if self._writers and len(self._idle) < PARTS_IN_FLIGHT + _FILLING:
                self._idle.append(buffer)
        self.forget(1)

    def forget(self, count: int) -> None:
        """Count buffers as returned that no other writer may get, because a thread may still be writing into them."""
        with self._changed:
            self._taken -= count
            self._changed.notify_all()

    def acquire_slot(self, timeout_s: float, *, with_buffer: bool = False) -> bool:
        """Wait for a slot, to send a part in a buffer or in the caller's memory.

        Returns false if none became free in time.
        """
        with self._changed:
            is_free = self._changed.wait_for(lambda: self._in_flight < PARTS_IN_FLIGHT, timeout=timeout_s)
            self._in_flight += is_free
            self._sent += is_free and with_buffer
        return is_free

    def release_slot(self, *, with_buffer: bool = False) -> None:
        """Release a slot of ``acquire_slot``, with the same argument."""
        with self._changed:
            self._in_flight -= 1
            self._sent -= with_buffer
            self._changed.notify_all()


class _OfProcess:
    """The window that all writers of a process share."""

    window = UploadWindow()

    @classmethod
    def after_fork(cls) -> None:
        """Drop the memory of the parent, and a lock that one of its threads may have held."""
        cls.window = UploadWindow()


os.register_at_fork(after_in_child=_OfProcess.after_fork)


def window() -> UploadWindow:
    """Return the window that all writers of this process share."""
    return _OfProcess.window


class Upload(ABC):
    """The requests that make one object of parts. Its coroutines run on the event loop, and raise anything."""

    in_order: ClassVar[bool] = False
    """Whether a part must not be sent before all parts before it were."""

    @abstractmethod
    async def send(self, number: int, data: memoryview) -> str:
        """Send a part, counted from 0. When this returns its tag, the memory is free for other bytes."""

    @abstractmethod
    async def complete(self, tags: Sequence[str]) -> None:
        """Make the object of all parts, whose tags these are."""

    @abstractmethod
    async def abort(self) -> None:
        """End the upload without an object."""


class OrderedUpload(Upload):
    """An upload that a client writes like a file: one part after the other, and none after one that has failed."""

    in_order = True

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s, self._turn, self._is_broken = deadline_s, asyncio.Lock(), False

    async def _in_turn(self, write: Callable[[], Awaitable[object]]) -> None:
        async with self._turn:
            if self._is_broken:
                raise ConnectionAbortedError("an earlier part has failed")
            self._is_broken = True
            await asyncio.wait_for(write(), self._deadline_s)
            self._is_broken = False


class _Part:
    """The first ``length`` bytes of a buffer, and how many of them are missing."""

    def __init__(self, buffer: mmap.mmap, length: int) -> None:
        self.buffer, self.data, self.missing = buffer, memoryview(buffer)[:length], length


class PartsWriter(CheckedWriter):
    """Copies what is written into parts, sends each as soon as it is whole, and returns while it is in flight.

    At most ``PARTS_IN_FLIGHT`` parts of the whole process are in flight; ``write`` waits for a slot before it sends
    another. So a caller with a single thread uses all of them. The memory of a part is free when the store has
    confirmed it, and the object appears with ``complete``.
    """

    def __init__(self, session: EndpointSession, action: str, upload: Upload, size: int, deadline_s: float) -> None:
        super().__init__(action, size)
        self._session, self._upload, self._deadline_s = session, upload, deadline_s
        self._part_bytes, self._window = part_bytes_for(size), window()
        self._filling: dict[int, _Part] = {}
        self._whole: dict[int, _Part] = {}  # not sent yet
        self._passing = threading.Lock()  # held by the thread that sends whole parts
        self._sent: list[Future[None]] = []
        self._running: set[asyncio.Task[Any]] = set()  # used on the event loop only
        self._tags: dict[int, str] = {}
        self._window.enter()
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
                self._send(number)

    def _begin_part(self, number: int, length: int) -> _Part:
        buffer = self._window.take_buffer(self._part_bytes, self._deadline_s)
        if buffer is None:
            raise self._stalled()
        try:
            with self._changed:
                self._raise_failure()
                part = self._filling.setdefault(number, _Part(buffer, length))
        except BaseException:
            self._window.give_back(buffer)
            raise
        if part.buffer is not buffer:  # another thread was faster
            self._window.give_back(buffer)
        return part

    def shrink(self, size: int) -> None:
        super().shrink(size)
        number, length = divmod(size, self._part_bytes)
        part = self._filling.get(number) if length else None
        if part is not None:
            part.missing -= len(part.data) - length
            part.data = part.data[:length]
            if not part.missing:
                self._send(number)

    def _send(self, number: int) -> None:
        """Send a part, all of which is written, and those that have waited for it."""
        with self._changed:
            self._raise_failure()
            self._whole[number] = self._filling.pop(number)
        with self._passing:
            while True:
                with self._changed:
                    self._raise_failure()
                    number = len(self._sent) if self._upload.in_order else next(iter(self._whole), -1)
                    if number not in self._whole:
                        return
                if not self._window.acquire_slot(self._deadline_s, with_buffer=True):
                    raise self._stalled()
                try:
                    with self._changed:
                        self._raise_failure()
                        sent = self._session.start(self._send_part(number, self._whole.pop(number)))
                        self._sent.append(sent)
                except BaseException:
                    self._window.release_slot(with_buffer=True)
                    raise
                sent.add_done_callback(self._has_ended)

    def _has_ended(self, sent: Future[None]) -> None:
        self._window.release_slot(with_buffer=True)
        error = None if sent.cancelled() else sent.exception()
        if isinstance(error, Exception):
            self._fail(error)

    async def _send_part(self, number: int, part: _Part) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            self._tags[number] = await self._upload.send(number, part.data)
        finally:
            self._window.give_back(part.buffer)

    def complete(self) -> None:
        with self._changed:
            if self._state == "open":
                self._written.check_whole()
        for sent in self._sent:
            # Not left to `_has_ended`, which may run after this thread has been woken.
            try:
                sent.result()
            except Exception as error:  # noqa: BLE001 - stores raise anything, and `_raise_failure` raises it
                self._fail(error)
        with self._changed:
            self._raise_failure()
            self._seal()
        # Every part by its number: a store accepts a list with gaps, and the object would lack their bytes.
        tags = [self._tags[number] for number in range(-(-self._size // self._part_bytes))]
        self._session.run(self._action, self._upload.complete(tags))
        with self._changed:
            self._state = "complete"
        self._leave()

    def abort(self) -> None:
        with self._changed:
            if not self._withdraw():
                return
        try:
            self._session.run(self._action, self._abort())
        except Exception as error:  # noqa: BLE001 - abort never raises
            _log.warning("%s: could not end the incomplete upload: %s", self._action, error)
        self._leave()

    async def _abort(self) -> None:
        for task in self._running:
            task.cancel()
        if self._running:
            # A part that arrives after the upload has ended would be kept, and cost money.
            await asyncio.wait(self._running)
        await self._upload.abort()

    def _stalled(self) -> StorageError:
        error = StorageError(f"{self._action}: no part was confirmed within {self._deadline_s:g} s")
        error.is_late = True
        self._fail(error)
        return error

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if self._state == "open":
                self._state, self._failure = "failed", self._session.error(error, self._action)

    def _leave(self) -> None:
        """Forget the parts that were not sent, and leave the window. Call it once, when the writer has ended."""
        self._is_counted = False
        with self._changed:
            self._window.forget(len(self._filling) + len(self._whole))
            self._filling.clear()
            self._whole.clear()
        self._window.leave()

    def __del__(self) -> None:
        # An abandoned writer would keep memory of the window, which all writers share.
        if getattr(self, "_is_counted", False):
            self._leave()
