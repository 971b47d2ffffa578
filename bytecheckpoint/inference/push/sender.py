"""One sender, a rank of the job: its writes, and how it reaches the workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import msgpack

from ...control.connections import Endpoint
from .layout import Write
from .quantizer import Quantizer
from .transports.base import Transport
from .transports.group import Membership
from .transports.shared_memory import ArenaAddress, SharedMemoryTransport, attach
from .transports.tcp import TcpTransport
from .writing import ChunkWriter, unpack_writes


@dataclass(frozen=True)
class PushAssignment:
    """What a sender must know for one push, besides its writes: of each target, the address of its memory, the tokens
    of its arenas, its endpoint, and the slots of its ring buffer if weights are streamed."""

    targets: list[Any]
    is_streamed: bool
    on_device: bool
    is_group: bool
    known: list[Any]


class Sender:
    """A sender's writes, its mappings of arenas, and its group."""

    def __init__(self, deadline_s: float, *, tcp_only: bool) -> None:
        self.deadline_s, self.tcp_only = deadline_s, tcp_only
        self.finite = False  # whether all values must be finite
        self._found_finite: list[int] = []  # the digests of the writes whose values were finite when last made
        self.assignment: PushAssignment
        self.task = self._packed = b""
        self.writes: list[Write] = []
        self.group = Membership()
        self._mapped: dict[str, SharedMemoryTransport] = {}

    def take(self, packed: bytes) -> None:
        """Unpack an assignment, for one push."""
        plain = msgpack.unpackb(packed)
        writes, self.task = plain.pop("writes"), plain.pop("task")
        if writes != self._packed:
            self.writes, self._packed, self._found_finite = unpack_writes(writes), writes, []
        self.assignment = PushAssignment(**plain)

    def open(self, targets: Iterable[int], stack: ExitStack) -> dict[int, Transport]:
        """Return a transport to each target: into an arena that this process can map, or by TCP to a ring buffer or to
        another arena, until the ``stack`` ends. Raises ``EngineError``.

        Mappings are kept for as long as the worker keeps the arena: the first write to each page of a new mapping costs
        as much as the copy itself.
        """
        given = self.assignment
        found: dict[int, Transport] = {}
        for token in self._mapped.keys() - {token for _, tokens, *_ in given.targets for token in tokens}:
            self._mapped.pop(token).close()
        for target in targets:
            arena, _, endpoint, ring = given.targets[target]
            address = None if self.tcp_only or arena is None else ArenaAddress(*arena)
            if address is not None and ring is None:
                if address.token not in self._mapped and (memory := attach(address)) is not None:
                    self._mapped[address.token] = SharedMemoryTransport(memory)
                if address.token in self._mapped:
                    found[target] = self._mapped[address.token]
                    continue
            found[target] = TcpTransport(
                Endpoint(*endpoint),
                self.deadline_s,
                slots=None if ring is None else ring[0],
                memory=address,
                on_device=given.on_device,
            )
            stack.callback(found[target].close)
        return found

    def write(
        self,
        quantizer: Quantizer,
        transports: Mapping[int, Transport],
        check: Callable[[], None],
        on_written: Callable[[int], None],
    ) -> list[int]:
        """Make the writes like ``ChunkWriter.run``, and return the digests of the chunks. Without transports, values
        are made and checked, and nothing is delivered."""
        writes = self.writes if transports else [replace(write, places=()) for write in self.writes]
        finite = self._found_finite if self.finite else None
        writer = ChunkWriter(transports, quantizer, on_device=self.assignment.on_device, finite=finite)
        digests = writer.run(writes, self.assignment.known, check, on_written)
        self._found_finite = digests if self.finite else []
        return digests

    def close(self) -> None:
        self.group.leave()
        for transport in self._mapped.values():
            transport.close()
        self._mapped.clear()
        self.writes, self.task, self._packed, self._found_finite = [], b"", b"", []
