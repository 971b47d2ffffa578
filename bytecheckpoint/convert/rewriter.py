"""From a committed checkpoint to new files, in bounded memory: what export, resharding and copying are made of.

A file's header is known from shapes alone, so a file is a header followed by a stream of pieces. Pieces are read ahead
by a few threads, verified and cast as they arrive, and written in file order. Whatever the sizes of tensors and
checkpoint, about ``PIECE * (AHEAD + threads)`` bytes are held at once.
"""

from __future__ import annotations

import itertools
import mmap
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import torch

from .checkpoint import Checkpoint, cut
from .dtypes import DType
from .engine.checksums import ChunkHasher
from .engine.reading.reader import Reader, ReadPart
from .engine.tensor_bytes import byte_view
from .errors import KeyExistsError, KeyNotFoundError
from .geometry import Box
from .manifest import MANIFEST_KEY
from .metadata import BasicMeta
from .planners import plan_load, slabs
from .safetensors_file import HeaderEntry, build_header
from .shards import torch_dtype
from .storage_backends.base import StorageBackend
from .tables import BoxTable, Int64

__all__ = ["AHEAD", "PIECE", "Item", "Progress", "Rewriter", "StreamedFile", "refuse_checkpoint"]

PIECE = 8 << 20
"""Bytes that are read, held and written at once."""

AHEAD = 3
"""Pieces that are read or waiting while one is written."""

_THREADS = 4

Progress = Callable[[int], None]
"""Called with the number of bytes that were done since the last call; from the caller's own thread."""


@dataclass(frozen=True)
class Item:
    """One tensor of a file to be: ``box`` of the tensor in manifest row ``row``, as ``dtype``, called ``name``."""

    name: str
    row: int
    box: Box
    dtype: DType

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.dtype.itemsize


@dataclass(frozen=True)
class StreamedFile:
    """A safetensors file to be: its first bytes, then ``items`` back to back."""

    key: str
    head: bytes
    items: tuple[Item, ...]

    @classmethod
    def lay_out(cls, key: str, items: Sequence[Item], note: dict[str, str]) -> StreamedFile:
        """Larger element types come first, so that every tensor is aligned. Raises ``FormatError`` for names that
        cannot stand in one file."""
        ordered = tuple(sorted(items, key=lambda item: -item.dtype.itemsize))
        entries = [HeaderEntry(item.name, item.dtype, item.box.lengths, item.nbytes) for item in ordered]
        return cls(key, build_header(entries, note), ordered)

    @property
    def data_size(self) -> int:
        return sum(item.nbytes for item in self.items)

    @property
    def size(self) -> int:
        return len(self.head) + self.data_size

    def offsets(self) -> Int64:
        """Where each item begins in the data area."""
        sizes = np.array([item.nbytes for item in self.items], np.int64)
        return np.cumsum(sizes) - sizes


