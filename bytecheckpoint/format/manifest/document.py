"""The manifest in memory: columns, and look-ups in them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import numpy as np

from ...errors import FormatError
from ...tensors.geometry import Box
from ...tensors.metadata import ByteMeta
from ...tensors.tables import BoxTable, Int64, TensorTable, ragged_positions, ragged_starts
from ..checksums import Checksums, empty_checksums
from .files import MAX_ENCODED_CHUNK, FileTable, FrameTable, ReferenceTable, is_encoded


def timestamp() -> str:
    """Return the current time in the format of ``Manifest.created``."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def seconds_of(created: str) -> float:
    """Return such a time in seconds since the epoch; 0 if it is no time, as of a hostile or a foreign checkpoint."""
    try:
        return datetime.fromisoformat(created).timestamp()
    except ValueError:
        return 0.0


@dataclass(frozen=True)
class SectionInfo:
    """One entry of the saved state. ``kind`` is the name of the adapter that wrote it."""

    name: str
    kind: str


@dataclass(eq=False)
class Summary:
    """What a manifest states without its tables of tensors and shards, which are most of it.

    ``created`` is RFC 3339 in UTC with microseconds; ``attempt`` is the directory of all files; ``metadata`` is the
    user's plain values.
    """

    library_version: str
    step: int | None
    created: str
    world_size: int
    attempt: str
    metadata: dict[str, Any]
    sections: list[SectionInfo]
    files: FileTable

    @property
    def file_bytes(self) -> int:
        """Bytes of all data files."""
        return int(self.files.size.sum())


