"""The ring buffer of a worker that loads weights while they arrive.

Senders fill the slots of the ring buffer, wave by wave; the engine's loader reads the chunks and frees the slots. The
chunks come in the recorded order of the loader. When the loader reads in another order, the ring buffer copies complete
waves out of the way (``set_aside``), so a complete slot can always be freed. Since all senders write in one order,
neither end can wait for the other in a cycle.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from ....errors import BytecheckpointError, CorruptionError, DeadlineError, EngineError
from ....tensors.geometry import Box
from ..layout import ArrivedChunk, ChunkStore, Waves
from ..messages import without_traceback
from .base import Digests, xxh3_digests
from .cuda_ipc import DeviceArena, compute_device, synchronize
from .group import GroupBackend, check_backend
from .shared_memory import SharedArena
from .tcp import ChunkServer

_ABSENT, _ARRIVING, _ARRIVED = range(3)  # states of a chunk


class GroupMemory:
    """Memory for a ring buffer, on a device from which the backend can receive. Raises like ``check_backend``."""

    address = None  # senders cannot map it

    def __init__(self, backend: GroupBackend, nbytes: int) -> None:
        check_backend(backend)
        device = torch.device("cpu") if backend == "gloo" else compute_device()
        with torch.inference_mode(False):  # another thread writes into it
            self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def close(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)


RingMemory = SharedArena | DeviceArena | GroupMemory


class RingBuffer(ChunkStore):
    """A ring buffer of ``waves.nbytes``, and the server that fills it.

    ``copies`` are the copies that the loader is expected to make (``LoadRecord.copies``). The ring buffer owns
    ``memory``, by default a new arena, and verifies chunks with ``digests``. ``get``, ``release`` and ``drain`` are for
    the thread of the model: they wait at most ``deadline_s`` for the next chunk and raise ``DeadlineError``,
    ``CorruptionError`` for a damaged chunk, or ``EngineError`` when a sender ends too early.
    """

    def __init__(
        self,
        waves: Waves,
        copies: Sequence[tuple[int, Box]],
        deadline_s: float,
        memory: RingMemory | None = None,
        digests: Digests = xxh3_digests,
    ) -> None:
        self._waves, self._deadline_s, self._compute_digests = waves, deadline_s, digests
        self._uses_left = _expected_uses(waves, copies)
        count = len(waves.layout.chunks)
        self._state = bytearray(count)
        self._missing = [len(waves.chunks(wave)) for wave in range(waves.count)]
        self._taken = self._requested_wave = 0
        self._aside: dict[int, torch.Tensor] = {}
        self._failure: BytecheckpointError | None = None
        self._changed = threading.Condition()
        self.digests = [0] * count
        self.set_aside = 0
        """Bytes that were copied out of the way because the loader read in another order than recorded."""
        self._memory = memory or SharedArena(waves.nbytes)
        try:
            self._server = ChunkServer(self, deadline_s)
        except BaseException:
            self._memory.close()
            raise
        self.address, self.endpoint = self._memory.address, self._server.endpoint

    def get(self, chunk: int) -> torch.Tensor:
        with self._changed:
            while True:
                if chunk in self._aside:
                    return self._aside[chunk]
                if self._state[chunk] == _ARRIVED:
                    if self._waves.wave_of[chunk] < self._taken:
                        raise EngineError(
                            f"the engine's loader reads {self._name_of(chunk)} more often than when it was recorded; "
                            "raise memory_bytes of Pusher, so that weights need not be streamed"
                        )
                    return self._slot(chunk)
                self._make_room(max(self._waves.wave_of[chunk], self._requested_wave))
                self._wait(f"for {self._name_of(chunk)}")

    def release(self, chunk: int) -> None:
        with self._changed:
            uses = self._uses_left[chunk]
            if uses is not None:
                self._uses_left[chunk] = uses - 1
                if uses == 1:
                    self._aside.pop(chunk, None)
                    self._free_complete_waves()

    def drain(self) -> None:
        """Receive and discard the chunks that the loader did not read, so that senders can finish."""
        with self._changed:
            self._uses_left = [0] * len(self._uses_left)
            self._aside.clear()
            self._free_complete_waves()
            while self._taken < self._waves.count:
                self._wait("for the rest")
                self._free_complete_waves()

    def close(self) -> None:
        """End all connections and free the memory."""
        try:
            self._server.close()
            self.fail(EngineError("this push is over"))
        finally:
            self._memory.close()
            self._aside.clear()

    def fail(self, error: Exception) -> None:
        """Make the loader and all senders raise ``error``, or an ``EngineError`` about it. The first failure stays."""
        known = error if isinstance(error, BytecheckpointError) else EngineError(f"{type(error).__name__}: {error}")
        with self._changed:
            if self._failure is None:
                self._failure = without_traceback(known)
                self._server.report_failure(known)
                self._changed.notify_all()

    def sender_failed(self, error: BytecheckpointError) -> None:
        with self._changed:
            is_complete = not any(self._missing)
        if not is_complete:
            self.fail(error)

    def check(self) -> None:
        """Raise the failure, if any."""
        if self._failure is not None:
            # A copy: the traceback of the raised error refers to views of slots.
            raise without_traceback(self._failure)

    def wait_for_room(self, chunks: Sequence[int]) -> None:
        """Return when the waves of all ``chunks`` have room. A waiting loader sets aside what is in the way."""
        wave = max(self._waves.wave_of[chunk] for chunk in chunks)
        with self._changed:
            self._requested_wave = max(self._requested_wave, wave)
            self._changed.notify_all()
            while wave >= self._taken + self._waves.slots:
                self.check()
                self._changed.wait()
            self.check()

    def claim(self, chunk: int, nbytes: int) -> torch.Tensor:
        waves = self._waves
        with self._changed:
            if chunk >= len(self._state) or nbytes not in (0, waves.layout.sizes[chunk]):
                raise EngineError(f"there is no chunk {chunk} of {nbytes} bytes in this stream")
            wave = waves.wave_of[chunk]
            if self._state[chunk] != _ABSENT or not self._taken <= wave < self._taken + waves.slots:
                raise EngineError(f"chunk {chunk} of wave {wave} arrived when {self._taken} waves had been taken")
            self._state[chunk] = _ARRIVING
            return self._slot(chunk)

    def verify(self, chunks: Sequence[ArrivedChunk]) -> None:
        for chunk, digest in zip(chunks, self._compute_digests([chunk.place for chunk in chunks]), strict=True):
            if digest != chunk.digest:
                raise CorruptionError(
                    f"{self._name_of(chunk.number)} did not arrive as it was sent; it was not loaded, push again"
                )
        with self._changed:
            for number, _, digest in chunks:
                self._state[number], self.digests[number] = _ARRIVED, digest
                self._missing[self._waves.wave_of[number]] -= 1
            self._changed.notify_all()

    def _name_of(self, chunk: int) -> str:
        return self._waves.layout.name_of(chunk)

    def _slot(self, chunk: int) -> torch.Tensor:
        begin = self._waves.offset(chunk)
        return self._memory.memory[begin : begin + self._waves.layout.sizes[chunk]]

    def _wait(self, purpose: str) -> None:
        self.check()
        if not self._changed.wait(self._deadline_s):
            raise DeadlineError(f"no sender wrote anything for {self._deadline_s:g} s; this worker waits {purpose}")

    def _make_room(self, wave: int) -> None:
        """Free complete waves for ``wave``, also those with unread chunks."""
        while wave >= self._taken + self._waves.slots and not self._missing[self._taken]:
            self._free_wave()

    def _free_complete_waves(self) -> None:
        while self._taken < self._waves.count and not self._missing[self._taken]:
            if any((self._uses_left[chunk] or 0) > 0 for chunk in self._waves.chunks(self._taken)):
                return
            self._free_wave()

    def _free_wave(self) -> None:
        for chunk in self._waves.chunks(self._taken):
            uses = self._uses_left[chunk]
            if uses is None or uses > 0:
                self._aside[chunk] = self._slot(chunk).clone()
                self.set_aside += 0 if uses is None else self._aside[chunk].numel()
        synchronize([self._memory.memory])  # copies out of the slot may still be queued on the device
        self._taken += 1
        self._changed.notify_all()
        self._server.report_taken(self._taken)


def _expected_uses(waves: Waves, copies: Sequence[tuple[int, Box]]) -> list[int | None]:
    """Return how often the loader reads each chunk. None where that is unknown: of what it computes with, and of
    vectors, since vLLM copies biases again while it counts elements. A copy of those is kept until the end."""
    uses = [0] * len(waves.layout.chunks)
    for part, box in copies:
        for chunk, _, _ in waves.layout.overlaps(part, box):
            uses[chunk] += 1
    is_vector = [len(waves.layout.parts[part].shape) <= 1 for part, _ in waves.layout.chunks]
    return [count if count and not vector else None for count, vector in zip(uses, is_vector, strict=True)]
