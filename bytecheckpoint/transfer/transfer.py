"""Copy the files of a committed checkpoint to another store, several parts at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event, Lock

from ..errors import KeyNotFoundError, StorageError
from ..format.manifest.document import Manifest
from ..runtime.threads import Threads
from ..storage_backends.base import PartWriter, StorageBackend
from .journal import FileUpload, Journal
from .source import SourceFile

_log = logging.getLogger(__name__)

WINDOW = 8
"""Parts that are read, checked and sent at the same time. Each takes the memory of one part of the target's store."""


@dataclass
class TransferReport:
    """What a transfer did.

    Attributes:
        url: URL of the copy.
        files: Number of data files.
        size: Bytes of all data files.
        sent: Bytes that were sent; the others were at the target already, from an earlier transfer.
    """

    url: str
    files: int = 0
    size: int = 0
    sent: int = 0


class _LostUploadError(Exception):
    """The store no longer has the upload of the file ``key``, which an earlier process began."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


@dataclass(eq=False)
class _File:
    """A file on its way. ``missing`` are the numbers of the parts that are not stored."""

    key: str
    size: int
    source: SourceFile
    writer: PartWriter
    tags: dict[int, str]
    is_resumed: bool
    missing: set[int] = field(default_factory=set)

    def count(self) -> int:
        return -(-self.size // self.writer.part_bytes)

    def length(self, number: int) -> int:
        return min(self.writer.part_bytes, self.size - number * self.writer.part_bytes)


class Stop:
    """Ends transfers before they are complete, after the parts that are in flight. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._actions: list[Callable[[], None]] = []
        self.is_set = False

    def set(self) -> None:
        """Run the actions of the blocks that are running, and of all later ones."""
        with self._lock:
            self.is_set = True
            actions = [*self._actions]
        for action in actions:
            action()

    @contextmanager
    def calling(self, action: Callable[[], None]) -> Iterator[None]:
        """Run ``action``, which ends the block early, if this is set before the block ends."""
        with self._lock:
            self._actions.append(action)
            is_set = self.is_set
        try:
            if is_set:
                action()
            yield
        finally:
            with self._lock:
                self._actions.remove(action)


