"""The ``merge`` and ``write`` steps: from staged bytes and fragments to durable files."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from ..engine.files import data_key, tensor_image
from ..engine.merging.merge import MergeResources, MergeWork, merge
from ..engine.writing import WrittenFile, write_images, write_whole
from .agreement import SaveShare
from .codec_choice import note_rate
from .companions import StoredModel, companion_images
from .record import WrittenFiles
from .run import SaveRun
from .staging import StateCopy

__all__ = ["merge_tensors", "write_files"]


def merge_tensors(run: SaveRun, share: SaveShare, copy: StateCopy, work: MergeWork) -> list[WrittenFile]:
    """Send this rank's fragments to their owners; put together and write the tensors that this rank owns."""
    engine, op, timings = run.engine, run.op, run.timings
    images = [tensor_image(data_key(share.attempt, file.section, op.rank, "tensors"), file) for file in work.files]
    means = MergeResources(engine.merge_arena, engine.merge_threads, engine.io, run.options.deadline_s)
    written = merge(op, run.backend, work, images, copy.fragments, means, run.commit.chunk_size, timings)
    timings.count("merge", sum(file.size for file in written))
    return written


def write_files(
    run: SaveRun, share: SaveShare, copy: StateCopy, merged: Sequence[WrittenFile], models: Sequence[StoredModel]
) -> WrittenFiles:
    """Write the staged images and the companions, and make them durable."""
    backend, timings, chunk_size = run.backend, run.timings, run.commit.chunk_size

    def point(name: str) -> None:
        timings.point(name)
        run.op.check()

    begun = perf_counter()
    planned = write_images(backend, copy.staging, chunk_size, run.engine.io, timings, point)
    note_rate(run.engine, backend, planned, perf_counter() - begun)
    images = []
    if share.planned.plan is not None and models:
        images = companion_images(share.planned.plan, models, share.attempt)
    companions = [write_whole(backend, image, chunk_size, timings) for image in images]
    timings.count("write", sum(file.size for file in (*planned, *companions)))
    if merged:
        # In the order of the plan: files of tensors by section, then values.
        planned = sorted([*merged, *planned], key=lambda file: (0, file.section) if file.kind == "tensors" else (1, ""))
    return WrittenFiles(planned, companions)
