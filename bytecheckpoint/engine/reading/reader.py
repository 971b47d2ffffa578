"""From stored shards to memory: ranged reads, checked chunk by chunk as they arrive.

No load succeeds with a byte in it whose checksum did not hold. (A byte may reach its tensor before: a failure is raised
before ``apply`` runs.) See ``read_plan`` for what is read together, and ``fetch`` for the way it takes.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial

from ...errors import CorruptionError, StorageError
from ...manifest import Manifest
from ...storage_backends.base import StorageBackend
from ...trace import Timings
from .bounce import BounceRing
from .chunk_check import ChunkCheck
from .fetch import Fetcher
from .placement import ReadPart
from .read_plan import plan_reads
from .stored_files import OpenFiles, StoredFiles, read_stored_file
from .task_queue import TaskQueue

__all__ = ["ReadPart", "ReadStats", "Reader", "StoredShard"]

_COPIERS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
# Reads in flight, as far as the executor has threads. Two that wait keep a device busy beside those that are checked
# and copied; more threads only wait for the interpreter lock, and push each other out of the processor's cache.
_DEPTH_DIRECT = _COPIERS + 2
_DEPTH_REMOTE = 8
_GROUP = 2  # extents that a thread takes at a time
_FETCH = 8 << 20  # bytes of a shard that are handed out at once


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
    """Reads parts of the shards of one manifest. Thread-safe; ``verify=False`` leaves checksums unlooked at.

    Whatever is not read straight into place passes through ``ring`` (one of the reader's own where none is given).
    """

    def __init__(
        self,
        backend: StorageBackend,
        manifest: Manifest,
        executor: Executor,
        *,
        verify: bool = True,
        ring: BounceRing | None = None,
        timings: Timings | None = None,
    ) -> None:
        self.backend = backend
        self.manifest = manifest
        self.verify = verify
        self.stats = ReadStats()
        self.ring = BounceRing() if ring is None else ring
        self.source = StoredFiles(backend, manifest)
        self.timings = timings or Timings("read", url=backend.url)
        self._executor = executor
        self._heads_checked: set[int] = set()

    def read(self, parts: Sequence[ReadPart]) -> None:
        """Read all parts. Raises ``CorruptionError`` naming file, tensor and byte range at the first bad chunk, and
        ``StorageError`` where the store does not answer."""
        plan = plan_reads(self.manifest, parts, checked=self.verify, size=self.read_size)
        heads = self._heads(sorted({int(self.manifest.shard_file[part.row]) for part in parts}))
        groups = plan.groups(_GROUP * plan.size)
        files = OpenFiles(self.source, Counter(plan.file[plan.starts[group[0]]] for group in groups))

        fetcher = Fetcher(
            self.source,
            plan,
            files,
            self.ring,
            checked=self.verify,
            on_read=self._count_read,
            timings=self.timings,
        )

        # The queue is handed to it, not closed over: in a cycle, the tensors would outlive this call.
        def task(index: int, queue: TaskQueue) -> None:
            if index < len(heads):
                self._check_head(heads[index])
            else:
                fetcher.fetch(groups[index - len(heads)], _raise, partial(_widen, queue))

        with closing(files):
            TaskQueue(self._executor, len(heads) + len(groups), task).run(_COPIERS)
        self.stats.add(wanted=plan.wanted)

    @property
    def read_size(self) -> int:
        """Bytes that one read fetches."""
        return min(self.backend.read_size, self.ring.limit // 8)

    def shard(self, row: int) -> StoredShard:
        """The bytes of one stored shard, for who wants them as they lie."""
        return StoredShard(self, row)

    def _count_read(self, nbytes: int) -> None:
        self.stats.add(read=nbytes)

    def _heads(self, files: Sequence[int]) -> list[int]:
        """Those of the files whose header is still to be checked: it tells a swapped file from the right one."""
        return [file for file in files if file not in self._heads_checked] if self.verify else []

    def _check_head(self, file: int) -> None:
        read_stored_file(self.backend, self.manifest, file, head_only=True)
        self.stats.add(read=int(self.manifest.files.head_length[file]))
        self._heads_checked.add(file)


class StoredShard:
    """The bytes of one shard, ``length`` of them, with a checksum for every ``chunk_size``. Thread-safe."""

    def __init__(self, reader: Reader, row: int) -> None:
        self._reader, self._row = reader, row
        self._file = int(reader.manifest.shard_file[row])
        self._begin = int(reader.manifest.files.head_length[self._file] + reader.manifest.shard_offset[row])
        self.length = int(reader.manifest.shard_nbytes[row])
        self.chunk_size = int(reader.manifest.files.chunk_size[self._file])

    def pieces(self) -> Iterator[tuple[int, int]]:
        """``(start, stop)`` of what is best read at once: whole chunks, of 8 MiB together unless one is longer."""
        step = max(_FETCH - _FETCH % self.chunk_size, self.chunk_size)
        return ((start, min(start + step, self.length)) for start in range(0, self.length, step))

    def fetch(self, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from byte ``start`` on, and check it unless the reader leaves that out.

        Both ends are ends of chunks. Raises ``CorruptionError`` and ``StorageError`` like ``Reader.read``.
        """
        reader, begin = self._reader, self._begin + start
        try:
            reader.backend.read_into(reader.manifest.files.name[self._file], begin, buffer)
        except StorageError as error:
            end = begin + len(buffer)
            raise reader.source.read_error(self._file, self._row, begin, end, error) from error
        reader.stats.add(read=len(buffer))
        if reader.verify:
            ChunkCheck(reader.source, self._file, _raise).feed(self._row, self._begin, begin, buffer)


def _widen(queue: TaskQueue, direct: bool) -> None:
    queue.widen(_DEPTH_DIRECT if direct else _DEPTH_REMOTE)


def _raise(row: int, error: CorruptionError) -> None:
    raise error
