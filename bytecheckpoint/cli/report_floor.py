"""How fast this machine writes and reads bytes below a root: what ``bcp report`` compares saves and loads with."""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from time import perf_counter
from typing import Any

from ..runtime.threads import Threads
from ..storage_backends.base import StorageBackend

_BYTES = 1 << 30
_PIECE = 8 << 20
_THREADS = 8


def measure_floor(root: StorageBackend) -> dict[str, float]:
    """Write an object, make it durable, read it and remove it. Return the bytes per second of ``write`` and ``read``.

    Several threads move large pieces of aligned memory, which bypass the page cache where the store allows it. Raises
    ``StorageError``.
    """
    key = f"floor-{secrets.token_hex(8)}"
    pieces = [mmap.mmap(-1, _PIECE) for _ in range(_THREADS)]
    for piece in pieces:
        piece[:] = os.urandom(_PIECE)  # a file system may store zeros as nothing
    with Threads(_THREADS, thread_name_prefix="bcp-floor") as pool:
        try:
            begin = perf_counter()
            with root.create(key, _BYTES) as writer:
                _move(pool, pieces, writer.write)
                writer.complete()
            written = perf_counter()
            with root.open_object(key) as reader:
                is_direct = reader.direct_alignment() > 0
                _move(pool, pieces, reader.read_direct if is_direct else lambda at, piece: reader.read(at, [piece]))
            end = perf_counter()
        finally:
            root.delete([key])
    return {"write": _BYTES / (written - begin), "read": _BYTES / (end - written)}


def _move(pool: Executor, pieces: Sequence[mmap.mmap], move: Callable[[int, Any], object]) -> None:
    """Call ``move`` with all offsets of the object; each thread has a piece of memory."""

    def every(number: int) -> None:
        for offset in range(number * _PIECE, _BYTES, len(pieces) * _PIECE):
            move(offset, pieces[number])

    for done in [pool.submit(every, number) for number in range(len(pieces))]:
        done.result()
