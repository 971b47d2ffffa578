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
import os
import secrets
import socket
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from ....errors import CorruptionError, EngineError

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
    "local_addresses",
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
_HANDSHAKE_S = 10.0
_MAX_SENDERS = 256
_DRAIN_BYTES = 1 << 16  # per call

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
        theirs, ours = receive(connection, NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
        connection.sendall(ours + _hmac(endpoint.key, b"client", theirs, ours))
        if not hmac.compare_digest(receive(connection, NONCE_BYTES), _hmac(endpoint.key, b"server", ours, theirs)):
            raise EngineError("the server does not have the key of this push")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection
    except BaseException:
        connection.close()
        raise


def authenticate_client(connection: socket.socket, key: bytes) -> None:
    """Run the server's side of the handshake. Raises ``OSError`` or ``EngineError``."""
    ours = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(ours)
    theirs = receive(connection, NONCE_BYTES)
    if not hmac.compare_digest(receive(connection, NONCE_BYTES), _hmac(key, b"client", ours, theirs)):
        raise EngineError("the client does not have the key of this push")
    connection.sendall(_hmac(key, b"server", theirs, ours))


def _hmac(key: bytes, role: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.new(key, role + first + second, hashlib.sha256).digest()


def receive_into(connection: socket.socket, out: memoryview) -> None:
    """Fill ``out``. Raises ``EngineError`` when the peer closes the connection first."""
    at = 0
    while at < len(out):
        count = connection.recv_into(out[at:])
        if not count:
            raise EngineError(f"the connection ended {len(out) - at} bytes too early")
        at += count


def receive(connection: socket.socket, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    receive_into(connection, memoryview(data))
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


def local_addresses() -> tuple[str, ...]:
    """Return the addresses at which other hosts may reach this one, the likeliest first."""
    hosts = [os.environ.get("VLLM_HOST_IP", "")]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends no packet; only selects the outgoing interface
        hosts.append(probe.getsockname()[0])
    hosts += [socket.gethostname(), "127.0.0.1"]
    return tuple(dict.fromkeys(host for host in hosts if host))


class Acceptor(ABC):
    """Listens for senders until ``close``, and serves each authenticated connection in its own thread."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(NONCE_BYTES)
        self._listener = socket.create_server(("", 0), backlog=_MAX_SENDERS)
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
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
                self._connections.add(connection)
                self._work = [work for work in self._work if not work.done()]
                self._work.append(self._threads.submit(self._run, connection))

    def _run(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.settimeout(_HANDSHAKE_S)
                authenticate_client(connection, self._key)
                self._serve(connection)
        except (OSError, EngineError, CorruptionError) as error:
            _log.warning("push: a sender's connection ended: %s", error)
        except Exception:  # noqa: BLE001 - the sender notices the closed connection
            _log.exception("push: receiving from a sender failed")
        finally:
            with self._lock:
                self._connections.discard(connection)
