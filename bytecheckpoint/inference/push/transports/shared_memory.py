"""Arenas: anonymous shared memory of a worker, which senders on its host write to.

A memfd has no name anywhere: it is gone when the last process that has it mapped has ended, however that ended. A
sender reaches it through ``/proc/<pid>/fd``, which the kernel lets only processes of the same user open, and knows it
again by a token that nobody can guess.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import EngineError

__all__ = ["Address", "Arena", "attach", "open_arena"]

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(frozen=True)
class Address:
    """Where a process of the same user on the same host finds an arena."""

    pid: int
    descriptor: int
    token: str
    nbytes: int

    @classmethod
    def from_plain(cls, values: Any) -> Address:
        pid, descriptor, token, nbytes = values
        return cls(pid, descriptor, token, nbytes)

    def plain(self) -> list[Any]:
        return [self.pid, self.descriptor, self.token, self.nbytes]


class Arena:
    """``nbytes`` of memory of this process. Never changes its size: a sender that is late writes into memory that
    exists, if perhaps only for itself."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.token = secrets.token_hex(16)
        size = max(nbytes, 1)
        self._descriptor = os.memfd_create(f"bcp-{self.token}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            try:
                # Taken now, as memory that is missing later is a SIGBUS and no error.
                os.posix_fallocate(self._descriptor, 0, size)
            except OSError as error:
                raise EngineError(
                    f"no memory for an arena of {nbytes:,} bytes ({error.strerror}); a worker needs two of the size of "
                    "its weights"
                ) from error
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _SEALS)
            self.memory = _mapped(self._descriptor, size)
        except BaseException:
            os.close(self._descriptor)
            raise

    @property
    def address(self) -> Address:
        return Address(os.getpid(), self._descriptor, self.token, self.nbytes)

    @property
    def descriptor(self) -> int:
        """Until ``close``."""
        return self._descriptor

    def close(self) -> None:
        """Give up this process's hold; the memory goes when nobody has a view of it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self.memory = torch.empty(0, dtype=torch.uint8)

    def __del__(self) -> None:
        self.close()


def attach(address: Address) -> torch.Tensor | None:
    """The memory of another process's arena; None where ``open_arena`` says so."""
    descriptor = open_arena(address)
    if descriptor is None:
        return None
    try:
        return _mapped(descriptor, max(address.nbytes, 1))
    finally:
        os.close(descriptor)


def open_arena(address: Address) -> int | None:
    """A descriptor of another process's arena, for the caller to close; None where this process cannot reach it
    (another host, user or container), or where it is gone."""
    try:
        descriptor = os.open(f"/proc/{address.pid}/fd/{address.descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    if not _is_arena(descriptor, address):
        os.close(descriptor)
        return None
    return descriptor


def _is_arena(descriptor: int, address: Address) -> bool:
    # On another host the same number may be anything.
    if os.readlink(f"/proc/self/fd/{descriptor}") != f"/memfd:bcp-{address.token} (deleted)":
        return False
    sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    return sealed and os.fstat(descriptor).st_size == max(address.nbytes, 1)


def _mapped(descriptor: int, size: int) -> torch.Tensor:
    # Tensors keep the mapping alive, and the last of them ends it.
    with torch.inference_mode(False):  # other threads write to it
        return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
