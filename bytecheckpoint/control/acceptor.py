"""A server for blocking connections, one thread for each, and the way to it."""

from __future__ import annotations

import contextlib
import logging
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterable

from ..errors import CorruptionError, EngineError
from ..runtime.threads import Threads
from .addresses import LOOPBACK, listen, own_addresses
from .connections import Endpoint, LoopThread, accept, new_key
from .connections import connect as connect_to

_CONNECT_S = 5.0
_MOST_CONNECTIONS = 256
# The kernel asks every five seconds whether the other host still runs, and gives up after the third question.
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}

_log = logging.getLogger(__name__)


def all_addresses(facing: Iterable[str] = ()) -> list[str]:
    """Return the addresses at which other processes, also of this host, reach this one, the likeliest first.

    Those from which packets to the hosts ``facing`` this one leave come first.
    """
    return list(dict.fromkeys([*own_addresses(facing), LOOPBACK]))


def connect(endpoint: Endpoint) -> socket.socket:
    """Return an authenticated connection. Raises ``EngineError``."""
    try:
        return connect_to(endpoint, limit_s=_CONNECT_S)
    except OSError as error:
        raise EngineError(
            f"a port of this library cannot be reached from {socket.gethostname()}: {error}; open it between senders "
            "and workers, or run the sender on the worker's host as the same user"
        ) from error


def notice_lost_host(connection: socket.socket) -> None:
    """Let a connection end soon after the other side's host is gone."""
    for option, value in _KEEPALIVE.items():
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


class Acceptor(ABC):
    """Listens until ``close``, and serves each authenticated connection in its own thread.

    ``facing`` is as in ``all_addresses``.
    """

    def __init__(self, facing: Iterable[str] = ()) -> None:
        listener = listen()
        self.endpoint = Endpoint(all_addresses(facing), listener.getsockname()[1], new_key())
        self._connections: set[socket.socket] = set()
        self._threads = Threads(_MOST_CONNECTIONS, thread_name_prefix="bcp-tcp")
        self._accepting = LoopThread("bcp-accept")
        self._accepting.submit(accept(listener, self.endpoint.key, self._take))

    @abstractmethod
    def _serve(self, connection: socket.socket) -> None:
        """Serve an authenticated connection. Raises ``OSError``, ``EngineError`` or ``CorruptionError`` to end the
        connection."""

    def close(self) -> None:
        """End all connections and wait for their threads."""
        self._accepting.close()
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._threads.shutdown()

    def _take(self, introduction: bytes, connection: socket.socket) -> None:
        self._connections.add(connection)
        self._threads.submit(self._run, connection)

    def _run(self, connection: socket.socket) -> None:
        try:
            with connection:
                self._serve(connection)
        except (OSError, EngineError, CorruptionError) as error:
            _log.warning("a connection ended: %s", error)
        except Exception:  # noqa: BLE001 - the other side notices the closed connection
            _log.exception("serving a connection failed")
        finally:
            self._connections.discard(connection)
