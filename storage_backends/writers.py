"""What writers of different stores have in common: their states, and the check that every byte is written once."""

from __future__ import annotations

from collections.abc import Callable
from threading import Condition
from typing import Literal

from typing_extensions import Buffer

from ..errors import StorageError
from .base import ObjectWriter
from .buffers import WrittenRanges, byte_view


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
            error = type(self._failure)(*self._failure.args)
            error.is_late = self._failure.is_late
            raise error from self._failure
        self._check_open()

    def _check_open(self) -> None:
        if self._state != "open":
            raise StorageError(f"{self._action}: this writer is {self._state}")


class BufferedWriter(CheckedWriter):
    """Buffers an object in memory: the writer of a store that takes a small object, or any object, as a whole.

    Args:
        action: What it does, for error messages: "writing 'key' in store://root".
        size: The size of the object.
        store: ``complete`` calls it with the whole object; it may keep the memory.

    Raises:
        StorageError: ``size`` is negative.
    """

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
