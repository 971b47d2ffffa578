"""Encode plain values as bytes."""

from __future__ import annotations

import dataclasses
import struct
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from datetime import date, datetime, timedelta, timezone
from enum import Enum
from io import SEEK_CUR, BytesIO
from pathlib import PurePath
from typing import Any, cast

import msgpack
import numpy as np

from ...errors import FormatError, UnserializableError
from .pickled import pickle_bytes
from .types import MAX_DEPTH, Container, Ext, UnreadObject, check_hashes, check_key, is_stored_dtype


def encode_value(value: object, where: str, *, allow_pickle: bool = False) -> bytes:
    """Encode a plain value as one msgpack document; equal values of equal types give equal bytes.

    ``where`` is the dotted path that errors name. Raises ``UnserializableError`` for a value that is not plain; with
    ``allow_pickle`` it is stored as a pickle instead, unless it is a tensor.
    """
    return _Encoder(allow_pickle=allow_pickle).pack(value, where, 0)


class _Encoder:
    def __init__(self, *, allow_pickle: bool) -> None:
        self.allow_pickle = allow_pickle

    def pack(self, value: object, where: str, depth: int) -> bytes:
        return _packb(self.lower(value, where, depth), where)

    def lower(self, value: Any, where: str, depth: int) -> object:
        """Replace a value that msgpack has no type for by an extension."""
        kind = type(value)
        if value is None or kind is bool or kind is float or kind is bytes:
            return value
        if kind is int:
            return value if -(2**63) <= value < 2**64 else _big_int(value)
        if kind is str:
            return value if value.isascii() else _text(value)
        if depth > MAX_DEPTH:
            raise UnserializableError(
                f"{where} is nested more than {MAX_DEPTH} levels deep (or contains itself); flatten it before saving"
            )
        if kind is list:
            return self.items(value, where, depth)
        if kind in _HASHED:
            _check_hashes(value, where)
        if kind is dict:
            return {self.key(k, where, depth): self.lower(v, _below(where, k), depth + 1) for k, v in value.items()}
        found = _EXTENSIONS.get(kind)
        if found is not None:
            code, payload = found
            return self.ext(code, payload(self, value, where, depth), where)
        if isinstance(value, np.generic) and kind.__module__ == "numpy":
            return self.ext(Ext.NUMPY_SCALAR, _numpy_scalar(value, where), where)
        plain = _plain_of_kind(value)
        if plain is not None:
            return self.ext(Ext.KIND, [plain[0], self.lower(plain[1], where, depth + 1)], where)
        if isinstance(value, PurePath):
            return self.ext(Ext.PATH, str(value).encode("utf-8", "surrogatepass"), where)
        if kind.__module__ == "torch" and kind.__name__ in _TORCH_EXTENSIONS:
            code, torch_payload = _TORCH_EXTENSIONS[kind.__name__]
            return self.ext(code, torch_payload(value), where)
        return self.pickle(value, where)

    def ext(self, code: Ext, payload: bytes | list[Any], where: str) -> msgpack.ExtType:
        """Make an extension; a list is packed as a document."""
        return msgpack.ExtType(int(code), payload if isinstance(payload, bytes) else _packb(payload, where))

    def items(self, values: Iterable[object], where: str, depth: int) -> list[object]:
        # The keys of a mapping may be many thousand names.
        return [
            item if type(item) is str and item.isascii() else self.lower(item, f"{where}.{index}", depth + 1)
            for index, item in enumerate(values)
        ]

    def pairs(self, values: dict[Any, Any], where: str, depth: int) -> list[object]:
        lowered = ((self.key(k, where, depth), self.lower(v, _below(where, k), depth + 1)) for k, v in values.items())
        return [part for pair in lowered for part in pair]

    def sorted_items(self, values: Collection[object], where: str, depth: int) -> bytes:
        packed = sorted(self.pack(item, f"{where}.<element>", depth + 1) for item in values)
        return cast(bytes, msgpack.Packer().pack_array_header(len(packed))) + b"".join(packed)

    def bounds(self, value: range | slice, where: str, depth: int) -> list[object]:
        return self.items([value.start, value.stop, value.step], where, depth)

    def deque(self, value: deque[Any], where: str, depth: int) -> list[object]:
        return [value.maxlen, self.items(value, where, depth)]

    def container(self, value: Container, where: str, depth: int) -> list[object]:
        keys = [self.items(value.keys, where, depth)] if value.keys else []
        return [value.kind, value.length, *keys]

    def key(self, key: Any, where: str, depth: int) -> object:
        check_key(key, where)
        return self.lower(key, f"{where}.<key>", depth + 1)

    def pickle(self, value: object, where: str) -> msgpack.ExtType:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if any(base.__module__ == "torch" and base.__name__ == "Tensor" for base in type(value).__mro__):
            raise UnserializableError(
                f"{where} is a tensor inside a plain value; put tensors in mappings with str or int keys, "
                f"in lists or in tuples"
            )
        if not self.allow_pickle:
            raise UnserializableError(
                f"{where} is a {kind}, which is not a plain value and is not stored; store its state_dict() or its "
                f"plain fields instead, or pass allow_pickle=True to both save and load"
            )
        return msgpack.ExtType(int(Ext.PICKLE), pickle_bytes(value, where))


def _packb(value: object, where: str) -> bytes:
    try:
        return cast(bytes, msgpack.packb(value, strict_types=True))
    except (ValueError, OverflowError) as error:
        raise UnserializableError(f"{where} cannot be stored: {error}; split it into smaller values") from error


