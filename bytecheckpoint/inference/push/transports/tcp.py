"""Chunks over authenticated TCP connections: a sender's transport, and the server of a worker.

A sender sends ``(chunk, length, digest)`` frames, each followed by ``length`` bytes. ``(ANNOUNCED, count, 0)`` comes
before ``count`` frames of length 0, of chunks that the sender wrote into mapped memory (shared memory or CUDA IPC).
``END`` instead of a chunk number ends the stream. The server stores chunks in an arena or in a ring buffer. It sends
``(TAKEN, waves)`` when it frees room, and at the end ``(FINISHED, 0)``, or ``(FAILED, length)`` and a msgpack message.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from functools import partial

import msgpack
import torch

from ....control.acceptor import Acceptor, connect
from ....control.connections import Endpoint, at_most, receive, receive_into, send
from ....engine.tensor_bytes import byte_view
from ....errors import BytecheckpointError, CorruptionError, DeadlineError, EngineError
from ..layout import ArrivedChunk, ChunkStore, ChunkTarget
from ..messages import SenderLost
from .base import OutgoingChunk, Transport, TransportBroken, hosts_of_engine
from .cuda_ipc import OpenArena, attach_device, synchronize
from .shared_memory import ArenaAddress, attach

FRAME = struct.Struct("!QQQ")
STATUS = struct.Struct("!BQ")
FINISHED, FAILED, TAKEN = range(3)
END = (1 << 64) - 1
ANNOUNCED = END - 1

_MAX_TEXT_BYTES = 1 << 16
_MAX_TEXT = 4000  # characters
_DRAIN_BYTES = 1 << 16
_ANY_TIME = at_most(None)


class ChunkServer(Acceptor):
    """Receives chunks from senders into ``store``, and reports room and failures to all of them."""

    def __init__(self, store: ChunkStore, deadline_s: float) -> None:
        self._store, self._wait = store, at_most(deadline_s)
        self._sending = threading.Lock()
        self._senders: set[socket.socket] = set()
        self._status = STATUS.pack(TAKEN, 0)
        self._has_failed = False
        super().__init__(hosts_of_engine())

    def report_taken(self, waves: int) -> None:
        """Report to all senders that the first ``waves`` waves have left the ring buffer."""
        self._report(STATUS.pack(TAKEN, waves))

    def report_failure(self, error: BytecheckpointError) -> None:
        """Make all senders raise ``error``, now and when they connect later."""
        self._report(_failure_frame(error))
        self._has_failed = True

    def _report(self, frame: bytes) -> None:
        with self._sending:
            if self._has_failed:
                return
            self._status = frame
            for connection in self._senders:
                with contextlib.suppress(OSError):  # the loader notices the missing chunks of a lost sender
                    send(connection, frame, self._wait)

    def _serve(self, connection: socket.socket) -> None:
        try:
            with self._sending:
                self._senders.add(connection)
                send(connection, self._status, self._wait)
            while self._receive_chunks(connection):
                pass
            with self._sending:
                send(connection, STATUS.pack(FINISHED, 0), self._wait)
        except Exception as error:
            self._fail(connection, _as_failure(error))
            raise
        finally:
            with self._sending:
                self._senders.discard(connection)

    def _fail(self, connection: socket.socket, error: BytecheckpointError) -> None:
        # Not in `_serve`: a local variable for the error would form a reference cycle that keeps the memory mapped.
        self._store.sender_failed(error)
        with contextlib.suppress(OSError):
            with self._sending:
                send(connection, _failure_frame(error), self._wait)
            connection.shutdown(socket.SHUT_WR)
            # Closing a socket with unread bytes resets the connection, and the sender can lose the last message to it.
            while True:
                receive(connection, _DRAIN_BYTES, _ANY_TIME)

    def _receive_chunks(self, connection: socket.socket) -> bool:
        """Receive a chunk, or an announcement of several. Return False at the end of the stream."""
        # A sender is silent while the engine loads a layer; the loader's own deadline covers a stalled sender.
        frames = receive(connection, FRAME.size, _ANY_TIME)
        kind, count, _ = FRAME.unpack(frames)
        if kind == END:
            return False
        if kind == ANNOUNCED:
            frames = receive(connection, count * FRAME.size, _ANY_TIME)
        arrived = []
        for chunk, length, digest in FRAME.iter_unpack(frames):
            place = self._store.claim(chunk, length)
            if length:
                landing = torch.empty(length, dtype=torch.uint8) if place.is_cuda else place
                receive_into(connection, byte_view(landing), _ANY_TIME)
                if landing is not place:
                    place.copy_(landing)
            arrived.append(ArrivedChunk(chunk, place, digest))
        self._store.verify(arrived)
        return True


def _as_failure(error: Exception) -> BytecheckpointError:
    if isinstance(error, CorruptionError):
        return error
    if isinstance(error, (OSError, EngineError)):
        return SenderLost(f"a sender is gone: {error}")
    return EngineError(f"receiving failed: {type(error).__name__}: {error}")  # a device without free memory, say


def _failure_frame(error: BytecheckpointError) -> bytes:
    text: bytes = msgpack.packb([type(error).__name__, str(error)[:_MAX_TEXT]])
    return STATUS.pack(FAILED, len(text)) + text


class TcpTransport(Transport):
    """Sends chunks to one worker's server.

    With ``slots``, the server fills a ring buffer: ``write`` waits until the chunk's wave has room. ``memory`` is the
    ring buffer's, in host memory or ``on_device``; where this process can map it, bytes go there instead of over the
    connection. Without ``slots``, the server fills an arena.

    Raises ``EngineError`` when the worker cannot be reached. A worker that fails later, or makes no progress for
    ``deadline_s``, raises ``TransportBroken`` in a stream, else ``EngineError`` or ``DeadlineError``.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        deadline_s: float,
        *,
        slots: int | None = None,
        memory: ArenaAddress | None = None,
        on_device: bool = False,
    ) -> None:
        self._slots, self._deadline_s = slots, deadline_s
        self._memory: torch.Tensor | None = None
        self._device_arena: OpenArena | None = None
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._taken, self._is_over, self._failure = 0, False, ""
        self._where = f"{endpoint.addresses[0]}:{endpoint.port}"
        self._connection = connect(endpoint)
        try:
            if memory is not None:
                self._attach(memory, on_device=on_device)
            self._listener = threading.Thread(target=self._listen, name="bcp-push-ring", daemon=True)
            self._listener.start()
        except BaseException:
            self._connection.close()
            self._release_memory()
            raise

    def _attach(self, memory: ArenaAddress, *, on_device: bool) -> None:
        if not on_device:
            self._memory = attach(memory)
            return
        self._device_arena = attach_device(memory)
        if self._device_arena is not None:
            self._memory = self._device_arena.memory

    def write(self, chunks: Sequence[OutgoingChunk]) -> None:
        frames: list[bytes] = []
        for places, data, digest in chunks:
            for place in places:
                self.check()
                if not self.has_room([place]):
                    self._announce(frames, chunks)  # the worker may need what is before it in order to make room
                    with self._changed:
                        self._wait_until(partial(self.has_room, [place]), "make room")
                if self._memory is None:
                    self._send([FRAME.pack(place.chunk, data.numel(), digest), byte_view(data.cpu())])
                else:
                    self._memory[place.offset : place.offset + data.numel()].copy_(data, non_blocking=True)
                    frames.append(FRAME.pack(place.chunk, 0, digest))
        self._announce(frames, chunks)

    def _announce(self, frames: list[bytes], chunks: Sequence[OutgoingChunk]) -> None:
        """Announce to the worker what is in its memory now."""
        if frames:
            assert self._memory is not None
            synchronize([self._memory, *(chunk.data for chunk in chunks)])
            self._send([FRAME.pack(ANNOUNCED, len(frames), 0) + b"".join(frames)])
            frames.clear()

    def has_room(self, places: Sequence[ChunkTarget]) -> bool:
        return self._slots is None or max(place.wave for place in places) < self._taken + self._slots

    def check(self) -> None:
        """Raise the failure that the worker reported, if any."""
        if self._failure:
            raise self._broken(self._failure)

    def finish(self) -> None:
        self._send([FRAME.pack(END, 0, 0)])
        with self._changed:
            self._wait_until(lambda: self._is_over, "confirm what was sent")
        self._release_memory()  # a worker can free device memory only after this

    def interrupt(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.interrupt()
        self._listener.join()
        self._connection.close()
        self._release_memory()

    def _release_memory(self) -> None:
        self._memory = None
        if self._device_arena is not None:
            self._device_arena.close()

    def _send(self, parts: Sequence[bytes | memoryview]) -> None:
        try:
            with self._sending:
                for part in parts:
                    send(self._connection, part, at_most(self._deadline_s))
        except TimeoutError:
            raise self._late("take bytes") from None
        except OSError as error:
            with self._changed:
                # The worker's last message may still be on its way.
                self._changed.wait_for(lambda: self._is_over or self._failure, self._deadline_s)
            text = self._failure or f"the connection to the worker at {self._where} broke: {error}"
            raise self._broken(text) from error

    def _wait_until(self, condition: Callable[[], bool], action: str) -> None:
        while True:
            self.check()
            if condition():
                return
            if self._is_over:
                raise self._broken(f"the worker at {self._where} ended the stream")
            before = self._taken
            if not self._changed.wait(self._deadline_s) and self._taken == before:
                raise self._late(action)

    def _late(self, action: str) -> BytecheckpointError:
        text = f"the worker at {self._where} did not {action} within {self._deadline_s:g} s; is its process stopped?"
        return self._broken(text, is_late=True)

    def _broken(self, text: str, *, is_late: bool = False) -> BytecheckpointError:
        if self._slots is None:
            return (DeadlineError if is_late else EngineError)(f"{text}; nothing was applied")
        return TransportBroken(text, is_late=is_late)

    def _listen(self) -> None:
        try:
            while self._receive_status():
                pass
        except (OSError, EngineError, ValueError, msgpack.UnpackException) as error:
            with self._changed:
                if not self._is_over:
                    self._failure = self._failure or f"the connection to the worker at {self._where} broke: {error}"
                self._changed.notify_all()

    def _receive_status(self) -> bool:
        """Return False after the last frame."""
        kind, number = STATUS.unpack(receive(self._connection, STATUS.size, _ANY_TIME))
        failure = ""
        if kind == FAILED:
            error, text = msgpack.unpackb(receive(self._connection, min(number, _MAX_TEXT_BYTES), _ANY_TIME))
            failure = f"the worker at {self._where} ended the stream: {error}: {text}"
        with self._changed:
            if kind == TAKEN:
                self._taken = number
            elif kind == FAILED:
                self._failure = failure
            else:
                self._is_over = True
            self._changed.notify_all()
        return bool(kind == TAKEN)
