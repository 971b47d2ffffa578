"""The memory and threads that a process keeps for its saves, and what it remembers of them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ..checkpoint.attempts import has_expired
from ..engine.blocks import Block
from ..engine.merging.merge import MIN_MERGE_BLOCKS
from ..engine.objects import files_of
from ..engine.resources import IOEngine
from ..engine.staging.arena import BLOCK, Arena
from ..errors import StateError, UsageError
from ..format.manifest.document import Manifest
from ..format.manifest.envelope import MANIFEST_TRAILER
from ..runtime.threads import Threads
from ..storage_backends import StorageBackend, parent_url
from .agreement import PlanCache
from .upload_queue import UploadQueue

DEFAULT_MERGE_MEMORY_BYTES = 64 << 20
"""Default memory of the merge stage, which bounds its unfinished pieces: eight blocks."""

_MAX_COPY_THREADS = 4  # saturate the memory bandwidth of one processor
_RECENT_S = 600.0  # longer than a listing of any store lacks what was committed
_HELPERS = 3  # at most one gated save is being copied, and one save merged, with two threads

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class LastCommit:
    """A committed checkpoint, whose manifest has ``size`` bytes and ends in its checksum, ``trailer``.

    ``parent`` is the URL of the folder that it is in; empty if it shares nothing there.
    """

    url: str = field(repr=False)  # it may contain a password
    parent: str = field(repr=False)
    manifest: Manifest
    size: int
    trailer: bytes

    @classmethod
    def of(cls, backend: StorageBackend, manifest: Manifest, data: bytes) -> LastCommit:
        """Describe the checkpoint at the root of a backend, whose encoded manifest is ``data``."""
        return cls(backend.url, parent_url(backend), manifest, len(data), data[-MANIFEST_TRAILER:])


class SharedSaves:
    """What the saves of a process know of each other, on rank 0. Thread-safe.

    Attributes:
        committing: Held while a save checks what it names and commits, and while objects are removed.
        last_commit: The last checkpoint that was committed at a path, without a tier before it.
        shared_roots: Roots on which rank 0 has seen the files of all ranks.
    """

    def __init__(self) -> None:
        self.committing = threading.Lock()
        self.last_commit: LastCommit | None = None
        self.shared_roots: set[str] = set()
        self._lock = threading.Lock()
        self._running: dict[str, Collection[str]] = {}  # by attempt, the objects that its manifest may name
        self._unknown: set[str] = set()  # the attempts of those whose outcome is unknown
        self._recent: dict[str, tuple[float, Collection[str]]] = {}  # by attempt, when it ended, and what it may name

    def begin(self, attempt: str) -> LastCommit | None:
        """Begin a save, which may refer to what the last commit names until it ends. Return the last commit."""
        with self._lock:
            last = self.last_commit
            self._running[attempt] = files_of(last.manifest) if last is not None else ()
        return last

    def refer(self, attempt: str, manifest: Manifest) -> None:
        """Let a save refer to what this manifest names instead."""
        with self._lock:
            self._running[attempt] = files_of(manifest)

    def end(self, attempt: str, *, is_unknown: bool = False) -> None:
        """End a save: its manifest is committed at its path, or will never be.

        If that ``is_unknown``, the save counts as running for 24 hours from its beginning.
        """
        with self._lock:
            if is_unknown:
                self._unknown.add(attempt)
            else:
                self._recent[attempt] = time.monotonic(), self._running.pop(attempt, ())
                since = time.monotonic() - _RECENT_S
                self._recent = {attempt: one for attempt, one in self._recent.items() if one[0] > since}

    def forget(self, attempt: str) -> None:
        """Forget a save whose checkpoint was removed."""
        with self._lock:
            self._recent.pop(attempt, None)

    def recent(self, staleness_s: float) -> set[str]:
        """Return what the saves may name that ended in the last seconds, which a listing may lack for so long."""
        since = time.monotonic() - staleness_s
        with self._lock:
            return set().union(*(names for when, names in self._recent.values() if when > since))

    def running(self) -> dict[str, Collection[str]]:
        """Return the saves that have not ended, and what each of them may name."""
        with self._lock:
            for attempt in [one for one in self._unknown if has_expired(one)]:
                self._unknown.remove(attempt)
                self._running.pop(attempt, None)
            return dict(self._running)


class SaveEngine(IOEngine):
    """An ``IOEngine`` that also owns the staging memory and the background threads of saves.

    Attributes:
        arena: Staging memory.
        merge_arena: Memory of the merge stage.
        background: Finishes saves one after the other, in the order in which they began.
        helpers: Copies the state of a gated save, and runs the merge stage of one save.
        uploads: Uploads what was saved to tiers, one checkpoint after the other.
        upload_queue: What waits for that.
        plans: Plans of the last saves.
        shared: What the incremental saves of this process know of each other, on rank 0.
        store_rates: How fast the last save to each store was, in bytes per second.
    """

    def __init__(
        self,
        *,
        memory_budget: int | None = None,
        slots: int = 2,
        merge_memory: int = DEFAULT_MERGE_MEMORY_BYTES,
    ) -> None:
        if merge_memory < MIN_MERGE_BLOCKS * BLOCK:
            raise UsageError(f"merge_memory must be at least {MIN_MERGE_BLOCKS * BLOCK} bytes, not {merge_memory!r}")
        self.arena = Arena(memory_budget, slots)
        self.merge_arena = Arena(merge_memory)
        self.background = Threads(1, thread_name_prefix="bcp-save")
        self.helpers = Threads(_HELPERS, thread_name_prefix="bcp-help")
        self.uploads = Threads(1, thread_name_prefix="bcp-upload")
        self.upload_queue: UploadQueue[Any] = UploadQueue()
        self.plans = PlanCache()
        self.shared = SharedSaves()
        self.store_rates: dict[str, float] = {}
        super().__init__()

    @property
    def is_background_thread(self) -> bool:
        """Whether the calling thread is the background thread, as in a save's done callback."""
        return self.background.is_current

    @property
    def copy_helpers(self) -> int:
        """Threads that may help the caller to copy: this rank's share of the processors, minus the caller."""
        return max(0, min(self.cores, _MAX_COPY_THREADS) - 1)

    def start_threads(self) -> None:
        """Start all threads that saves use, unless they have started. Raises ``ThreadError``."""
        for pool in (self.io, self.background, self.helpers, self.uploads):
            pool.start()

    def grow_arena(
        self, goal: int, prepare: Callable[[Block], None] | None = None, *, threads: int = 0
    ) -> list[Future[None]]:
        """Fault in staging memory in the background until the arena has ``goal`` blocks; pass each to ``prepare``.

        Args:
            goal: The number of blocks.
            prepare: Called with each new block.
            threads: How many threads do it; 0 for as many as may help the caller to copy.

        Returns:
            Tasks, which raise ``StateError`` if there is no memory.
        """

        def add_blocks() -> None:
            try:
                while not self._closed and self.arena.add(goal, prepare):
                    pass
            except Exception as error:
                _log.warning("staging memory stays at %d bytes: %s", self.arena.nbytes, error)
                raise

        tasks: list[Future[None]] = []
        if self.arena.blocks < goal:
            with suppress(RuntimeError):  # closed: the save itself fails
                tasks += [self.io.submit(add_blocks) for _ in range(threads or max(1, self.copy_helpers))]
        return tasks

    def submit(self, task: Callable[[], None]) -> Future[None]:
        """Queue ``task`` for the background thread. Raises ``StateError`` after ``close``."""
        try:
            return self.background.submit(task)
        except RuntimeError as error:
            raise StateError(f"the save cannot continue in the background: {error}") from error

    def close(self) -> None:
        """Finish all saves and uploads in flight, end the threads and release the memory."""
        self._closed = True  # threads that fault in staging memory stop before the next block
        self.background.shutdown(wait=True)
        self.helpers.shutdown(wait=True)
        self.uploads.shutdown(wait=True)
        super().close()
        self.arena.trim()
        self.merge_arena.trim()
