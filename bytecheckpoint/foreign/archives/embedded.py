"""Many archives of ``torch.save`` in one file, as ``torch.distributed.checkpoint`` writes them.

A checkpoint can have a hundred thousand, and most of them have the same bytes as others of their length, except for the
storages and their CRC-32 values. So only those that differ are parsed; all others are compared with a parsed one, in
large batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ...errors import FormatError
from ...storage_backends.base import ObjectReader, StorageBackend
from ..pickles import TensorRef
from .ranges import Positions, Rows, read_rows
from .torch_archive import ArchiveParts, TorchArchive, interpret_parts, read_parts

_MAX_ROW = 1 << 20  # an archive of which more bytes matter, such as one of many tensors, is parsed separately
_BATCH = 32 << 20  # bytes that are compared at once
_MAX_PATTERNS = 32  # archives of one length are compared with at most so many others
_GAP = 4096  # bytes between two parts that are read rather than skipped
_STRUCTURE = frozenset(["data.pkl", "byteorder"])  # entries whose contents matter, besides the storages
_CRC_IN_HEADER, _CRC_SIZE = 14, 4


@dataclass(frozen=True)
class _Pattern:
    """The bytes that make another archive equal to a parsed one.

    A row has the bytes of all windows, each ``width`` long; ``checked`` lists the positions in a row that must be as in
    ``expected``, and ``crc_at`` where the CRC-32 of each storage is.
    """

    windows: Positions
    width: int
    expected: npt.NDArray[np.uint8]
    checked: npt.NDArray[np.bool_]
    crc_at: list[int]

    def match(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Return which rows are equal to this archive."""
        is_equal: npt.NDArray[np.bool_] = ((rows == self.expected) | ~self.checked).all(axis=1)
        return is_equal

    def crcs(self, rows: Rows) -> list[list[int]]:
        """Return the CRC-32 values of the storages, one list for each row."""
        fields = [np.ascontiguousarray(rows[:, at : at + _CRC_SIZE]).view("<u4") for at in self.crc_at]
        found: list[list[int]] = np.concatenate(fields, axis=1).tolist() if fields else [[]] * len(rows)
        return found


class EmbeddedArchives(Sequence[TorchArchive]):
    """The archives of one file, in the order in which they were listed.

    Attributes:
        patterns: What the archives contain, with positions relative to each archive, and without duplicates.
        pattern: For each archive, its position in ``patterns``.
    """

    def __init__(self, file: str, where: str, offsets: Positions) -> None:
        self.patterns: list[TorchArchive] = []
        self.pattern: Positions = np.full(len(offsets), -1, np.int64)
        self._parts: list[ArchiveParts] = []
        self._file, self._where, self._offsets = file, where, offsets
        self._crcs: list[list[int]] = [[]] * len(offsets)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> TorchArchive:  # type: ignore[override]  # no slices
        """Return one archive with its positions in the file, as ``read_archive`` does."""
        base, number = int(self._offsets[index]), int(self.pattern[index])
        pattern, parts, crcs = self.patterns[number], self._parts[number], self._crcs[index]
        value = pattern.value
        if type(value) is not TensorRef:
            by_name = {
                parts.entries[f"data/{key}"].name: crc32 for key, crc32 in zip(pattern.storages, crcs, strict=True)
            }
            return interpret_parts(parts, self._file, base, f"{self._where} at byte {base}", by_name)
        crc32 = crcs[0] if parts.has_crcs else None
        storage = replace(value.storage, offset=base + value.storage.offset, crc32=crc32)
        return TorchArchive(replace(value, storage=storage), {storage.key: storage})

    def _add(self, parts: ArchiveParts, archive: TorchArchive) -> int:
        self.patterns.append(archive)
        self._parts.append(parts)
        return len(self.patterns) - 1

    def _assign(self, indices: Positions, number: int, crcs: list[list[int]]) -> None:
        self.pattern[indices] = number
        for index, values in zip(indices.tolist(), crcs, strict=True):
            self._crcs[index] = values


