"""Stream the tensors of a checkpoint into new safetensors files, in bounded memory.

A file's header depends on shapes only, so a file is a header followed by a stream of pieces. A few threads read pieces
ahead, verify and cast them; the caller writes them in file order. Whatever the sizes of tensors and checkpoint, about
``2 * PIECE_BYTES * (PIECES_AHEAD + 1)`` bytes are held at once.
"""

from __future__ import annotations

import itertools
import mmap
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import numpy.typing as npt
import torch

from ..checkpoint.checkpoint import Checkpoint
from ..engine.checksums import ChunkHasher
from ..engine.reading.reader import Reader, ReadPart
from ..engine.tensor_bytes import box_view, byte_view
from ..errors import CommitUnknownError, KeyExistsError, KeyNotFoundError
from ..format.manifest import MANIFEST_KEY
from ..format.safetensors import HeaderEntry, build_header
from ..planners import plan_load, split_box
from ..storage_backends.base import StorageBackend
from ..tensors.dtypes import DType
from ..tensors.geometry import Box
from ..tensors.metadata import BasicMeta
from ..tensors.shards import torch_dtype
from ..tensors.tables import BoxTable, Int64

__all__ = [
    "PIECES_AHEAD",
    "PIECE_BYTES",
    "OutputFile",
    "OutputTensor",
    "Progress",
    "Rewriter",
    "cleanup_on_failure",
    "refuse_checkpoint",
]

PIECE_BYTES = 8 << 20
"""Bytes that are read, held and written at once: enough to reach the rate of disks and object stores."""

PIECES_AHEAD = 3
"""Pieces that are read ahead while one is written, so that reading and writing overlap."""

_IO_THREADS = 4

Progress = Callable[[int], None]
"""Called in the calling thread with the number of bytes done since the last call."""


@dataclass(frozen=True)
class OutputTensor:
    """One tensor of an output file: ``box`` of the tensor in manifest row ``row``, stored as ``dtype`` and ``name``."""

    name: str
    row: int
    box: Box
    dtype: DType

    @property
    def nbytes(self) -> int:
        """Bytes in the output file."""
        return self.box.numel * self.dtype.itemsize


