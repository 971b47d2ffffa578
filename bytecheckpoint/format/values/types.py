"""What the encoder and the decoder of values share: paths, tags, limits, keys."""

from __future__ import annotations

import math
import re
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import msgpack

from ...errors import FormatError, StateError, UnserializableError
from ...tensors.metadata import Path
from ..msgpack_scan import check_depth, scan_msgpack

MAPPINGS = ("dict", "OrderedDict")
"""The kinds of containers that may have keys."""

MAX_DEPTH = 64
"""The number of levels that plain values may nest."""

CONTAINER_KINDS = ("dict", "OrderedDict", "list", "tuple", "tensor", "left_out")

VALUE_KINDS = ("enum", "namedtuple", "dataclass", "defaultdict", "str", "int", "float")
"""Kinds of values whose types only a program has. Their names are not stored, so that no name is imported."""

# Fixed widths only: the layout of a long double depends on the platform.
NUMPY_DTYPES = frozenset(
    ["|b1", "|i1", "|u1"]
    + [
        f"{order}{kind}"
        for order in "<>"
        for kind in ("i2", "i4", "i8", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
    ]
)

_MOST_EQUAL = 100  # keys of a dict that have the same hash


_NUMPY_TEXT = re.compile(r"[<>]U[1-9][0-9]{0,8}|\|S[1-9][0-9]{0,8}")


def is_stored_dtype(name: object) -> bool:
    """Whether arrays of this numpy dtype are stored."""
    return type(name) is str and (name in NUMPY_DTYPES or _NUMPY_TEXT.fullmatch(name) is not None)


class Ext(IntEnum):
    """Extension tags. Payloads marked * are one msgpack document."""

    BIG_INT = 1  # two's complement, little-endian, outside [-2**63, 2**64)
    COMPLEX = 2  # two big-endian float64
    TEXT = 3  # a str that is not valid Unicode: UTF-8 with surrogates passed through
    BYTEARRAY = 4
    TUPLE = 5  # * array
    SET = 6  # * array, sorted by encoding
    FROZENSET = 7  # * array, sorted by encoding
    ORDERED_DICT = 8  # * array of keys and values in turn
    COUNTER = 9  # * array of keys and values in turn
    DEQUE = 10  # * [maxlen or nil, array]
    RANGE = 11  # * [start, stop, step]
    SLICE = 12  # * [start, stop, step]
    NDARRAY = 13  # * [dtype, shape, row-major bytes]
    NUMPY_SCALAR = 14  # * [dtype, bytes]
    TORCH_DTYPE = 15  # UTF-8 name without "torch."
    TORCH_DEVICE = 16  # * [type, index or nil]
    TORCH_SIZE = 17  # * array of ints
    CONTAINER = 18  # * [kind, length] or [kind, length, keys]
    KIND = 19  # * [kind, plain value]; a reader without a template of the kind uses the plain value
    PATH = 20  # UTF-8 text, as TEXT
    DATETIME = 21  # * [ISO 8601 text, fold]
    DATE = 22  # ISO 8601 text
    TIMEDELTA = 23  # * [days, seconds, microseconds]
    NAMESPACE = 24  # * array of names and values in turn
    BYTES_IO = 25  # * [bytes, position]
    UNREAD = 126  # UTF-8 text; only in indexes of other systems' files, never in a file
    PICKLE = 127


@dataclass(frozen=True)
class Container:
    """A branch of a section's tree whose type its flattened leaves do not determine.

    ``kind`` is ``dict``, ``OrderedDict``, ``list``, ``tuple``, or ``tensor`` for a tensor whose path does not follow
    from its dotted name. ``left_out`` marks a tensor (by its name) or value (by its path) that the save was asked to
    leave out. ``length`` is the number of items of a list or tuple, else 0. ``keys`` are those of a mapping in its
    order, if they were stored.
    """

    kind: str
    length: int = 0
    keys: tuple[str | int, ...] = ()


@dataclass(frozen=True)
class UnreadObject:
    """An object in another system's file that this library does not read. ``what`` describes it for messages."""

    what: str


def unread_in(value: object) -> UnreadObject | None:
    """Return the first ``UnreadObject`` in a plain value; None if there is none."""
    if isinstance(value, UnreadObject):
        return value
    items: Iterable[object] = ()
    if isinstance(value, dict):
        items = (*value.keys(), *value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        items = value
    elif isinstance(value, Namespace):
        items = vars(value).values()
    return next((found for item in items if (found := unread_in(item)) is not None), None)


LEFT_OUT = Container("left_out")


def is_left_out(value: object) -> bool:
    """Whether a decoded value is ``LEFT_OUT``."""
    return type(value) is Container and value == LEFT_OUT


def path_name(path: Path) -> str:
    """Return the path with dots, as in messages and tensor names."""
    if len(path) == 1:
        return str(path[0])
    return ".".join(map(str, path))


def is_number(component: str) -> bool:
    """Return whether a component of a name is a number. A hostile name may have too many digits for ``int``."""
    return component.isdecimal() and len(component) < 19


def check_key(key: Any, where: str) -> None:
    """Raise ``UnserializableError`` unless ``key`` can be a key of a stored mapping."""
    kind = type(key)
    if kind is tuple:
        for part in key:
            check_key(part, where)
    elif kind is float:
        if math.isnan(key):
            raise UnserializableError(f"{where} has a NaN key, which no look-up can find. Use another key")
    elif key is not None and kind not in (str, int, bool, bytes):
        raise UnserializableError(
            f"{where} has a key of type {kind.__module__}.{kind.__qualname__}; "
            f"keys must be str, int, float, bool, None, bytes or tuples of these"
        )


def check_hashes(keys: Iterable[Hashable]) -> None:
    """Check keys before a dict or a set is made of them.

    To insert n keys with the same hash takes n² comparisons inside C, where not even Ctrl-C ends it. Such keys are easy
    to find among numbers and tuples of numbers; hashes of texts are random in each process.

    Raises ``FormatError``, and ``TypeError`` for a key that has no hash.
    """
    numbers = [hash(key) for key in keys if type(key) is not str]
    if len(numbers) > _MOST_EQUAL and max(Counter(numbers).values()) > _MOST_EQUAL:
        raise FormatError(f"more than {_MOST_EQUAL} keys of a dict, or items of a set, have the same hash")


_MAX_DEPTH = MAX_DEPTH + 3  # levels of the value, and those that a values file adds


def unpack(data: bytes, where: str, *, ext_hook: Callable[[int, bytes], Any]) -> Any:
    """Decode ``data``; ``ext_hook`` creates objects of extension types. ``where`` names the document in errors.

    Raises ``FormatError`` for anything but one document, before it allocates more than a small multiple of its length.
    """
    scan_msgpack(where, data)
    try:
        value = msgpack.unpackb(
            data, raw=False, use_list=True, strict_map_key=False, ext_hook=ext_hook, object_pairs_hook=unique_pairs
        )
    except StateError:  # ``ext_hook`` refuses a pickle; this error is also a ValueError
        raise
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise FormatError(f"{where}: not a valid msgpack document: {error or type(error).__name__}") from error
    check_depth(where, value, _MAX_DEPTH)
    return value


def unique_pairs(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return a stored mapping. Raises ``FormatError`` for a duplicate or invalid key."""
    result: dict[Any, Any] = {}
    for key, _ in pairs:
        _check_stored_key(key)
    check_hashes(key for key, _ in pairs)
    for key, value in pairs:
        if key in result:
            raise FormatError("a mapping has a key twice")
        result[key] = value
    return result


def _check_stored_key(key: Any) -> None:
    try:
        check_key(key, "a stored mapping")
    except UnserializableError as error:
        raise FormatError(str(error)) from None
