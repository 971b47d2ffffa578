"""Read stored shards into memory in ranges, and check them chunk by chunk as they arrive.

A read that returns has delivered only bytes whose checksums match. (A wrong byte may reach a tensor, but then the read
raises.) ``read_plan`` decides what is read together; ``fetch`` moves the bytes.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from ...errors import CorruptionError, StorageError
from ...format.manifest.document import Manifest
from ...planners.load_plan import plan_load
from ...storage_backends.base import StorageBackend
from ...telemetry.trace import Timings
from ...tensors.geometry import Box
from ...tensors.tables import BoxTable
from ..tensor_bytes import box_view
from .bounce import BouncePool
from .checks import CrcCheck, CrcTable
from .fetch import Fetcher
from .placement import ReadPart
from .read_plan import ReadPlan, plan_reads
from .stored_files import OpenFiles, StoredFiles, read_stored_file, source_after
from .task_queue import TaskQueue
from .views import StoredViews

__all__ = ["ReadPart", "ReadStats", "ShardReader"]

# Threads at work, if the executor has that many. One per processor checks and copies cached bytes. Two more that wait
# keep a local device busy; additional threads would only compete for the GIL and the processor's cache. A remote store
# answers slowly, so eight requests are in flight.
_CACHED_THREADS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
_DIRECT_THREADS = _CACHED_THREADS + 2
_REMOTE_THREADS = 8

_EXTENTS_PER_TASK = 2
_MIN_REMOTE_BYTES = 8 << 20  # of a read; less would mostly be latency
_DEVICE_BYTES = 8 << 20  # of a read for a GPU, which takes the bytes from memory; small reads suit a processor's cache

# Bytes between two ranges that are read rather than skipped, as a share of a read: a remote store's 1 to 2 MiB take as
# much processor time as a request (benchmarks/object_store.py).
_GAPS_PER_READ, _REMOTE_GAPS_PER_READ = 32, 8


@dataclass
class ReadStats:
    """Bytes fetched from storage, of these the checked ones, and bytes requested. Thread-safe.

    ``read / requested`` is the read amplification. ``over_reads`` are those of plans (``ReadPlan.over_reads``).
    """

    read: int = 0
    checked: int = 0
    requested: int = 0
    over_reads: dict[str, tuple[int, int]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, read: int = 0, requested: int = 0, checked: int = 0) -> None:
        """Count bytes."""
        with self._lock:
            self.read += read
            self.requested += requested
            self.checked += checked


class ShardReader:
    """Reads parts of the shards of one manifest. Thread-safe; ``verify=False`` skips the manifest's checksums.

    ``crcs`` are checked wherever one call reads a whole range of them. Bytes that are not read straight into their
    tensors pass through ``bounce_pool``; by default the reader has its own. With ``views``, the manifest's shards are
    boxes of those of ``stored``, the manifest that describes the files and has the checksums.
    """

    def __init__(
        self,
        backend: StorageBackend,
        manifest: Manifest,
        executor: Executor,
        *,
        verify: bool = True,
        bounce_pool: BouncePool | None = None,
        timings: Timings | None = None,
        crcs: CrcTable | None = None,
        views: StoredViews | None = None,
    ) -> None:
        self.backend = backend
        self.manifest = manifest
        self._views = views
        self.stored = manifest if views is None else views.stored
        self.verify = verify
        self.stats = ReadStats()
        self.bounce_pool = BouncePool() if bounce_pool is None else bounce_pool
        self.source = StoredFiles(backend, self.stored)
        self.crcs = crcs
        self.timings = timings or Timings("read", url=backend.url)
        self._executor = executor
        self._heads_checked: set[int] = set()

    def parts_of(self, boxes: Sequence[tuple[int, Box, torch.Tensor]]) -> list[ReadPart]:
        """Return what to read in order to fill tensors with boxes of the manifest's tensors, which are given by row.

        Raises ``PlanError`` if a box is not stored.
        """
        requested = BoxTable.build([(row, box) for row, box, _ in boxes])
        rows = self.manifest.shards_of_all(np.unique(requested.tensor))
        plan = plan_load(self.manifest.tensors, self.manifest.shards.take(rows), requested)
        return [ReadPart(int(rows[i]), box, box_view(boxes[n][2], box, boxes[n][1])) for n, i, box in plan.rows()]

    def read(self, parts: Sequence[ReadPart], crc_check: CrcCheck | None = None) -> None:
        """Read all parts. With ``crc_check``, the caller finishes it after its last read.

        Raises ``CorruptionError``, which names file, tensor and byte range of the first bad chunk, ``StorageError`` if
        the store fails, and ``UnsupportedVersionError``, before anything is read, for a codec that is not installed.
        """
        if self._views is not None:
            parts = list(self._views.stored_parts(self.manifest.shards, parts))
        is_remote, size = self.backend.is_remote, self._size_for(parts)
        gap = size // (_REMOTE_GAPS_PER_READ if is_remote else _GAPS_PER_READ)
        plan = plan_reads(self.stored, parts, checked=self.verify, size=size, gap=gap)
        used = sorted({int(self.stored.shard_file[part.row]) for part in parts})
        self.source.check_codecs(used)
        # The header of a file identifies it, if it was swapped with another one.
        heads = [file for file in used if file not in self._heads_checked] if self.verify else []
        groups = plan.groups(size if is_remote else _EXTENTS_PER_TASK * size)
        files = OpenFiles(self.source, Counter(plan.file_of(group) for group in groups))

        own_check = self.crc_check() if crc_check is None else None
        fetcher = self.fetcher(plan, files, checked=self.verify, crc_check=crc_check or own_check)

        # A closure over the queue would form a reference cycle, and the tensors would outlive this call.
        def task(index: int, queue: TaskQueue) -> None:
            if index < len(heads):
                self._check_head(heads[index])
                return
            group = groups[index - len(heads)]
            try:
                fetcher.fetch(group, _raise, partial(_widen, queue))
            except (CorruptionError, StorageError) as error:
                again = self.fetcher_after(error, plan, group, checked=self.verify)
                if again is None:
                    raise
                again.fetch(group, _raise)

        with closing(files):
            TaskQueue(self._executor, len(heads) + len(groups), task).run(
                _REMOTE_THREADS if is_remote else _CACHED_THREADS
            )
        self.stats.add(requested=plan.requested)
        self.stats.over_reads.update(plan.over_reads)
        self._finish(own_check)

    @property
    def read_size(self) -> int:
        """Bytes that one read fetches; small enough that eight reads share the bounce buffers."""
        return min(self.backend.read_size, self.bounce_pool.limit // 8)

    def _size_for(self, parts: Sequence[ReadPart]) -> int:
        """Return the size of one read of ``parts``. From a remote store, each thread gets several of them."""
        if not self.backend.is_remote:
            for_device = _DEVICE_BYTES if any(part.out.is_cuda for part in parts) else 0
            return max(self.read_size, min(for_device, self.bounce_pool.limit // 8))
        requested = sum(part.out.numel() * part.out.element_size() for part in parts)
        return min(self.read_size, max(_MIN_REMOTE_BYTES, requested // (2 * _REMOTE_THREADS)))

    def crc_check(self) -> CrcCheck | None:
        """Return a new check of the CRC-32s, if there are any."""
        return None if self.crcs is None else CrcCheck(self.source, self.crcs)

    def _finish(self, check: CrcCheck | None) -> None:
        if check is not None:
            self.stats.add(checked=check.finish())

    def count_read(self, nbytes: int) -> None:
        """Count bytes that were read, and checked if this reader uses the manifest's checksums."""
        self.stats.add(read=nbytes, checked=nbytes if self.verify else 0)

    def fetcher(self, plan: ReadPlan, files: OpenFiles, *, checked: bool, crc_check: CrcCheck | None = None) -> Fetcher:
        """Return what fetches the extents of ``plan`` from ``files``, and counts the bytes."""
        return Fetcher(
            plan=plan,
            files=files,
            bounce_pool=self.bounce_pool,
            checked=checked,
            on_read=self.count_read,
            timings=self.timings,
            crc_check=crc_check,
        )

    def fetcher_after(
        self, error: CorruptionError | StorageError, plan: ReadPlan, extents: range, *, checked: bool
    ) -> Fetcher | None:
        """Return what fetches these extents, once, from where to read after ``error``; None if it must be raised."""
        other = source_after(self.backend, error)
        if other is None:
            return None
        files = OpenFiles(StoredFiles(other, self.stored), {plan.file_of(extents): 1})
        return self.fetcher(plan, files, checked=checked)

    def _check_head(self, file: int) -> None:
        read_stored_file(self.backend, self.stored, file, head_only=True)
        self.count_read(int(self.stored.files.head_length[file]))
        self._heads_checked.add(file)


def _widen(queue: TaskQueue, direct: bool) -> None:  # noqa: FBT001 - the fetcher calls it with one argument
    queue.widen(_DIRECT_THREADS if direct else _REMOTE_THREADS)


def _raise(row: int, error: CorruptionError) -> None:
    raise error
