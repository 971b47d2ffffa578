"""Plans on the wire: one msgpack map, integer columns as little-endian words. What comes in is a peer's and checked.

Nothing is unpickled, and nothing is allocated that the bytes received do not already pay for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from ..errors import PlanError
from ..tables import Int64, ragged_positions, ragged_starts

__all__ = [
    "Bool",
    "Fields",
    "check_within",
    "column",
    "columns",
    "flags",
    "malformed",
    "pack",
    "pack_words",
    "unpack_words",
]

Bool = npt.NDArray[np.bool_]

_SHORT = 64
_WORDS = {1: "<u1", 2: "<u2", 4: "<u4", 8: "<i8"}
_WIDTHS: Int64 = np.array([*_WORDS], np.int64)
_HEAD = np.dtype([("width", "u1"), ("length", "<u4")])


def column(values: Int64) -> bytes | list[int]:
    """An integer column. A short one is a list of numbers, quickly made; of any other, one byte says how wide its words
    are, then come the words, the narrowest that hold all."""
    if len(values) <= _SHORT:
        numbers: list[int] = values.tolist()
        return numbers
    width = int(_widths(values, np.array([0, len(values)], np.int64))[0])
    return bytes([width]) + values.astype(_WORDS[width], copy=False).tobytes()


def columns(values: Int64, starts: Int64) -> list[bytes]:
    """Many columns at once: row ``i`` is ``values[starts[i] : starts[i + 1]]``, in words however short it is."""
    packed = [b""] * (len(starts) - 1)
    widths = _widths(values, starts)
    for width in np.unique(widths).tolist():
        prefix, words = bytes([width]), values.astype(_WORDS[width]).tobytes()
        rows = np.flatnonzero(widths == width)
        bounds = zip(rows.tolist(), (starts[rows] * width).tolist(), (starts[rows + 1] * width).tolist())
        for row, begin, end in bounds:
            packed[row] = prefix + words[begin:end]
    return packed


def _widths(values: Int64, starts: Int64) -> Int64:
    """The bytes of the narrowest words that hold all of each column, of those that ``columns`` packs."""
    widths: Int64 = np.ones(len(starts) - 1, np.int64)
    filled = np.flatnonzero(starts[1:] > starts[:-1])
    if len(filled):
        low = np.minimum.reduceat(values, starts[filled])
        high = np.maximum.reduceat(values, starts[filled])
        narrowest = np.searchsorted(np.array([1 << 8, 1 << 16, 1 << 32]), high, side="right")
        widths[filled] = _WIDTHS[np.where(low < 0, 3, narrowest)]
    return widths


def pack_words(*parts: Int64) -> bytes:
    """A message of nothing but columns, for ``unpack_words``: of each the width of its words, in a byte, and its
    length, in four; then all words."""
    head = np.empty(len(parts), _HEAD)
    words = []
    for index, values in enumerate(parts):
        width = int(_widths(values, np.array([0, len(values)], np.int64))[0])
        head[index] = width, len(values)
        words.append(values.astype(_WORDS[width], copy=False).tobytes())
    return head.tobytes() + b"".join(words)


def unpack_words(kind: str, told: Sequence[bytes], count: int) -> list[tuple[Int64, Int64]]:
    """What peers told in ``pack_words`` of ``count`` columns each: of every column the numbers of all peers one after
    the other, and how many are each peer's. Raises ``PlanError`` for a message of another make."""
    size = count * _HEAD.itemsize
    if any(len(data) < size for data in told):
        raise malformed(kind, "it is cut short")
    head = np.frombuffer(b"".join([data[:size] for data in told]), _HEAD).reshape(-1, count)
    widths, lengths = head["width"].astype(np.int64), head["length"].astype(np.int64)
    ends = size + np.cumsum(widths * lengths, axis=1)
    if not np.isin(widths, _WIDTHS).all() or (ends[:, -1] != list(map(len, told))).any():
        raise malformed(kind, "its columns are not as long as they should be")
    begins = ends - widths * lengths
    return [
        (_joined(told, widths[:, at], lengths[:, at], begins[:, at], ends[:, at]), lengths[:, at])
        for at in range(count)
    ]


def _joined(told: Sequence[bytes], widths: Int64, lengths: Int64, begins: Int64, ends: Int64) -> Int64:
    """One column of all messages, in which it has words of ``widths`` at bytes ``[begins, ends)``."""
    starts = ragged_starts(lengths)
    values = np.empty(int(starts[-1]), np.int64)
    for width in np.unique(widths).tolist():
        rows = np.flatnonzero(widths == width)
        bounds = zip(rows.tolist(), begins[rows].tolist(), ends[rows].tolist())
        words = np.frombuffer(b"".join([told[row][begin:end] for row, begin, end in bounds]), _WORDS[width])
        if len(rows) == len(told):
            return words.astype(np.int64)
        values[ragged_positions(starts[rows], lengths[rows])] = words
    return values


