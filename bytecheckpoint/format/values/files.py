"""Paths, digests and files of a section's values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import msgpack
import xxhash

from ...errors import FormatError, UnserializableError
from ...tensors.metadata import Path
from .types import MAX_DEPTH, path_name, unpack

VALUES_FILE_VERSION = 1


def encode_path(path: Path) -> bytes:
    """Encode a path as a msgpack array. Raises ``UnserializableError`` for a component that is neither str nor int."""
    if len(path) > MAX_DEPTH:
        raise UnserializableError(
            f"path {path_name(path[:4])}... is more than {MAX_DEPTH} levels deep; flatten the tree"
        )
    for part in path:
        if type(part) is not str and type(part) is not int:
            raise UnserializableError(f"path {path!r}: component {part!r} is neither str nor int")
    try:
        return cast(bytes, msgpack.packb(list(path), strict_types=True))
    except (ValueError, OverflowError) as error:
        raise UnserializableError(
            f"key path {path!r} cannot be stored ({error}); keys must be valid Unicode and ints must fit in 64 bits"
        ) from error


def decode_path(data: bytes) -> Path:
    """Decode what ``encode_path`` has encoded. Raises ``FormatError``."""
    return _path(unpack(data, "path", ext_hook=_no_extensions))


def _path(parts: object) -> Path:
    if type(parts) is not list or any(type(part) is not str and type(part) is not int for part in parts):
        raise FormatError("a value's path must be an array of strings and integers")
    if len(parts) > MAX_DEPTH:
        raise FormatError(f"a value's path has {len(parts)} components; at most {MAX_DEPTH} are allowed")
    return tuple(parts)


def value_digest(encoded: bytes) -> bytes:
    """Return 16 bytes with which ranks compare an encoded value (xxh3-128, big-endian)."""
    return xxhash.xxh3_128_digest(encoded)


def _no_extensions(code: int, payload: bytes) -> Any:
    raise FormatError(f"extension type {code} is not allowed here")


def encode_values_file(entries: Sequence[tuple[bytes, bool, bytes]]) -> bytes:
    """Return the contents of a values file: one msgpack document of ``(encoded path, shared, encoded value)`` entries.

    ``shared`` is true for a value of every rank, false for a value of the rank that writes the file.
    """
    packer = msgpack.Packer(strict_types=True)
    parts = [packer.pack_map_header(2), packer.pack("values_version"), packer.pack(VALUES_FILE_VERSION)]
    parts += [packer.pack("entries"), packer.pack_array_header(len(entries))]
    begin, flags = packer.pack_array_header(3), [packer.pack(False), packer.pack(True)]
    for path, shared, encoded in entries:
        parts += (begin, path, flags[shared], packer.pack(encoded))
    return b"".join(parts)


def decode_values_file(data: bytes) -> list[tuple[Path, bool, bytes]]:
    """Return the entries of a values file, whose values are still encoded (see ``decode_value``).

    Raises ``FormatError``.
    """
    document = unpack(data, "values file", ext_hook=_no_extensions)
    if type(document) is not dict or document.get("values_version") != VALUES_FILE_VERSION:
        raise FormatError(f"not a values file of version {VALUES_FILE_VERSION}")
    rows = document.get("entries")
    if type(rows) is not list or len(document) != 2:
        raise FormatError("values file: it must consist of values_version and an array of entries")
    entries = list(_entries(rows))
    if len({(path, shared) for path, shared, _ in entries}) != len(entries):
        raise FormatError("values file: one path is stored twice")
    return entries


def _entries(rows: list[Any]) -> Iterator[tuple[Path, bool, bytes]]:
    for row in rows:
        if type(row) is not list or len(row) != 3 or type(row[1]) is not bool or type(row[2]) is not bytes:
            raise FormatError("values file: an entry is not [path, shared, value]")
        yield _path(row[0]), row[1], row[2]
