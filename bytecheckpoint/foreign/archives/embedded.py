"""Many archives of ``torch.save`` in one file, as ``torch.distributed.checkpoint`` writes them.

A checkpoint can have a hundred thousand, and most of them have the same bytes as others of their length, except for the
one storage and CRC-32 values. So only those that differ are parsed; all others are compared with a parsed one, in large
batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import FormatError
from ...storage_backends.base import ObjectReader, StorageBackend
from ..pickles.records import TensorRef
from .ranges import Positions, Rows, read_rows
from .torch_archive import ArchiveParts, interpret_parts, read_parts

_MAX_ROW = 1 << 20  # an archive of which more bytes matter is parsed separately
_BATCH = 32 << 20  # bytes that are compared at once
_MAX_PATTERNS = 32  # archives of one length are compared with at most so many others
_STRUCTURE = frozenset(["data.pkl", "byteorder"])  # entries whose contents matter, besides the storage
_CRC_IN_HEADER, _CRC_SIZE = 14, 4


def read_embedded(backend: StorageBackend, key: str, offsets: Sequence[int], lengths: Sequence[int]) -> list[Any]:
    """Read the objects of many archives in one file.

    Args:
        backend: Storage backend of the file.
        key: The file.
        offsets: Where each archive begins.
        lengths: The bytes of each archive.

    Returns:
        The objects, as ``interpret`` returns each of them.

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
    found: dict[int, Any] = {}
    with backend.open_object(key) as reader:
        for length, members in groups.items():
            bases = np.array([offsets[index] for index in members], np.int64)
            found.update(zip(members, _read_group(reader, key, where, bases, length), strict=True))
    return [found[index] for index in range(len(offsets))]


def _read_group(reader: ObjectReader, file: str, where: str, bases: Positions, length: int) -> list[Any]:
    """Read the objects of archives of one length, which begin at ``bases``."""
    found: list[Any] = [None] * len(bases)
    left, tries = np.arange(len(bases)), 0
    while len(left):
        first, left, tries = int(left[0]), left[1:], tries + 1
        base = int(bases[first])
        parts = read_parts(reader, base, length, f"{where} at byte {base}")
        found[first] = interpret_parts(parts, file, base, f"{where} at byte {base}")
        pattern = _Pattern.of(reader, base, parts, found[first]) if len(left) and tries <= _MAX_PATTERNS else None
        if pattern is not None:
            left = pattern.match(reader, bases, left, found)
    return found


@dataclass(frozen=True)
class _Pattern:
    """The bytes that make another archive equal to a parsed one: all but those of the storage, ``[start, end)``.

    The parsed one begins at ``base`` and holds ``value``. ``checked`` marks the bytes on which the result depends;
    ``crc_at`` is where the CRC-32 of the storage is.
    """

    base: int
    value: Any
    start: int
    end: int
    length: int
    expected: Rows
    checked: npt.NDArray[np.bool_]
    crc_at: int | None

    @classmethod
    def of(cls, reader: ObjectReader, base: int, parts: ArchiveParts, value: Any) -> _Pattern | None:
        """Return the pattern; None if there are too many bytes, or storages of anything but one tensor."""
        data = [entry for name, entry in parts.entries.items() if name.startswith("data/")]
        if len(data) > 1 or (data and type(value) is not TensorRef):
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
        pattern = cls(base, value, start, end, parts.length, np.empty(0, np.uint8), checked, crc_at)
        return replace(pattern, expected=pattern.read(reader, np.array([base], np.int64))[0])

    def match(self, reader: ObjectReader, bases: Positions, members: Positions, found: list[Any]) -> Positions:
        """Add the objects of those archives that equal the parsed one, and return the others."""
        rest = [members[:0]]
        step = max(1, _BATCH // len(self.expected))
        for at in range(0, len(members), step):
            batch = members[at : at + step]
            rows = self.read(reader, bases[batch])
            is_equal = ((rows == self.expected) | ~self.checked).all(axis=1)
            for index, crc32 in zip(batch[is_equal].tolist(), self.crcs(rows[is_equal]), strict=True):
                found[index] = _moved(self.value, int(bases[index]) - self.base, crc32)
            rest.append(batch[~is_equal])
        return np.concatenate(rest)

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


def _moved(value: Any, distance: int, crc32: int | None) -> Any:
    """The object of an archive that equals another one, ``distance`` bytes before it, with this ``value``."""
    if type(value) is not TensorRef:
        return value
    old = value.storage
    return replace(value, storage=replace(old, offset=old.offset + distance, crc32=crc32))