def _below(where: str, key: object) -> str:
    return f"{where}.{key}" if type(key) is str or (type(key) is int and abs(key) < 2**64) else f"{where}[{key!r:.80}]"


def _big_int(value: int) -> msgpack.ExtType:
    return msgpack.ExtType(int(Ext.BIG_INT), value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _text(value: str) -> object:
    try:
        value.encode()
    except UnicodeEncodeError:
        return msgpack.ExtType(int(Ext.TEXT), value.encode("utf-8", "surrogatepass"))
    return value


def _plain_of_kind(value: Any) -> tuple[str, object] | None:
    """The kind of a value whose type only a program has, and the plain value that is stored."""
    if isinstance(value, Enum):
        return "enum", value.value
    if isinstance(value, tuple) and hasattr(type(value), "_fields"):
        return "namedtuple", tuple(value)
    if isinstance(value, defaultdict):
        return "defaultdict", dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [one.name for one in dataclasses.fields(value)]
        # Attributes beyond the fields would be lost.
        is_complete = all(hasattr(value, name) for name in names) and set(getattr(value, "__dict__", ())) <= set(names)
        return ("dataclass", {name: getattr(value, name) for name in names}) if is_complete else None
    if getattr(value, "__dict__", None):
        return None
    if isinstance(value, str):
        return "str", str.__str__(value)
    if isinstance(value, int):
        return "int", int.__int__(value)
    return ("float", float.__float__(value)) if isinstance(value, float) else None


def _datetime(value: datetime, where: str) -> list[object]:
    if value.tzinfo is not None and type(value.tzinfo) is not timezone:
        raise UnserializableError(
            f"{where} has the time zone {value.tzinfo!r}, whose rules are not stored; convert it with "
            ".astimezone(datetime.timezone.utc)"
        )
    return [value.isoformat(), value.fold]


def _numpy_scalar(value: np.generic, where: str) -> list[object]:
    if value.dtype.kind in "US" and value.dtype.itemsize == 0:
        return [f"{value.dtype.str[:2]}1", bytes(4 if value.dtype.kind == "U" else 1)]  # numpy strips trailing zeros
    return [_numpy_dtype(value.dtype, where), value.tobytes()]


def _numpy_dtype(dtype: np.dtype[Any], where: str) -> str:
    if dtype.names is not None or not is_stored_dtype(dtype.str):
        raise UnserializableError(
            f"{where} is of numpy dtype {dtype}, which is not stored; only bool, int, uint, float and complex of at "
            f"most 64 bits a part, and text, are: convert it first"
        )
    return str(dtype.str)


# The extension of each type, and the function that makes its payload.
_HASHED = frozenset([dict, set, frozenset, OrderedDict, Counter])


def _check_hashes(keys: Iterable[Any], where: str) -> None:
    try:
        check_hashes(keys)
    except FormatError as error:
        raise UnserializableError(f"{where}: {error}, and could not be read again") from None


_EXTENSIONS: dict[type, tuple[Ext, Callable[[_Encoder, Any, str, int], bytes | list[Any]]]] = {
    complex: (Ext.COMPLEX, lambda encoder, value, where, depth: struct.pack(">dd", value.real, value.imag)),
    bytearray: (Ext.BYTEARRAY, lambda encoder, value, where, depth: bytes(value)),
    tuple: (Ext.TUPLE, _Encoder.items),
    set: (Ext.SET, _Encoder.sorted_items),
    frozenset: (Ext.FROZENSET, _Encoder.sorted_items),
    OrderedDict: (Ext.ORDERED_DICT, _Encoder.pairs),
    Counter: (Ext.COUNTER, _Encoder.pairs),
    deque: (Ext.DEQUE, _Encoder.deque),
    datetime: (Ext.DATETIME, lambda encoder, value, where, depth: _datetime(value, where)),
    date: (Ext.DATE, lambda encoder, value, where, depth: value.isoformat().encode()),
    timedelta: (
        Ext.TIMEDELTA,
        lambda encoder, value, where, depth: [value.days, value.seconds, value.microseconds],
    ),
    Namespace: (Ext.NAMESPACE, lambda encoder, value, where, depth: encoder.pairs(vars(value), where, depth)),
    BytesIO: (Ext.BYTES_IO, lambda encoder, value, where, depth: [value.getvalue(), value.seek(0, SEEK_CUR)]),
    range: (Ext.RANGE, _Encoder.bounds),
    slice: (Ext.SLICE, _Encoder.bounds),
    np.ndarray: (
        Ext.NDARRAY,
        lambda encoder, value, where, depth: [_numpy_dtype(value.dtype, where), list(value.shape), value.tobytes()],
    ),
    Container: (Ext.CONTAINER, _Encoder.container),
    UnreadObject: (Ext.UNREAD, lambda encoder, value, where, depth: value.what.encode("utf-8", "replace")),
}

# By name, so that this module does not import torch.
_TORCH_EXTENSIONS: dict[str, tuple[Ext, Callable[[Any], bytes | list[Any]]]] = {
    "dtype": (Ext.TORCH_DTYPE, lambda value: str(value).removeprefix("torch.").encode()),
    "device": (Ext.TORCH_DEVICE, lambda value: [value.type, value.index]),
    "Size": (Ext.TORCH_SIZE, lambda value: [int(n) for n in value]),
}
