"""From stored shards to memory: ranged reads, verified chunk by chunk as they arrive.

A part of a stored shard that is contiguous in the destination is read straight into it; any other part goes through
a bounce buffer of bounded size and is copied out box by box. No byte reaches a tensor before its checksum held:
what is read straight into the destination is checked there, and a failure is raised before ``apply`` runs.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence
from concurrent.futures import Executor, wait
from dataclasses import dataclass, field

import torch
import xxhash

from ..errors import CorruptionError, KeyNotFoundError, StorageError
from ..geometry import Box
from ..manifest import Manifest
from ..metadata import BasicMeta, ByteMeta
from ..planners.slabs import slabs, span
from ..shards import torch_dtype
from ..storage_backends.base import StorageBackend
from .files import as_bytes, chunk_checksums, copy_elements

__all__ = ["ReadPart", "ReadStats", "Reader", "read_stored_file"]

BOUNCE = 8 << 20  # bytes of one bounce buffer; there is one per reading thread
_GAP_CHUNKS = 2  # runs further apart than this many chunks are read apart


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
        futures = [self._executor.submit(self._read_part, part) for part in ordered]
        wait(futures)
        for future in futures:
            future.result()

    def skip_heads(self) -> None:
        """Leave file headers unchecked: the caller has checked them."""
        self._heads_checked = set(range(len(self.manifest.files)))

    def _check_heads(self, files: Sequence[int]) -> None:
        """The header of every file that is read from: it tells a swapped file from the right one at once."""
        if not self.verify:
            return
        for row in files:
            if row not in self._heads_checked:
                read_stored_file(self.backend, self.manifest, row, head_only=True)
                self.stats.add(read=int(self.manifest.files.head_length[row]))
                self._heads_checked.add(row)

    def _read_part(self, part: ReadPart) -> None:
        manifest = self.manifest
        meta = manifest.tensors.meta_of(int(manifest.shards.tensor[part.row]))
        stored = manifest.shards.box_of(part.row)
        nbytes = part.box.numel * meta.dtype.itemsize
        self.stats.add(wanted=nbytes)
        if nbytes == 0:
            return
        bytes_at = manifest.byte_meta(part.row)
        if part.box == stored and _is_plain_memory(part.out, meta):
            self._read_straight(bytes_at, part)
            return
        gap = _GAP_CHUNKS * bytes_at.chunk_size
        for box in slabs(part.box, stored, meta.dtype.itemsize, BOUNCE, gap):
            self._read_slab(bytes_at, meta, stored, box, part)

    def _read_straight(self, at: ByteMeta, part: ReadPart) -> None:
        """The whole shard, into the memory where it belongs."""
        out = memoryview(as_bytes(part.out).numpy())  # type: ignore[arg-type]
        for start in range(0, at.length, BOUNCE):
            piece = out[start : min(start + BOUNCE, at.length)]
            self._fetch(at, part.row, start, piece)

    def _read_slab(self, at: ByteMeta, meta: BasicMeta, stored: Box, box: Box, part: ReadPart) -> None:
        """The chunks around one slab, into a bounce buffer, and from there the slab's elements to their place."""
        start, stop = span(box, stored, meta.dtype.itemsize)
        first = start - start % at.chunk_size
        last = min(-(-stop // at.chunk_size) * at.chunk_size, at.length)
        bounce = self._bounce(last - first)
        self._fetch(at, part.row, first, memoryview(bounce.numpy()))  # type: ignore[arg-type]
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

    def _fetch(self, at: ByteMeta, row: int, start: int, buffer: memoryview) -> None:
        """Bytes ``[start, start + len(buffer))`` of a shard; ``start`` is on a chunk boundary."""
        name = self.manifest.tensors.names[int(self.manifest.shards.tensor[row])]
        where = f"tensor {name} {self.manifest.shards.box_of(row)}"
        begin, end = at.offset + start, at.offset + start + len(buffer)
        try:
            self.backend.read_into(at.file, at.offset + start, buffer)
        except KeyNotFoundError as error:
            raise _missing(self.backend, at.file, where) from error
        except StorageError as error:
            size = int(self.manifest.files.size[int(self.manifest.shard_file[row])])
            raise _unreadable(self.backend, at.file, size, f"bytes [{begin}, {end}) of {where}", error) from error
        self.stats.add(read=len(buffer))
        if not self.verify:
            return
        first = start // at.chunk_size
        for index, found in enumerate(chunk_checksums(buffer, at.chunk_size)):
            if found != at.checksums[first + index]:
                begin = at.offset + start + index * at.chunk_size
                end = min(begin + at.chunk_size, at.offset + at.length)
                raise CorruptionError(
                    f"{self.backend.url}/{at.file}: checksum mismatch in {where}, bytes [{begin}, {end}): stored data "
                    f"were changed after they were written; restore the file or load an earlier checkpoint"
                )


def read_stored_file(backend: StorageBackend, manifest: Manifest, row: int, *, head_only: bool) -> bytes:
    """The checked head of file ``row``: a safetensors header, or all of a values document.

    Raises ``CorruptionError`` where the file is missing, of another size (unless ``head_only``) or changed, and
    ``StorageError`` where the store does not give it out.
    """
    files = manifest.files
    key, size, length = files.name[row], int(files.size[row]), int(files.head_length[row])
    buffer = bytearray(length)
    try:
        if not head_only and (found := backend.stat(key).size) != size:
            raise CorruptionError(f"{backend.url}/{key}: file has {found} bytes, the manifest says {size}")
        backend.read_into(key, 0, buffer)
    except KeyNotFoundError as error:
        raise _missing(backend, key, f"section {manifest.sections[int(files.section[row])].name}") from error
    except StorageError as error:
        raise _unreadable(backend, key, size, f"its first {length} bytes", error) from error
    if xxhash.xxh3_64_intdigest(buffer) != int(files.head_checksum[row]):
        what = "header" if files.kind[row] == "tensors" else "values"
        section = manifest.sections[int(files.section[row])].name
        raise CorruptionError(
            f"{backend.url}/{key}: checksum mismatch in the {what} of section {section}, bytes [0, {length}): "
            f"this is not the file that was saved (changed, or swapped with another)"
        )
    return bytes(buffer)


def _missing(backend: StorageBackend, key: str, where: str) -> CorruptionError:
    return CorruptionError(
        f"{backend.url}/{key}: file is missing, but the manifest names it for {where}; it was deleted, not copied, "
        f"or the checkpoint was overwritten while it was being read (then load again)"
    )


def _unreadable(
    backend: StorageBackend, key: str, size: int, what: str, error: StorageError
) -> CorruptionError | StorageError:
    """Tells a file that was cut from a store that does not answer, which says nothing about the checkpoint."""
    try:
        found = backend.stat(key).size
    except StorageError:
        found = size
    if found == size:
        return type(error)(f"{backend.url}/{key}: cannot read {what}: {error}")
    return CorruptionError(
        f"{backend.url}/{key}: cannot read {what}: the file has {found} bytes, the manifest says {size}; it was cut "
        f"short or replaced; restore it or load an earlier checkpoint"
    )


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
    typed = elements if dtype == torch.uint8 else elements.view(dtype)
    return typed.as_strided(box.lengths, strides)
