"""What writers of different stores have in common: their states, and the check that every byte is written once."""

from __future__ import annotations

import mmap
from abc import abstractmethod
from collections.abc import Callable
from threading import Condition
from typing import Literal

import numpy as np
from typing_extensions import Buffer

from ..errors import StorageError
from .base import ObjectWriter
from .buffers import WrittenRanges, byte_view
from .window import Window

__all__ = ["BufferedWriter", "CheckedWriter", "Part", "PartedWriter"]


class CheckedWriter(ObjectWriter):
    """A writer that checks what is written, and when. Subclasses hold ``_changed`` when they call its methods."""

    def __init__(self, action: str, size: int) -> None:
        """``action`` describes the operation in error messages. Raises ``StorageError`` if ``size`` is negative."""
        self._action = action
        self._size = size
        self._written = WrittenRanges(action, size)
        self._state: Literal["open", "failed", "complete", "aborted"] = "open"
        self._failure: BaseException | None = None
        self._changed = Condition()

    def shrink(self, size: int) -> None:
        with self._changed:
            self._raise_failure()
            self._written.shrink(size)
            self._size = size

    def _admit(self, offset: int, length: int) -> None:
        """Record a range that is about to be written.

        Raises the first failure of any thread, so that every thread that writes reports its cause.
        """
        self._raise_failure()
        self._written.add(offset, length)

    def _seal(self) -> None:
        """Check that every byte is written. The writer counts as failed until the subclass has completed it."""
        self._check_open()
        self._written.check_whole()
        self._state = "failed"

    def _withdraw(self) -> bool:
        """Abort the writer. Returns false if there is nothing to remove."""
        if self._state in ("complete", "aborted"):
            return False
        self._state, self._failure = "aborted", None
        return True

    def _raise_failure(self) -> None:
        """Raise the failure of another thread, if any, and check that the writer is open."""
        if isinstance(self._failure, StorageError):
            raise type(self._failure)(*self._failure.args) from self._failure
        self._check_open()

    def _check_open(self) -> None:
        if self._state != "open":
            raise StorageError(f"{self._action}: this writer is {self._state}")


class BufferedWriter(CheckedWriter):
    """Buffer an object in memory; ``complete`` passes all of it to ``store``, which may keep the memory."""

    def __init__(self, action: str, size: int, store: Callable[[memoryview], object]) -> None:
        super().__init__(action, size)
        self._data = bytearray(size)
        self._store = store

    def write(self, offset: int, data: Buffer) -> None:
        view = byte_view(data)
        with self._changed:
            self._admit(offset, len(view))
            self._data[offset : offset + len(view)] = view

    def complete(self) -> None:
        with self._changed:
            self._seal()
            self._store(memoryview(self._data)[: self._size].toreadonly())
            self._state = "complete"
            self._data = bytearray()

    def abort(self) -> None:
        with self._changed:
            if self._withdraw():
                self._data = bytearray()


class Part:
    """The first ``length`` bytes of a buffer, and how many of them are missing."""

    def __init__(self, buffer: mmap.mmap, length: int) -> None:
        self.buffer, self.data, self.missing = buffer, memoryview(buffer)[:length], length


class PartedWriter(CheckedWriter):
    """Copies what is written into parts, and sends each as soon as it is whole (``_send``).

    At most ``PARTS_IN_FLIGHT`` parts of the whole process are in flight; ``write`` waits for a slot before it sends
    another. So a caller with a single thread uses all of them.
    """

    def __init__(self, action: str, size: int, deadline_s: float, part_bytes: int, window: Window) -> None:
        super().__init__(action, size)
        self._deadline_s, self._part_bytes, self._window = deadline_s, part_bytes, window
        self._filling: dict[int, Part] = {}
        window.enter()
        self._is_counted = True

    @abstractmethod
    def _send(self, number: int, part: Part) -> None:
        """Take a whole part out of ``_filling`` and send it. Its buffer goes back to the window afterwards."""

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

    def _begin_part(self, number: int, length: int) -> Part:
        buffer = self._window.take_buffer(self._part_bytes, self._deadline_s)
        if buffer is None:
            raise self._stalled()
        try:
            with self._changed:
                self._raise_failure()
                part = self._filling.setdefault(number, Part(buffer, length))
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
                self._send(number, part)

    def _stalled(self) -> StorageError:
        error = StorageError(f"{self._action}: no part was confirmed within {self._deadline_s:g} s")
        error.is_late = True
        self._fail(error)
        return error

    def _fail(self, error: StorageError) -> None:
        with self._changed:
            if self._state == "open":
                self._state, self._failure = "failed", error

    def _leave(self) -> None:
        """Forget the parts that were not sent, and leave the window. Call it once, when the writer has ended."""
        self._is_counted = False
        with self._changed:
            self._window.forget(len(self._filling))
            self._filling.clear()
        self._window.leave()

    def __del__(self) -> None:
        # An abandoned writer would keep memory of the window, which all writers share.
        if getattr(self, "_is_counted", False):
            self._leave()