class Rewriter:
    """Streams tensors of one checkpoint, whatever layout they are stored in. Use it as a context manager.

    Every byte is checked against the manifest on its way. ``bytes_read`` counts what was fetched.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        checkpoint.require_checksums()
        self._manifest = checkpoint.manifest
        self._io = ThreadPoolExecutor(_THREADS, thread_name_prefix="bcp-rewrite-io")
        # Apart from the pool above, which the tasks in this one wait for.
        self._ahead = ThreadPoolExecutor(2, thread_name_prefix="bcp-rewrite")
        self._reader = Reader(checkpoint.backend, checkpoint.manifest, self._io)
        # Reused, not allocated for each piece: what threads free, malloc keeps. One more than are read ahead, for the
        # one that is being written; each has room for a piece and its cast. Pages that are not used cost nothing.
        self._memories = [torch.frombuffer(mmap.mmap(-1, 2 * PIECE), dtype=torch.uint8) for _ in range(AHEAD + 1)]

    def __enter__(self) -> Rewriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ahead.shutdown(wait=True, cancel_futures=True)
        self._io.shutdown(wait=True, cancel_futures=True)

    @property
    def bytes_read(self) -> int:
        return self._reader.stats.read

    def read(self, row: int, box: Box, dtype: DType | None = None, memory: torch.Tensor | None = None) -> torch.Tensor:
        """One box of a tensor, contiguous, cast where ``dtype`` says so; in ``memory`` (flat uint8), where that is
        given and large enough for both. Raises ``CorruptionError``."""
        meta = self._manifest.tensors.meta_of(row)
        out = _tensor_in(memory, 0, box, torch_dtype(meta))
        mine = self._manifest.shards_of(row)
        stored = self._manifest.shards.take(np.arange(mine.start, mine.stop, dtype=np.int64))
        plan = plan_load(self._manifest.tensors, stored, BoxTable.build([(row, box)]))
        self._reader.read([ReadPart(mine.start + i, part, cut(out, part, box)) for _, i, part in plan.pieces()])
        if dtype is None or dtype == meta.dtype:
            return out
        return _tensor_in(memory, PIECE, box, torch_dtype(BasicMeta(dtype, ()))).copy_(out)

    def pieces(self, items: Sequence[Item]) -> Iterator[tuple[int, torch.Tensor]]:
        """``(index of the item, next piece of it)``, every item's pieces in the order of its bytes. A piece is good
        until the next one is asked for."""
        waiting: deque[tuple[int, Future[torch.Tensor]]] = deque()
        memories = itertools.cycle(self._memories)
        for index, item in enumerate(items):
            itemsize = self._manifest.tensors.meta_of(item.row).dtype.itemsize
            for box in slabs(item.box, item.box, max(itemsize, item.dtype.itemsize), PIECE, 0):
                waiting.append((index, self._ahead.submit(self.read, item.row, box, item.dtype, next(memories))))
                if len(waiting) >= AHEAD:
                    first, future = waiting.popleft()
                    yield first, future.result()
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()

    def write(
        self, target: StorageBackend, file: StreamedFile, progress: Progress, *, chunk_size: int = PIECE
    ) -> list[int]:
        """Write one file and make it durable; returns the checksums of its items' chunks, in file order.

        On any error nothing of the file remains. Where a half-written file would be visible, its header is written
        last: until then it begins with zeros, which no reader takes for a safetensors file.
        """
        hasher = ChunkHasher(chunk_size)
        at, current = len(file.head), 0
        with target.create(file.key, file.size) as writer:
            if target.atomic_writer:
                writer.write(0, file.head)
            for index, piece in self.pieces(file.items):
                if index != current:
                    hasher.end_item()
                    current = index
                data = byte_view(piece)
                writer.write(at, data)
                hasher.update(data)
                at += len(data)
                progress(len(data))
            hasher.end_item()
            if not target.atomic_writer:
                writer.write(0, file.head)
            writer.complete()
        return hasher.checksums


def _tensor_in(memory: torch.Tensor | None, start: int, box: Box, dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor with the box's shape in ``memory`` from byte ``start`` on; a new one where it has no room."""
    nbytes = box.numel * dtype.itemsize
    if memory is None or start + nbytes > len(memory):
        return torch.empty(box.lengths, dtype=dtype)
    flat = memory[start : start + nbytes]
    return (flat if dtype == torch.uint8 else flat.view(dtype)).view(box.lengths)


def refuse_checkpoint(target: StorageBackend, source_url: str = "") -> None:
    """Raise ``KeyExistsError`` where a checkpoint is committed at ``target``: these tools never overwrite one."""
    try:
        target.stat(MANIFEST_KEY)
    except KeyNotFoundError:
        return
    if target.url == source_url:
        raise KeyExistsError(f"{target.url} is both source and target; give another target")
    raise KeyExistsError(
        f"{target.url} holds a checkpoint already, and it was left as it is; give another target, or remove it first"
    )
