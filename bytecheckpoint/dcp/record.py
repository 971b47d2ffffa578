"""Write a rank's items into files of one attempt, and build the manifest of all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from ..engine.files import FileImage, data_key, lay_out_file, tensor_image
from ..engine.writing import WrittenFile, write_images, write_whole
from ..errors import PlanError, StorageError
from ..format.checksums import empty_checksums
from ..format.manifest.document import Manifest, SectionInfo, timestamp
from ..format.values.encoding import encode_value
from ..format.values.files import encode_path, encode_values_file
from ..format.values.types import path_name
from ..saving.engine import SaveEngine
from ..saving.options import SaveRequest
from ..saving.record import file_table
from ..saving.staging import StateCopy
from ..storage_backends.base import StorageBackend
from ..telemetry.trace import Timings
from ..tensors.geometry import Box
from ..tensors.metadata import BasicMeta, Path
from ..tensors.tables import BoxTable, TensorTable
from ..version import HEADER_METADATA, VERSION
from .items import SectionItems, describe_containers


@dataclass
class Share:
    """What the coordinator sends every rank with its plan: where to write, below ``url``.

    A planner that caches its plan hands out the share of an earlier save, which has been ``used`` then.
    """

    url: str
    attempt: str
    top_level: str
    chunk_size: int
    used: bool = False


_Key = tuple[str, str]
"""Section and name of a tensor."""


@dataclass(frozen=True, eq=False)
class RankRecord:
    """What one rank wrote: its files, the tensors of which it has boxes, and each box in the order of the files.

    A box has the index of its file, and its offset from the data start. ``leaves`` are the items by section, with
    their paths; ``aliases`` are pairs of full names.
    """

    attempt: str
    top_level: str
    files: list[WrittenFile]
    metas: dict[_Key, BasicMeta]
    boxes: list[tuple[_Key, Box, int, int]]
    leaves: dict[str, list[tuple[Path, bool]]]
    aliases: list[tuple[str, str]]


def write_items(
    backend: StorageBackend,
    engine: SaveEngine,
    sections: Mapping[str, SectionItems],
    share: Share,
    timings: Timings,
    *,
    allow_pickle: bool,
    deadline_s: float,
) -> RankRecord:
    """Write this rank's items, hashed and durable. After a failure, none of its files remains.

    Raises:
        UnserializableError: A value has no stored form.
        StorageError: A storage operation failed.
    """
    images: list[FileImage] = []
    boxes: list[tuple[_Key, Box, int, int]] = []
    for section, items in sections.items():
        source = items.source
        if source.shards:
            # Larger elements first, so that every tensor is aligned (docs/format.md).
            shards = sorted(source.shards, key=lambda shard: -shard.meta.dtype.itemsize)
            layout = lay_out_file(section, np.arange(len(shards)), shards, HEADER_METADATA)
            places = zip(shards, layout.offsets, strict=True)
            boxes += [((section, shard.fqn), shard.box, len(images), int(offset)) for shard, offset in places]
            images.append(tensor_image(data_key(share.attempt, section, timings.rank, "tensors"), layout, shards))
        if source.values:
            entries = [
                (
                    encode_path(path),
                    True,
                    encode_value(value, f"{section}.{path_name(path)}", allow_pickle=allow_pickle),
                )
                for path, value in source.values.items()
            ]
            key = data_key(share.attempt, section, timings.rank, "values")
            images.append(FileImage(key, section, "values", encode_values_file(entries)))
    with timings.step("write"):
        written = _write(backend, engine, images, share.chunk_size, timings, deadline_s)
    return RankRecord(
        share.attempt,
        share.top_level,
        written,
        {(section, fqn): meta for section, items in sections.items() for fqn, meta in items.source.metas.items()},
        boxes,
        {section: items.leaves for section, items in sections.items()},
        [
            (f"{section}.{alias}", f"{section}.{fqn}")
            for section, items in sections.items()
            for alias, fqn in items.source.aliases.items()
        ],
    )


def _write(
    backend: StorageBackend,
    engine: SaveEngine,
    images: Sequence[FileImage],
    chunk_size: int,
    timings: Timings,
    deadline_s: float,
) -> list[WrittenFile]:
    keys = [image.key for image in images]
    copy = StateCopy(engine, images, {}, timings, deadline_s=deadline_s, is_async=False, gate=False)
    try:
        written = write_images(backend, copy.staging, chunk_size, engine.io, timings)
    except BaseException as error:
        copy.staging.discard(error)
        with suppress(StorageError):  # no manifest will ever name them, and the first error is the one to raise
            backend.delete(keys)
        raise
    timings.count("write", sum(file.size for file in written))
    return written


def assemble(
    backend: StorageBackend,
    attempt: str,
    records: Sequence[tuple[int, RankRecord]],
    options: SaveRequest,
    timings: Timings,
    *,
    world_size: int,
) -> Manifest:
    """Return the manifest of a save from the records of the ranks that wrote something.

    It also writes, for each section, a file with the containers of the section's tree.

    Raises:
        PlanError: The ranks wrote into different attempts, or describe a tensor differently.
    """
    _check_attempts(attempt, records)
    chunk_size = max((file.chunk_size for _, record in records for file in record.files), default=1)
    written = [(rank, file) for rank, record in records for file in record.files]
    written += [(0, file) for file in _write_containers(backend, attempt, records, chunk_size, timings)]
    names = sorted({section for _, record in records for section in record.leaves})
    metas: dict[_Key, BasicMeta] = {}
    boxes: list[tuple[_Key, Box, int, int]] = []
    empty: set[_Key] = set()
    first_file = 0
    for rank, record in records:
        for key, meta in record.metas.items():
            if metas.setdefault(key, meta) != meta:
                raise PlanError(
                    f"{'.'.join(key)}: rank {rank} wrote parts of {meta}, another rank parts of {metas[key]}"
                )
        for key, box, file, offset in record.boxes:
            if box.numel or key not in empty:  # several ranks may have all of a tensor without elements
                boxes.append((key, box, first_file + file, offset))
            if not box.numel:
                empty.add(key)
        first_file += len(record.files)
    rows = {key: row for row, key in enumerate(metas)}
    checksums = [file.checksums for _, record in records for file in record.files]
    return Manifest(
        library_version=VERSION,
        step=options.step,
        created=timestamp(),
        world_size=world_size,
        attempt=attempt,
        metadata=dict(options.metadata),
        sections=[SectionInfo(name, "tree") for name in names],
        files=file_table(written, {name: index for index, name in enumerate(names)}),
        tensors=TensorTable.build([(*key, meta) for key, meta in metas.items()]),
        scope=np.full(len(metas), -1, np.int64),
        shards=BoxTable.build([(rows[key], box) for key, box, _, _ in boxes]),
        shard_file=np.array([file for _, _, file, _ in boxes], np.int64),
        shard_offset=np.array([offset for *_, offset in boxes], np.int64),
        checksums=np.concatenate([empty_checksums(), *checksums]),
        aliases=sorted({pair for _, record in records for pair in record.aliases}),
    ).in_order()


def _check_attempts(attempt: str, records: Sequence[tuple[int, RankRecord]]) -> None:
    found = {(record.attempt, record.top_level): rank for rank, record in records}
    if len(found) > 1 or any(one != attempt for one, _ in found):
        raise PlanError(
            f"not all ranks wrote into {attempt}: {found}; does every rank pass a Writer of the same path? If the "
            f"planner caches plans, disable its cache for the next save"
        )


def _write_containers(
    backend: StorageBackend,
    attempt: str,
    records: Sequence[tuple[int, RankRecord]],
    chunk_size: int,
    timings: Timings,
) -> Iterable[WrittenFile]:
    leaves: dict[str, dict[Path, bool]] = {}
    for _, record in records:
        for section, found in record.leaves.items():
            leaves.setdefault(section, {}).update(found)
    for section, items in leaves.items():
        containers = describe_containers(section, items.items())
        if containers:
            entries = [(encode_path(path), True, encode_value(one, section)) for path, one in containers.items()]
            key = f"{attempt}/{section}-containers.msgpack"
            image = FileImage(key, section, "values", encode_values_file(entries))
            yield write_whole(backend, image, chunk_size, timings)