def flags(values: Bool) -> bytes:
    """A column of truth values, one byte each."""
    return values.astype(np.uint8).tobytes()


def pack(kind: str, fields: Mapping[str, object]) -> bytes:
    """One message: its kind, then named fields of plain values and packed columns."""
    packed: bytes = msgpack.packb({"kind": kind, **fields}, use_bin_type=True)
    return packed


def malformed(kind: str, why: str) -> PlanError:
    """The error to raise for a message that breaks a rule."""
    return PlanError(f"received a malformed {kind}: {why}; do all ranks run the same version of this library?")


def check_within(kind: str, name: str, values: Int64, low: int, high: int) -> Int64:
    """``values`` of a column, all of them in ``[low, high)``. Raises ``PlanError`` where they are not."""
    if len(values) and (int(values.min()) < low or int(values.max()) >= high):
        raise malformed(kind, f"column {name!r} holds a number outside [{low}, {high})")
    return values


class Fields:
    """The fields of one received message, each taken out with the type it must have. All raise ``PlanError``."""

    def __init__(self, kind: str, data: bytes) -> None:
        self.kind = kind
        try:
            fields = msgpack.unpackb(data, raw=False, strict_map_key=True)
        except (ValueError, OverflowError, msgpack.UnpackException) as error:
            raise self.malformed(f"not msgpack ({error})") from error
        if not isinstance(fields, dict) or fields.get("kind") != kind:
            raise self.malformed("not a message of this kind")
        self._fields: dict[str, Any] = fields

    def malformed(self, why: str) -> PlanError:
        """The error to raise for a message that breaks a rule."""
        return malformed(self.kind, why)

    def integers(self, name: str, length: int | None = None) -> Int64:
        """A column of int64, of ``length`` rows where that is known."""
        values = self.column_of(self._fields.get(name), name)
        if length is not None and len(values) != length:
            raise self.malformed(f"column {name!r} has {len(values)} rows, not {length}")
        return values

    def columns(self, name: str, count: int | None = None) -> list[Int64]:
        """A list of columns."""
        raw: list[Any] = self._typed(name, list)
        if count is not None and len(raw) != count:
            raise self.malformed(f"field {name!r} has {len(raw)} columns, not {count}")
        return [self.column_of(one, name) for one in raw]

    def column_of(self, raw: object, name: str) -> Int64:
        """The column that this part of field ``name`` is."""
        if type(raw) is list and len(raw) <= _SHORT and set(map(type, raw)) <= {int}:
            try:
                return np.array(raw, np.int64)
            except OverflowError as error:
                raise self.malformed(f"column {name!r} holds a number of more than 64 bits") from error
        if type(raw) is not bytes:
            raise self.malformed(f"column {name!r} is {type(raw).__name__}")
        width = raw[0] if raw else 0
        if width not in _WORDS or (len(raw) - 1) % width:
            raise self.malformed(f"column {name!r} of {len(raw)} bytes is cut short")
        return np.frombuffer(raw, _WORDS[width], offset=1).astype(np.int64)

    def flags(self, name: str, length: int) -> Bool:
        """A column of truth values."""
        raw = self._typed(name, bytes)
        if len(raw) != length:
            raise self.malformed(f"column {name!r} has {len(raw)} rows, not {length}")
        values: Bool = np.frombuffer(raw, np.uint8) != 0
        return values

    def strings(self, name: str, length: int | None = None) -> list[str]:
        return self._items(name, str, length)

    def blobs(self, name: str, length: int | None = None) -> list[bytes]:
        return self._items(name, bytes, length)

    def pairs(self, name: str) -> list[tuple[str, str]]:
        """Pairs of strings, sent as one flat list."""
        flat = self.strings(name)
        if len(flat) % 2:
            raise self.malformed(f"field {name!r} holds half a pair")
        return list(zip(flat[::2], flat[1::2]))

    def within(self, name: str, values: Int64, low: int, high: int) -> Int64:
        """``values``, all of them in ``[low, high)``."""
        return check_within(self.kind, name, values, low, high)

    def _typed(self, name: str, kind: type) -> Any:
        value = self._fields.get(name)
        if type(value) is not kind:
            raise self.malformed(f"field {name!r} is {type(value).__name__}, not {kind.__name__}")
        return value

    def _items(self, name: str, kind: type, length: int | None) -> list[Any]:
        items: list[Any] = self._typed(name, list)
        if length is not None and len(items) != length:
            raise self.malformed(f"field {name!r} has {len(items)} items, not {length}")
        for item in items:
            if type(item) is not kind:
                raise self.malformed(f"field {name!r} holds a {type(item).__name__}, not only {kind.__name__}")
        return items
