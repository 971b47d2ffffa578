"""From stored shards to memory: ranged reads, verified chunk by chunk as they arrive.

A part of a stored shard that is contiguous in the destination is read straight into it; any other part goes through
a bounce buffer of bounded size and is copied out box by box. Small shards that lie side by side are fetched by one
read. No byte reaches a tensor before its checksum held:
what is read straight into the destination is checked there, and a failure is raised before ``apply`` runs.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, wait
from dataclasses import dataclass, field
from functools import partial

import torch

from ..errors import CorruptionError, KeyNotFoundError, StorageError
from ..geometry import Box
from ..manifest import Manifest
from ..metadata import BasicMeta, ByteMeta
from ..planners.slabs import slabs, span
from ..shards import torch_dtype
from ..storage_backends.base import StorageBackend
from .checksums import ChunkHasher, chunk_checksums
from .stored_files import missing, read_stored_file, unreadable
from .tensor_bytes import byte_view, copy_elements

__all__ = ["ReadPart", "ReadStats", "Reader", "StoredShard"]

_BOUNCE = 8 << 20  # bytes of one bounce buffer; there is one per reading thread
_GAP_CHUNKS = 2  # runs further apart than this many chunks are read apart
_SMALL = 1 << 20  # bytes of a shard that is worth reading together with its neighbours
_GAP = 64 << 10  # bytes between two shards that are cheaper to read than to pass over


@dataclass(frozen=True, eq=False)
class ReadPart:
    """Read ``box`` (global coordinates) of stored shard ``row`` of the manifest into ``out``, which has its shape.

    ``out`` may be of another dtype (the values are cast), on any device, and non-contiguous.
    """

    row: int
    box: Box
    out: torch.Tensor


@dataclass
class ReadStats:
    """Bytes fetched from storage and bytes that were wanted; their ratio is the read amplification."""

    read: int = 0
    wanted: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, read: int = 0, wanted: int = 0) -> None:
        with self._lock:
            self.read += read
            self.wanted += wanted


class Reader:
    """Reads parts of the shards of one manifest. Thread-safe; ``verify=False`` leaves checksums unlooked at."""

    def __init__(self, backend: StorageBackend, manifest: Manifest, executor: Executor, *, verify: bool = True) -> None:
        self.backend = backend
        self.manifest = manifest
        self.verify = verify
        self.stats = ReadStats()
        self._executor = executor
        self._heads_checked: set[int] = set()
        self._own = threading.local()

    def read(self, parts: Sequence[ReadPart]) -> None:
        """Read all parts. Raises ``CorruptionError`` naming file, tensor and byte range at the first bad chunk, and
        ``StorageError`` where the store does not answer."""
        self._check_heads(sorted({int(self.manifest.shard_file[part.row]) for part in parts}))
        ordered = sorted(
            parts, key=lambda part: (self.manifest.shard_file[part.row], self.manifest.shard_offset[part.row])
        )
        futures = [self._executor.submit(task) for run in self._runs(ordered) for task in self._tasks(run)]
        wait(futures)
        for future in futures:
            future.result()

    def shard(self, row: int) -> StoredShard:
        """The bytes of one stored shard, for who wants them as they lie."""
        return StoredShard(self, row)

    def _check_heads(self, files: Sequence[int]) -> None:
        """The header of every file that is read from: it tells a swapped file from the right one at once."""
        if not self.verify:
            return
        for row in files:
            if row not in self._heads_checked:
                read_stored_file(self.backend, self.manifest, row, head_only=True)
                self.stats.add(read=int(self.manifest.files.head_length[row]))
                self._heads_checked.add(row)

    def _runs(self, ordered: Sequence[ReadPart]) -> Iterator[list[ReadPart]]:
        """Parts in the order of their bytes, cut into runs that one read of at most 8 MiB fetches."""
        manifest = self.manifest
        run: list[ReadPart] = []
        file = begin = end = 0
        for part in ordered:
            at, size = int(manifest.shard_offset[part.row]), int(manifest.shard_nbytes[part.row])
            near = file == manifest.shard_file[part.row] and at - end <= _GAP and at + size - begin <= _BOUNCE
            if run and not (near and size <= _SMALL):
                yield run
                run = []
            if not run:
                file, begin = int(manifest.shard_file[part.row]), at
            run.append(part)
            # Nothing joins a large shard.
            end = at + size if size <= _SMALL else -_BOUNCE
        if run:
            yield run

    def _tasks(self, run: list[ReadPart]) -> Iterator[Callable[[], None]]:
        """What the threads do: one read for a run of small shards, one a piece for a shard that is read straight."""
        if len(run) > 1:
            yield partial(self._read_run, run)
            return
        part = run[0]
        meta = self.manifest.tensors.meta_of(int(self.manifest.shards.tensor[part.row]))
        if not part.box.numel:
            return
        if part.box != self.manifest.shards.box_of(part.row) or not _is_plain_memory(part.out, meta):
            yield partial(self._read_part, part, meta)
            return
        shard, memory = self.shard(part.row), byte_view(part.out)
        self.stats.add(wanted=shard.length)
        for start, stop in shard.pieces():
            yield partial(shard.fetch, start, memory[start:stop])

    def _read_run(self, run: Sequence[ReadPart]) -> None:
        """Whole shards that lie side by side, through one bounce buffer."""
        manifest = self.manifest
        shards = {row: self.shard(row) for row in dict.fromkeys(part.row for part in run)}
        begin = int(manifest.shard_offset[run[0].row])
        places = {row: int(manifest.shard_offset[row]) - begin for row in shards}
        bounce = self._bounce(max(places[row] + shard.length for row, shard in shards.items()))
        shards[run[0].row].read_from(0, byte_view(bounce))
        for row, shard in shards.items():
            shard.compare(0, byte_view(bounce[places[row] : places[row] + shard.length]))
        for part in run:
            meta = manifest.tensors.meta_of(int(manifest.shards.tensor[part.row]))
            self.stats.add(wanted=part.box.numel * meta.dtype.itemsize)
            if part.box.numel:
                stored = manifest.shards.box_of(part.row)
                start, stop = span(part.box, stored, meta.dtype.itemsize)
                at = places[part.row]
                copy_elements(part.out, _strided_view(bounce[at + start : at + stop], meta, part.box, stored))

    def _read_part(self, part: ReadPart, meta: BasicMeta) -> None:
        """Part of a shard, or all of it for memory of another kind, slab after slab."""
        stored, shard = self.manifest.shards.box_of(part.row), self.shard(part.row)
        self.stats.add(wanted=part.box.numel * meta.dtype.itemsize)
        for box in slabs(part.box, stored, meta.dtype.itemsize, _BOUNCE, _GAP_CHUNKS * shard.chunk_size):
            self._read_slab(shard, meta, stored, box, part)

    def _read_slab(self, shard: StoredShard, meta: BasicMeta, stored: Box, box: Box, part: ReadPart) -> None:
        """The chunks around one slab, into a bounce buffer, and from there the slab's elements to their place."""
        start, stop = span(box, stored, meta.dtype.itemsize)
        first = start - start % shard.chunk_size
        last = min(-(-stop // shard.chunk_size) * shard.chunk_size, shard.length)
        bounce = self._bounce(last - first)
        shard.fetch(first, byte_view(bounce))
        elements = bounce[start - first : stop - first]
        source = _strided_view(elements, meta, box, stored)
        out = part.out[box.relative_to(part.box).slices()] if part.box.ndim else part.out
        copy_elements(out, source)

    def _bounce(self, nbytes: int) -> torch.Tensor:
        """This thread's bounce buffer: faulted in once, and given back, where malloc would keep it."""
        memory: torch.Tensor | None = getattr(self._own, "bounce", None)
        if memory is None or len(memory) < nbytes:
            self._own.bounce = memory = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        return memory[:nbytes]


class StoredShard:
    """The bytes of one shard, ``length`` of them, with a checksum for every ``chunk_size``. Thread-safe."""

    def __init__(self, reader: Reader, row: int) -> None:
        self._reader, self._row = reader, row
        self._at: ByteMeta = reader.manifest.byte_meta(row)
        self.length = self._at.length
        self.chunk_size = self._at.chunk_size

    def pieces(self) -> Iterator[tuple[int, int]]:
        """``(start, stop)`` of what is best read at once: whole chunks, of 8 MiB together unless one is longer."""
        step = max(_BOUNCE - _BOUNCE % self.chunk_size, self.chunk_size)
        return ((start, min(start + step, self.length)) for start in range(0, self.length, step))

    def fetch(self, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from byte ``start`` on, and check it unless the reader leaves that out.

        Both ends are ends of chunks. Raises ``CorruptionError`` and ``StorageError`` like ``Reader.read``.
        """
        self.read_from(start, buffer)
        self.compare(start, buffer)

    def check(self, start: int, stop: int) -> None:
        """``fetch`` of bytes that nobody wants, always checked, in 8 MiB of memory however long a chunk is."""
        hasher = ChunkHasher(self.chunk_size)
        for at in range(start, stop, _BOUNCE):
            piece = byte_view(self._reader._bounce(min(_BOUNCE, stop - at)))
            self.read_from(at, piece)
            hasher.update(piece)
        hasher.end_item()
        self._compare(start, hasher.checksums)

    def compare(self, start: int, data: memoryview) -> None:
        """Check bytes that were read from ``start`` on, unless the reader leaves that out."""
        if self._reader.verify:
            self._compare(start, chunk_checksums(data, self.chunk_size))

    def read_from(self, start: int, buffer: memoryview) -> None:
        """Fill ``buffer``, unchecked, from byte ``start`` of the shard on, and on into what lies behind it."""
        reader, at = self._reader, self._at
        begin = at.offset + start
        try:
            reader.backend.read_into(at.file, begin, buffer)
        except KeyNotFoundError as error:
            raise missing(reader.backend, at.file, self._where()) from error
        except StorageError as error:
            size = int(reader.manifest.files.size[int(reader.manifest.shard_file[self._row])])
            what = f"bytes [{begin}, {begin + len(buffer)}) of {self._where()}"
            raise unreadable(reader.backend, at.file, size, what, error) from error
        reader.stats.add(read=len(buffer))

    def _compare(self, start: int, found: Sequence[int]) -> None:
        """Raise for the first chunk, of those from byte ``start`` on, whose checksum is not the manifest's."""
        first = start // self.chunk_size
        promised = self._at.checksums[first : first + len(found)]
        for index, (one, other) in enumerate(zip(found, promised)):
            if one != other:
                begin = self._at.offset + start + index * self.chunk_size
                end = min(begin + self.chunk_size, self._at.offset + self.length)
                raise CorruptionError(
                    f"{self._reader.backend.url}/{self._at.file}: checksum mismatch in {self._where()}, bytes "
                    f"[{begin}, {end}): stored data were changed after they were written; restore the file or load an "
                    f"earlier checkpoint"
                )

    def _where(self) -> str:
        tensors, shards = self._reader.manifest.tensors, self._reader.manifest.shards
        return f"tensor {tensors.names[int(shards.tensor[self._row])]} {shards.box_of(self._row)}"


def _is_plain_memory(out: torch.Tensor, meta: BasicMeta) -> bool:
    return (
        out.device.type == "cpu"
        and out.is_contiguous()
        and not out.is_conj()
        and not out.is_neg()
        and out.dtype == torch_dtype(meta)
    )


def _strided_view(elements: torch.Tensor, meta: BasicMeta, box: Box, stored: Box) -> torch.Tensor:
    """``box`` of the row-major shard ``stored``, seen in the bytes that span it."""
    strides = torch.empty(stored.lengths, device="meta").stride() if stored.numel else ()
    dtype = torch_dtype(meta)
    if elements.storage_offset() % dtype.itemsize:
        elements = elements.clone()  # chunks of a length that does not fit the elements
    typed = elements if dtype == torch.uint8 else elements.view(dtype)
    return typed.as_strided(box.lengths, strides)
