"""The ``merge`` and ``write`` steps: from staged bytes and fragments to durable files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..control.base import Operation
from ..engine.files import data_key, tensor_image
from ..engine.merging.merge import MergeResources, MergeWork, merge
from ..engine.resources import IOEngine
from ..engine.writing import WrittenFile, write_images, write_whole
from ..storage_backends.base import StorageBackend
from ..telemetry.trace import Timings
from .agreement import SaveShare
from .companions import StoredModel, companion_images
from .staging import StateCopy

__all__ = ["WrittenFiles", "merge_tensors", "write_files"]


@dataclass(frozen=True)
class WrittenFiles:
    """The files that this rank made durable: those of the plan, and companions, which no plan lists."""

    planned: Sequence[WrittenFile]
    companions: Sequence[WrittenFile]


def merge_tensors(
    op: Operation,
    backend: StorageBackend,
    engine: IOEngine,
    work: MergeWork,
    copy: StateCopy,
    timings: Timings,
    share: SaveShare,
    *,
    chunk_size: int,
    deadline_s: float,
) -> list[WrittenFile]:
    """Send this rank's fragments to their owners; put together and write the tensors that this rank owns."""
    images = [tensor_image(data_key(share.attempt, file.section, op.rank, "tensors"), file) for file in work.files]
    means = MergeResources(engine.merge_arena, engine.merge_threads, engine.io, deadline_s)
    written = merge(op, backend, work, images, copy.fragments, means, chunk_size, timings)
    timings.count("merge", sum(file.size for file in written))
    return written


def write_files(
    op: Operation,
    backend: StorageBackend,
    engine: IOEngine,
    copy: StateCopy,
    share: SaveShare,
    merged: Sequence[WrittenFile],
    models: Sequence[StoredModel],
    timings: Timings,
    *,
    chunk_size: int,
) -> WrittenFiles:
    """Write the staged images and the companions, and make them durable."""

    def point(name: str) -> None:
        timings.point(name)
        op.check()

    planned = write_images(backend, copy.staging, chunk_size, engine.io, timings, point)
    images = []
    if share.planned.plan is not None and models:
        images = companion_images(share.planned.plan, models, share.attempt)
    companions = [write_whole(backend, image, chunk_size, timings) for image in images]
    timings.count("write", sum(file.size for file in (*planned, *companions)))
    if merged:
        # In the order of the plan: files of tensors by section, then values.
        planned = sorted([*merged, *planned], key=lambda file: (0, file.section) if file.kind == "tensors" else (1, ""))
    return WrittenFiles(planned, companions)
