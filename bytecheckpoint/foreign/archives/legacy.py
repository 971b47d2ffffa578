"""Files as ``torch.save`` wrote them before version 1.6: pickles, then each storage's bytes after their number."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...errors import FormatError
from ...storage_backends.base import ObjectReader
from ..pickles import Global, Instance, Storage, interpret_prefix, storage_dtype
from ..pickles.interpreter import MAX_PICKLE_BYTES
from .ranges import ByteWindow

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