@dataclass(eq=False)
class Manifest(Summary):
    """The contents of one checkpoint. Do not change an instance: look-ups cache what they compute.

    ``tensors`` are sorted by full name; ``scope`` is -1 for a tensor of the whole job, else the rank that alone has it.
    ``shards`` are sorted by (tensor, offsets); ``shard_offset`` counts bytes from the data start of file
    ``shard_file``, as if it were not encoded. ``checksums`` are those of all shards' chunks, in shard order.
    ``aliases`` are pairs of full names (alias, tensor that stores its bytes), sorted. If ``is_shared``, the files are
    objects of the root, to which its other checkpoints may refer. After a rename, ``tensors`` are not sorted, and
    ``row_of`` is the row of each name. ``save_times`` is how long the save took, which may be anything or empty in a
    manifest that was read.
    """

    tensors: TensorTable
    scope: Int64
    shards: BoxTable
    shard_file: Int64
    shard_offset: Int64
    checksums: Checksums
    aliases: list[tuple[str, str]] = field(default_factory=list)
    is_shared: bool = False
    row_of: Mapping[str, int] | None = None
    save_times: Mapping[str, Any] = field(default_factory=dict)

    def in_order(self) -> Manifest:
        """Return this manifest, whose tables may be in any row order, with sorted ones.

        ``tensors.section`` then points to ``sections``. Raises ``KeyError`` for a tensor whose section is not listed;
        ``validate`` checks everything else.
        """
        tensors, shards = self.tensors, self.shards
        index = {section.name: i for i, section in enumerate(self.sections)}
        section = np.array([index[name] for name in tensors.sections], np.int64)
        order = np.array(sorted(range(len(tensors)), key=tensors.names.__getitem__), np.int64)
        sorted_tensors = TensorTable(
            [tensors.names[row] for row in order.tolist()],
            [s.name for s in self.sections],
            section[tensors.section[order]],
            tensors.dtype[order],
            tensors.ndim[order],
            tensors.shape[ragged_positions(tensors.starts[:-1][order], tensors.ndim[order])],
        )
        new_row = np.empty(len(order), np.int64)
        new_row[order] = np.arange(len(order))
        moved = BoxTable(new_row[shards.tensor], shards.offsets, shards.lengths, shards.starts)
        rows = _shard_order(moved)
        counts = _chunks(moved.nbytes(sorted_tensors), self.files.chunk_size[self.shard_file])
        return replace(
            self,
            tensors=sorted_tensors,
            scope=self.scope[order],
            shards=moved.take(rows),
            shard_file=self.shard_file[rows],
            shard_offset=self.shard_offset[rows],
            checksums=self.checksums[ragged_positions((np.cumsum(counts) - counts)[rows], counts[rows])],
            aliases=sorted(self.aliases),
        )

    def with_tensors(
        self,
        sections: list[SectionInfo],
        tensors: TensorTable,
        scope: Int64,
        shards: BoxTable,
        shard_file: Int64,
        shard_offset: Int64,
        aliases: list[tuple[str, str]],
    ) -> tuple[Manifest, Int64]:
        """Return a manifest of other tensors in the same files, without checksums, and the order of their shards.

        The tables are as for ``in_order``; row ``i`` of the manifest's shards is row ``order[i]`` of ``shards``.
        """
        chunks = _chunks(shards.nbytes(tensors), self.files.chunk_size[shard_file])
        manifest = replace(
            self,
            sections=sections,
            tensors=tensors,
            scope=scope,
            shards=shards,
            shard_file=shard_file,
            shard_offset=np.arange(len(shards)),
            checksums=empty_checksums(int(chunks.sum())),
            aliases=aliases,
            is_shared=False,
            row_of=None,
            save_times={},
        ).in_order()
        order = manifest.shard_offset
        manifest.shard_offset = shard_offset[order]
        return manifest, order

    @cached_property
    def shard_nbytes(self) -> Int64:
        """Bytes of each shard."""
        return self.shards.nbytes(self.tensors)

    @cached_property
    def checksum_starts(self) -> Int64:
        """Shard ``i`` has checksums ``[checksum_starts[i], checksum_starts[i + 1])``."""
        return ragged_starts(_chunks(self.shard_nbytes, self.files.chunk_size[self.shard_file]))

    @cached_property
    def _shard_starts(self) -> Int64:
        return np.searchsorted(self.shards.tensor, np.arange(len(self.tensors) + 1))

    @cached_property
    def _shards_by_file(self) -> tuple[Int64, Int64]:
        order = np.lexsort((self.shard_offset, self.shard_file))
        return order, np.searchsorted(self.shard_file[order], np.arange(len(self.files) + 1))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return int(self.shard_nbytes.sum())

    @property
    def references(self) -> ReferenceTable:
        """The files of older checkpoints that hold bytes of this one."""
        return ReferenceTable() if self.files.frames is None else self.files.frames.references

    @cached_property
    def frame_checksums(self) -> Checksums:
        """The checksums of all frames. A frame as long as its chunk is the chunk."""
        frames, rows = self.files.frames, self._shards_by_file[0]
        if frames is None:
            return self.checksums[:0]
        rows = rows[is_encoded(self.files.codec)[self.shard_file[rows]]]
        first = self.checksum_starts[rows]
        found = self.checksums[ragged_positions(first, self.checksum_starts[rows + 1] - first)]
        found[frames.length < frames.nbytes] = frames.checksums
        return found

    def flattened(self) -> Manifest:
        """Return the manifest of a full copy, whose files have all frames themselves, in its own folder."""
        files, frames = self.files, self.files.frames
        if frames is None or not frames.references.name:
            return replace(self, is_shared=False) if self.is_shared else self
        length = np.where(is_encoded(files.codec), frames.sums(frames.length), files.size - files.head_length)
        own = find_frames(
            self,
            frames.length,
            frames.checksums,
            source=np.zeros_like(frames.source),
            offset=frames.source[:0],
            references=ReferenceTable(),
        )
        return replace(self, is_shared=False, files=replace(files, size=files.head_length + length, frames=own))

    def tensor_row(self, name: str) -> int | None:
        """Return the row of the tensor with this full name; None if there is none (the name may be an alias)."""
        if self.row_of is not None:
            return self.row_of.get(name)
        row = bisect_left(self.tensors.names, name)
        return row if row < len(self.tensors) and self.tensors.names[row] == name else None

    def resolve(self, name: str) -> str:
        """Return the name under which the bytes of ``name`` are stored: its alias target, or ``name`` itself."""
        at = bisect_left(self.aliases, (name, ""))
        return self.aliases[at][1] if at < len(self.aliases) and self.aliases[at][0] == name else name

    def shards_of(self, row: int) -> slice:
        """The shard rows of one tensor."""
        return slice(int(self._shard_starts[row]), int(self._shard_starts[row + 1]))

    def shards_of_all(self, rows: Int64) -> Int64:
        """The shard rows of many tensors, one tensor after another."""
        first = self._shard_starts[rows]
        return ragged_positions(first, self._shard_starts[rows + 1] - first)

    def boxes_of(self, row: int) -> list[Box]:
        """The boxes of the shards of one tensor."""
        rows = self.shards_of(row)
        return [self.shards.box_of(shard) for shard in range(rows.start, rows.stop)]

    def shards_in(self, file: int) -> Int64:
        """The shard rows of one file, in the order of their bytes."""
        order, starts = self._shards_by_file
        return order[starts[file] : starts[file + 1]]

    def byte_meta(self, shard: int) -> ByteMeta:
        """Return where a shard's bytes are.

        ``offset`` counts from the beginning of the file, as if it were not encoded.
        """
        file = int(self.shard_file[shard])
        first, last = self.checksum_starts[shard : shard + 2].tolist()
        return ByteMeta(
            self.files.name[file],
            int(self.files.head_length[file] + self.shard_offset[shard]),
            int(self.shard_nbytes[shard]),
            int(self.files.chunk_size[file]),
            tuple(self.checksums[first:last].tolist()),
            self.files.codec[file],
        )

    def section_name(self, index: int) -> str:
        return self.sections[index].name

    def section_index(self, name: str) -> int | None:
        """Position of a section in ``sections``; None where it is not stored."""
        return next((i for i, section in enumerate(self.sections) if section.name == name), None)

    def section_tensors(self, name: str) -> Int64:
        """The tensor rows of a section; none for a section that is not stored."""
        index = self.section_index(name)
        return np.flatnonzero(self.tensors.section == (-1 if index is None else index))


