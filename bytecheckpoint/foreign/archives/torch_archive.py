"""Files of ``torch.save``: one object, and the bytes of its storages, which are not read."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import CorruptionError, FormatError
from ...format.hf_index import refuse_pointer
from ...storage_backends.base import ObjectReader, StorageBackend
from ..pickles.classes import storage_dtype
from ..pickles.interpreter import MAX_PICKLE_BYTES, interpret
from ..pickles.records import Global, Instance, Storage
from .directory import Entry, read_directory
from .ranges import ByteWindow

_PICKLE, _BYTE_ORDER, _DATA = "data.pkl", "byteorder", "data/"

OLD_MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""How a file from before version 1.6 of torch begins after the two bytes that name the pickle protocol: a number."""


@dataclass(frozen=True)
class ArchiveParts:
    """The parts of an archive that were read; positions are relative to the archive.

    Attributes:
        entries: The entries, by their names without the archive's own name.
        directory: Where the directory begins.
        length: The length of the archive in bytes.
        pickle: The pickled object.
        has_crcs: Whether the writer recorded CRC-32 values; torch can leave them out.
    """

    entries: Mapping[str, Entry]
    directory: int
    length: int
    pickle: bytes
    has_crcs: bool


def read_archive(backend: StorageBackend, key: str) -> Any:
    """Return the object that ``torch.save`` stored in a file, as ``interpret`` returns it.

    Raises ``FormatError`` if the file is no archive of ``torch.save``, or is damaged, compressed or big-endian,
    ``CorruptionError`` if the CRC-32 of the pickled object differs, and ``StorageError`` if it cannot be read.
    """
    length, where = backend.stat(key).size, f"{backend.url}/{key}"
    with backend.open_object(key) as reader:
        head = ByteWindow(reader, 0, length, where).read(0, min(length, 2 + len(OLD_MAGIC)))
        if head[2:] == OLD_MAGIC:
            raise FormatError(
                f"{where}: a torch before 1.6 wrote it, or a later one in that form, which is no archive and is not "
                f"read; write it again: torch.save(torch.load(path, weights_only=True), path)"
            )
        refuse_pointer(head, where)
        if not head.startswith(b"PK"):
            raise FormatError(f"{where}: torch.save did not write it; it begins with {head[:8]!r}")
        parts = read_parts(reader, 0, length, where)
    return interpret_parts(parts, key, 0, where)


def read_parts(reader: ObjectReader, base: int, length: int, where: str) -> ArchiveParts:
    """Read and check everything but the storages. Raises as ``read_archive``."""
    window = ByteWindow(reader, base, length, where)
    found, directory = read_directory(window)
    entries = _without_root(found, where)
    has_crcs = any(entry.crc32 for entry in entries.values())
    if any(name.startswith("code/") for name in entries):
        raise FormatError(
            f"{where}: it is a TorchScript archive; load it with torch.jit.load and save its state_dict()"
        )
    if _PICKLE not in entries:
        raise FormatError(f"{where}: it has no {_PICKLE}, so torch.save did not write it")
    if entries[_PICKLE].nbytes > MAX_PICKLE_BYTES:
        size = entries[_PICKLE].nbytes
        raise FormatError(f"{where}: its pickle has {size} bytes; at most {MAX_PICKLE_BYTES} are read")
    order = entries.get(_BYTE_ORDER)
    if order is not None and (order.nbytes > 100 or _contents(window, order, has_crcs=has_crcs) != b"little"):
        raise FormatError(f"{where}: its tensors are big-endian; save it again on a little-endian machine")
    pickle = _contents(window, entries[_PICKLE], has_crcs=has_crcs)
    return ArchiveParts(entries, directory, length, pickle, has_crcs)


def interpret_parts(parts: ArchiveParts, file: str, base: int, where: str) -> Any:
    """Interpret the object of an archive that begins at byte ``base`` of a file. Raises ``FormatError``."""
    storages: dict[str, Storage] = {}

    def storage_of(persistent_id: Any) -> Storage | Instance:
        if type(persistent_id) is not tuple or len(persistent_id) != 5 or persistent_id[0] != "storage":
            raise FormatError("it refers to something that is no storage")
        _, kind, key, location, numel = persistent_id
        if type(kind) is not Global or type(key) is not str or type(location) is not str or type(numel) is not int:
            raise FormatError("it refers to a storage in an unknown way")
        entry = parts.entries.get(_DATA + key)
        if entry is None:
            raise FormatError(f"it refers to storage {key!r:.50}, which is not in the archive")
        dtype = storage_dtype(kind)
        if dtype is None:
            return Instance(kind, persistent_id[1:])
        if numel != entry.nbytes // dtype.itemsize:
            raise FormatError(
                f"storage {key!r:.50} has {entry.nbytes} bytes, which are not {numel} elements of type {dtype}"
            )
        found = storages.get(key)
        if found is not None and found.dtype == dtype:
            return found
        if found is not None and entry.nbytes:
            raise FormatError(f"storage {key!r:.50} is used as {found.dtype} and as {dtype}")
        crc32 = entry.crc32 if parts.has_crcs else None
        storages[key] = Storage(key, dtype, file, base + entry.start, entry.nbytes, crc32)
        return storages[key]

    return interpret(parts.pickle, where, storage_of)


def _without_root(found: Mapping[str, Entry], where: str) -> dict[str, Entry]:
    roots = {name.partition("/")[0] for name in found}
    if len(roots) != 1 or any("/" not in name for name in found):
        raise FormatError(f"{where}: its entries are not in one folder, as those of torch.save are")
    return {name.partition("/")[2]: entry for name, entry in found.items()}


def _contents(window: ByteWindow, entry: Entry, *, has_crcs: bool) -> bytes:
    data = window.read(entry.start, entry.nbytes)
    if has_crcs and zlib.crc32(data) != entry.crc32:
        raise CorruptionError(
            f"{window.where}: the bytes of {entry.name!r} differ from their CRC-32; fetch the file again"
        )
    return data
