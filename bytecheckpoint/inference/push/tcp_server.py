"""The worker's end of connections: what authenticated senders send is received into the arena, and nowhere else."""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
import threading
from abc import ABC, abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import xxhash

from ...engine.tensor_bytes import byte_view
from ...errors import CorruptionError, EngineError
from .tcp_wire import FAILED, FINISHED, FRAME, NONCE_BYTES, STATUS, TcpAddress, own_hosts, proof, receive, receive_into

__all__ = ["SenderServer", "TcpServer"]

_MAX_SENDERS = 256
_HANDSHAKE_S = 10.0

_log = logging.getLogger(__name__)


class SenderServer(ABC):
    """Takes connections of senders until ``close``. ``deadline_s`` bounds each wait for bytes."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._key = secrets.token_bytes(NONCE_BYTES)
        self._listener = socket.create_server(("", 0), backlog=_MAX_SENDERS)
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._closed = False
        self._threads = ThreadPoolExecutor(_MAX_SENDERS + 1, thread_name_prefix="bcp-push-tcp")
        self._work: list[Future[None]] = [self._threads.submit(self._accept)]

    @abstractmethod
    def _converse(self, connection: socket.socket) -> None:
        """With a sender that has proved that it knows the key. In a thread of its own; raises ``EngineError`` or
        ``CorruptionError`` to end the connection."""

    @property
    def address(self) -> TcpAddress:
        return TcpAddress(own_hosts(), self._listener.getsockname()[1], self._key)

    def close(self) -> None:
        """End all connections, and wait until their threads have ended."""
        with self._lock:
            self._closed = True
            connections = [self._listener, *self._connections]
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._threads.shutdown(wait=True)
        self._listener.close()
        for work in self._work:
            work.result()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                self._connections.add(connection)
                self._work = [work for work in self._work if not work.done()]
                self._work.append(self._threads.submit(self._serve, connection))

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                self._shake_hands(connection)
                self._converse(connection)
        except (OSError, EngineError, CorruptionError) as error:
            _log.warning("push: a sender's connection ended: %s", error)
        except Exception:  # noqa: BLE001 - whoever waits for what it brings hears of it by the deadline, or before
            _log.exception("push: receiving from a sender failed")
        finally:
            with self._lock:
                self._connections.discard(connection)

    def _shake_hands(self, connection: socket.socket) -> None:
        connection.settimeout(_HANDSHAKE_S)
        nonce = secrets.token_bytes(NONCE_BYTES)
        connection.sendall(nonce)
        theirs = receive(connection, NONCE_BYTES)
        if not hmac.compare_digest(receive(connection, NONCE_BYTES), proof(self._key, b"sender", nonce, theirs)):
            raise EngineError("it does not know the key of this push")
        connection.sendall(proof(self._key, b"worker", theirs, nonce))
        connection.settimeout(self._deadline_s)


class TcpServer(SenderServer):
    """The TCP road's: writes to ``memory``, and not any more once it is closed."""

    def __init__(self, memory: torch.Tensor, deadline_s: float) -> None:
        self._memory = byte_view(memory)
        super().__init__(deadline_s)

    def _converse(self, connection: socket.socket) -> None:
        received = 0
        try:
            while (count := self._receive_chunk(connection)) is not None:
                received += count
        except (EngineError, CorruptionError) as error:
            text = str(error).encode()
            connection.sendall(STATUS.pack(FAILED, len(text)) + text)
            raise
        connection.sendall(STATUS.pack(FINISHED, received))

    def _receive_chunk(self, connection: socket.socket) -> int | None:
        """Bytes received; None where the sender has come to its end."""
        offset, length, digest = FRAME.unpack(receive(connection, FRAME.size))
        if not length:
            return None
        if offset + length > len(self._memory):
            raise EngineError(f"bytes {offset} to {offset + length} are outside an arena of {len(self._memory)}")
        place = self._memory[offset : offset + length]
        receive_into(connection, place)
        if xxhash.xxh3_64_intdigest(place) != digest:
            raise CorruptionError(f"bytes {offset} to {offset + length} of an arena were damaged on the way")
        return int(length)
