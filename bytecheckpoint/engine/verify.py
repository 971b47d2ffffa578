"""Every byte of a checkpoint against its checksum: several pieces at once, in bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from functools import partial

from ..errors import CheckpointError, StorageError
from .reader import Reader
from .stored_files import read_stored_file

__all__ = ["verify_files"]

_IN_FLIGHT = 8  # pieces read ahead of the one that is waited for; bounds what is queued, not what is held


@dataclass(frozen=True)
class _Piece:
    """Bytes to check: of shard ``row``, or with None the head of ``file``. ``check`` raises what is wrong."""

    file: int
    row: int | None
    nbytes: int
    check: Callable[[], object]


def verify_files(reader: Reader, executor: Executor) -> Iterator[tuple[int, str]]:
    """``(bytes checked, what is wrong with them or "")``, piece after piece, in the order of files and their bytes.

    A file whose head is wrong is one fault and nothing more is said of it; a shard is one fault however many of its
    chunks are wrong. Holds 8 MiB for each thread of ``executor``, and values files whole.
    """
    faulty_file: int | None = None
    faulty_row: int | None = None
    for piece, future in _ahead(_pieces(reader), executor):
        problem = ""
        try:
            future.result()
        except (CheckpointError, StorageError) as error:
            problem = str(error)
        if piece.row is None and problem:
            faulty_file = piece.file
            yield 0, problem
        elif piece.file != faulty_file:
            yield piece.nbytes, "" if piece.row == faulty_row else problem
            faulty_row = piece.row if problem else faulty_row


def _pieces(reader: Reader) -> Iterator[_Piece]:
    manifest = reader.manifest
    for file, head_length in enumerate(manifest.files.head_length.tolist()):
        head = partial(read_stored_file, reader.backend, manifest, file, head_only=False)
        yield _Piece(file, None, head_length, head)
        for row in manifest.shards_in(file).tolist():
            shard = reader.shard(row)
            for start, stop in shard.pieces():
                yield _Piece(file, row, stop - start, partial(shard.check, start, stop))


def _ahead(pieces: Iterator[_Piece], executor: Executor) -> Iterator[tuple[_Piece, Future[object]]]:
    """Every piece in its turn, with the check that was begun some pieces before."""
    waiting: deque[tuple[_Piece, Future[object]]] = deque()
    try:
        for piece in pieces:
            waiting.append((piece, executor.submit(piece.check)))
            if len(waiting) > _IN_FLIGHT:
                yield waiting.popleft()
        while waiting:
            yield waiting.popleft()
    finally:
        for _, future in waiting:
            future.cancel()
        wait([future for _, future in waiting])
