"""What ``bcp report`` shows of a root: its checkpoints, where the time of saves went, and the layout of the newest one;
and how fast this machine writes and reads bytes below it.

Everything becomes plain values for JSON, with columns of numbers where there are many.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ..checkpoint.attempts import new_attempt
from ..checkpoint.discovery import Listing, list_checkpoints, newest_listed
from ..checkpoint.location import Location
from ..checkpoint.manifest_file import read_manifest
from ..checkpoint.sweep import missing_files
from ..errors import CheckpointError
from ..format.manifest.document import Manifest
from ..runtime.messages import listed
from ..runtime.threads import Threads
from ..storage_backends.base import StorageBackend
from ..telemetry.save_times import SaveTimes
from .incomplete import waiting_uploads

Column: TypeAlias = npt.NDArray[np.float64]
"""A number for each rank; NaN where it has none."""

WAITS = ("agree", "plan", "merge", "confirm", "commit", "open", "apply", "report")
"""Steps in which ranks wait for each other, so that each takes as long as the slowest one."""

_READERS = 16
_MOST_SAVES = 8
_MOST_BOXES = 20_000
_MOST_SLOWEST = 10
_NEGLIGIBLE = 0.01  # of the time of the whole operation
_FLOOR_BYTES = 1 << 30
_FLOOR_PIECE = 8 << 20
_FLOOR_THREADS = 8
_NOTABLE = 0.1  # the share of its time that a slow rank takes longer than the median


@dataclass
class TimedOperation:
    """A save, a load or a push, by step.

    Attributes:
        kind: ``save``, ``load`` or ``push``.
        name: The checkpoint.
        ranks: The number of ranks.
        seconds: How long each step took.
        nbytes: Bytes that it moved.
        begin: When it began, from the first step of any rank on; empty if nothing has recorded that.
        hosts: The hosts of ranks, where they are known.
        sources: Bytes of a load that came from a tier of the rank's machine, from the store, and from other ranks, by
            source; empty if nothing has recorded that.
    """

    kind: str
    name: str
    ranks: int
    seconds: Mapping[str, Column]
    nbytes: Mapping[str, Column] = field(default_factory=dict)
    begin: Mapping[str, Column] = field(default_factory=dict)
    hosts: Mapping[int, str] = field(default_factory=dict)
    sources: Mapping[str, Column] = field(default_factory=dict)

    def to_document(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "kind": self.kind,
            "name": self.name,
            "ranks": self.ranks,
            "waits": [step for step in self.seconds if step in WAITS],
            "seconds": {step: _numbers(column, 5) for step, column in self.seconds.items()},
            "begin": {step: _numbers(column, 5) for step, column in self.begin.items()},
            "bytes": {step: _numbers(column, 0) for step, column in self.nbytes.items() if np.nansum(column)},
            "sources": {source: _numbers(column, 0) for source, column in self.sources.items()},
            "moved": [*self._moved()],
            "hosts": [self.hosts.get(rank, "") for rank in range(self.ranks)] if self.hosts else [],
            "slowest": [*self._slowest()],
        }

    def _moved(self) -> Iterator[dict[str, Any]]:
        """Yield the bytes of all ranks in each step that moves some, and the time of its slowest rank."""
        for step, column in self.nbytes.items():
            nbytes, seconds = int(np.nansum(column)), self.seconds.get(step)
            if nbytes and seconds is not None:
                yield {"step": step, "bytes": nbytes, "seconds": float(np.nanmax(seconds))}

    def _slowest(self) -> Iterator[dict[str, Any]]:
        """Yield the ranks that took longest over the median of a step in which ranks do not wait for each other."""
        whole = sum(float(np.nanmax(seconds)) for seconds in self.seconds.values())
        over = {
            step: np.nan_to_num(seconds - np.nanmedian(seconds))
            for step, seconds in self.seconds.items()
            if step not in WAITS
        }
        found = [
            (float(column[rank]), step, rank)
            for step, column in over.items()
            for rank in np.argsort(-column, kind="stable")[:_MOST_SLOWEST].tolist()
        ]
        for over_s, step, rank in sorted(found, key=lambda one: -one[0])[:_MOST_SLOWEST]:
            seconds, host = float(self.seconds[step][rank]), self.hosts.get(rank, "")
            if over_s > max(_NOTABLE * seconds, _NEGLIGIBLE * whole):
                yield {"rank": rank, "host": host, "step": step, "seconds": seconds, "median": seconds - over_s}


def _numbers(column: Column, digits: int) -> list[float | int | None]:
    values = column.round(digits).tolist() if digits else np.nan_to_num(column).astype(np.int64).tolist()
    return [None if value != value else value for value in values]


def root_document(root: Location) -> tuple[dict[str, Any], list[TimedOperation]]:
    """Describe the checkpoints below a root, or one checkpoint, and return the newest saves, oldest first.

    Raises ``CheckpointNotFoundError`` and ``StorageError``.
    """
    found = [one for one in list_checkpoints(root) if one.status != "other"]
    newest = newest_listed(root, found)
    detailed = {one.name for one in [one for one in found if one.status == "checkpoint"][-_MOST_SAVES:]}
    with Threads(_READERS, thread_name_prefix="bcp-report") as threads:
        examined = [*threads.map(partial(_examine, root, detailed), found)]
    document = {
        "checkpoints": [{**row, "newest": row["name"] == newest} for row, _ in examined],
        "uploads_waiting": waiting_uploads(root),
        "layout": None if newest is None else _layout(newest, read_manifest(_folder(root, newest))),
    }
    return document, [save for _, save in examined if save is not None]


def _folder(root: Location, name: str) -> StorageBackend:
    return (root if name == "." else root.join(name)).open()


def _examine(root: Location, detailed: Container[str], one: Listing) -> tuple[dict[str, Any], TimedOperation | None]:
    """Return the figures of one checkpoint, and if it is one of ``detailed`` its save."""
    row = {**asdict(one), "attempts": len(one.attempts), "shared_bytes": 0, "seconds": None, "stall": None}
    row["bytes"] = row.pop("size")
    if one.status != "checkpoint":
        return row, None
    backend = _folder(root, one.name)
    try:
        manifest = read_manifest(backend)
        missing = [*missing_files(backend, manifest)]
    except CheckpointError as error:  # it was replaced or removed meanwhile
        return {**row, "problem": str(error)}, None
    if missing:
        row["problem"] = f"{len(missing)} file(s) missing or truncated: {listed(missing)}"
    elif one.abandoned:
        row["problem"] = "abandoned by a rollback"
    frames = manifest.files.frames
    if frames is not None:
        row["shared_bytes"] = int(frames.length[frames.source > 0].sum())
    times = SaveTimes.from_document(manifest.save_times, manifest.world_size)
    if times is None:
        return row, None
    row |= {"seconds": times.seconds, "stall": times.stall}
    return row, _save(one.name, manifest, times) if one.name in detailed else None


def _save(name: str, manifest: Manifest, times: SaveTimes) -> TimedOperation:
    files, ranks = manifest.files, manifest.world_size
    nbytes = np.bincount(files.rank, weights=files.size, minlength=ranks).astype(np.float64)
    return TimedOperation("save", name, ranks, times.ranks, {"write": nbytes})


def _layout(name: str, manifest: Manifest) -> dict[str, Any]:
    """Return the boxes of the largest tensors, as columns."""
    tensors, shards = manifest.tensors, manifest.shards
    boxes = np.bincount(shards.tensor, minlength=len(tensors))
    nbytes = np.bincount(shards.tensor, weights=manifest.shard_nbytes, minlength=len(tensors))
    by_size = np.argsort(-nbytes, kind="stable")
    kept = np.sort(by_size[np.cumsum(boxes[by_size]) <= _MOST_BOXES])
    rows = np.flatnonzero(np.isin(shards.tensor, kept))
    part = shards.take(rows)
    used, file = np.unique(manifest.shard_file[rows], return_inverse=True)
    metas = [(row, tensors.meta_of(row)) for row in kept.tolist()]
    return {
        "checkpoint": name,
        "left_out": len(tensors) - len(kept),
        "tensors": [
            {
                "name": tensors.names[row],
                "dtype": str(meta.dtype),
                "shape": list(meta.shape),
                "bytes": meta.nbytes,
                "boxes": int(boxes[row]),
            }
            for row, meta in metas
        ],
        "offsets": part.offsets.tolist(),
        "lengths": part.lengths.tolist(),
        "file": file.tolist(),
        "files": [manifest.files.name[row].rpartition("/")[2] for row in used.tolist()],
        "file_ranks": manifest.files.rank[used].tolist(),
    }


def measure_floor(root: StorageBackend) -> dict[str, float]:
    """Write an object, make it durable, read it and remove it. Return the bytes per second of ``write`` and ``read``.

    Several threads move large pieces of aligned memory, which bypass the page cache where the store allows it. If this
    process is killed, ``bcp clean`` finds the object, as that of a failed attempt. Raises ``StorageError``.
    """
    key = f"{new_attempt()}/floor"
    pieces = [mmap.mmap(-1, _FLOOR_PIECE) for _ in range(_FLOOR_THREADS)]
    for piece in pieces:
        piece[:] = os.urandom(_FLOOR_PIECE)  # a file system may store zeros as nothing
    with Threads(_FLOOR_THREADS, thread_name_prefix="bcp-floor") as pool:
        try:
            begin = perf_counter()
            with root.create(key, _FLOOR_BYTES) as writer:
                _move(pool, pieces, writer.write)
                writer.complete()
            written = perf_counter()
            with root.open_object(key) as reader:
                is_direct = reader.direct_alignment() > 0
                _move(pool, pieces, reader.read_direct if is_direct else lambda at, piece: reader.read(at, [piece]))
            end = perf_counter()
        finally:
            root.delete([key])
    return {"write": _FLOOR_BYTES / (written - begin), "read": _FLOOR_BYTES / (end - written)}


def _move(pool: Executor, pieces: Sequence[mmap.mmap], move: Callable[[int, Any], object]) -> None:
    """Call ``move`` with all offsets of the object; each thread has a piece of memory."""

    def every(number: int) -> None:
        for offset in range(number * _FLOOR_PIECE, _FLOOR_BYTES, len(pieces) * _FLOOR_PIECE):
            move(offset, pieces[number])

    for done in [pool.submit(every, number) for number in range(len(pieces))]:
        done.result()
