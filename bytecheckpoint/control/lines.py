"""A process's lines to the ranks' stores: where each store is, and idle lines to those that are used all the time."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field

import msgpack

from .line import Line
from .peers import PeerIdentity

__all__ = ["Lines", "StoreAddress"]


@dataclass(frozen=True)
class StoreAddress:
    """Where the store of a rank is."""

    server: PeerIdentity
    addresses: Sequence[str]
    port: int

    def pack(self) -> bytes:
        return bytes(msgpack.packb([self.server.pack(), list(self.addresses), self.port]))

    @classmethod
    def unpack(cls, data: bytes) -> StoreAddress:
        server, addresses, port = msgpack.unpackb(data)
        return cls(PeerIdentity.unpack(server), addresses, port)


@dataclass
class Lines:
    """Thread-safe. ``directory`` has every store, by the rank that serves it; ``first`` are lines that are there
    already. Lines to the same stores are kept when they are not used."""

    directory: Mapping[int, StoreAddress]
    first: InitVar[Iterable[Line]]
    _idle: dict[int, list[Line]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self, first: Iterable[Line]) -> None:
        self._idle = {line.server: [line] for line in first}

    def borrow(self, server: int, patience_s: float) -> Line:
        """A line to that rank's store, for one user. Raises ``LineLost``."""
        with self._lock:
            idle = self._idle.get(server)
            line = idle.pop() if idle else None
        if line is None:
            return self.connect(server, patience_s)
        line.be_patient(patience_s)
        return line

    def connect(self, server: int, patience_s: float) -> Line:
        """A new line to that rank's store. Raises ``LineLost``."""
        place = self.directory[server]
        return Line.connect(place.addresses, place.port, server, patience_s=patience_s)

    def give_back(self, line: Line) -> None:
        """The borrower has no use for it any more."""
        with self._lock:
            if line.server in self._idle and not line.is_lost:
                self._idle[line.server].append(line)

    def drop(self) -> None:
        """Forget the idle ones."""
        with self._lock:
            self._idle.clear()
