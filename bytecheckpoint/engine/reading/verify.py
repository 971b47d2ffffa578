"""Check every byte of a checkpoint, with several reads at once and in bounded memory."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from functools import partial

from ...errors import CheckpointError, CorruptionError, StorageError
from .fetch import Fetcher
from .read_plan import plan_checks
from .reader import ShardReader
from .stored_files import OpenFiles, read_stored_file

_MAX_QUEUED = 8  # bounds the queue; the bounce buffers bound the memory
_EXTENTS_PER_TASK = 2
_CRC_PIECE_BYTES = 4 << 20

_Faults = dict[int, str]
"""Messages by shard."""


@dataclass(frozen=True)
class _Task:
    """Bytes of ``file`` to check: its head, or some of its shards.

    ``check`` returns the faults of shards, and raises the fault of a head.
    """

    file: int
    nbytes: int
    check: Callable[[], _Faults]


def verify_files(reader: ShardReader, executor: Executor) -> Iterator[tuple[int, str]]:
    """Yield ``(bytes checked, fault or "")`` piece by piece, in the order of files and bytes.

    A file with a wrong head is reported once and not checked further; a shard is reported once, however many of its
    chunks are wrong, and so is a reference of another size. Uses the reader's bounce buffers, and holds values files
    whole.
    """
    faulty_file: int | None = None
    reported: set[int | str] = set()  # rows of shards, and problems of references
    for task, future in _ahead(_tasks(reader), executor):
        try:
            faults = future.result()
        except (CheckpointError, StorageError) as error:
            faulty_file = task.file
            yield 0, str(error)
            continue
        if task.file == faulty_file:
            continue
        yield task.nbytes, ""
        for row, problem in faults.items():
            what = problem if row < 0 else row
            if what not in reported:
                reported.add(what)
                yield 0, problem


def verify_crcs(reader: ShardReader) -> Iterator[tuple[int, str]]:
    """Yield ``(bytes checked, fault or "")`` for every range of another system's files that has a CRC-32, in order."""
    table = reader.crcs
    if table is None:
        return
    buffer = memoryview(bytearray(_CRC_PIECE_BYTES))
    for file, begin, end, crc in zip(
        *(column.tolist() for column in (table.file, table.begin, table.end, table.crc)), strict=True
    ):
        found = 0
        try:
            for at in range(begin, end, len(buffer)):
                piece = buffer[: min(len(buffer), end - at)]
                reader.backend.read_into(reader.stored.files.name[file], at, piece)
                found = zlib.crc32(piece, found)
                yield len(piece), ""
        except StorageError as error:
            yield 0, f"{reader.backend.url}/{reader.stored.files.name[file]}: cannot read [{begin}, {end}): {error}"
            continue
        if found != crc:
            yield 0, str(reader.source.crc_mismatch(file, begin, end))


def _tasks(reader: ShardReader) -> Iterator[_Task]:
    manifest = reader.stored
    reader.source.check_codecs(range(len(manifest.files)))
    for file, head_length in enumerate(manifest.files.head_length.tolist()):
        yield _Task(file, head_length, partial(_check_head, reader, file))
        plan = plan_checks(manifest, manifest.shards_in(file), reader.read_size)
        files = OpenFiles(reader.source, {file: len(plan)})
        fetcher = reader.fetcher(plan, files, checked=True)
        for group in plan.groups(_EXTENTS_PER_TASK * plan.size):
            blocks = range(plan.starts[group[0]], plan.starts[group[-1] + 1])
            nbytes = sum(plan.end[block] - plan.begin[block] for block in blocks)
            yield _Task(file, nbytes, partial(_check_shards, reader, fetcher, group))


def _check_head(reader: ShardReader, file: int) -> _Faults:
    read_stored_file(reader.backend, reader.stored, file, head_only=False)
    return {}


def _check_shards(reader: ShardReader, fetcher: Fetcher, extents: range) -> _Faults:
    """Check what a load reads: where it reads again, only what is wrong then is a fault."""
    faults: _Faults = {}
    for extent in extents:
        found = _faults_in(fetcher, extent)
        for error in list(found.values())[:1]:
            again = reader.fetcher_after(error, fetcher.plan, range(extent, extent + 1), checked=True)
            found = found if again is None else _faults_in(again, extent)
        for row, error in found.items():
            faults.setdefault(row, str(error))
    return faults


def _faults_in(fetcher: Fetcher, extent: int) -> dict[int, CorruptionError | StorageError]:
    found: dict[int, CorruptionError | StorageError] = {}

    def note(row: int, error: CorruptionError) -> None:
        found.setdefault(row, error)

    try:
        fetcher.fetch(range(extent, extent + 1), note)
    except (CorruptionError, StorageError) as error:
        found.setdefault(fetcher.plan.row[fetcher.plan.blocks(extent)[0]], error)
    return found


def _ahead(tasks: Iterator[_Task], executor: Executor) -> Iterator[tuple[_Task, Future[_Faults]]]:
    """Yield the tasks in order; each check is submitted several tasks ahead."""
    waiting: deque[tuple[_Task, Future[_Faults]]] = deque()
    try:
        for task in tasks:
            waiting.append((task, executor.submit(task.check)))
            if len(waiting) > _MAX_QUEUED:
                yield waiting.popleft()
        while waiting:
            yield waiting.popleft()
    finally:
        for _, future in waiting:
            future.cancel()
        wait([future for _, future in waiting])