def find_frames(
    manifest: Manifest,
    length: Int64,
    checksums: Checksums,
    *,
    source: Int64,
    offset: Int64,
    references: ReferenceTable,
) -> FrameTable:
    """Find the chunk of each frame among those of the manifest's shards, whatever its own frames are.

    ``offset`` are the positions of the frames that references hold, in order. Raises ``FormatError`` if the frames
    are not those of the shards. The numbers are untrusted; ``validate`` checks the references.
    """
    files, shard_file, shard_offset = manifest.files, manifest.shard_file, manifest.shard_offset
    encoded, chunk_size, shard_nbytes = is_encoded(files.codec), files.chunk_size, manifest.shard_nbytes
    if len(shard_file) and int(shard_file.max()) >= len(files):
        raise FormatError("manifest: a shard refers to a file that does not exist")
    if ((chunk_size < 1) | (encoded & (chunk_size > MAX_ENCODED_CHUNK))).any():
        raise FormatError(f"manifest: the chunk size of an encoded file is not from 1 to {MAX_ENCODED_CHUNK}")
    rows = np.flatnonzero(encoded[shard_file] & (shard_nbytes != 0)) if len(files) else shard_file[:0]
    rows = rows[np.lexsort((shard_offset[rows], shard_file[rows]))]
    file, nbytes = shard_file[rows], shard_nbytes[rows]
    counts = -(-nbytes // chunk_size[file])
    # The maximum is compared first, because hostile counts may have a sum that wraps around.
    if (nbytes < 0).any() or int(counts.max(initial=0)) > len(length) or int(counts.sum()) != len(length):
        raise FormatError(f"manifest: {len(length)} frames, but the encoded files have {int(counts.sum())} chunks")
    skipped = ragged_positions(np.zeros_like(counts), counts) * np.repeat(chunk_size[file], counts)
    rest = np.repeat(nbytes, counts) - skipped
    of_file = np.repeat(file, counts)
    found = np.minimum(rest, chunk_size[of_file])
    bad = (length < 1) | (length > found)
    if bad.any():
        at = int(np.argmax(bad))
        raise FormatError(f"manifest: frame {at} has {length[at]} bytes, not from 1 to the {found[at]} of its chunk")
    if len(source) != len(length) or len(offset) != np.count_nonzero(source):
        raise FormatError("manifest: columns of frames differ in length")
    if len(checksums) != np.count_nonzero(length < found):
        raise FormatError(f"manifest: {len(checksums)} checksums are not those of the frames that are encoded")
    starts = np.searchsorted(of_file, np.arange(len(files) + 1))
    stored = np.where(source == 0, length, 0)
    ends = np.cumsum(stored)
    before = np.append(0, ends)[starts[:-1]]
    position = ends - stored - before[of_file] + files.head_length[of_file]
    position[source != 0] = offset
    begin = np.repeat(shard_offset[rows], counts) + skipped
    return FrameTable(length, checksums, starts, begin, found, position, source, references)


def _chunks(nbytes: Int64, chunk_size: Int64) -> Int64:
    return -(-nbytes // chunk_size)


def _shard_order(shards: BoxTable) -> Int64:
    counts = shards.starts[1:] - shards.starts[:-1]
    widest = int(counts.max(initial=0))
    keys = np.zeros((widest + 1, len(shards)), np.int64)
    keys[0] = shards.tensor
    for d in range(widest):
        rows = np.flatnonzero(counts > d)
        keys[d + 1, rows] = shards.offsets[shards.starts[:-1][rows] + d]
    return np.lexsort(keys[::-1])
