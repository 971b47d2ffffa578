"""Stream the tensors of a checkpoint into new safetensors files, in bounded memory.

A file's header depends on shapes only, so a file is a header followed by a stream of pieces. A few threads read pieces
ahead, verify and cast them; the caller writes them in file order. Whatever the sizes of tensors and checkpoint, about
``2 * PIECE_BYTES * (PIECES_AHEAD + 1)`` bytes are held at once.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import numpy as np
import torch

from ..checkpoint.attempts import remove_attempt
from ..checkpoint.index import Index
from ..checkpoint.manifest_file import commit
from ..engine.checksums import ChunkHasher, chunk_size_for
from ..engine.reading.reader import ReadPart, ShardReader
from ..engine.tensor_bytes import byte_view
from ..engine.writing import WrittenFile
from ..errors import CommitUnknownError, KeyExistsError, KeyNotFoundError
from ..format.checksums import checksum_of, empty_checksums
from ..format.manifest.document import Manifest, timestamp
from ..format.manifest.envelope import MANIFEST_KEY
from ..format.safetensors import build_header
from ..planners.extents import runs_of, split_box
from ..runtime.threads import Threads
from ..saving.record import file_table
from ..storage_backends.base import StorageBackend
from ..tensors.dtypes import DType
from ..tensors.geometry import Box, moved_box
from ..tensors.metadata import BasicMeta
from ..tensors.shards import torch_dtype
from ..tensors.tables import BoxTable, Int64
from ..version import VERSION
from .lora import LowRank

PIECE_BYTES = 8 << 20
"""Bytes that are read, held and written at once: enough to reach the rate of disks and object stores."""

PIECES_AHEAD = 3
"""Pieces that are read ahead while one is written, so that reading and writing overlap."""

_IO_THREADS = 4
_MAPPED_BYTES = 1 << 20  # malloc would keep the memory of larger tensors, for each thread that frees one

Progress = Callable[[int], None]
"""Called in the calling thread with the number of bytes done since the last call."""


@dataclass(frozen=True)
class OutputTensor:
    """One tensor of an output file: ``box`` of the tensor in manifest row ``row``, stored as ``dtype`` and ``name``.

    ``form`` is its shape in the file if that is not the box's. ``added`` is added to what is stored.
    """

    name: str
    row: int
    box: Box
    dtype: DType
    form: tuple[int, ...] | None = None
    added: LowRank | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the output file."""
        return self.box.lengths if self.form is None else self.form

    @property
    def nbytes(self) -> int:
        """Bytes in the output file."""
        return self.box.numel * self.dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype in the output file. Raises ``UnsupportedTensorError`` if this version of torch does not have it."""
        return torch_dtype(BasicMeta(self.dtype, ()))


@dataclass(frozen=True)
class OutputFile:
    """The layout of an output file: its padded header, then ``tensors`` back to back.

    The header of a file of plain values is its whole document. ``kind`` and ``rank`` are columns of the manifest.
    """

    key: str
    section: str
    head: bytes
    tensors: tuple[OutputTensor, ...] = ()
    kind: str = "tensors"
    rank: int = 0

    @classmethod
    def lay_out(cls, key: str, section: str, tensors: Sequence[OutputTensor], note: dict[str, str]) -> OutputFile:
        """Lay out a file. ``note`` is the header's metadata. Raises ``FormatError`` for names that cannot share a file.

        Tensors with larger elements come first, so that every tensor is aligned.
        """
        ordered = tuple(sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize))
        entries = [(tensor.name, BasicMeta(tensor.dtype, tensor.shape)) for tensor in ordered]
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

    Every byte that has a checksum is checked; leaving the context checks the CRC-32s of another system's files.
    ``bytes_read`` counts the fetched bytes.
    """

    piece_bytes = PIECE_BYTES
    """The most bytes of a piece, stored as well as cast."""

    def __init__(self, index: Index) -> None:
        self._index, self._manifest = index, index.manifest
        self._io = Threads(_IO_THREADS, thread_name_prefix="bcp-rewrite-io")
        # A separate pool: its tasks wait for tasks of the pool above.
        self._ahead = Threads(2, thread_name_prefix="bcp-rewrite")
        read = partial(ShardReader, index.data, verify=index.is_own, crcs=None if index.is_own else index.crcs)
        self._reader = read(index.manifest, self._io, views=index.views)
        self._copies = read(self._reader.stored, self._io)
        self._crc_check = self._reader.crc_check()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        self._ahead.shutdown(wait=True, cancel_futures=True)
        self._io.shutdown(wait=True, cancel_futures=True)
        if kind is None and self._crc_check is not None:
            self._crc_check.finish()

    @property
    def bytes_read(self) -> int:
        """Bytes fetched from the checkpoint so far."""
        return self._reader.stats.read + self._copies.stats.read

    def read(self, row: int, box: Box) -> torch.Tensor:
        """Return one box of the tensor in manifest row ``row``, contiguous. Raises ``CorruptionError``."""
        return self._read_all([OutputTensor("", row, box, self._manifest.tensors.meta_of(row).dtype)])[0]

    def pieces(self, tensors: Sequence[OutputTensor]) -> Iterator[torch.Tensor]:
        """Yield the pieces of all tensors in the order of their bytes."""
        waiting: deque[Future[list[torch.Tensor]]] = deque()
        for batch in self._batches(tensors):
            waiting.append(self._ahead.submit(self._read_all, batch))
            if len(waiting) >= PIECES_AHEAD:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()

    def _batches(self, tensors: Sequence[OutputTensor]) -> Iterator[list[OutputTensor]]:
        """Split large tensors, and combine small ones: a batch has at most ``piece_bytes``, stored as well as cast."""
        meta_of = self._manifest.tensors.meta_of
        pieces = (
            (replace(tensor, box=box), box.numel * itemsize)
            for tensor in tensors
            for itemsize in [max(meta_of(tensor.row).dtype.itemsize, tensor.dtype.itemsize)]
            for box in split_box(tensor.box, tensor.box, itemsize, self.piece_bytes, 0)
        )
        for run in runs_of(pieces, lambda piece: piece[1], self.piece_bytes):
            yield [tensor for tensor, _ in run]

    def _read_all(self, batch: Sequence[OutputTensor]) -> list[torch.Tensor]:
        """Return the tensors, contiguous and cast."""
        stored = [torch_dtype(self._manifest.tensors.meta_of(tensor.row)) for tensor in batch]
        found = [_empty(one.box, dtype) for one, dtype in zip(batch, stored, strict=True)]
        parts = self._reader.parts_of([(one.row, one.box, tensor) for one, tensor in zip(batch, found, strict=True)])
        self._reader.read(parts, self._crc_check)
        for part in parts:
            self._average(part)
        found = [
            tensor if one.added is None else one.added.added_to(tensor, one.box, self.read)
            for tensor, one in zip(found, batch, strict=True)
        ]
        return [
            tensor if tensor.dtype == one.torch_dtype else _empty(one.box, one.torch_dtype).copy_(tensor)
            for tensor, one in zip(found, batch, strict=True)
        ]

    def _average(self, part: ReadPart) -> None:
        """Replace what was read by the mean with what the other ranks stored, computed in float64, if it is one."""
        copies = self._index.means.get(part.row, ())
        if copies and part.out.numel():
            total, value = part.out.double(), torch.empty_like(part.out, memory_format=torch.contiguous_format)
            shard = self._manifest.shards.box_of(part.row)
            for row, within in copies:
                box = moved_box(shard, within, part.box)
                self._copies.read([ReadPart(row, box, value.view(box.lengths))], self._crc_check)
                total += value
            part.out.copy_(total / (1 + len(copies)))

    def write(
        self, target: StorageBackend, file: OutputFile, progress: Progress, *, chunk_size: int = PIECE_BYTES
    ) -> WrittenFile:
        """Write one file and make it durable. Return it with the checksums of its tensors' chunks, in file order.

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
        if not file.tensors:
            progress(len(file.head))
        head = len(file.head), checksum_of(file.head)
        return WrittenFile(file.key, file.size, *head, chunk_size, file.section, file.kind, hasher.checksums())

    def commit(self, target: StorageBackend, attempt: str, files: Sequence[OutputFile], progress: Progress) -> None:
        """Write all files of a new checkpoint and commit it, if everything that was read is right; use it once.

        After a failure, nothing remains. Raises as ``convert.reshard.reshard``.
        """
        with cleanup_on_failure(lambda: remove_attempt(target, attempt)):
            with self:
                manifest = self.write_all(target, attempt, files, progress)
            commit(target, manifest, may_replace=False)

    def write_all(
        self, target: StorageBackend, attempt: str, files: Sequence[OutputFile], progress: Progress
    ) -> Manifest:
        """Write all files of a new checkpoint, and return its manifest, which is not committed."""
        old = self._manifest
        chunk_size = chunk_size_for(sum(file.data_size for file in files))
        written = [self.write(target, file, progress, chunk_size=chunk_size) for file in files]
        tensors = [(number, tensor) for number, file in enumerate(files) for tensor in file.tensors]
        return Manifest(
            library_version=VERSION,
            step=old.step,
            created=old.created or timestamp(),  # another system's files may not state it
            world_size=old.world_size,
            attempt=attempt,
            metadata=old.metadata,
            sections=old.sections,
            # One process writes the tensors. Values of single ranks refer to the rank that saved them.
            files=file_table(
                [(file.rank, one) for file, one in zip(files, written, strict=True)],
                {section.name: number for number, section in enumerate(old.sections)},
            ),
            tensors=old.tensors,
            scope=old.scope,
            shards=BoxTable.build([(tensor.row, tensor.box) for _, tensor in tensors]),
            shard_file=np.array([number for number, _ in tensors], np.int64),
            shard_offset=np.concatenate([np.empty(0, np.int64), *(file.offsets() for file in files)]),
            checksums=np.concatenate([empty_checksums(), *(one.checksums for one in written)]),
            aliases=list(old.aliases),
        ).in_order()


def _empty(box: Box, dtype: torch.dtype) -> torch.Tensor:
    nbytes = box.numel * dtype.itemsize
    if nbytes < _MAPPED_BYTES:
        return torch.empty(box.lengths, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=dtype).view(box.lengths)


@contextmanager
def cleanup_on_failure(clean_up: Callable[[], object]) -> Iterator[None]:
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
