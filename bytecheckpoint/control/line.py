"""One connection to the ranks' own store: whole messages of any size under string keys, never a blocking wait.

The store is a ``torch.distributed.TCPStore`` that belongs to this library. Its own ``wait`` and ``get`` are never used
on a key that may be missing: they block under the client's lock, and each time-out prints to stderr.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore

__all__ = ["Line", "LineLost", "listen", "serve_store"]

# TCPStore refuses values above 8 MiB, by closing the connection.
_PART_BYTES = 4 << 20
_STORE_TIMEOUT = timedelta(seconds=30)
_CONNECT_S = 3.0
_BACKLOG = 4096
_WHOLE, _PARTS = b"\0", b"\1"


class LineLost(Exception):
    """The store does not answer; its host process is gone or out of reach. Internal to ``control``."""


def serve_store(address: str) -> tuple[Any, int]:
    """Start a store in this process, bound to ``address`` (empty for every interface); it and its port.

    It lives for as long as the returned object does.
    """
    listener = listen(address)
    port = listener.getsockname()[1]
    store = TCPStore(
        address or "127.0.0.1",
        port,
        is_master=True,
        timeout=_STORE_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, port


class Line:
    """For any thread; the client makes one request at a time. Methods raise ``LineLost`` when the store is gone."""

    def __init__(self, client: Any) -> None:
        self._client = client

    @classmethod
    def connect(cls, addresses: Sequence[str], port: int) -> Line:
        """Connect to the first address that answers. Dear: torch looks up names of both ends, over the network."""
        return cls(_connect(addresses, port))

    def put(self, key: str, payload: bytes) -> list[str]:
        """Store a message; the keys that it takes."""
        with _lost(key):
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
        with _lost(key):
            head = bytes(self._client.get(key))
            if head[:1] == _WHOLE:
                return head[1:], [key]
            names = [f"{key}#{number}" for number in range(struct.unpack("<I", head[1:])[0])]
            return b"".join(bytes(self._client.get(name)) for name in names), [key, *names]

    def take(self, key: str) -> bytes:
        """``read``, then delete."""
        payload, keys = self.read(key)
        self.delete(keys)
        return payload

    def has(self, key: str) -> bool:
        with _lost(key):
            return bool(self._client.check([key]))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter that starts at 0; its new value."""
        with _lost(key):
            return int(self._client.add(key, amount))

    def put_first(self, key: str, payload: bytes) -> bytes:
        """Store a message (at most 4 MiB) unless there is one already; the one that stands."""
        with _lost(key):
            return bytes(self._client.compare_set(key, b"", _WHOLE + payload))[1:]

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            with _lost(key):
                self._client.delete_key(key)

    def key_count(self) -> int:
        with _lost("num_keys"):
            return int(self._client.num_keys())


def listen(address: str) -> socket.socket:
    """A listening socket bound to ``address`` (empty for every interface) and a free port."""
    if not address and socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
        except OSError:
            # Compiled in, but switched off on this host.
            return socket.create_server(("", 0), backlog=_BACKLOG)
    return socket.create_server((address, 0), backlog=_BACKLOG)


def _connect(addresses: Sequence[str], port: int) -> Any:
    refused = []
    for address in addresses:
        try:
            # The store's own constructor retries a refused connection until its time-out.
            socket.create_connection((address, port), timeout=_CONNECT_S).close()
        except OSError as error:
            refused.append(f"{address}: {error}")
            continue
        with _lost(f"{address}:{port}"):
            return TCPStore(address, port, is_master=False, timeout=_STORE_TIMEOUT, wait_for_workers=False)
    raise LineLost(f"cannot connect to port {port} of " + "; ".join(refused))


@contextmanager
def _lost(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        # torch.distributed's DistError, in all its kinds, is a RuntimeError.
        raise LineLost(f"{what}: {str(error).splitlines()[0] if str(error) else error!r}") from error
