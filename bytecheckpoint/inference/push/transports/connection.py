"""Authenticated TCP connections: endpoints, the handshake, the frames of a chunk stream, and the accepting side.

The handshake proves to both ends that the other one has the endpoint's key:

    server -> client   nonce
    client -> server   nonce, HMAC
    server -> client   HMAC

A client of a chunk server then sends ``(chunk, length, digest)`` frames, each followed by ``length`` bytes. A length of
0 announces that the client wrote the chunk into mapped memory. ``END`` instead of a chunk number ends the stream. The
server sends ``(TAKEN, waves)`` when it frees room, and at the end ``(FINISHED, 0)``, or ``(FAILED, length)`` and a
msgpack message.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import secrets
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from ....errors import CorruptionError, EngineError
from .listening import listen, local_addresses

__all__ = [
    "END",
    "FAILED",
    "FINISHED",
    "FRAME",
    "NONCE_BYTES",
    "STATUS",
    "TAKEN",
    "Acceptor",
    "Endpoint",
    "authenticate_client",
    "connect",
    "drain",
    "receive",
    "receive_into",
    "set_unbounded_receive",
]

FRAME = struct.Struct("!QQQ")
STATUS = struct.Struct("!BQ")
FINISHED, FAILED, TAKEN = range(3)
END = (1 << 64) - 1
NONCE_BYTES = 32

_CONNECT_S = 5.0  # per address of an endpoint; a wrong address may never answer
_HANDSHAKE_S = 10.0  # in total, however slowly the bytes of a handshake arrive
_MAX_SENDERS = 256
_MAX_STRANGERS = 64  # connections that have not authenticated yet; beyond, the oldest is closed
_DRAIN_BYTES = 1 << 16  # per call
_MIN_S = 0.001

_log = logging.getLogger(__name__)


class Endpoint(NamedTuple):
    """A port and the addresses at which clients try to reach it, in order. ``key`` travels over the engine's RPC."""

    hosts: Sequence[str]
    port: int
    key: bytes


def connect(endpoint: Endpoint) -> tuple[socket.socket, str]:
    """Return an authenticated connection and the ``host:port`` that answered. Raises ``EngineError``."""
    failures = []
    for host in endpoint.hosts:
        try:
            return _connect(host, endpoint), f"{host}:{endpoint.port}"
        except (OSError, EngineError) as error:
            failures.append(f"{host}: {error}")
    raise EngineError(
        f"port {endpoint.port} cannot be reached from {socket.gethostname()} ({'; '.join(failures)}); open it between "
        "senders and workers, or run the sender on the worker's host as the same user"
    )


def _connect(host: str, endpoint: Endpoint) -> socket.socket:
    connection = socket.create_connection((host, endpoint.port), timeout=_CONNECT_S)
    try:
        end = time.monotonic() + _CONNECT_S
        theirs, ours = receive(connection, NONCE_BYTES, end), secrets.token_bytes(NONCE_BYTES)
        connection.sendall(ours + _hmac(endpoint.key, b"client", theirs, ours))
        if not hmac.compare_digest(receive(connection, NONCE_BYTES, end), _hmac(endpoint.key, b"server", ours, theirs)):
            raise EngineError("the server does not have the key of this push")
        connection.settimeout(_CONNECT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection
    except BaseException:
        connection.close()
        raise


def authenticate_client(connection: socket.socket, key: bytes) -> None:
    """Run the server's side of the handshake. Raises ``OSError`` or ``EngineError``."""
    end = time.monotonic() + _HANDSHAKE_S
    connection.settimeout(_HANDSHAKE_S)
    ours = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(ours)
    theirs = receive(connection, NONCE_BYTES, end)
    if not hmac.compare_digest(receive(connection, NONCE_BYTES, end), _hmac(key, b"client", ours, theirs)):
        raise EngineError("the client does not have the key of this push")
    connection.sendall(_hmac(key, b"server", theirs, ours))


def _hmac(key: bytes, role: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.new(key, role + first + second, hashlib.sha256).digest()


def receive_into(connection: socket.socket, out: memoryview, end: float | None = None) -> None:
    """Fill ``out``, until the time ``end`` if it is given. Raises ``EngineError`` when the peer closes the connection
    first."""
    at = 0
    while at < len(out):
        if end is not None:
            connection.settimeout(max(end - time.monotonic(), _MIN_S))
        count = connection.recv_into(out[at:])
        if not count:
            raise EngineError(f"the connection ended {len(out) - at} bytes too early")
        at += count


def receive(connection: socket.socket, nbytes: int, end: float | None = None) -> bytes:
    data = bytearray(nbytes)
    receive_into(connection, memoryview(data), end)
    return bytes(data)


def drain(connection: socket.socket) -> None:
    """Discard what the peer still sends, until it closes the connection. Raises ``OSError``.

    Closing a socket with unread bytes resets the connection, and the peer can lose the last message to it.
    """
    while connection.recv(_DRAIN_BYTES):
        pass


def set_unbounded_receive(connection: socket.socket, *, send_timeout_s: float) -> None:
    """Let receives wait without a limit, and let sends raise ``BlockingIOError`` after ``send_timeout_s``."""
    connection.settimeout(None)
    seconds = int(send_timeout_s)
    timeval = struct.pack("@ll", seconds, int((send_timeout_s - seconds) * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)


class Acceptor(ABC):
    """Listens for senders until ``close``, and serves each authenticated connection in its own thread."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(NONCE_BYTES)
        self._listener = listen(_MAX_SENDERS)
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, bool] = {}  # whether they have authenticated, oldest first
        self._closed = False
        self._threads = ThreadPoolExecutor(_MAX_SENDERS + 1, thread_name_prefix="bcp-push-tcp")
        self._work: list[Future[None]] = [self._threads.submit(self._accept)]

    @abstractmethod
    def _serve(self, connection: socket.socket) -> None:
        """Serve an authenticated sender. Raises ``EngineError`` or ``CorruptionError`` to end the connection."""

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(local_addresses(), self._listener.getsockname()[1], self._key)

    def close(self) -> None:
        """End all connections and wait for their threads."""
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
                strangers = [one for one, is_known in self._connections.items() if not is_known]
                if len(strangers) >= _MAX_STRANGERS:
                    with contextlib.suppress(OSError):
                        strangers[0].shutdown(socket.SHUT_RDWR)
                self._connections[connection] = False
                self._work = [work for work in self._work if not work.done()]
                self._work.append(self._threads.submit(self._run, connection))

    def _run(self, connection: socket.socket) -> None:
        try:
            with connection:
                authenticate_client(connection, self._key)
                with self._lock:
                    self._connections[connection] = True
                self._serve(connection)
        except (OSError, EngineError, CorruptionError) as error:
            _log.warning("push: a sender's connection ended: %s", error)
        except Exception:  # noqa: BLE001 - the sender notices the closed connection
            _log.exception("push: receiving from a sender failed")
        finally:
            with self._lock:
                self._connections.pop(connection, None)
