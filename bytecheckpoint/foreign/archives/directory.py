"""The directory of a zip archive in which every entry is stored as it is (no compression), as ``torch.save`` writes it.

Python's ``zipfile`` is not used: it reads entries one by one, and accepts entries that overlap.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

import numpy as np

from ...errors import FormatError
from .ranges import ByteWindow

_END = struct.Struct("<4sHHHHIIH")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR64 = struct.Struct("<4sIQI")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_MAX_DIRECTORY = 256 << 20
_MAX_NAME = 1000
_ENCRYPTED, _SIZES_FOLLOW = 0x1, 0x8


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry; positions are relative to the archive.

    Attributes:
        name: Its name.
        header: Where its local header begins.
        start: Its first byte.
        nbytes: Its length in bytes.
        crc32: The CRC-32 that the directory records.
        crc_field: Where the directory records it.
    """

    name: str
    header: int
    start: int
    nbytes: int
    crc32: int
    crc_field: int

    @property
    def header_length(self) -> int:
        """The bytes of the local header that are checked."""
        return _LOCAL.size + len(self.name.encode())


def read_directory(window: ByteWindow) -> tuple[dict[str, Entry], int]:
    """Return the entries by name, and where the directory begins.

    Checks that the entries do not overlap, lie before the directory, are not compressed, and that their local headers
    agree with the directory. Raises ``FormatError``.
    """
    count, size, start = _read_end(window)
    if size > _MAX_DIRECTORY:
        raise FormatError(f"{window.where}: its directory has {size} bytes; at most {_MAX_DIRECTORY} are read")
    if count * _CENTRAL.size > size:
        raise FormatError(f"{window.where}: its directory of {size} bytes cannot list {count} entries")
    entries = _parse(window.read(start, size), count, start, window.where)
    located = _locate(window, entries)
    position, previous = 0, ""
    for entry in sorted(located, key=lambda one: one.header):
        if entry.header < position:
            raise FormatError(f"{window.where}: entries {previous!r} and {entry.name!r} overlap")
        position, previous = entry.start + entry.nbytes, entry.name
    if position > start:
        raise FormatError(f"{window.where}: entry {previous!r} overlaps the directory")
    return {entry.name: entry for entry in located}, start


def _read_end(window: ByteWindow) -> tuple[int, int, int]:
    """Return number of entries, size and position of the directory."""
    where, at = window.where, window.length - _END.size
    if at < 0:
        raise FormatError(f"{where}: {window.length} bytes are no zip archive; fetch the file again")
    magic, disk, first_disk, here, count, size, start, comment = _END.unpack(window.read(at, _END.size))
    if magic != b"PK\5\6" or comment:
        raise FormatError(f"{where}: no zip archive ends here; it was truncated, or something was appended")
    end = at
    if (disk, first_disk) not in ((0, 0), (0xFFFF, 0xFFFF)) or here != count:
        raise FormatError(f"{where}: its zip archive has several parts")
    locator = window.read(at - _LOCATOR64.size, _LOCATOR64.size) if at >= _LOCATOR64.size else b""
    if locator[:4] == b"PK\6\7":
        _, disk, end, _ = _LOCATOR64.unpack(locator)
        record = _END64.unpack(window.read(end, _END64.size))
        if record[0] != b"PK\6\6" or end + _END64.size > at - _LOCATOR64.size or disk:
            raise FormatError(f"{where}: the end record of its zip archive is invalid")
        here, count, size, start = record[6:]
        if here != count:
            raise FormatError(f"{where}: its zip archive has several parts")
    if start + size != end:
        raise FormatError(f"{where}: the directory of its zip archive does not end at the end record")
    return count, size, start


def _parse(raw: bytes, count: int, base: int, where: str) -> list[Entry]:
    """Return the entries of the directory; ``start`` of each is still unknown."""
    entries: list[Entry] = []
    names: set[str] = set()
    at = 0
    for _ in range(count):
        if at + _CENTRAL.size > len(raw):
            raise FormatError(f"{where}: the directory of its zip archive ends early")
        fields = _CENTRAL.unpack_from(raw, at)
        magic, _, _, flags, method, _, _, crc32, packed, nbytes, name_length, extra_length, comment_length = fields[:13]
        header = fields[16]
        name_at = at + _CENTRAL.size
        extra_at = name_at + name_length
        following = extra_at + extra_length + comment_length
        if magic != b"PK\1\2" or following > len(raw) or name_length > _MAX_NAME or fields[13] not in (0, 0xFFFF):
            raise FormatError(f"{where}: entry {len(entries)} of its directory is invalid")
        try:
            name = raw[name_at:extra_at].decode("utf-8")
        except UnicodeDecodeError:
            raise FormatError(f"{where}: the name of entry {len(entries)} is not UTF-8") from None
        wide = [nbytes == 0xFFFFFFFF, packed == 0xFFFFFFFF, header == 0xFFFFFFFF]
        if any(wide):
            numbers = _wide_numbers(raw[extra_at : extra_at + extra_length], sum(wide), f"{where}: entry {name!r}")
            nbytes, packed, header = (
                numbers.pop(0) if is_wide else value
                for is_wide, value in zip(wide, (nbytes, packed, header), strict=True)
            )
        if method or flags & _ENCRYPTED or packed != nbytes:
            raise FormatError(
                f"{where}: entry {name!r} is compressed or encrypted; unpack the archive and pack it again "
                f"without compression (zip -0), or load it with torch.load and save it again"
            )
        if name in names:
            raise FormatError(f"{where}: it has two entries {name!r}")
        names.add(name)
        entries.append(Entry(name, header, 0, nbytes, crc32, base + at + 16))
        at = following
    if at != len(raw):
        raise FormatError(f"{where}: the directory of its zip archive has {len(raw) - at} bytes too many")
    return entries


def _wide_numbers(extra: bytes, count: int, where: str) -> list[int]:
    """Return the 64-bit numbers of the zip64 field."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1 and length >= 8 * count and at + 4 + length <= len(extra):
            return list(struct.unpack_from(f"<{count}Q", extra, at + 4))
        at += 4 + length
    raise FormatError(f"{where} has no zip64 sizes")


def _locate(window: ByteWindow, entries: list[Entry]) -> list[Entry]:
    """Read the local headers, and return the entries with their positions."""
    if not entries:
        return []
    names = [entry.name.encode() for entry in entries]
    width = _LOCAL.size + max(map(len, names))
    for entry in entries:
        if entry.header > window.length - width:
            raise FormatError(f"{window.where}: entry {entry.name!r} begins outside of the archive")
    rows = window.read_rows(np.array([entry.header for entry in entries], np.int64), width)
    located = []
    for entry, name, row in zip(entries, names, rows, strict=True):
        raw = row.tobytes()
        magic, _, flags, method, _, _, _, packed, nbytes, name_length, extra_length = _LOCAL.unpack_from(raw)
        sizes = {entry.nbytes, 0xFFFFFFFF, 0 if flags & _SIZES_FOLLOW else entry.nbytes}
        is_equal = raw[_LOCAL.size : _LOCAL.size + name_length] == name and {packed, nbytes} <= sizes
        if magic != b"PK\3\4" or method or flags & _ENCRYPTED or not is_equal:
            raise FormatError(f"{window.where}: entry {entry.name!r} differs from the directory of the zip archive")
        located.append(replace(entry, start=entry.header + _LOCAL.size + name_length + extra_length))
    return located
