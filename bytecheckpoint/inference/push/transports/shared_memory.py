"""Shared memory of a worker, which senders of the same user on the same host write into.

An arena is a memfd: it has no name, and the kernel frees it when the last process that maps it ends. A sender opens it
through ``/proc/<pid>/fd``, which the kernel permits only to processes of the same user, and identifies it by a random
token.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ....engine.blocks import Pinning
from ....errors import EngineError
from ..layout import ArrivedChunk, ChunkStore, Layout
from .base import OutgoingChunk, Transport

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class ArenaAddress(NamedTuple):
    """Where a process of the same user on the same host finds an arena."""

    pid: int
    descriptor: int
    token: str
    nbytes: int


class SharedArena:
    """``nbytes`` of shared memory of fixed size. A late sender writes into memory that still exists, even when no other
    process maps it any more.

    ``descriptor`` is its open file descriptor, and -1 after ``close``. If this process copies from the memory to a CUDA
    ``device``, it is registered with CUDA where that is possible.
    """

    def __init__(self, nbytes: int, device: torch.device | None = None) -> None:
        self.nbytes = nbytes
        self.token = secrets.token_hex(16)
        size = max(nbytes, 1)
        self.descriptor = os.memfd_create(f"bcp-{self.token}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            try:
                # Allocate now: a page that cannot be allocated later raises SIGBUS instead of an error.
                os.posix_fallocate(self.descriptor, 0, size)
            except OSError as error:
                raise EngineError(
                    f"no memory for an arena of {nbytes:,} bytes ({error.strerror}); a worker needs two of the size of "
                    "its weights"
                ) from error
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
            self.memory = _map(self.descriptor, size)
            self._pinning = Pinning(self.memory)
            if device is not None and device.type == "cuda":
                self._pinning.try_pin(device)
        except BaseException:
            os.close(self.descriptor)
            self.descriptor = -1  # `__del__` must not close it again: it may be another file's by then
            raise

    @property
    def address(self) -> ArenaAddress:
        return ArenaAddress(os.getpid(), self.descriptor, self.token, self.nbytes)

    def close(self) -> None:
        """Release this process's mapping. The memory is freed when no process maps it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
            self._pinning.unpin()
            del self._pinning  # it maps the memory too
            self.memory = torch.empty(0, dtype=torch.uint8)

    def __del__(self) -> None:
        self.close()


class ArenaChunks(ChunkStore):
    """The chunks of ``layout`` in an arena, which has room for all of them."""

    def __init__(self, layout: Layout, memory: torch.Tensor) -> None:
        self._layout, self._memory = layout, memory

    def claim(self, chunk: int, nbytes: int) -> torch.Tensor:
        if chunk >= len(self._layout.chunks) or nbytes != self._layout.sizes[chunk]:
            raise EngineError(f"there is no chunk {chunk} of {nbytes} bytes in this version")
        return self.get(chunk)

    def verify(self, chunks: Sequence[ArrivedChunk]) -> None:
        """Do nothing: all chunks are verified before the first one is loaded."""

    def get(self, chunk: int) -> torch.Tensor:
        return self._memory[self._layout.span(chunk)]


def attach(address: ArenaAddress) -> torch.Tensor | None:
    """Map another process's arena; None where ``open_arena`` returns None."""
    descriptor = open_arena(address)
    if descriptor is None:
        return None
    try:
        return _map(descriptor, max(address.nbytes, 1))
    finally:
        os.close(descriptor)


def open_arena(address: ArenaAddress) -> int | None:
    """Open another process's arena; the caller closes the descriptor.

    Returns None when this process cannot reach the arena (another host, user or container) or the arena is gone.
    """
    try:
        descriptor = os.open(f"/proc/{address.pid}/fd/{address.descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    if not _is_arena(descriptor, address):
        os.close(descriptor)
        return None
    return descriptor


def _is_arena(descriptor: int, address: ArenaAddress) -> bool:
    # On another host, the same pid and number may be any file.
    if os.readlink(f"/proc/self/fd/{descriptor}") != f"/memfd:bcp-{address.token} (deleted)":
        return False
    sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    return sealed and os.fstat(descriptor).st_size == max(address.nbytes, 1)


def _map(descriptor: int, size: int) -> torch.Tensor:
    # Tensors keep the mapping alive; the last of them unmaps it.
    with torch.inference_mode(False):  # other threads write into it
        return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)


class SharedMemoryTransport(Transport):
    """Copies chunks into a worker's mapped arena."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory

    def write(self, chunks: Sequence[OutgoingChunk]) -> None:
        for places, data, _ in chunks:
            for place in places:
                self._memory[place.offset : place.offset + data.numel()].copy_(data)

    def close(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
