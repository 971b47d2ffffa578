"""Serving a store, and connecting to one without ever waiting for longer than one wants to.

``TCPStore``'s client waits for answers without a bound: where the store's process is stopped, or its host has gone
without a word, a request would never return. So each connection's socket gets the system's own bound on sending and
receiving. The client does not tell its socket; it is the one that has come to face the store's port while connecting.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore

__all__ = ["Connection", "connect", "listen", "serve_store"]

_STORE_TIMEOUT = timedelta(seconds=30)
_CONNECT_S = 3.0
_BACKLOG = 4096
_TOLERANCE_S = 0.1
_MEET_S = 0.5  # a store's constructor takes that and, to say why in C++, half a second more where nobody listens
_LEAST_S, _MOST_S = 0.25, 86400.0  # to connect; to wait at all
_SILENT = ("Socket Timeout", "wait timeout")  # what torch says when the system's bound was reached, or its own
_FOLDER = "/proc/self/fd"

_connecting = threading.Lock()  # one at a time, so that the new socket can be told


def listen(address: str) -> socket.socket:
    """A listening socket bound to ``address`` (empty for every interface) and a free port."""
    if not address and socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
        except OSError:
            # Compiled in, but switched off on this host.
            return socket.create_server(("", 0), backlog=_BACKLOG)
    return socket.create_server((address, 0), backlog=_BACKLOG)


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


class Connection:
    """A client of a store with the descriptor of its socket, which the client owns; -1 where that is not known."""

    def __init__(self, client: Any, descriptor: int) -> None:
        self.client = client
        self._descriptor = descriptor
        self._patience_s = float("inf")

    def be_patient(self, patience_s: float) -> None:
        """How long each later request may wait, at least a millisecond, and up to a tenth of a second more."""
        patience_s = min(max(patience_s, 1e-3), _MOST_S)
        if self._descriptor >= 0 and not patience_s <= self._patience_s <= patience_s + _TOLERANCE_S:
            self._patience_s = patience_s
            seconds, micros = divmod(int(patience_s * 1e6), 1_000_000)
            bound = struct.pack("ll", seconds, micros)
            # Given family, type and protocol it asks the system nothing, and a socket's bounds do not depend on them.
            borrowed = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, self._descriptor)
            try:
                borrowed.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bound)
                borrowed.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bound)
            finally:
                borrowed.detach()
            self.client.set_timeout(timedelta(seconds=patience_s))

    def ran_out_of_patience(self, text: str) -> bool:
        """Whether a client's error says so."""
        return any(words in text for words in _SILENT)


def connect(addresses: Sequence[str], port: int, patience_s: float) -> Connection:
    """Connect to the first address that answers. Raises ``OSError``; ``TimeoutError`` where one was reached that did
    not speak."""
    refused = []
    patience_s = min(max(patience_s, _LEAST_S), _MOST_S)
    for address in addresses:
        with _connecting:
            try:
                _knock(address, port, min(_CONNECT_S, patience_s))
            except OSError as error:
                refused.append(f"{address}: {error}")
                continue
            try:
                connection = _introduced(address, port, patience_s)
            except RuntimeError as error:
                raise OSError(f"{address}:{port}: {str(error).splitlines()[0]}") from error
        connection.be_patient(patience_s)
        return connection
    raise OSError(f"cannot connect to port {port} of " + "; ".join(refused))


def _knock(address: str, port: int, timeout_s: float) -> None:
    """Raises ``OSError`` where nobody listens: the store's own constructor would try again, until its time-out."""
    socket.create_connection((address, port), timeout=timeout_s).close()


def _introduced(address: str, port: int, patience_s: float) -> Connection:
    """Tries again as long as somebody listens: the process may have ended since it did."""
    end = time.monotonic() + patience_s
    while True:
        try:
            return _met(address, port, max(end - time.monotonic(), _LEAST_S))
        except RuntimeError:
            if time.monotonic() > end:
                raise
        _knock(address, port, min(_CONNECT_S, max(end - time.monotonic(), _LEAST_S)))


def _met(address: str, port: int, patience_s: float) -> Connection:
    """Both sides of a store speak when they meet, and that wait has no bound either."""
    # For so long it tries again where nobody listens.
    bound = timedelta(seconds=min(_MEET_S, patience_s / 2))
    with ThreadPoolExecutor(1, "bytecheckpoint-connect") as executor:
        before = _facing(port)
        made = executor.submit(TCPStore, address, port, is_master=False, timeout=bound, wait_for_workers=False)
        try:
            client = made.result(patience_s)
        except FutureTimeoutError:
            for descriptor, _local in _facing(port) - before:
                _hang_up(descriptor)
            with contextlib.suppress(RuntimeError):
                made.result()
            raise TimeoutError(f"{address}:{port}: no answer in {patience_s:g} s") from None
        client.set_timeout(_STORE_TIMEOUT)
        found = sorted(_facing(port) - before)
        return Connection(client, found[0][0] if len(found) == 1 else -1)


def _facing(port: int) -> set[tuple[int, int]]:
    """The descriptors of this process's sockets that are connected to that port of any host, with their own ports."""
    found = set()
    for name in os.listdir(_FOLDER) if os.path.isdir(_FOLDER) else []:
        # Others open and close theirs meanwhile. A copy is looked at, so that nobody's is closed here.
        with contextlib.suppress(OSError, ValueError), _copy(int(name)) as seen:
            peer, own = seen.getpeername(), seen.getsockname()
            if isinstance(peer, tuple) and peer[1] == port:
                found.add((int(name), own[1]))
    return found


def _hang_up(descriptor: int) -> None:
    with contextlib.suppress(OSError), _copy(descriptor) as seen:
        seen.shutdown(socket.SHUT_RDWR)


def _copy(descriptor: int) -> socket.socket:
    if not os.readlink(f"{_FOLDER}/{descriptor}").startswith("socket:"):
        raise OSError("not a socket")
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
