"""The connections of a ring: chunks come by them, or the word that they are there; senders hear of room and failure."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Protocol

import msgpack
import torch

from ...engine.tensor_bytes import byte_view
from ...errors import BytecheckpointError, CorruptionError, EngineError
from .messages import SenderGone
from .tcp_server import SenderServer
from .tcp_wire import END, FAILED, FINISHED, FRAME, STATUS, TAKEN, receive, receive_into, wait_for_ever

__all__ = ["RingServer", "TakesChunks"]

_MAX_TEXT = 4000


class TakesChunks(Protocol):
    """What connections do with a ring, each in a thread of its own."""

    @property
    def is_complete(self) -> bool: ...

    def join(self, connection: socket.socket) -> None:
        """A sender is there."""

    def claim(self, chunk: int, nbytes: int) -> torch.Tensor:
        """Where a chunk comes that it announces, of no bytes where it has put them there itself."""

    def prove(self, chunk: int, place: torch.Tensor, digest: int) -> None:
        """It is there."""

    def fail(self, error: BytecheckpointError) -> None:
        """It will not come."""


class RingServer(SenderServer):
    """Of one ring."""

    def __init__(self, ring: TakesChunks, deadline_s: float) -> None:
        self._ring = ring
        self._sending = threading.Lock()
        self._senders: set[socket.socket] = set()
        super().__init__(deadline_s)

    def add(self, connection: socket.socket, taken: int, failure: BytecheckpointError | None) -> None:
        """Tell a sender how things stand, and from now on what all are told."""
        with self._sending:
            self._senders.add(connection)
            connection.sendall(_taken(taken) if failure is None else _failed(failure))

    def tell_taken(self, waves: int) -> None:
        """So many have been taken out."""
        self._tell(_taken(waves))

    def tell_failed(self, error: BytecheckpointError) -> None:
        """Nothing more is taken."""
        self._tell(_failed(error))

    def _tell(self, frame: bytes) -> None:
        with self._sending:
            for connection in self._senders:
                with contextlib.suppress(OSError):  # whoever has gone is noticed where its chunks are awaited
                    connection.sendall(frame)

    def _converse(self, connection: socket.socket) -> None:
        # A sender is silent for as long as the model takes for a layer: who stalls is noticed where chunks are awaited.
        wait_for_ever(connection, sending_s=self._deadline_s)
        try:
            self._ring.join(connection)
            received = 0
            while (chunk := self._receive_chunk(connection)) is not None:
                received += chunk
            with self._sending:
                connection.sendall(STATUS.pack(FINISHED, received))
        except Exception as error:
            if not self._ring.is_complete:
                self._ring.fail(_what_ended(error))
            raise
        finally:
            with self._sending:
                self._senders.discard(connection)

    def _receive_chunk(self, connection: socket.socket) -> int | None:
        """Bytes received; None where the sender has come to its end."""
        chunk, length, digest = FRAME.unpack(receive(connection, FRAME.size))
        if chunk == END:
            return None
        place = self._ring.claim(chunk, length)
        if length:
            landing = torch.empty(length, dtype=torch.uint8) if place.is_cuda else place
            receive_into(connection, byte_view(landing))
            if landing is not place:
                place.copy_(landing)
        self._ring.prove(chunk, place, digest)
        return int(length)


def _what_ended(error: Exception) -> BytecheckpointError:
    """A connection."""
    if isinstance(error, CorruptionError):
        return error
    if isinstance(error, (OSError, EngineError)):
        return SenderGone(f"a sender is gone: {error}")
    return EngineError(f"receiving failed: {type(error).__name__}: {error}")  # a device has no memory left, say


def _taken(waves: int) -> bytes:
    return STATUS.pack(TAKEN, waves)


def _failed(error: BytecheckpointError) -> bytes:
    text: bytes = msgpack.packb([type(error).__name__, str(error)[:_MAX_TEXT]])
    return STATUS.pack(FAILED, len(text)) + text
