"""The worker's end of a stream: chunks come into a ring of slots, are proved, put in by the engine's loader, and make
room for others. The model's thread takes out what connections bring; both wait for each other only here.

Chunks come in the order in which the loader was seen to want them. Where it wants them in another, what is in its way
is set aside in memory of its own, so neither end ever waits for the other in a circle: all senders write in one order,
and a slot that is complete can always be emptied.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from typing import Protocol

import torch

from ...errors import BytecheckpointError, CorruptionError, DeadlineError, EngineError
from ...geometry import Box
from .arena import Address, Arena
from .device_memory import settle
from .digesting import Digest, xxh3_of
from .messages import without_frames
from .ring_server import RingServer
from .serving import Chunks
from .tcp_wire import TcpAddress
from .waves import Waves

__all__ = ["Ring", "RingMemory"]

_NOTHING, _COMING, _HERE = range(3)  # what is known of a chunk
_ANY = 1 << 62  # uses of a chunk that the loader computes with: nobody knows how many


class RingMemory(Protocol):
    """Bytes, and where senders reach them, if they do. Nothing uses them any more when they are closed."""

    memory: torch.Tensor

    @property
    def address(self) -> Address | None: ...

    def close(self) -> None: ...


class Ring(Chunks):
    """Offers ``waves.nbytes`` of memory, and a port, to senders. ``takes`` are the copies that the loader will make
    (``Learned.takes``). ``get``, ``used`` and ``drain`` are for one thread; each waits ``deadline_s`` at most for the
    next chunk, whichever it is, and raises ``DeadlineError``, ``CorruptionError`` for a chunk that is not as it was
    sent, ``EngineError`` where a sender ends too early.

    ``memory``, by default an arena in host memory, is the ring's from now on. ``digest`` is what senders take."""

    def __init__(
        self,
        waves: Waves,
        takes: Sequence[tuple[int, Box]],
        deadline_s: float,
        memory: RingMemory | None = None,
        digest: Digest = xxh3_of,
    ) -> None:
        self._waves, self._deadline_s, self._digest = waves, deadline_s, digest
        self._left = _expected_uses(waves, takes)
        # Of vectors nobody knows how often: where vLLM counts elements before it loads, it copies biases already.
        self._vectors = [len(waves.layout.parts[part].shape) <= 1 for part, _ in waves.layout.chunks]
        count = len(waves.layout.chunks)
        self._state = bytearray(count)
        self._missing = [len(waves.chunks(wave)) for wave in range(waves.count)]
        self._taken = self._asked = 0
        self._aside: dict[int, torch.Tensor] = {}
        self._failure: BytecheckpointError | None = None
        self._changed = threading.Condition()
        self.digests = [0] * count
        self.set_aside = 0
        """Bytes so far that the loader wanted in another order than it was seen to."""
        self._memory = memory or Arena(waves.nbytes)
        try:
            self._server = RingServer(self, deadline_s)
        except BaseException:
            self._memory.close()
            raise

    @property
    def memory(self) -> Address | None:
        """Where senders reach it."""
        return self._memory.address

    @property
    def port(self) -> TcpAddress:
        return self._server.address

    def get(self, chunk: int) -> torch.Tensor:
        with self._changed:
            while True:
                if chunk in self._aside:
                    return self._aside[chunk]
                if self._state[chunk] == _HERE:
                    if self._waves.wave_of[chunk] < self._taken:
                        raise EngineError(
                            f"the engine's loader wants {self._waves.layout.name_of(chunk)} more often than it was "
                            "seen to; give Pusher more memory_bytes, so that weights need not be streamed"
                        )
                    return self._slot(chunk)
                self._empty_until(max(self._waves.wave_of[chunk], self._asked))
                self._wait(f"for {self._waves.layout.name_of(chunk)}")

    def used(self, chunk: int) -> None:
        with self._changed:
            self._left[chunk] -= 1
            if not self._left[chunk] and not self._vectors[chunk]:
                self._aside.pop(chunk, None)
                self._take_out()

    def drain(self) -> None:
        """Take out what the loader did not want, so that senders come to their end."""
        with self._changed:
            self._left = [0] * len(self._left)
            self._aside.clear()
            self._take_out()
            while self._taken < self._waves.count:
                self._wait("for the rest")
                self._take_out()

    def close(self) -> None:
        """Ends connections, and gives the memory back."""
        try:
            self._server.close()
            self.fail(EngineError("this push is over"))
        finally:
            self._memory.close()
            self._aside.clear()

    def fail(self, error: BytecheckpointError) -> None:
        """Have all, on both ends, raise ``error``. The first one stays."""
        with self._changed:
            if self._failure is None:
                self._failure = without_frames(error)
                self._server.tell_failed(error)
                self._changed.notify_all()

    def join(self, connection: socket.socket) -> None:
        """A sender is there: it hears how things stand, and of every change from now on."""
        with self._changed:
            self._server.add(connection, self._taken, self._failure)

    def check(self) -> None:
        """Raise what has failed; not itself, as it would keep what it is raised through, which has views of slots."""
        if self._failure is not None:
            raise without_frames(self._failure)

    def make_room(self, chunks: Sequence[int]) -> None:
        """Return when there is room for all of them. The loader, where it waits itself, sets aside what is in the
        way."""
        wave = max(self._waves.wave_of[chunk] for chunk in chunks)
        with self._changed:
            self._asked = max(self._asked, wave)
            self._changed.notify_all()
            while wave >= self._taken + self._waves.slots:
                self.check()
                self._changed.wait()
            self.check()

    def claim(self, chunk: int, nbytes: int) -> torch.Tensor:
        """Where a chunk comes that a sender announces. ``EngineError`` where it must not."""
        waves = self._waves
        with self._changed:
            if chunk >= len(self._state) or nbytes not in (0, waves.layout.sizes[chunk]):
                raise EngineError(f"there is no chunk {chunk} of {nbytes} bytes in this stream")
            wave = waves.wave_of[chunk]
            if self._state[chunk] != _NOTHING or not self._taken <= wave < self._taken + waves.slots:
                raise EngineError(f"chunk {chunk} of wave {wave} comes when {self._taken} waves have been taken out")
            self._state[chunk] = _COMING
            return self._slot(chunk)

    def prove(self, chunk: int, place: torch.Tensor, digest: int) -> None:
        """A chunk is there. Raises ``CorruptionError`` where it is not as it was sent."""
        if self._digest(place) != digest:
            raise CorruptionError(self.damaged(chunk))
        self.here(chunk, digest)

    def damaged(self, chunk: int) -> str:
        return f"{self._waves.layout.name_of(chunk)} did not arrive as it was sent; it was not put in, push again"

    def here(self, chunk: int, digest: int) -> None:
        """A chunk is there, and proved."""
        with self._changed:
            self._state[chunk], self.digests[chunk] = _HERE, digest
            self._missing[self._waves.wave_of[chunk]] -= 1
            self._changed.notify_all()

    @property
    def is_complete(self) -> bool:
        with self._changed:
            return not any(self._missing)

    def _slot(self, chunk: int) -> torch.Tensor:
        begin = self._waves.offset(chunk)
        return self._memory.memory[begin : begin + self._waves.layout.sizes[chunk]]

    def _wait(self, what: str) -> None:
        self.check()
        if not self._changed.wait(self._deadline_s):
            raise DeadlineError(f"no sender wrote anything for {self._deadline_s:g} s; this worker waits {what}")

    def _empty_until(self, wave: int) -> None:
        """Make room for ``wave``, as far as what is in its way is complete."""
        while wave >= self._taken + self._waves.slots and not self._missing[self._taken]:
            for chunk in self._waves.chunks(self._taken):
                if self._left[chunk] > 0 and not self._vectors[chunk]:
                    self._aside[chunk] = self._slot(chunk).clone()
                    self.set_aside += self._aside[chunk].numel()
            self._count_one()

    def _take_out(self) -> None:
        """Give back slots of which everything has been used."""
        while self._taken < self._waves.count and not self._missing[self._taken]:
            chunks = self._waves.chunks(self._taken)
            if any(self._left[chunk] > 0 and not self._vectors[chunk] for chunk in chunks):
                return
            self._count_one()

    def _count_one(self) -> None:
        for chunk in self._waves.chunks(self._taken):
            if self._vectors[chunk]:
                self._aside[chunk] = self._slot(chunk).clone()
        settle([self._memory.memory])  # copies out of it may not have begun
        self._taken += 1
        self._changed.notify_all()
        self._server.tell_taken(self._taken)


def _expected_uses(waves: Waves, takes: Sequence[tuple[int, Box]]) -> list[int]:
    layout = waves.layout
    of_part: dict[int, list[int]] = {}
    for chunk, (part, _) in enumerate(layout.chunks):
        of_part.setdefault(part, []).append(chunk)
    uses = [0] * len(layout.chunks)
    for part, box in takes:
        for chunk in of_part.get(part, ()):
            uses[chunk] += layout.chunks[chunk][1].intersect(box) is not None
    return [count or _ANY for count in uses]
