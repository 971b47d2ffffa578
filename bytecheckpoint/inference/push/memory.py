"""The memory policy of a worker, and the versions of its weights that it holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import xxhash

from ...engine.tensor_bytes import byte_view
from ...errors import EngineError
from .layout import ALIGNMENT_BYTES, Layout, Waves, align
from .messages import Table
from .transports.base import find_damaged
from .transports.shared_memory import ArenaChunks, SharedArena

Mode = Literal["double", "streamed"]

DOUBLE: Mode = "double"
"""The worker holds the next version, which is verified before any weight changes, and the served one for a rollback."""
STREAMED: Mode = "streamed"
"""Chunks pass through a ring buffer and are verified before they are loaded. No rollback to a pushed version."""

_FREE_SHARE = 0.8  # of the free memory; other processes of the host need the rest
_SLOTS = 4  # enough to overlap sending, receiving and loading
_SLOT_BYTES = 64 << 20  # larger slots overlap no better

Version = int | str | None


def choose_mode(nbytes: int, limit: int | None, held: int, sharers: int) -> Mode:
    """Return the mode for a version of ``nbytes``. ``limit`` is the memory that the user permits; None stands for what
    pushes already hold and the host's free memory, which ``sharers`` workers divide among themselves."""
    allowed = limit if limit is not None else held + int(_FREE_SHARE * free_memory() / sharers)
    return DOUBLE if allowed >= 2 * nbytes else STREAMED


