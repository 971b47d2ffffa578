"""Files as ``torch.save`` wrote them before version 1.6: pickles, then each storage's bytes after their number."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...errors import FormatError
from ...storage_backends.base import ObjectReader
from ...tensors.dtypes import DType
from ..pickles import Global, Instance, Storage, interpret_prefix, storage_dtype
from ..pickles.interpreter import MAX_PICKLE_BYTES
from .ranges import ByteWindow

LEGACY_MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""How such a file begins after the two bytes that name the pickle protocol: a number."""

_PROTOCOL = 1001
_FIRST_READ = 1 << 20
_COUNT_BYTES = 8  # the number of elements, before the bytes of each storage


class _Declared(NamedTuple):
    dtype: DType
    numel: int
    location: str


class _Pickles(NamedTuple):
    data: bytes
    start: int  # of the object's pickle
    declared: dict[str, _Declared]
    keys: list[str]  # of the storages, in the order of their bytes
    end: int


def read_legacy(reader: ObjectReader, file: str, base: int, length: int, where: str) -> tuple[Any, dict[str, Storage]]:
    """Return the object and its storages, which have no CRC-32. Raises ``FormatError``."""
    window = ByteWindow(reader, base, length, where)
    pickles = _read_pickles(window)
    storages = _place(pickles, file, window)

    def find(persistent_id: Any) -> Storage | Instance | Global:
        _declare(persistent_id, {})
        if persistent_id[0] == "module":
            return Instance(persistent_id[1])
        _, kind, key, location, _, view = persistent_id
        found = storages.get(key)
        if found is None:
            return Instance(kind, persistent_id[2:])
        if view is None:
            return found
        _, start, numel = view
        size = found.dtype.itemsize
        if not 0 <= start <= start + numel <= found.nbytes // size:
            raise FormatError(f"a view of storage {key!r:.50} reaches outside of it")
        return Storage(str(view[0]), found.dtype, file, found.offset + start * size, numel * size, None, location)

    return interpret_prefix(pickles.data, where, find, pickles.start)[0], storages


def _read_pickles(window: ByteWindow) -> _Pickles:
    """Read the beginning of the file: more and more of it, until it holds all pickles."""
    longest = min(window.length, MAX_PICKLE_BYTES)
    size = min(_FIRST_READ, longest)
    while True:
        try:
            return _interpret_all(window.read(0, size), window.where)
        except FormatError:
            if size == longest:
                raise
        size = min(8 * size, longest)


def _interpret_all(data: bytes, where: str) -> _Pickles:
    """Interpret magic number, version, properties of the writer's system, object and keys."""
    declared: dict[str, _Declared] = {}
    position, starts, values = 0, [], []
    for index in range(5):
        starts.append(position)
        persistent = (lambda one: _declare(one, declared)) if index == 3 else None
        value, position = interpret_prefix(data, where, persistent, position)
        values.append(value)
    _, version, system, _, keys = values
    if version != _PROTOCOL or type(system) is not dict or system.get("little_endian") is not True:
        raise FormatError(f"{where}: it is an old torch.save file of an unknown version, or big-endian")
    if type(keys) is not list or not all(type(key) is str for key in keys) or sorted(keys) != sorted(declared):
        raise FormatError(f"{where}: the list of its storages differs from those that the object uses")
    return _Pickles(data, starts[3], declared, keys, position)


def _declare(persistent_id: Any, declared: dict[str, _Declared]) -> Instance:
    """Record the storage that a persistent id describes. Raises ``FormatError``."""
    kinds = [type(part) for part in persistent_id] if type(persistent_id) is tuple else []
    if kinds[:2] == [str, Global] and persistent_id[0] == "module":
        return Instance(persistent_id[1])
    is_view = kinds[5:] == [tuple] and [type(part) for part in persistent_id[5][1:]] == [int, int]
    if kinds[:5] != [str, Global, str, str, int] or not (is_view or kinds[5:] == [type(None)]):
        raise FormatError("it refers to something that is no storage")
    name, kind, key, location, numel = persistent_id[:5]
    dtype = storage_dtype(kind)
    if name != "storage" or dtype is None or not 0 <= numel < 1 << 62:
        raise FormatError(f"it refers to a storage of class {kind}, which is not supported in old torch.save files")
    new = _Declared(dtype, numel, location)
    if declared.setdefault(key, new) != new:
        raise FormatError(f"storage {key!r:.50} is described in two ways")
    return Instance(kind, persistent_id[2:])


def _place(pickles: _Pickles, file: str, window: ByteWindow) -> dict[str, Storage]:
    """Find the bytes of each storage, and compare the number of elements before them."""
    storages: dict[str, Storage] = {}
    position, starts, counts = pickles.end, [], []
    for key in pickles.keys:
        dtype, numel, location = pickles.declared[key]
        starts.append(position)
        counts.append(numel)
        begin, nbytes = position + _COUNT_BYTES, numel * dtype.itemsize
        storages[key] = Storage(key, dtype, file, window.base + begin, nbytes, None, location)
        position = begin + nbytes
    if position != window.length:
        raise FormatError(f"{window.where}: its storages need {position} bytes, but it has {window.length}")
    rows = window.read_rows(np.array(starts, np.int64), _COUNT_BYTES)
    if not np.array_equal(rows.view("<i8").ravel(), np.array(counts, np.int64)):
        raise FormatError(f"{window.where}: the sizes of its storages differ from those that the object states")
    return storages
