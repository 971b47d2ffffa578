"""Files of ``torch.save``: one object, and the bytes of its storages, which are not read."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import CorruptionError, FormatError
from ...format.hf_index import refuse_pointer
from ...storage_backends.base import ObjectReader, StorageBackend
from ..pickles.classes import storage_dtype
from ..pickles.interpreter import MAX_PICKLE_BYTES, interpret, interpret_prefix
from ..pickles.records import Global, Instance, Storage
from .directory import Entry, read_directory
from .ranges import ByteWindow

_PICKLE, _BYTE_ORDER, _DATA = "data.pkl", "byteorder", "data/"


@dataclass(frozen=True)
class TorchArchive:
    """What ``torch.save`` stored.

    Attributes:
        value: The object, as ``interpret`` returns it.
        storages: The storages that it refers to, by key.
    """

    value: Any
    storages: Mapping[str, Storage]


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


def read_archive(backend: StorageBackend, key: str, *, base: int = 0, length: int | None = None) -> TorchArchive:
    """Read the object that ``torch.save`` stored, and find its storages.

    Files from before version 1.6 of torch, which are no zip archives, are read as well.

    Args:
        backend: The storage backend.
        key: The file.
        base: Where the archive begins in the file.
        length: Its length in bytes; None for the rest of the file.

    Returns:
        The object and its storages.

    Raises:
        FormatError: It is no archive of ``torch.save``, or it is damaged, compressed or big-endian.
        CorruptionError: The CRC-32 of the pickled object differs.
        StorageError: The file cannot be read.
    """
    if length is None:
        length = backend.stat(key).size - base
    where = f"{backend.url}/{key}" + (f" at byte {base}" if base else "")
    with backend.open_object(key) as reader:
        head = ByteWindow(reader, base, length, where).read(0, min(length, 2 + len(LEGACY_MAGIC)))
        if head[2:] == LEGACY_MAGIC:
            return TorchArchive(*read_legacy(reader, key, base, length, where))
        refuse_pointer(head, where)
        if not head.startswith(b"PK"):
            raise FormatError(f"{where}: torch.save did not write it; it begins with {head[:8]!r}")
        parts = read_parts(reader, base, length, where)
    return interpret_parts(parts, key, base, where)


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


def interpret_parts(parts: ArchiveParts, key: str, base: int, where: str) -> TorchArchive:
    """Interpret the object. Raises ``FormatError``."""
    finder = StorageFinder(parts, key, base)
    return TorchArchive(interpret(parts.pickle, where, finder), finder.storages)


class StorageFinder:
    """Finds the storage that a persistent id of ``torch.save`` means."""

    def __init__(self, parts: ArchiveParts, file: str, base: int) -> None:
        self.storages: dict[str, Storage] = {}
        self._parts = parts
        self._file = file
        self._base = base

    def __call__(self, persistent_id: Any) -> Storage | Instance:
        """Return the storage. Raises ``FormatError``."""
        if type(persistent_id) is not tuple or len(persistent_id) != 5 or persistent_id[0] != "storage":
            raise FormatError("it refers to something that is no storage")
        _, kind, key, location, numel = persistent_id
        if type(kind) is not Global or type(key) is not str or type(location) is not str or type(numel) is not int:
            raise FormatError("it refers to a storage in an unknown way")
        entry = self._parts.entries.get(_DATA + key)
        if entry is None:
            raise FormatError(f"it refers to storage {key!r:.50}, which is not in the archive")
        dtype = storage_dtype(kind)
        if dtype is None:
            return Instance(kind, persistent_id[1:])
        if numel != entry.nbytes // dtype.itemsize:
            raise FormatError(
                f"storage {key!r:.50} has {entry.nbytes} bytes, which are not {numel} elements of type {dtype}"
            )
        found = self.storages.get(key)
        if found is not None and found.dtype == dtype:
            return found
        if found is not None and entry.nbytes:
            raise FormatError(f"storage {key!r:.50} is used as {found.dtype} and as {dtype}")
        crc32 = entry.crc32 if self._parts.has_crcs else None
        start = self._base + entry.start
        self.storages[key] = Storage(key, dtype, self._file, start, entry.nbytes, crc32, location)
        return self.storages[key]


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


LEGACY_MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""How such a file begins after the two bytes that name the pickle protocol: a number."""

_PROTOCOL = 1001
_FIRST_READ = 1 << 20
_COUNT_BYTES = 8  # the number of elements, before the bytes of each storage


