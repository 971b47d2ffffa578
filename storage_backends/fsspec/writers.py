"""The writer for stores that accept an object only in order."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from fsspec.spec import AbstractBufferedFile
from typing_extensions import Buffer

from ..buffers import byte_view
from ..writers import CheckedWriter
from .connection import Connection
from .errors import map_error, translated_errors
from .objects import flush_to_device

__all__ = ["StreamWriter"]

_log = logging.getLogger(__name__)


class StreamWriter(CheckedWriter):
    """Forward parts to a file that can only be written from start to end.

    The thread that brings the next part forwards it, while other threads wait for the lock; this is the back-pressure.
    A part that arrives early is copied and kept, because blocking would deadlock a writer with a single thread. Writing
    roughly in order therefore needs little memory.

    ``publish`` gives the finished file, of this size, its name if closing it does not; ``discard`` removes what was
    written.
    """

    def __init__(
        self,
        action: str,
        size: int,
        connection: Connection,
        file: Any,
        *,
        publish: Callable[[int], None] | None = None,
        discard: Callable[[], None],
    ) -> None:
        super().__init__(action, size)
        self._connection = connection
        self._file = file
        self._publish = publish
        self._remove = discard
        self._early: dict[int, bytes] = {}
        self._next = 0

    def write(self, offset: int, data: Buffer) -> None:
        view = byte_view(data)
        with self._changed:
            self._admit(offset, len(view))
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
        with self._changed:
            self._seal()
            with translated_errors(self._action):
                self._finish()
            self._state = "complete"

    def abort(self) -> None:
        with self._changed:
            if not self._withdraw():
                return
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
            count = self._connection.call(self._file.write, view[done:])
            done += len(view) - done if count is None else count
        self._next += len(view)

    def _finish(self) -> None:
        self._connection.call(self._close)
        if self._publish is not None:
            self._publish(self._size)

    def _close(self) -> None:
        if not isinstance(self._file, AbstractBufferedFile):
            flush_to_device(self._file)
        self._file.close()
        if isinstance(self._file, AbstractBufferedFile) and not self._file.autocommit:
            self._file.commit()

    def _discard(self) -> None:
        if isinstance(self._file, AbstractBufferedFile):
            try:
                self._connection.call(self._file.discard)
            finally:
                # close() would upload the rest and, in some implementations, commit. The finalizer calls it, too.
                self._file.closed = True
                self._file.buffer = None
            if self._publish is not None:
                self._remove()
            return
        self._connection.call(self._file.close)
        self._remove()
