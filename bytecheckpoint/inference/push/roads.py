"""Roads: how a sender's bytes get into a worker's arena. One small interface, so that others fit in."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch

from ...engine.tensor_bytes import byte_view
from ...errors import DeadlineError, EngineError
from .arena import Address, attach
from .tcp_wire import FRAME, NONCE_BYTES, STATUS, TcpAddress, proof, receive

__all__ = ["Place", "Road", "SharedMemory", "Tcp", "connect"]

_CONNECT_S = 5.0


class Place(NamedTuple):
    """Where a chunk goes: ``offset`` in the memory of ``target``. In a stream, it is number ``chunk`` there, and comes
    with a ``wave``."""

    target: int
    offset: int
    chunk: int = 0
    wave: int = 0


class Road(ABC):
    """To one worker's memory, for one push. For several threads at a time."""

    @abstractmethod
    def write(self, place: Place, data: torch.Tensor, digest: int) -> None:
        """Put ``data``, contiguous bytes whose xxh3-64 is ``digest``, where it goes. It may be reused when this
        returns."""

    @abstractmethod
    def finish(self) -> None:
        """Return when all has arrived. Raises ``DeadlineError``, or ``EngineError`` with the worker's words."""

    def interrupt(self) -> None:  # noqa: B027 - most wait for nothing
        """Have a ``write`` or ``finish`` that waits in another thread raise. Never raises itself."""

    @abstractmethod
    def close(self) -> None:
        """Never raises."""


class SharedMemory(Road):
    """The arena itself, mapped."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory

    @classmethod
    def open(cls, address: Address) -> SharedMemory | None:
        """None where this process does not reach the arena."""
        memory = attach(address)
        return None if memory is None else cls(memory)

    def write(self, place: Place, data: torch.Tensor, digest: int) -> None:
        self._memory[place.offset : place.offset + data.numel()].copy_(data)

    def finish(self) -> None:
        """What was written is there."""

    def close(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)


class Tcp(Road):
    """A connection for each sender and worker; the worker checks every chunk as it comes."""

    def __init__(self, address: TcpAddress, deadline_s: float) -> None:
        """Raises as ``connect``."""
        self._deadline_s, self._sent = deadline_s, 0
        self._connection, self._where = connect(address)
        self._connection.settimeout(deadline_s)
        self._sending = threading.Lock()

    def write(self, place: Place, data: torch.Tensor, digest: int) -> None:
        with self._sending:
            try:
                self._connection.sendall(FRAME.pack(place.offset, data.numel(), digest))
                self._connection.sendall(byte_view(data))
            except TimeoutError:
                raise self._too_late("take bytes") from None
            except OSError:
                self.finish()  # raises what the worker had to say
                raise
            self._sent += data.numel()

    def finish(self) -> None:
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its last words may still be there
                self._connection.sendall(FRAME.pack(0, 0, 0))
            failed, number = STATUS.unpack(receive(self._connection, STATUS.size))
            if failed:
                text = receive(self._connection, min(number, 1 << 16)).decode(errors="replace")
                raise EngineError(f"the worker at {self._where} ended the connection: {text}")
        except TimeoutError:
            raise self._too_late("confirm what was sent") from None
        except OSError as error:
            raise EngineError(f"the connection to the worker at {self._where} broke: {error}") from error
        if number != self._sent:
            raise EngineError(f"the worker at {self._where} received {number} of {self._sent} bytes")

    def interrupt(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()

    def _too_late(self, what: str) -> DeadlineError:
        return DeadlineError(
            f"the worker at {self._where} did not {what} within {self._deadline_s:g} s; is its process stopped? "
            "nothing was put in"
        )


def connect(address: TcpAddress) -> tuple[socket.socket, str]:
    """A connection whose both ends know the key, and what errors call it. Raises ``EngineError`` where no host of the
    address answers as it should."""
    tried = []
    for host in address.hosts:
        try:
            return _connect(host, address), f"{host}:{address.port}"
        except (OSError, EngineError) as error:
            tried.append(f"{host}: {error}")
    raise EngineError(
        f"a worker's port {address.port} cannot be reached from {socket.gethostname()} ({'; '.join(tried)}); "
        "open it between senders and workers, or run the sender on the worker's host as the same user"
    )


def _connect(host: str, address: TcpAddress) -> socket.socket:
    connection = socket.create_connection((host, address.port), timeout=_CONNECT_S)
    try:
        nonce = receive(connection, NONCE_BYTES)
        mine = secrets.token_bytes(NONCE_BYTES)
        connection.sendall(mine + proof(address.key, b"sender", nonce, mine))
        if not hmac.compare_digest(receive(connection, NONCE_BYTES), proof(address.key, b"worker", mine, nonce)):
            raise EngineError("it is not the worker")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection
    except BaseException:
        connection.close()
        raise