@dataclass(frozen=True)
class OutputFile:
    """The layout of an output file: its padded header, then ``tensors`` back to back."""

    key: str
    section: str
    head: bytes
    tensors: tuple[OutputTensor, ...]

    @classmethod
    def lay_out(cls, key: str, section: str, tensors: Sequence[OutputTensor], note: dict[str, str]) -> OutputFile:
        """Lay out a file. ``note`` is the header's metadata. Raises ``FormatError`` for names that cannot share a file.

        Tensors with larger elements come first, so that every tensor is aligned.
        """
        ordered = tuple(sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize))
        entries = [HeaderEntry(tensor.name, tensor.dtype, tensor.box.lengths, tensor.nbytes) for tensor in ordered]
        return cls(key, section, build_header(entries, note), ordered)

    @property
    def data_size(self) -> int:
        """Bytes after the header."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self.head) + self.data_size

    def offsets(self) -> Int64:
        """Return the offset of each tensor from the end of the header."""
        sizes = np.array([tensor.nbytes for tensor in self.tensors], np.int64)
        return np.cumsum(sizes) - sizes


class Rewriter:
    """Reads, casts and writes tensors of one checkpoint. Use it as a context manager.

    Every byte is checked against the manifest. ``bytes_read`` counts the bytes that were fetched.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Raise ``StateError`` if the checkpoint has no checksums."""
        checkpoint.require_checksums()
        self._manifest = checkpoint.manifest
        self._io = ThreadPoolExecutor(_IO_THREADS, thread_name_prefix="bcp-rewrite-io")
        # A separate pool: its tasks wait for tasks of the pool above.
        self._ahead = ThreadPoolExecutor(2, thread_name_prefix="bcp-rewrite")
        self._reader = Reader(checkpoint.backend, checkpoint.manifest, self._io)
        # Allocated once: malloc keeps the memory that threads free. One more than are read ahead, for the piece that is
        # being written; each has room for a piece and its cast. Unused pages cost nothing.
        self._memories = [
            torch.frombuffer(mmap.mmap(-1, 2 * PIECE_BYTES), dtype=torch.uint8) for _ in range(PIECES_AHEAD + 1)
        ]

    def __enter__(self) -> Rewriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ahead.shutdown(wait=True, cancel_futures=True)
        self._io.shutdown(wait=True, cancel_futures=True)

    @property
    def bytes_read(self) -> int:
        """Bytes fetched from the checkpoint so far."""
        return self._reader.stats.read

    def read(self, row: int, box: Box, dtype: DType | None = None, memory: torch.Tensor | None = None) -> torch.Tensor:
        """Return one box of the tensor in manifest row ``row``, contiguous, cast to ``dtype`` if that is given.

        The result lies in ``memory`` (flat uint8) if that is given and large enough. Raises ``CorruptionError``.
        """
        meta = self._manifest.tensors.meta_of(row)
        out = _tensor_in(memory, 0, box, torch_dtype(meta))
        shards = self._manifest.shards_of(row)
        stored = self._manifest.shards.take(np.arange(shards.start, shards.stop, dtype=np.int64))
        plan = plan_load(self._manifest.tensors, stored, BoxTable.build([(row, box)]))
        self._reader.read([ReadPart(shards.start + i, part, box_view(out, part, box)) for _, i, part in plan.rows()])
        if dtype is None or dtype == meta.dtype:
            return out
        return _tensor_in(memory, PIECE_BYTES, box, torch_dtype(BasicMeta(dtype, ()))).copy_(out)

    def pieces(self, tensors: Sequence[OutputTensor]) -> Iterator[torch.Tensor]:
        """Yield the pieces of all tensors in the order of their bytes. A piece is valid until the next is requested."""
        waiting: deque[Future[torch.Tensor]] = deque()
        memories = itertools.cycle(self._memories)
        for tensor in tensors:
            itemsize = self._manifest.tensors.meta_of(tensor.row).dtype.itemsize
            for box in split_box(tensor.box, tensor.box, max(itemsize, tensor.dtype.itemsize), PIECE_BYTES, 0):
                waiting.append(self._ahead.submit(self.read, tensor.row, box, tensor.dtype, next(memories)))
                if len(waiting) >= PIECES_AHEAD:
                    yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def write(
        self, target: StorageBackend, file: OutputFile, progress: Progress, *, chunk_size: int = PIECE_BYTES
    ) -> npt.NDArray[np.uint64]:
        """Write one file and make it durable. Return the checksums of its tensors' chunks, in file order.

        On an error the file is removed. If the store shows files that are being written, the header is written last:
        until then the file starts with zeros, which no reader accepts as safetensors.
        """
        hasher = ChunkHasher(file.offsets(), [tensor.nbytes for tensor in file.tensors], chunk_size)
        at = 0
        with target.create(file.key, file.size) as writer:
            if target.atomic_writer:
                writer.write(0, file.head)
            for piece in self.pieces(file.tensors):
                data = byte_view(piece)
                writer.write(len(file.head) + at, data)
                hasher.update(at, data)
                at += len(data)
                progress(len(data))
            if not target.atomic_writer:
                writer.write(0, file.head)
            writer.complete()
        return hasher.checksums()


def _tensor_in(memory: torch.Tensor | None, start: int, box: Box, dtype: torch.dtype) -> torch.Tensor:
    """Return a contiguous tensor of the box's shape, in ``memory`` from byte ``start`` on if there is room."""
    nbytes = box.numel * dtype.itemsize
    if memory is None or start + nbytes > len(memory):
        return torch.empty(box.lengths, dtype=dtype)
    flat = memory[start : start + nbytes]
    return (flat if dtype == torch.uint8 else flat.view(dtype)).view(box.lengths)


@contextmanager
def cleanup_on_failure(clean_up: Callable[[], None]) -> Iterator[None]:
    """Call ``clean_up`` if the block fails, unless its manifest may be in place (``CommitUnknownError``)."""
    try:
        yield
    except CommitUnknownError:
        raise
    except BaseException:
        clean_up()
        raise


def refuse_checkpoint(target: StorageBackend, source_url: str = "") -> None:
    """Raise ``KeyExistsError`` if ``target`` holds a committed checkpoint: conversions never overwrite one."""
    try:
        target.stat(MANIFEST_KEY)
    except KeyNotFoundError:
        return
    if target.url == source_url:
        raise KeyExistsError(f"{target.url} is both source and target; give another target")
    raise KeyExistsError(
        f"{target.url} already holds a checkpoint, which was not changed; give another target, or remove it first"
    )
