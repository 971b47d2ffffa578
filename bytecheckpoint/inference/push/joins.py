"""A join: what an engine that was pushed to (the holder) serves is pushed to other engines.

Rank 0 connects to every worker of the holder, and reads chunks from its shared memory, or over the connection where it
cannot map that. A worker keeps the bytes of its version for as long as the connection lasts, and keeps serving.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from ...control.acceptor import Acceptor, connect, notice_lost_host
from ...control.connections import Endpoint, at_most, receive, receive_into, send
from ...engine.tensor_bytes import byte_view, copy_elements
from ...errors import CorruptionError, DeadlineError, EngineError, PlanError, StateError
from ...runtime.threads import run_daemon
from ...tensors.geometry import Box
from ..layouts.parts import torch_dtype_of
from .engines.base import Engine, ask_all, failures_of
from .layout import Layout, Write
from .memory import HeldVersion
from .messages import Table, check_faults
from .sources import PushSource
from .transports.base import find_damaged, hosts_of_engine
from .transports.shared_memory import ArenaAddress, SharedArena, attach

_NUMBER = struct.Struct("!Q")  # of a chunk; before them, how many are requested, or 0 at the end


class Holds:
    """What other engines read of the versions of one worker. For the thread that runs the model."""

    def __init__(self) -> None:
        self._holds: list[_Hold] = []

    def hold(self, message: Mapping[str, Any], served: HeldVersion) -> dict[str, Any]:
        """Describe the served version, and keep its bytes until the connection ends that the sender now makes."""
        assert served.arena is not None
        hold = _Hold(served, served.arena, message["deadline_s"])
        self._holds = [*self._current(), hold]
        return {
            "table": served.table.packed,
            "layout": served.layout.packed,
            "digests": served.digests,
            "arena": served.arena.address,
            "endpoint": hold.endpoint,
            "finite": served.finite,
        }

    def reads(self, version: HeldVersion) -> bool:
        """Return whether another engine still needs the bytes of ``version``."""
        self._holds = self._current()
        return any(hold.arena is version.arena for hold in self._holds)

    def close(self) -> None:
        for hold in self._holds:
            hold.close()
        self._holds.clear()

    def _current(self) -> list[_Hold]:
        for hold in self._holds:
            if hold.has_expired:
                hold.close()
        return [hold for hold in self._holds if not hold.has_expired]


class _Hold(Acceptor):
    """Sends chunks to one process. Over when its connection ends, is silent for long, or none came; then, ``arena`` is
    not read any more."""

    def __init__(self, served: HeldVersion, arena: SharedArena, wait_s: float) -> None:
        self.arena: SharedArena | None = arena
        self._layout, self._memory = served.layout, served.memory  # stays mapped, whatever becomes of the arena
        self._wait_s, self._end = wait_s, time.monotonic() + wait_s
        self._is_connected = False
        super().__init__(hosts_of_engine())

    @property
    def has_expired(self) -> bool:
        return self.arena is None or (not self._is_connected and time.monotonic() > self._end)

    def _serve(self, connection: socket.socket) -> None:
        self._is_connected = True
        notice_lost_host(connection)
        wait = at_most(self._wait_s)
        try:
            # A sender that maps the memory sends nothing. If it is stopped, its push has ended before this does.
            while count := _NUMBER.unpack(receive(connection, _NUMBER.size, at_most(2 * self._wait_s)))[0]:
                for (chunk,) in _NUMBER.iter_unpack(receive(connection, count * _NUMBER.size, wait)):
                    send(connection, byte_view(self._memory[self._layout.span(chunk)]), wait)
        finally:
            self.arena, self._memory = None, torch.empty(0, dtype=torch.uint8)
            run_daemon(self.close, "bcp-push-held")  # not in this thread, for which it waits


class EngineSource(PushSource):
    """The version that ``engine`` serves; on other ranks than 0, where that is None, nothing.

    ``fetch`` may return other dtypes than ``table`` states: those in which the workers received their parts. Where they
    received a box in several, the table's dtype comes first.
    """

    def __init__(self, engine: Engine | None, deadline_s: float, *, tcp_only: bool) -> None:
        self._workers: list[_Worker] = []
        self.table, self.held = Table(()), []
        if engine is None:
            return
        self._name = engine.name
        answers = ask_all(engine, "hold", {"deadline_s": deadline_s}, deadline_s)
        try:
            for number, answer in enumerate(answers):
                if "failure" not in answer:  # connected before an error of another one, so that it ends its hold
                    name = f"worker {number} of {engine.name}"
                    self._workers.append(_Worker(name, answer, deadline_s, tcp_only=tcp_only))
            for error in failures_of(engine, answers):
                raise error
            if len({answer["applied_by"] for answer in answers}) > 1:
                versions = [answer["version"] for answer in answers]
                raise StateError(f"workers of {engine.name} serve different versions: {versions}; push to it again")
        except BaseException:
            self.close()
            raise
        self.version = answers[0]["version"]
        self.checked_late = all(answer["finite"] for answer in answers)  # else a stream of them would begin unchecked
        self.table = Table.unpack(answers[0]["table"])
        self._stored = {name: meta.dtype for name, meta in self.table.rows}
        self._parts: dict[str, list[tuple[_Worker, int]]] = {}
        for worker in self._workers:
            for number, part in enumerate(worker.layout.parts):
                found = self._parts.setdefault(part.name, [])
                is_stored = part.dtype == self._stored.get(part.name)
                found.insert(0 if is_stored else len(found), (worker, number))
                self.held.append((part.name, part.box))

    def fetch(self, boxes: Sequence[tuple[str, Box]]) -> list[torch.Tensor]:
        """Raises ``CorruptionError`` for bytes that have changed since the push, and ``EngineError`` or
        ``DeadlineError`` for a worker that sends nothing more."""
        places = [self._place_of(name, box) for name, box in boxes]
        needed: dict[_Worker, dict[int, None]] = {}
        for (worker, part), (_, box) in zip(places, boxes, strict=True):
            chunks = (chunk for chunk, _, _ in worker.layout.overlaps(part, box))
            needed.setdefault(worker, {}).update(dict.fromkeys(chunks))
        read = {worker: worker.read(list(chunks)) for worker, chunks in needed.items()}
        return [
            _assemble(worker.layout, part, box, read[worker])
            for (worker, part), (_, box) in zip(places, boxes, strict=True)
        ]

    def _place_of(self, name: str, box: Box) -> tuple[_Worker, int]:
        for worker, part in self._parts.get(name, ()):
            if worker.layout.parts[part].box.contains(box):
                return worker, part
        raise PlanError(f"{name} {box} is not held here; the plan belongs to another version")

    def check_exact(self, writes: Sequence[Write]) -> None:
        """Check that engines get the values that the original source would send. They would not where the holder
        received a float32 as bfloat16, for example."""
        faults: dict[str, str] = {}
        for write in writes:
            if write.name in self._parts:  # else they are scales of weights that are held
                worker, part = self._place_of(write.name, write.box)
                found, stored = worker.layout.parts[part].dtype, self._stored[write.name]
                if found not in (write.dtype, stored):
                    faults[write.name] = f"{write.dtype} is requested of {stored}, it has {found}"
        check_faults(
            f"{self._name} no longer has the exact values of {len(faults)} tensor(s)" if faults else "",
            [("dtype", name, text) for name, text in faults.items()],
            then="\n  nothing was sent; push from their original source, or accept the values that it has "
            "(strict=False)",
        )

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._workers.clear()


class _Worker:
    """A worker of the holder. ``read`` is for one thread."""

    def __init__(self, name: str, answer: Mapping[str, Any], wait_s: float, *, tcp_only: bool) -> None:
        self._name, self._wait, self._wait_s = name, at_most(wait_s), wait_s
        self._version, self._digests = answer["version"], answer["digests"]
        self.layout = Layout.unpack(answer["layout"])
        self._connection = connect(Endpoint(*answer["endpoint"]))
        self._memory = None if tcp_only else attach(ArenaAddress(*answer["arena"]))

    def read(self, chunks: Sequence[int]) -> dict[int, torch.Tensor]:
        """Return the bytes of chunks, which are verified."""
        memory, spans = self._memory, map(self.layout.span, chunks)
        # A copy of what is mapped: its bytes must not change between this check and their digest for the engine.
        found = self._receive(chunks) if memory is None else [memory[span].clone() for span in spans]
        damaged = find_damaged([byte_view(data) for data in found], [self._digests[chunk] for chunk in chunks])
        if damaged:
            raise CorruptionError(
                f"{self._name}: version {self._version!r} is damaged in memory: "
                f"{self.layout.name_of(chunks[damaged[0]])}; it was not sent, push to this engine again"
            )
        return dict(zip(chunks, found, strict=True))

    def _receive(self, chunks: Sequence[int]) -> list[torch.Tensor]:
        found = [torch.empty(self.layout.sizes[chunk], dtype=torch.uint8) for chunk in chunks]
        try:
            send(self._connection, b"".join(map(_NUMBER.pack, (len(chunks), *chunks))), self._wait)
            for data in found:
                receive_into(self._connection, byte_view(data), self._wait)
        except TimeoutError:
            raise DeadlineError(f"{self._name} sent nothing for {self._wait_s:g} s; is its process stopped?") from None
        except OSError as error:
            raise EngineError(f"{self._name} sends no more, as it ended or released its memory: {error}") from error
        return found

    def close(self) -> None:
        with suppress(OSError):
            send(self._connection, _NUMBER.pack(0), at_most(0))
        self._connection.close()
        self._memory = None


def _assemble(layout: Layout, part: int, box: Box, chunks: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Return a view of one chunk, or a copy from several."""
    dtype = torch_dtype_of(layout.parts[part].dtype)
    out: torch.Tensor | None = None
    for number, held, common in layout.overlaps(part, box):
        source = chunks[number].view(dtype).view(held.lengths)[common.relative_to(held).slices()]
        if common == box:
            return source
        out = torch.empty(box.lengths, dtype=dtype) if out is None else out
        copy_elements(out[common.relative_to(box).slices()], source)
    return torch.empty(box.lengths, dtype=dtype) if out is None else out
