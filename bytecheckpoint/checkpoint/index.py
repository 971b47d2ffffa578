"""What a path stores, whichever system wrote it: tensors as boxes with byte ranges, plain values, and checks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import msgpack
import numpy as np
import zstandard

from ..engine.objects import data_of
from ..engine.reading.checks import CrcTable
from ..engine.reading.reader import ShardReader
from ..engine.reading.views import StoredViews
from ..engine.resources import IOEngine
from ..format.manifest.document import Manifest
from ..format.manifest.payload import pack_payload, unpack_payload
from ..format.manifest.validation import validate_foreign
from ..format.values.files import decode_path, encode_path
from ..storage_backends import join
from ..storage_backends.base import StorageBackend
from ..telemetry.trace import Timings
from ..tensors.geometry import Box
from ..tensors.tables import BoxTable, Int64, ragged_starts
from .manifest_file import read_manifest
from .renaming import Rename, Renames
from .values import StoredValue, stored_values

OWN_SYSTEM = "bytecheckpoint"

_START = b"index of foreign files\n"  # no manifest begins like this


@dataclass(frozen=True, eq=False)
class Index:
    """The contents of one path.

    Attributes:
        backend: Storage backend whose root holds the files.
        manifest: The tables. Those of another system's files have no checksums, no attempt and no values files.
        system: What wrote the files.
        name: The file's key, if the path is a single file below the backend's root.
        foreign_values: The plain values of another system's checkpoint, which the index holds itself.
        crcs: The CRC-32s of ranges of another system's files.
        views: Where the manifest's shards are in what the files hold, if rules describe them; None if the manifest
            itself describes the files.
        names: The renames that the names of ``manifest`` come from.
        means: If the value of a shard of ``manifest`` is a mean: the other copies, as rows and boxes of what ``views``
            describes. Only ``convert.rewriter`` computes means; no path is opened with them.
    """

    backend: StorageBackend
    manifest: Manifest
    system: str = OWN_SYSTEM
    name: str = ""
    foreign_values: tuple[StoredValue, ...] = ()
    crcs: CrcTable | None = None
    views: StoredViews | None = None
    names: Renames | None = None
    means: Mapping[int, Sequence[tuple[int, Box]]] = field(default_factory=dict)

    @classmethod
    def read(cls, backend: StorageBackend) -> Index:
        """Read the index of a checkpoint of this library. Raises as ``read_manifest``."""
        return cls(backend, read_manifest(backend))

    @property
    def url(self) -> str:
        """The path that the index describes."""
        return join(self.backend.url, self.name) if self.name else self.backend.url

    @cached_property
    def data(self) -> StorageBackend:
        """Storage backend whose keys are the names of the data files."""
        return data_of(self.backend, self.manifest if self.views is None else self.views.stored)

    @property
    def is_own(self) -> bool:
        """Whether this library wrote the files, with checksums for every byte."""
        return self.system == OWN_SYSTEM

    @property
    def has_checksums(self) -> bool:
        """Whether the manifest has a checksum for every chunk of its shards."""
        return self.is_own and self.views is None

    def values(self, *, section: str | None = None, ranks: Collection[int] | None = None) -> Iterator[StoredValue]:
        """Yield all plain values, or those of one section.

        Of the values that single ranks own, only those of ``ranks`` if that is given. Raises as ``stored_values``.
        """
        if self.names is not None:
            yield from self.names.values(section, ranks)
            return
        if self.is_own:
            yield from stored_values(self.data, self.manifest, section=section, ranks=ranks)
        for value in self.foreign_values:
            is_owned_here = value.rank is None or ranks is None or value.rank in ranks
            if section in (None, value.section) and is_owned_here:
                yield value

    def renamed(self, rename: Rename | None) -> Index:
        """Return the index of the same contents under other names. Raises as ``Renames``."""
        if rename is None:
            return self
        before = None if self.names is None else self.names.stored_names
        names = Renames(self.manifest, rename, lambda one, ranks: self.values(section=one, ranks=ranks), before)
        return replace(self, manifest=names.manifest, names=names)

    def stored_name(self, row: int) -> str:
        """Return the full name that a tensor has in the checkpoint."""
        return (self.manifest.tensors.names if self.names is None else self.names.stored_names)[row]

    def reader(self, engine: IOEngine, *, verify: bool, timings: Timings | None = None) -> ShardReader:
        """Return a reader of the tensors that checks what can be checked, or with ``verify=False`` nothing."""
        return ShardReader(
            self.data,
            self.manifest,
            engine.io,
            verify=verify and self.is_own,
            bounce_pool=engine.bounce_pool,
            timings=timings,
            crcs=self.crcs if verify else None,
            views=self.views,
        )


def encode_index(index: Index) -> bytes:
    """Return an index as bytes, for ``decode_index`` on the other ranks of one job."""
    values = [[one.section, encode_path(one.path), one.rank, one.encoded] for one in index.foreign_values]
    crcs = None
    if index.crcs is not None:
        crcs = [column.tobytes() for column in (index.crcs.file, index.crcs.begin, index.crcs.end, index.crcs.crc)]
    manifest, views = index.manifest, None
    if index.views is not None:
        views, files = _pack_views(index.views), manifest.files
        manifest = replace(manifest, files=replace(files, codec=["raw"] * len(files), frames=None))
    packed: bytes = msgpack.packb([index.system, index.name, pack_payload(manifest), values, crcs, views])
    return _START + zstandard.ZstdCompressor(level=1).compress(packed)


def is_encoded_index(data: bytes) -> bool:
    """Whether ``encode_index`` made these bytes."""
    return data.startswith(_START)


def decode_index(data: bytes, backend: StorageBackend) -> Index:
    """Return the index that ``encode_index`` has encoded on another rank, validated. Raises ``FormatError``."""
    packed: list[Any] = msgpack.unpackb(zstandard.ZstdDecompressor().decompress(data[len(_START) :]))
    system, name, tables, values, crcs, views = packed
    manifest = unpack_payload(tables)
    stored_views = None if views is None else _unpack_views(*views)
    if stored_views is not None:
        manifest.files = stored_views.stored.files  # with their frames, which are not those of the views
    validate_foreign(manifest)
    return Index(
        backend,
        manifest,
        system,
        name,
        tuple(StoredValue(section, decode_path(path), rank, encoded) for section, path, rank, encoded in values),
        None if crcs is None else CrcTable(*map(_numbers, crcs)),
        stored_views,
    )


def _pack_views(views: StoredViews) -> list[Any]:
    within, stored = views.within, views.stored
    # Columns of a manifest cannot hold the negative offsets that views of files without frames may have.
    tables = pack_payload(replace(stored, shard_offset=np.maximum(stored.shard_offset, 0)))
    columns = (stored.shard_offset, views.row, within.offsets, within.lengths, np.diff(within.starts))
    return [tables, *(column.tobytes() for column in columns)]


def _unpack_views(tables: bytes, *columns: bytes) -> StoredViews:
    offset, row, offsets, lengths, ndim = map(_numbers, columns)
    stored = replace(unpack_payload(tables), shard_offset=offset)
    return StoredViews(stored, row, BoxTable(row, offsets, lengths, ragged_starts(ndim)))


def _numbers(column: bytes) -> Int64:
    return np.frombuffer(column, np.int64)