@dataclass(eq=False, kw_only=True)
class Transfer:
    """One transfer of the files ``rows`` of a checkpoint. ``run`` it once; ``stop`` it from any thread.

    Of an incremental checkpoint, the target gets complete files (``Manifest.flattened``), or with ``keeps_references``
    those that the source has. Both backends have the data files at their roots (``engine.objects.data_of``).

    Every byte is checked before it is sent. With a ``journal``, what the target has stored is not sent again by a later
    transfer. The manifest is not copied. ``names`` are those of the manifest's files at the target. ``rate_limit`` is
    in bytes per second; ``progress`` is called in another thread with stored bytes.
    """

    source: StorageBackend
    target: StorageBackend
    manifest: Manifest
    names: Sequence[str]
    rows: Sequence[int]
    journal: Journal | None
    keeps_references: bool = False
    window: int = WINDOW
    rate_limit: float | None = None
    progress: Callable[[int], None] = lambda nbytes: None

    def __post_init__(self) -> None:
        self._sizes = (self.manifest if self.keeps_references else self.manifest.flattened()).files.size.tolist()
        self._report = TransferReport(self.target.url, len(self.rows), sum(self._sizes[row] for row in self.rows))
        self._open: list[_File] = []
        self._failure: BaseException | None = None
        self._ending = Event()  # set when there is a failure, and by ``stop``
        self._is_stopped = False
        self._finding, self._counting = Lock(), Lock()
        self._shown = 0  # bytes that ``progress`` has been called with
        self._next_start = 0.0

    def run(self) -> TransferReport:
        """Copy the files.

        Raises ``CorruptionError`` if the source is damaged, and ``StorageError`` if a store fails; after either of
        them, a transfer with the same journal can continue.
        """
        while True:
            try:
                self._copy_all()
            except _LostUploadError as error:
                _log.info(
                    "%s/%s: the store has dropped the upload; beginning again", self.target.display_url, error.key
                )
                assert self.journal is not None
                self.journal.forget(error.key)
            else:
                return self._report

    def stop(self) -> None:
        """Let ``run`` end after the parts that are in flight. It then raises ``StorageError``."""
        self._is_stopped = True
        self._ending.set()

    def _copy_all(self) -> None:
        self._show(-self._shown)
        self._open, self._failure = [], None
        self._ending.clear()
        if self._is_stopped:
            self._ending.set()
        parts = self._parts()
        with Threads(self.window, thread_name_prefix="bcp-transfer") as threads:
            try:
                wait([threads.submit(self._work, parts) for _ in range(self.window)])
            except BaseException as error:  # noqa: BLE001 - an interrupt, raised when all threads have ended
                self._fail(error)
        if not self._ending.is_set():
            return
        for file in self._open:
            if not file.writer.token or self.journal is None:
                file.writer.abort()
        try:
            raise self._failure or StorageError(f"the transfer to {self.target.display_url} was stopped")
        finally:
            del self  # the traceback refers to this frame

    def _fail(self, error: BaseException) -> None:
        """Keep the first failure, or an interrupt, which ends all work."""
        self._failure = error if self._failure is None or not isinstance(error, Exception) else self._failure
        self._ending.set()

    def _parts(self) -> Iterator[tuple[_File, int]]:
        """Yield the parts to send, by file and number."""
        for row in self.rows:
            file = self._begin(row)
            if file is None:
                continue
            missing = sorted(file.missing)
            if not missing:
                self._complete(file)
            for number in missing:
                yield file, number

    def _begin(self, row: int) -> _File | None:
        """Open a file; None if it is stored already."""
        key, size = self.names[row], self._sizes[row]
        journal = self.journal
        if journal is not None and key in journal.stored:
            if self._is_stored(key, size):
                self._show(size)
                return None
            journal.forget(key)
        known = journal.uploads.get(key) if journal is not None else None
        token = known.token if known is not None else ""
        writer = self.target.create_parts(key, size, token=token)
        if known is None or writer.token != token:
            known, token = FileUpload(size, writer.token, writer.part_bytes), ""
            if journal is not None and writer.token:
                try:
                    journal.begin(key, known)
                except BaseException:
                    writer.abort()  # no later process would know of it
                    raise
        source = SourceFile(self.source, self.manifest, row, writer.part_bytes, keeps_references=self.keeps_references)
        file = _File(key, size, source, writer, dict(known.tags), bool(token))
        self._open.append(file)
        file.missing = set(range(file.count())) - known.tags.keys()
        self._show(sum(file.length(number) for number in known.tags))
        return file

    def _is_stored(self, key: str, size: int) -> bool:
        try:
            return self.target.stat(key).size == size
        except KeyNotFoundError:
            return False

    def _work(self, parts: Iterator[tuple[_File, int]]) -> None:
        memory = bytearray()
        try:
            while True:
                with self._finding:
                    part = None if self._ending.is_set() else next(parts, None)
                if part is None:
                    return
                file, number = part
                if len(memory) < file.length(number):
                    memory = bytearray(file.length(number))
                self._copy_part(file, number, memoryview(memory)[: file.length(number)])
        except BaseException as error:  # noqa: BLE001 - raised when all threads have ended
            self._fail(error)

    def _copy_part(self, file: _File, number: int, view: memoryview) -> None:
        file.source.read(number * file.writer.part_bytes, view)
        self._pace(len(view))
        if self._ending.is_set():
            return
        try:
            tag = file.writer.put_part(number, view)
        except KeyNotFoundError as error:
            raise self._lost(file, error) from error
        if self.journal is not None and file.writer.token:
            self.journal.add_part(file.key, number, tag)
        with self._counting:
            file.tags[number] = tag
            file.missing.discard(number)
            is_complete = not file.missing
            self._report.sent += len(view)
        self._show(len(view))
        if is_complete:
            self._complete(file)

    def _complete(self, file: _File) -> None:
        try:
            file.writer.complete([file.tags[number] for number in range(file.count())])
        except KeyNotFoundError as error:
            raise self._lost(file, error) from error
        self._open.remove(file)
        if self.journal is not None:
            self.journal.add_stored(file.key)

    def _lost(self, file: _File, error: KeyNotFoundError) -> Exception:
        return _LostUploadError(file.key) if file.is_resumed else error

    def _pace(self, nbytes: int) -> None:
        """Wait until the rate allows another part."""
        if not self.rate_limit:
            return
        with self._counting:
            now = time.monotonic()
            start = max(now, self._next_start)
            self._next_start = start + nbytes / self.rate_limit
        self._ending.wait(start - now)

    def _show(self, nbytes: int) -> None:
        with self._counting:
            self._shown += nbytes
            if nbytes:
                self.progress(nbytes)
