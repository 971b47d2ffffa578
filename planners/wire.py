"""Encode plans as messages: one msgpack map, with integer columns as little-endian words.

A received message is validated. Nothing is unpickled, and no more memory is allocated than the received bytes account
for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from ..errors import PlanError
from ..tensors.dtypes import DTYPES
from ..tensors.tables import Int64, TensorTable, ragged_positions, ragged_starts

Bool = npt.NDArray[np.bool_]

MAX_LENGTH = 2**62
"""No offset, length or place in a message is this large."""

_MAX_NDIM = 64
_MAX_LISTED = 64
_WORDS = {1: "<u1", 2: "<u2", 4: "<u4", 8: "<i8"}
_WIDTHS: Int64 = np.array([*_WORDS], np.int64)
_COLUMN_HEADER = np.dtype([("width", "u1"), ("length", "<u4")])


def pack_column(values: Int64) -> bytes | list[int]:
    """Pack an integer column: a short one as a list, others as one byte with the width of the words, then the words.

    The words are the narrowest that hold all values.
    """
    if len(values) <= _MAX_LISTED:
        numbers: list[int] = values.tolist()
        return numbers
    width = int(_widths(values, np.array([0, len(values)], np.int64))[0])
    return bytes([width]) + values.astype(_WORDS[width], copy=False).tobytes()


def pack_columns(values: Int64, starts: Int64) -> list[bytes]:
    """Pack many columns at once: row ``i`` is ``values[starts[i] : starts[i + 1]]``, always as words."""
    packed = [b""] * (len(starts) - 1)
    widths = _widths(values, starts)
    for width in np.unique(widths).tolist():
        prefix, words = bytes([width]), values.astype(_WORDS[width]).tobytes()
        rows = np.flatnonzero(widths == width)
        bounds = zip(rows.tolist(), (starts[rows] * width).tolist(), (starts[rows + 1] * width).tolist(), strict=True)
        for row, begin, end in bounds:
            packed[row] = prefix + words[begin:end]
    return packed


def _widths(values: Int64, starts: Int64) -> Int64:
    """Return the width in bytes of the narrowest words for each of the columns that ``pack_columns`` packs."""
    widths: Int64 = np.ones(len(starts) - 1, np.int64)
    filled = np.flatnonzero(starts[1:] > starts[:-1])
    if len(filled):
        low = np.minimum.reduceat(values, starts[filled])
        high = np.maximum.reduceat(values, starts[filled])
        narrowest = np.searchsorted(np.array([1 << 8, 1 << 16, 1 << 32]), high, side="right")
        widths[filled] = _WIDTHS[np.where(low < 0, 3, narrowest)]
    return widths


def pack_words(*parts: Int64) -> bytes:
    """Pack a message of columns only, for ``unpack_words``.

    The width (one byte) and the length (four bytes) of each column come first, then the words of all columns.
    """
    head = np.empty(len(parts), _COLUMN_HEADER)
    words = []
    for index, values in enumerate(parts):
        width = int(_widths(values, np.array([0, len(values)], np.int64))[0])
        head[index] = width, len(values)
        words.append(values.astype(_WORDS[width], copy=False).tobytes())
    return head.tobytes() + b"".join(words)


def unpack_words(kind: str, messages: Sequence[bytes], count: int) -> list[tuple[Int64, Int64]]:
    """Unpack the ``pack_words`` messages of several peers, each of ``count`` columns.

    Returns, for each column, the values of all peers one after the other, and how many values each peer sent. Raises
    ``PlanError`` for a malformed message.
    """
    size = count * _COLUMN_HEADER.itemsize
    if any(len(data) < size for data in messages):
        raise malformed(kind, "it is truncated")
    head = np.frombuffer(b"".join([data[:size] for data in messages]), _COLUMN_HEADER).reshape(-1, count)
    widths, lengths = head["width"].astype(np.int64), head["length"].astype(np.int64)
    ends = size + np.cumsum(widths * lengths, axis=1)
    if not np.isin(widths, _WIDTHS).all() or (ends[:, -1] != list(map(len, messages))).any():
        raise malformed(kind, "its columns do not have the lengths that it states")
    begins = ends - widths * lengths
    return [
        (_joined(messages, widths[:, at], lengths[:, at], begins[:, at], ends[:, at]), lengths[:, at])
        for at in range(count)
    ]


def _joined(messages: Sequence[bytes], widths: Int64, lengths: Int64, begins: Int64, ends: Int64) -> Int64:
    """Join one column of all messages.

    Message ``i`` has it in words of ``widths[i]`` at bytes ``[begins[i], ends[i])``.
    """
    starts = ragged_starts(lengths)
    values = np.empty(int(starts[-1]), np.int64)
    for width in np.unique(widths).tolist():
        rows = np.flatnonzero(widths == width)
        bounds = zip(rows.tolist(), begins[rows].tolist(), ends[rows].tolist(), strict=True)
        words = np.frombuffer(b"".join([messages[row][begin:end] for row, begin, end in bounds]), _WORDS[width])
        if len(rows) == len(messages):
            return words.astype(np.int64)
        values[ragged_positions(starts[rows], lengths[rows])] = words
    return values


def pack_flags(values: Bool) -> bytes:
    """Pack a column of truth values, one byte each."""
    return values.astype(np.uint8).tobytes()


def pack_message(kind: str, fields: Mapping[str, object]) -> bytes:
    """Pack a message: its kind, then named fields of plain values and packed columns."""
    packed: bytes = msgpack.packb({"kind": kind, **fields}, use_bin_type=True)
    return packed


def malformed(kind: str, why: str) -> PlanError:
    """Return the error for a message that breaks a rule."""
    return PlanError(f"received a malformed {kind}: {why}; do all ranks run the same version of this library?")


def check_range(kind: str, name: str, values: Int64, low: int, high: int) -> Int64:
    """Return ``values`` if all are in ``[low, high)``; otherwise raise ``PlanError``."""
    if len(values) and (int(values.min()) < low or int(values.max()) >= high):
        raise malformed(kind, f"column {name!r} holds a number outside [{low}, {high})")
    return values


def tensor_fields(tensors: TensorTable) -> dict[str, object]:
    """Return the fields of a message for ``Fields.tensors``."""
    return {
        "names": tensors.names,
        "tensor_sections": tensors.sections,
        "section": pack_column(tensors.section),
        "dtype": pack_column(tensors.dtype),
        "ndim": pack_column(tensors.ndim),
        "shape": pack_column(tensors.shape),
    }


class Fields:
    """The fields of one received message. Each accessor checks the type and raises ``PlanError`` if it differs."""

    def __init__(self, kind: str, data: bytes) -> None:
        self.kind = kind
        try:
            fields = msgpack.unpackb(data, raw=False, strict_map_key=True)
        except (ValueError, OverflowError, msgpack.UnpackException) as error:
            raise self.malformed(f"it is not msgpack ({error})") from error
        if not isinstance(fields, dict) or fields.get("kind") != kind:
            raise self.malformed("it is a message of another kind")
        self._fields: dict[str, Any] = fields

    def malformed(self, why: str) -> PlanError:
        """Return the error for a message that breaks a rule."""
        return malformed(self.kind, why)

    def integers(self, name: str, length: int | None = None) -> Int64:
        """Return a column of int64, and check that it has ``length`` rows if that is given."""
        values = self.column_of(self._fields.get(name), name)
        if length is not None and len(values) != length:
            raise self.malformed(f"column {name!r} has {len(values)} rows, not {length}")
        return values

    def columns(self, name: str, count: int | None = None) -> list[Int64]:
        """Return a list of columns."""
        raw: list[Any] = self._typed(name, list)
        if count is not None and len(raw) != count:
            raise self.malformed(f"field {name!r} has {len(raw)} columns, not {count}")
        return [self.column_of(one, name) for one in raw]

    def column_of(self, raw: object, name: str) -> Int64:
        """Decode one packed column of field ``name``."""
        if type(raw) is list and len(raw) <= _MAX_LISTED and set(map(type, raw)) <= {int}:
            try:
                return np.array(raw, np.int64)
            except OverflowError as error:
                raise self.malformed(f"column {name!r} holds a number of more than 64 bits") from error
        if type(raw) is not bytes:
            raise self.malformed(f"column {name!r} is {type(raw).__name__}")
        width = raw[0] if raw else 0
        if width not in _WORDS or (len(raw) - 1) % width:
            raise self.malformed(f"column {name!r} of {len(raw)} bytes is truncated")
        return np.frombuffer(raw, _WORDS[width], offset=1).astype(np.int64)

    def flags(self, name: str, length: int) -> Bool:
        """Return a column of truth values."""
        raw = self._typed(name, bytes)
        if len(raw) != length:
            raise self.malformed(f"column {name!r} has {len(raw)} rows, not {length}")
        values: Bool = np.frombuffer(raw, np.uint8) != 0
        return values

    def strings(self, name: str, length: int | None = None) -> list[str]:
        """Return a list of strings."""
        return self._items(name, str, length)

    def blobs(self, name: str, length: int | None = None) -> list[bytes]:
        """Return a list of byte strings."""
        return self._items(name, bytes, length)

    def pairs(self, name: str) -> list[tuple[str, str]]:
        """Return pairs of strings, which are sent as one flat list."""
        flat = self.strings(name)
        if len(flat) % 2:
            raise self.malformed(f"field {name!r} holds half a pair")
        return list(zip(flat[::2], flat[1::2], strict=True))

    def tensors(self) -> TensorTable:
        """Return the table of ``tensor_fields``. Every name is unique and begins with its section."""
        names, sections = self.strings("names"), self.strings("tensor_sections")
        count = len(names)
        if len(set(names)) != count:
            raise self.malformed("a tensor is listed twice")
        section = self.in_range("section", self.integers("section", count), 0, len(sections))
        dtype = self.in_range("dtype", self.integers("dtype", count), 0, len(DTYPES))
        ndim = self.in_range("ndim", self.integers("ndim", count), 0, _MAX_NDIM + 1)
        shape = self.in_range("shape", self.integers("shape", int(ndim.sum())), 0, MAX_LENGTH)
        prefixes = [f"{section}." for section in sections]
        of_name = [prefixes[code] for code in section.tolist()]
        if not all(map(str.startswith, names, of_name)):
            name = next(name for name, prefix in zip(names, of_name, strict=True) if not name.startswith(prefix))
            raise self.malformed(f"the name of tensor {name!r} does not begin with its section")
        return TensorTable(names, sections, section, dtype, ndim, shape)

    def in_range(self, name: str, values: Int64, low: int, high: int) -> Int64:
        """Return ``values`` if all are in ``[low, high)``; otherwise raise ``PlanError``."""
        return check_range(self.kind, name, values, low, high)

    def _typed(self, name: str, kind: type) -> Any:
        value = self._fields.get(name)
        if type(value) is not kind:
            raise self.malformed(f"field {name!r} is {type(value).__name__}, not {kind.__name__}")
        return value

    def _items(self, name: str, kind: type, length: int | None) -> list[Any]:
        items: list[Any] = self._typed(name, list)
        if length is not None and len(items) != length:
            raise self.malformed(f"field {name!r} has {len(items)} items, not {length}")
        if others := set(map(type, items)) - {kind}:
            raise self.malformed(f"field {name!r} holds a {others.pop().__name__}, not only {kind.__name__}")
        return items