def read_embedded(
    backend: StorageBackend, key: str, offsets: Sequence[int] | Positions, lengths: Sequence[int] | Positions
) -> EmbeddedArchives:
    """Read the objects of many archives in one file.

    Args:
        backend: The storage backend.
        key: The file.
        offsets: The first byte of each archive.
        lengths: The length of each archive in bytes.

    Returns:
        The archives. Each costs a few hundred bytes of memory.

    Raises:
        FormatError: An archive is damaged, or does not lie inside the file.
        CorruptionError: The CRC-32 of a pickled object differs.
        StorageError: The file cannot be read.
    """
    where, size = f"{backend.url}/{key}", backend.stat(key).size
    for offset, length in ((int(one), int(other)) for one, other in zip(offsets, lengths, strict=True)):
        if offset < 0 or length <= 0 or offset + length > size:
            raise FormatError(f"{where}: an item at byte {offset} of {length} bytes is not inside its {size} bytes")
    starts, ends = np.asarray(offsets, np.int64), np.asarray(lengths, np.int64)
    found = EmbeddedArchives(key, where, starts)
    order = np.argsort(ends, kind="stable")
    with backend.open_object(key) as reader:
        for members in np.split(order, np.flatnonzero(np.diff(ends[order])) + 1):
            if len(members):
                _read_group(reader, found, members, int(ends[members[0]]))
    return found


def _read_group(reader: ObjectReader, found: EmbeddedArchives, members: Positions, length: int) -> None:
    """Read archives of one length."""
    tries = 0
    while len(members):
        base = int(found._offsets[members[0]])
        where = f"{found._where} at byte {base}"
        parts = read_parts(reader, base, length, where)
        archive = interpret_parts(parts, found._file, 0, where)
        number = found._add(parts, archive)
        found._assign(members[:1], number, [[parts.entries[f"data/{key}"].crc32 for key in archive.storages]])
        members = members[1:]
        tries += 1
        pattern = _pattern(reader, base, length, parts, archive) if len(members) and tries <= _MAX_PATTERNS else None
        if pattern is None:
            continue
        is_left = np.ones(len(members), bool)
        step = max(1, _BATCH // len(pattern.expected))
        for first in range(0, len(members), step):
            batch = members[first : first + step]
            rows = _read(reader, found._offsets[batch], pattern.windows, pattern.width)
            is_equal = pattern.match(rows)
            found._assign(batch[is_equal], number, pattern.crcs(rows[is_equal]))
            is_left[first : first + step] = ~is_equal
        members = members[is_left]


def _read(reader: ObjectReader, offsets: Positions, windows: Positions, width: int) -> Rows:
    """Return the windows of each archive, one archive in a row."""
    starts = (offsets[:, None] + windows[None, :]).ravel()
    return read_rows(reader, starts, width).reshape(len(offsets), len(windows) * width)


def _pattern(
    reader: ObjectReader, base: int, length: int, parts: ArchiveParts, archive: TorchArchive
) -> _Pattern | None:
    """Find the bytes on which the result depends; None if there are too many. Positions are relative to the archive."""
    needed, free = [(parts.directory, length)], []
    for name, entry in parts.entries.items():
        needed.append((entry.header, entry.header + entry.header_length))
        if name in _STRUCTURE:
            needed.append((entry.start, entry.start + entry.nbytes))
        elif parts.has_crcs:
            free += [entry.crc_field, entry.header + _CRC_IN_HEADER]
    windows, width = _cut(sorted(needed), length)
    if len(windows) * width > _MAX_ROW:
        return None
    checked = np.zeros((len(windows), width), bool)
    for values, begin in zip(checked, windows.tolist(), strict=True):
        for first, last in needed:
            values[max(first - begin, 0) : max(last - begin, 0)] = True
        for at in free:
            values[max(at - begin, 0) : max(at + _CRC_SIZE - begin, 0)] = False
    expected = _read(reader, np.array([base], np.int64), windows, width)[0]
    tail = (len(windows) - 1) * width - int(windows[-1])  # where byte 0 of the archive would be in the last window
    crc_at = [tail + parts.entries[f"data/{key}"].crc_field for key in archive.storages]
    return _Pattern(windows, width, expected, checked.ravel(), crc_at)


def _cut(needed: list[tuple[int, int]], length: int) -> tuple[Positions, int]:
    """Return the beginnings and the width of windows, all of one width, that contain all ranges."""
    groups: list[list[int]] = []
    for first, last in needed:
        if groups and first <= groups[-1][1] + _GAP:
            groups[-1][1] = max(groups[-1][1], last)
        else:
            groups.append([first, last])
    width = max(last - first for first, last in groups)
    return np.array([min(first, length - width) for first, _ in groups], np.int64), width