def ring_of(layout: Layout, limit: int | None) -> Waves:
    """Return the waves of the ring buffer that fits into the limit, by default 256 MiB.

    It has four slots, or fewer where chunks are long, but at least one; with one, nothing overlaps. Raises
    ``EngineError`` when the longest chunk does not fit.
    """
    limit = _SLOTS * _SLOT_BYTES if limit is None else limit
    longest = max(map(align, layout.sizes), default=ALIGNMENT_BYTES)
    if longest > limit:
        raise EngineError(
            f"a worker may use {limit:,} bytes for a push, and one chunk needs {longest:,}; raise "
            "memory_bytes of Pusher, or lower its chunk_bytes"
        )
    limit = min(limit, max(layout.nbytes, longest))
    slot_bytes = max(longest, min(_SLOT_BYTES, limit // _SLOTS) // ALIGNMENT_BYTES * ALIGNMENT_BYTES)
    return Waves(layout, min(_SLOTS, limit // slot_bytes), slot_bytes)


def free_memory() -> int:
    """Return the bytes that this process can still allocate: the host's available memory, or what the limit of its
    control group (a container) leaves."""
    free = 1024 * _field("/proc/meminfo", "MemAvailable:")
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        allowed, taken = _number(limit), _number(used)
        if allowed is not None and taken is not None:
            # The used memory includes the page cache, which the kernel reclaims.
            free = min(free, max(allowed - taken, 0) + _field(f"{Path(used).parent}/memory.stat", "inactive_file"))
    return free


def _field(path: str, name: str) -> int:
    """Return the number after a name in a file of the kernel; 0 if it has none."""
    try:
        lines = Path(path).read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), 0)


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such file, or "max"
        return None


@dataclass
class HeldVersion:
    """A version, and the arena with its bytes if this worker holds them.

    ``digests`` are the xxh3-64 digests of its chunks, and empty while a sender may be writing. ``applied_by`` is the
    transaction that applied the version; it distinguishes versions of the same name. ``finite`` states that the senders
    checked its values.
    """

    table: Table
    layout: Layout
    arena: SharedArena | None
    digests: list[int]
    version: Version = None
    applied_by: str = ""
    finite: bool = True

    @property
    def memory(self) -> torch.Tensor:
        assert self.arena is not None
        return self.arena.memory

    @property
    def chunks(self) -> ArenaChunks:
        return ArenaChunks(self.layout, self.memory)

    @property
    def digest(self) -> bytes:
        """The digest of all bytes; equal bytes in equal layouts have equal digests."""
        return xxhash.xxh3_128_digest(repr(self.digests).encode())

    def faults(self, digests: list[int]) -> list[int]:
        """Return the chunks whose bytes do not have these digests."""
        data = byte_view(self.memory)
        return find_damaged([data[self.layout.span(chunk)] for chunk in range(len(digests))], digests)

    def release(self) -> None:
        """Free the bytes."""
        if self.arena is not None:
            self.arena.close()
            self.arena = None


class VersionStore:
    """The versions of one worker.

    ``served`` is None while the engine serves what it started with, or has loaded itself. ``next`` is being written, or
    will be; until then it holds the version that was served before. ``device`` is that of the weights, if it is known.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self.served: HeldVersion | None = None
        self.next: HeldVersion | None = None
        self._before: HeldVersion | None = None

    @property
    def _all(self) -> list[HeldVersion]:
        return [version for version in (self.next, self.served) if version is not None]

    @property
    def held(self) -> int:
        """Bytes of host memory."""
        return sum(version.layout.nbytes for version in self._all if version.arena is not None)

    @property
    def tokens(self) -> list[str]:
        """The tokens of the existing arenas; senders may keep their mappings of these."""
        return [version.arena.token for version in self._all if version.arena is not None]

    def layout(self, digest: bytes, packed: bytes | None) -> Layout | None:
        """Return the layout with this digest; None when it is neither known nor given."""
        for version in self._all:
            if version.layout.digest == digest:
                return version.layout
        return None if packed is None else Layout.unpack(packed)

    def begin(self, table: Table, layout: Layout, mode: Mode, is_read: Callable[[HeldVersion], bool]) -> HeldVersion:
        """Prepare ``next`` for a version of ``layout``.

        In mode ``streamed``, all versions lose their arenas. Memory that another engine still reads (``is_read``) is
        never reused.
        """
        self._before = None  # its memory may be written to
        if mode == STREAMED:
            self.release()
            self.next = HeldVersion(table, layout, None, [])
            return self.next
        found = self.next
        if found is not None and (found.layout.digest != layout.digest or not found.digests or is_read(found)):
            # A sender of a failed push may still be writing there.
            found.release()
            found = None
        self.next = found or HeldVersion(table, layout, SharedArena(layout.nbytes, self._device), [])
        return self.next

    def serve_next(self, transaction: str) -> None:
        """Make ``next`` the served version."""
        assert self.next is not None
        self._before, self.served = self.served, self.next
        self.served.applied_by = transaction
        self.next = self._before if self._before is not None and self._before.arena is not None else None

    def repeat(self, version: HeldVersion, transaction: str) -> None:
        """Serve the same bytes under the name of ``version``. ``next`` stays."""
        assert self.served is not None
        finite = self.served.finite or version.finite
        self._before = self.served
        self.served = replace(self.served, version=version.version, applied_by=transaction, finite=finite)

    @property
    def before(self) -> HeldVersion | None:
        """The version that was served before, if this worker holds all of its bytes and no sender may write there."""
        return self._before if self._before is not None and self._before.arena is not None else None

    def revert(self) -> None:
        """Make the previous version the served one."""
        reverted, self.served, self._before = self.served, self._before, None
        if reverted is not None and self.served is not None and reverted.arena is self.served.arena:
            return  # of the same bytes
        self.next = reverted if reverted is not None and reverted.arena is not None else None

    def forget(self) -> None:
        """Note that the engine serves none of these versions any more. Memory is kept for the next one."""
        served, self.served, self._before = self.served, None, None
        if self.next is None:
            self.next = served if served is not None and served.arena is not None else None
        elif served is not None:
            served.release()

    def release(self) -> None:
        """Free all memory. The engine keeps serving."""
        for version in self._all:
            version.release()
        self.next = self._before = None
