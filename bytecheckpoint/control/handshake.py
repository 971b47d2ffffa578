"""Mutual authentication of a new connection between two ranks.

    listener -> connector   challenge (16 bytes)
    connector -> listener   magic (8) | length of the body (2) | body | nonce (16) | MAC (32)
    listener -> connector   MAC (32)

The body names the connector and the purpose. Both MACs are keyed BLAKE2b over both random values with a key that the
ranks of one communicator share. The key never travels on the connection, so a process that reuses a rank's address
learns nothing, and a recorded handshake cannot be replayed.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import socket
import struct
from typing import Literal, NamedTuple

import msgpack

__all__ = ["Introduction", "introduce", "welcome"]

_MAGIC = b"bcpctrl1"
_HEAD = struct.Struct("<8sH")
_NONCE_BYTES = 16
_MAC_BYTES = 32
_LONGEST_BODY_BYTES = 4096


class Introduction(NamedTuple):
    """The rank that connects, and for what: control messages, or one stream of an operation."""

    sender: int
    purpose: Literal["messages", "stream"]
    operation: str = ""
    channel: str = ""


async def introduce(connection: socket.socket, key: bytes, introduction: Introduction) -> None:
    """Authenticate to a listener, and check that it has the key. ``connection`` is non-blocking.

    Raises ``ConnectionError`` if the listener does not have the key, ``ValueError`` if the names are too long.
    """
    body = msgpack.packb(introduction)
    if len(body) > _LONGEST_BODY_BYTES:
        raise ValueError(f"the name of the channel is too long: {introduction.channel[:60]}...")
    challenge, nonce = await _read(connection, _NONCE_BYTES), secrets.token_bytes(_NONCE_BYTES)
    mac = _mac(key, b"connector", challenge, nonce, body)
    await _loop().sock_sendall(connection, _HEAD.pack(_MAGIC, len(body)) + body + nonce + mac)
    if not hmac.compare_digest(await _read(connection, _MAC_BYTES), _mac(key, b"listener", challenge, nonce)):
        raise ConnectionError("the process at this address does not have the key of this job")


async def welcome(connection: socket.socket, key: bytes) -> Introduction:
    """Authenticate a process that has connected. ``connection`` is non-blocking.

    Raises ``ConnectionError`` or ``ValueError`` for anything but a rank of this communicator. Reads no byte after the
    handshake.
    """
    challenge = secrets.token_bytes(_NONCE_BYTES)
    await _loop().sock_sendall(connection, challenge)
    magic, length = _HEAD.unpack(await _read(connection, _HEAD.size))
    if magic != _MAGIC or length > _LONGEST_BODY_BYTES:
        raise ValueError("it is not a connection between ranks")
    body, nonce = await _read(connection, length), await _read(connection, _NONCE_BYTES)
    if not hmac.compare_digest(await _read(connection, _MAC_BYTES), _mac(key, b"connector", challenge, nonce, body)):
        raise ValueError("it does not have the key of this job")
    await _loop().sock_sendall(connection, _mac(key, b"listener", challenge, nonce))
    return Introduction(*msgpack.unpackb(body))


async def _read(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        received = await _loop().sock_recv(connection, count - len(data))
        if not received:
            raise ConnectionError("it closed the connection during the handshake")
        data += received
    return data


def _mac(key: bytes, *parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), key=key, digest_size=_MAC_BYTES).digest()


def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()
