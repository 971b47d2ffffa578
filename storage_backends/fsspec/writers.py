"""Writers for stores that accept an object only as a whole or in order."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from typing import Any

from fsspec.spec import AbstractBufferedFile
from typing_extensions import Buffer

from ...errors import StorageError
from ..base import ObjectWriter
from ..buffers import WrittenRanges, byte_view
from .errors import map_error

__all__ = ["BufferedWriter", "StreamWriter"]

_log = logging.getLogger(__name__)


class BufferedWriter(ObjectWriter):
    """Buffer a small object in memory; ``complete`` passes all of it to ``store``."""

    def __init__(self, action: str, size: int, store: Callable[[bytes], None]) -> None:
        self._action = action
        self._written = WrittenRanges(action, size)
        self._data = bytearray(size)
        self._store = store
        self._state = "open"
        self._lock = Lock()

    def write(self, offset: int, data: Buffer) -> None:
        view = byte_view(data)
        with self._lock:
            self._check_open()
            self._written.add(offset, len(view))
            self._data[offset : offset + len(view)] = view

    def complete(self) -> None:
        with self._lock:
            self._check_open()
            self._written.check_whole()
            self._state = "failed"
            self._store(bytes(self._data))
            self._state = "complete"
            self._data = bytearray()

    def abort(self) -> None:
        with self._lock:
            if self._state != "complete":
                self._state = "aborted"
                self._data = bytearray()

    def _check_open(self) -> None:
        if self._state != "open":
            raise StorageError(f"{self._action}: this writer is {self._state}")


class StreamWriter(ObjectWriter):
    """Forward parts to a file that can only be written from start to end.

    The thread that brings the next part forwards it, while other threads wait for the lock; this is the back-pressure.
    A part that arrives early is copied and kept, because blocking would deadlock a writer with a single thread. Writing
    roughly in order therefore needs little memory.

    ``publish`` gives the finished file its name if closing it does not; ``discard`` removes what was written.
    """

    def __init__(
        self,
        action: str,
        size: int,
        file: Any,
        *,
        publish: Callable[[], None] | None = None,
        discard: Callable[[], None],
    ) -> None:
        self._action = action
        self._written = WrittenRanges(action, size)
        self._file = file
        self._publish = publish
        self._remove = discard
        self._early: dict[int, bytes] = {}
        self._next = 0
        self._state = "open"
        self._failure: StorageError | None = None
        self._lock = Lock()

    def write(self, offset: int, data: Buffer) -> None:
        view = byte_view(data)
        with self._lock:
            self._raise_first_failure()
            self._check_open()
            self._written.add(offset, len(view))
            if not len(view):
                return
            if offset != self._next:
                self._early[offset] = bytes(view)
                return
            try:
                self._append(view)
                while self._next in self._early:
                    self._append(memoryview(self._early.pop(self._next)))
            except Exception as error:
                self._state, self._failure = "failed", map_error(error, self._action, reading=False)
                raise self._failure from error

    def complete(self) -> None:
        with self._lock:
            self._check_open()
            self._written.check_whole()
            self._state = "failed"
            try:
                self._finish()
            except Exception as error:
                raise map_error(error, self._action, reading=False) from error
            self._state = "complete"

    def abort(self) -> None:
        with self._lock:
            if self._state in ("complete", "aborted"):
                return
            self._state, self._failure = "aborted", None
            self._early.clear()
            try:
                self._discard()
            except Exception as error:  # noqa: BLE001 - abort never raises, and stores raise anything
                _log.warning("%s: could not remove the incomplete object: %s", self._action, error)

    def __del__(self) -> None:
        # Without this, the finalizer of an abandoned file would close it and upload what it has buffered.
        file = getattr(self, "_file", None)
        if isinstance(file, AbstractBufferedFile) and self._state != "complete":
            file.closed = True

    def _append(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            # Raw files may write less than requested; others return the full length or None.
            count = self._file.write(view[done:])
            done += len(view) - done if count is None else count
        self._next += len(view)

    def _finish(self) -> None:
        if not isinstance(self._file, AbstractBufferedFile):
            self._file.flush()
            with suppress(AttributeError, OSError):
                os.fsync(self._file.fileno())
        self._file.close()
        if isinstance(self._file, AbstractBufferedFile) and not self._file.autocommit:
            self._file.commit()
        if self._publish is not None:
            self._publish()

    def _discard(self) -> None:
        if isinstance(self._file, AbstractBufferedFile):
            try:
                self._file.discard()
            finally:
                # close() would upload the rest and, in some implementations, commit. The finalizer calls it, too.
                self._file.closed = True
                self._file.buffer = None
            if self._publish is not None:
                self._remove()
            return
        self._file.close()
        self._remove()

    def _raise_first_failure(self) -> None:
        """Raise the first failure of any thread, so that every thread that writes reports its cause."""
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args) from self._failure

    def _check_open(self) -> None:
        if self._state != "open":
            raise StorageError(f"{self._action}: this writer is {self._state}")
