"""Many archives of ``torch.save`` in one file, as ``torch.distributed.checkpoint`` writes them.

A checkpoint can have a hundred thousand, and most of them have the same bytes as others of their length, except for the
one storage and CRC-32 values. So only those that differ are parsed; all others are compared with a parsed one, in large
batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ...errors import FormatError
from ...storage_backends.base import ObjectReader, StorageBackend
from ..pickles.records import Storage, TensorRef
from .ranges import Positions, Rows, read_rows
from .torch_archive import ArchiveParts, TorchArchive, interpret_parts, read_parts

_MAX_ROW = 1 << 20  # an archive of which more bytes matter is parsed separately
_BATCH = 32 << 20  # bytes that are compared at once
_MAX_PATTERNS = 32  # archives of one length are compared with at most so many others
_STRUCTURE = frozenset(["data.pkl", "byteorder"])  # entries whose contents matter, besides the storage
_CRC_IN_HEADER, _CRC_SIZE = 14, 4


def read_embedded(
    backend: StorageBackend, key: str, offsets: Sequence[int], lengths: Sequence[int]
) -> list[TorchArchive]:
    """Read the objects of many archives in one file.

    Args:
        backend: Storage backend of the file.
        key: The file.
        offsets: Where each archive begins.
        lengths: The bytes of each archive.

    Returns:
        The archives, as ``read_archive`` returns each of them.

    Raises:
        FormatError: A range is not inside the file, or holds no archive that this library reads.
        CorruptionError: An archive is damaged.
        StorageError: The store failed.
    """
    where, size = f"{backend.url}/{key}", backend.stat(key).size
    groups: dict[int, list[int]] = {}
    for index, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        if offset < 0 or length <= 0 or offset + length > size:
            raise FormatError(f"{where}: an item at byte {offset} of {length} bytes is not inside its {size} bytes")
        groups.setdefault(length, []).append(index)
    found: dict[int, TorchArchive] = {}
    with backend.open_object(key) as reader:
        for length, members in groups.items():
            group = _Group(reader, key, where, length, np.array(offsets, np.int64))
            group.read(np.array(members, np.int64), found)
    return [found[index] for index in range(len(offsets))]


@dataclass(frozen=True)
class _Group:
    """Archives of one length."""

    reader: ObjectReader
    file: str
    where: str
    length: int
    offsets: Positions

    def read(self, members: Positions, found: dict[int, TorchArchive]) -> None:
        """Add the archives of these numbers to ``found``."""
        tries = 0
        while len(members):
            first, members = int(members[0]), members[1:]
            base, tries = int(self.offsets[first]), tries + 1
            where = f"{self.where} at byte {base}"
            parts = read_parts(self.reader, base, self.length, where)
            archive = found[first] = interpret_parts(parts, self.file, base, where)
            pattern = (
                _Pattern.of(self.reader, base, parts, archive) if len(members) and tries <= _MAX_PATTERNS else None
            )
            if pattern is not None:
                members = self._match(pattern, archive, base, members, found)

    def _match(
        self, pattern: _Pattern, like: TorchArchive, base: int, members: Positions, found: dict[int, TorchArchive]
    ) -> Positions:
        """Add those that equal a parsed archive, and return the others."""
        rest = [members[:0]]
        step = max(1, _BATCH // len(pattern.expected))
        for at in range(0, len(members), step):
            batch = members[at : at + step]
            rows = pattern.read(self.reader, self.offsets[batch])
            is_equal = ((rows == pattern.expected) | ~pattern.checked).all(axis=1)
            crcs = pattern.crcs(rows[is_equal])
            for index, crc32 in zip(batch[is_equal].tolist(), crcs, strict=True):
                found[index] = _moved(like, int(self.offsets[index]) - base, crc32)
            rest.append(batch[~is_equal])
        return np.concatenate(rest)


@dataclass(frozen=True)
class _Pattern:
    """The bytes that make another archive equal to a parsed one: all but those of the storage, ``[start, end)``.

    ``checked`` marks those on which the result depends; ``crc_at`` is where the CRC-32 of the storage is.
    """

    start: int
    end: int
    length: int
    expected: Rows
    checked: npt.NDArray[np.bool_]
    crc_at: int | None

    @classmethod
    def of(cls, reader: ObjectReader, base: int, parts: ArchiveParts, archive: TorchArchive) -> _Pattern | None:
        """Return the pattern; None if there are too many bytes, or if the archive is no tensor and has storages."""
        data = [parts.entries[f"data/{key}"] for key in archive.storages]
        if data and type(archive.value) is not TensorRef:
            return None
        start, end = (data[0].start, data[0].start + data[0].nbytes) if data else (parts.length, parts.length)
        size = start + parts.length - end
        if size > _MAX_ROW:
            return None
        checked = np.zeros(size, bool)

        def mark(first: int, last: int, *, matters: bool = True) -> None:
            # Nothing that is marked is inside the storage.
            checked[slice(*(at if at <= start else at - end + start for at in (first, last)))] = matters

        mark(parts.directory, parts.length)
        for name, entry in parts.entries.items():
            mark(entry.header, entry.header + entry.header_length)
            if name in _STRUCTURE:
                mark(entry.start, entry.start + entry.nbytes)
            elif parts.has_crcs:
                for at in (entry.crc_field, entry.header + _CRC_IN_HEADER):
                    mark(at, at + _CRC_SIZE, matters=False)
        crc_at = data[0].crc_field - end + start if data and parts.has_crcs else None
        pattern = cls(start, end, parts.length, np.empty(0, np.uint8), checked, crc_at)
        return replace(pattern, expected=pattern.read(reader, np.array([base], np.int64))[0])

    def read(self, reader: ObjectReader, bases: Positions) -> Rows:
        """Return these bytes of the archives that begin at ``bases``, one archive in a row."""
        head = read_rows(reader, bases, self.start)
        return np.concatenate([head, read_rows(reader, bases + self.end, self.length - self.end)], axis=1)

    def crcs(self, rows: Rows) -> list[int | None]:
        """Return the CRC-32 of the storage of each row."""
        if self.crc_at is None:
            return [None] * len(rows)
        found: list[int | None] = np.ascontiguousarray(rows[:, self.crc_at :][:, :_CRC_SIZE]).view("<u4")[:, 0].tolist()
        return found


def _moved(like: TorchArchive, distance: int, crc32: int | None) -> TorchArchive:
    """An archive that equals another one, ``distance`` bytes before it."""
    if type(like.value) is not TensorRef:
        return like
    old = like.value.storage
    storage: Storage = replace(old, offset=old.offset + distance, crc32=crc32)
    return TorchArchive(replace(like.value, storage=storage), {storage.key: storage})
