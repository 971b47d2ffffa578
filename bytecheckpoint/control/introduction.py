"""The first words on a connection between ranks: who sends what to whom, proved by a key from the ranks' own store.

``magic (8) | length of the words (2) | words | keyed BLAKE2b of the words (32)``. The receiver's key never travels on
the connection itself, so an address that has become somebody else's learns nothing from it.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import NamedTuple

import msgpack

__all__ = ["Introduction", "PartialIntroduction", "introduce"]

_MAGIC = b"bcpstrm1"
_HEAD = struct.Struct("<8sH")
_MAC_BYTES = 32
_LONGEST_WORDS = 4096


class Introduction(NamedTuple):
    sender: int
    channel: str


def introduce(key: bytes, operation: str, sender: int, channel: str) -> bytes:
    """The words of a sender. Raises ``ValueError`` when operation and channel are longer than 4 KiB together."""
    words: bytes = msgpack.packb([operation, sender, channel])
    if len(words) > _LONGEST_WORDS:
        raise ValueError(f"the channel's name is too long: {channel[:60]}...")
    return _HEAD.pack(_MAGIC, len(words)) + words + _mac(key, words)


class PartialIntroduction:
    """What has come so far of an introduction, from whom it may be."""

    def __init__(self, key: bytes, operation: str) -> None:
        self._key, self._operation = key, operation
        self._data = b""

    @property
    def wanted(self) -> int:
        """How many bytes may be read next without touching the stream itself."""
        return self._length() - len(self._data)

    def take(self, data: bytes) -> Introduction | None:
        """Add bytes; the introduction once it is whole. Raises ``ValueError`` for anything but a rank's own."""
        self._data += data
        if self.wanted:
            return None
        words, mac = self._data[_HEAD.size : -_MAC_BYTES], self._data[-_MAC_BYTES:]
        if not hmac.compare_digest(_mac(self._key, words), mac):
            raise ValueError("a wrong key")
        operation, sender, channel = msgpack.unpackb(words)
        if operation != self._operation:
            raise ValueError(f"for {operation}")
        return Introduction(sender, channel)

    def _length(self) -> int:
        if len(self._data) < _HEAD.size:
            return _HEAD.size
        magic, length = _HEAD.unpack_from(self._data)
        if magic != _MAGIC or length > _LONGEST_WORDS:
            raise ValueError("not a stream between ranks")
        return int(_HEAD.size + length + _MAC_BYTES)


def _mac(key: bytes, words: bytes) -> bytes:
    return hashlib.blake2b(words, key=key, digest_size=_MAC_BYTES).digest()
