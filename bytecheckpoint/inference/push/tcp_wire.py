"""The TCP road's frames, and how the two ends prove to each other that they know the key of this push.

worker -> sender   nonce
sender -> worker   nonce, proof
worker -> sender   proof
sender -> worker   (offset, length, xxh3-64, bytes) for each chunk, and one of length 0
worker -> sender   (FINISHED, bytes received), or (FAILED, length of a message) and the message

Into a ring (see ``ring.py``) the sender says the number of the chunk instead of an offset, length 0 where it has put
the bytes into shared memory itself, and ``END`` when it has no more. Meanwhile the worker says (TAKEN, waves).
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import socket
import struct
from dataclasses import dataclass
from typing import Any

from ...errors import EngineError

__all__ = [
    "END",
    "FAILED",
    "FINISHED",
    "FRAME",
    "NONCE_BYTES",
    "STATUS",
    "TAKEN",
    "TcpAddress",
    "own_hosts",
    "proof",
    "receive",
    "receive_into",
    "wait_for_ever",
]

FRAME = struct.Struct("!QQQ")
STATUS = struct.Struct("!BQ")
FINISHED, FAILED, TAKEN = range(3)
END = (1 << 64) - 1
NONCE_BYTES = 32


@dataclass(frozen=True)
class TcpAddress:
    """``hosts`` are tried in turn. ``key`` came by the engine's own RPC, and is good for one push."""

    hosts: tuple[str, ...]
    port: int
    key: bytes

    @classmethod
    def from_plain(cls, values: Any) -> TcpAddress:
        hosts, port, key = values
        return cls(tuple(hosts), port, key)

    def plain(self) -> list[Any]:
        return [list(self.hosts), self.port, self.key]


def proof(key: bytes, who: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.new(key, who + first + second, hashlib.sha256).digest()


def receive_into(connection: socket.socket, out: memoryview) -> None:
    """Fill ``out``. Raises ``EngineError`` where the other end stops before that."""
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


def wait_for_ever(connection: socket.socket, *, sending_s: float) -> None:
    """For what comes; what goes raises ``OSError`` when nobody has taken any of it for so long."""
    connection.settimeout(None)
    seconds = int(sending_s)
    timeval = struct.pack("@ll", seconds, int((sending_s - seconds) * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)


def own_hosts() -> tuple[str, ...]:
    """Where others may find this host, the likeliest first."""
    hosts = [os.environ.get("VLLM_HOST_IP", "")]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # no packet is sent: it only asks which interface leads out
        hosts.append(probe.getsockname()[0])
    hosts += [socket.gethostname(), "127.0.0.1"]
    return tuple(dict.fromkeys(host for host in hosts if host))
