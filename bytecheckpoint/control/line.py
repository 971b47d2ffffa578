"""One connection to a store of the ranks' own: whole messages of any size under string keys, never a blocking wait.

The store is a ``torch.distributed.TCPStore`` that belongs to this library. Its own ``wait`` and ``get`` are never used
on a key that may be missing: they block under the client's lock, and each time-out prints to stderr.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .connecting import Connection, connect

__all__ = ["Line", "LineLost"]

# TCPStore refuses values above 8 MiB, by closing the connection.
_PART_BYTES = 4 << 20
_WHOLE, _PARTS = b"\0", b"\1"
_NOTHING = bytes.fromhex("5c1f0ad3b0f94e0c8a6be1f44d27a913")  # no value is this one


class LineLost(Exception):
    """The store of rank ``server`` does not answer; its process is gone, stopped, or out of reach. Internal to
    ``control``. ``is_silent``: the connection stands, but there was no answer for as long as the line's patience."""

    def __init__(self, text: str, server: int, *, is_silent: bool = False) -> None:
        super().__init__(text)
        self.server, self.is_silent = server, is_silent


class Line:
    """To the store of rank ``server``. For any thread, one request at a time. Methods raise ``LineLost`` when the store
    is gone, and from then on always: an answer that comes too late would be taken for that to a later request."""

    def __init__(self, client: Any, server: int = 0, connection: Connection | None = None) -> None:
        self.server = server
        self._client, self._connection = client, connection
        self._lock = threading.Lock()
        self._lost: LineLost | None = None

    @property
    def is_lost(self) -> bool:
        return self._lost is not None

    @classmethod
    def connect(cls, addresses: Sequence[str], port: int, server: int, *, patience_s: float) -> Line:
        """Connect to the first address that answers. Dear: torch looks up names of both ends, over the network."""
        try:
            connection = connect(addresses, port, patience_s)
        except TimeoutError as error:
            raise LineLost(str(error), server, is_silent=True) from error
        except OSError as error:
            raise LineLost(str(error), server) from error
        return cls(connection.client, server, connection)

    def be_patient(self, patience_s: float) -> None:
        """How long each later request may wait for an answer. No bound for a store in this process."""
        if self._connection is not None:
            self._connection.be_patient(patience_s)

    def put(self, key: str, payload: bytes) -> list[str]:
        """Store a message; the keys that it takes."""
        with self._asking(key):
            if len(payload) <= _PART_BYTES:
                self._client.set(key, _WHOLE + payload)
                return [key]
            parts = range(0, len(payload), _PART_BYTES)
            names = [f"{key}#{number}" for number in range(len(parts))]
            for name, start in zip(names, parts):
                self._client.set(name, payload[start : start + _PART_BYTES])
            # The head goes last: who sees it can read every part.
            self._client.set(key, _PARTS + struct.pack("<I", len(names)))
            return [key, *names]

    def read(self, key: str) -> tuple[bytes, list[str]]:
        """A message that is known to be there, and the keys that it takes."""
        with self._asking(key):
            head = self._get(key)
            if head[:1] == _WHOLE:
                return head[1:], [key]
            names = [f"{key}#{number}" for number in range(struct.unpack("<I", head[1:])[0])]
            return b"".join(map(self._get, names)), [key, *names]

    def _get(self, key: str) -> bytes:
        # One request, where ``get`` waits for the key and then asks for it, each with the whole of its patience.
        found = bytes(self._client.compare_set(key, _NOTHING, _NOTHING))
        if found == _NOTHING:
            raise RuntimeError("it is not there any more")
        return found

    def take(self, key: str) -> bytes:
        """``read``, then delete."""
        payload, keys = self.read(key)
        self.delete(keys)
        return payload

    def has(self, key: str) -> bool:
        with self._asking(key):
            return bool(self._client.check([key]))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter that starts at 0; its new value."""
        with self._asking(key):
            return int(self._client.add(key, amount))

    def put_first(self, key: str, payload: bytes) -> bytes:
        """Store a message (at most 4 MiB) unless there is one already; the one that stands."""
        with self._asking(key):
            return bytes(self._client.compare_set(key, b"", _WHOLE + payload))[1:]

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            with self._asking(key):
                self._client.delete_key(key)

    def key_count(self) -> int:
        with self._asking("num_keys"):
            return int(self._client.num_keys())

    @contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        with self._lock:
            if self._lost is not None:
                raise LineLost(str(self._lost), self.server, is_silent=self._lost.is_silent)
            try:
                yield
            except RuntimeError as error:
                # torch.distributed's DistError, in all its kinds, is a RuntimeError.
                text = str(error).splitlines()[0] if str(error) else repr(error)
                is_silent = self._connection is not None and self._connection.ran_out_of_patience(text)
                self._lost = LineLost(f"{what}: {text}", self.server, is_silent=is_silent)
                raise self._lost from error