def read_legacy(reader: ObjectReader, file: str, base: int, length: int, where: str) -> tuple[Any, dict[str, Storage]]:
    """Return the object and its storages, which have no CRC-32. Raises ``FormatError``."""
    window = ByteWindow(reader, base, length, where)
    longest = min(length, MAX_PICKLE_BYTES)
    size = min(_FIRST_READ, longest)
    finder = _StorageFinder(file)
    while (found := _interpret_all(window.read(0, size), where, finder)) is None:
        if size == longest:
            raise FormatError(f"{where}: its pickle ends early; fetch the file again")
        finder, size = _StorageFinder(file), min(8 * size, longest)  # with more of the file
    value, keys, end = found
    _place(finder, keys, end, window)
    return value, finder.storages


def _interpret_all(data: bytes, where: str, finder: _StorageFinder) -> tuple[Any, list[str], int] | None:
    """Interpret magic number, version, properties of the writer's system, object and keys. None if data are missing."""
    position, values = 0, []
    for index in range(5):
        found = interpret_prefix(data, where, finder if index == 3 else None, position)
        if found is None:
            return None
        values.append(found[0])
        position = found[1]
    _, version, system, value, keys = values
    if version != _PROTOCOL or type(system) is not dict or system.get("little_endian") is not True:
        raise FormatError(f"{where}: it is an old torch.save file of an unknown version, or big-endian")
    if type(keys) is not list or not all(type(key) is str for key in keys) or sorted(keys) != sorted(finder.storages):
        raise FormatError(f"{where}: the list of its storages differs from those that the object uses")
    return value, keys, position


class _StorageFinder:
    """Makes the storages that an object uses. Where their bytes are is known only after its pickle."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.storages: dict[str, Storage] = {}
        self.views: list[tuple[Storage, str, int]] = []  # with the key of the viewed storage, and the first byte there

    def __call__(self, persistent_id: Any) -> Storage | Instance:
        """Return the storage, or the view of one, that a persistent id describes. Raises ``FormatError``."""
        kinds = [type(part) for part in persistent_id] if type(persistent_id) is tuple else []
        if kinds[:2] == [str, Global] and persistent_id[0] == "module":
            return Instance(persistent_id[1])
        is_view = kinds[5:] == [tuple] and [type(part) for part in persistent_id[5][1:]] == [int, int]
        if kinds[:5] != [str, Global, str, str, int] or not (is_view or kinds[5:] == [type(None)]):
            raise FormatError("it refers to something that is no storage")
        name, kind, key, location, numel, view = persistent_id
        dtype = storage_dtype(kind)
        if name != "storage" or dtype is None or not 0 <= numel < 1 << 62:
            raise FormatError(f"it refers to a storage of class {kind}, which is not supported in old torch.save files")
        new = Storage(key, dtype, self.file, 0, numel * dtype.itemsize, None, location)
        found = self.storages.setdefault(key, new)
        if (found.dtype, found.nbytes, found.location) != (dtype, new.nbytes, location):
            raise FormatError(f"storage {key!r:.50} is described in two ways")
        if view is None:
            return found
        _, start, count = view
        if not 0 <= start <= start + count <= numel:
            raise FormatError(f"a view of storage {key!r:.50} reaches outside of it")
        part = Storage(str(view[0]), dtype, self.file, 0, count * dtype.itemsize, None, location)
        self.views.append((part, key, start * dtype.itemsize))
        return part


def _place(finder: _StorageFinder, keys: list[str], end: int, window: ByteWindow) -> None:
    """Set where the bytes of each storage are, and compare the number of elements before them."""
    position, starts, counts = end, [], []
    for key in keys:
        storage = finder.storages[key]
        starts.append(position)
        counts.append(storage.nbytes // storage.dtype.itemsize)
        storage.offset = window.base + position + _COUNT_BYTES
        position += _COUNT_BYTES + storage.nbytes
    for view, key, start in finder.views:
        view.offset = finder.storages[key].offset + start
    if position != window.length:
        raise FormatError(f"{window.where}: its storages need {position} bytes, but it has {window.length}")
    rows = window.read_rows(np.array(starts, np.int64), _COUNT_BYTES)
    if not np.array_equal(rows.view("<i8").ravel(), np.array(counts, np.int64)):
        raise FormatError(f"{window.where}: the sizes of its storages differ from those that the object states")
