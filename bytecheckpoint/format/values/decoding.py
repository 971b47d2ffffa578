"""Decode untrusted bytes to plain values."""

from __future__ import annotations

import math
import struct
from argparse import Namespace
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from datetime import date, datetime, timedelta
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

import msgpack
import numpy as np

from ...errors import FormatError, StateError
from .pickled import unpickle
from .types import (
    CONTAINER_KINDS,
    MAPPINGS,
    MAX_DEPTH,
    VALUE_KINDS,
    Container,
    Ext,
    UnreadObject,
    check_hashes,
    is_stored_dtype,
    unique_pairs,
    unpack,
)

_T = TypeVar("_T")


def decode_value(data: bytes, *, allow_pickle: bool = False, where: str = "value") -> Any:
    """Decode what ``encode_value`` has encoded.

    Raises ``FormatError`` for anything but one encoded value, before it allocates more than a small multiple of its
    length, and ``StateError`` for a pickle unless ``allow_pickle`` is true. Set it only for a checkpoint whose author
    you would let run code on this machine.
    """
    return _Decoder(where, allow_pickle=allow_pickle).decode(data, 0)


class _Decoder:
    def __init__(self, where: str, *, allow_pickle: bool) -> None:
        self.allow_pickle = allow_pickle
        self.where = where

    def decode(self, data: bytes, depth: int) -> Any:
        if depth > MAX_DEPTH + 2:
            raise FormatError(f"{self.where}: nested more than {MAX_DEPTH} levels deep")
        value = unpack(data, self.where, ext_hook=lambda code, payload: self.extension(code, payload, depth))
        if type(value) is msgpack.Timestamp:
            raise FormatError(f"{self.where}: timestamps are not stored values")
        return value

    def extension(self, code: int, payload: bytes, depth: int) -> Any:
        decoder = _DECODERS.get(code)
        if decoder is None:
            raise FormatError(f"{self.where}: unknown extension type {code}; written by a newer version?")
        return decoder(self, payload, depth)

    def array(self, payload: bytes, depth: int, length: int | None = None) -> list[Any]:
        value = self.decode(payload, depth + 1)
        if type(value) is not list or (length is not None and len(value) != length):
            raise FormatError(f"{self.where}: an extension's payload is not the array it must be")
        return value

    def require(self, condition: bool, what: str) -> None:  # noqa: FBT001 - as an assertion
        if not condition:
            raise FormatError(f"{self.where}: {what}")

    def pairs(self, payload: bytes, depth: int) -> list[tuple[Any, Any]]:
        flat = self.array(payload, depth)
        self.require(len(flat) % 2 == 0, "a mapping has a key without a value")
        return list(zip(flat[::2], flat[1::2], strict=True))

    def elements(self, payload: bytes, depth: int) -> frozenset[Any]:
        flat = self.array(payload, depth)
        try:
            check_hashes(flat)
            result = frozenset(flat)
        except TypeError as error:
            raise FormatError(f"{self.where}: a set has an element that cannot be one ({error})") from error
        self.require(len(result) == len(flat), "a set has an element twice")
        return result

    def ndarray(self, payload: bytes, depth: int) -> np.ndarray[Any, Any]:
        name, shape, raw = self.array(payload, depth, 3)
        self.require(is_stored_dtype(name), "an array of an unknown dtype")
        self.require(type(raw) is bytes and type(shape) is list, "an array without bytes or shape")
        self.require(all(type(n) is int and 0 <= n < 2**63 for n in shape), "an array with an invalid shape")
        dtype = np.dtype(name)
        self.require(math.prod(shape) * dtype.itemsize == len(raw), "an array whose bytes do not fit its shape")
        try:
            array: np.ndarray[Any, Any] = np.frombuffer(bytearray(raw), dtype).reshape(shape)
        except ValueError as error:
            raise FormatError(f"{self.where}: numpy refuses an array of shape {shape}: {error}") from error
        self.check_text(dtype, raw)
        return array

    def numpy_scalar(self, payload: bytes, depth: int) -> Any:
        name, raw = self.array(payload, depth, 2)
        self.require(is_stored_dtype(name), "a numpy scalar of an unknown dtype")
        dtype = np.dtype(name)
        self.require(type(raw) is bytes and len(raw) == dtype.itemsize, "a numpy scalar of the wrong size")
        self.check_text(dtype, raw)
        return np.frombuffer(raw, dtype)[0]

    def check_text(self, dtype: np.dtype[Any], raw: bytes) -> None:
        """Refuse code points that numpy would accept and Python would not."""
        if dtype.kind == "U" and raw:
            points = np.frombuffer(raw, f"{dtype.str[0]}u4")
            self.require(int(points.max()) < 0x110000, "text with invalid code points")

    def of_kind(self, payload: bytes, depth: int) -> Any:
        kind, value = self.array(payload, depth, 2)
        self.require(type(kind) is str and kind in VALUE_KINDS, "a value of an unknown kind")
        return value

    def datetime(self, payload: bytes, depth: int) -> datetime:
        text, fold = self.array(payload, depth, 2)
        self.require(type(text) is str and type(fold) is int and fold in (0, 1), "an invalid time")
        return self.parsed(lambda: datetime.fromisoformat(text).replace(fold=fold))

    def timedelta(self, payload: bytes, depth: int) -> timedelta:
        parts = self.array(payload, depth, 3)
        self.require(all(type(n) is int for n in parts), "an invalid duration")
        return self.parsed(lambda: timedelta(*parts))

    def parsed(self, parse: Callable[[], _T]) -> _T:
        try:
            return parse()
        except (ValueError, OverflowError) as error:
            raise FormatError(f"{self.where}: an invalid time or duration: {error}") from error

    def namespace(self, payload: bytes, depth: int) -> Namespace:
        found = unique_pairs(self.pairs(payload, depth))
        self.require(all(type(name) is str for name in found), "a namespace with a name that is not text")
        namespace = Namespace()
        vars(namespace).update(found)
        return namespace

    def bytes_io(self, payload: bytes, depth: int) -> BytesIO:
        data, position = self.array(payload, depth, 2)
        self.require(type(data) is bytes and type(position) is int and 0 <= position < 2**63, "an invalid buffer")
        buffer = BytesIO(data)
        buffer.seek(position)
        return buffer

    def deque(self, payload: bytes, depth: int) -> deque[Any]:
        maxlen, items = self.array(payload, depth, 2)
        self.require(maxlen is None or (type(maxlen) is int and 0 <= maxlen < 2**63), "a deque with an invalid bound")
        self.require(type(items) is list and (maxlen is None or len(items) <= maxlen), "a deque beyond its bound")
        return deque(items, maxlen)

    def range(self, payload: bytes, depth: int) -> range:
        bounds = self.array(payload, depth, 3)
        self.require(all(type(n) is int for n in bounds) and bounds[2] != 0, "a range with invalid bounds")
        return range(*bounds)

    def torch_dtype(self, payload: bytes) -> Any:
        import torch

        # getattr would import lazy submodules by a stored name, so look the dtype up in the namespace.
        known = {str(v).removeprefix("torch."): v for v in vars(torch).values() if isinstance(v, torch.dtype)}
        name = self.text(payload)
        self.require(name in known, f"this torch has no dtype {name!r:.80}")
        return known[name]

    def torch_device(self, payload: bytes, depth: int) -> Any:
        import torch

        kind, index = self.array(payload, depth, 2)
        self.require(type(kind) is str and (index is None or type(index) is int), "an invalid device")
        try:
            return torch.device(kind) if index is None else torch.device(kind, index)
        except (RuntimeError, TypeError, ValueError) as error:
            raise FormatError(f"{self.where}: this torch has no device {kind!r:.80}, {index}") from error

    def torch_size(self, payload: bytes, depth: int) -> Any:
        import torch

        sizes = self.array(payload, depth)
        self.require(all(type(n) is int and -(2**63) <= n < 2**63 for n in sizes), "a torch.Size with an invalid entry")
        return torch.Size(sizes)

    def container(self, payload: bytes, depth: int) -> Container:
        fields = self.array(payload, depth)
        self.require(len(fields) in (2, 3), "a container with other than two or three fields")
        kind, length, keys = fields if len(fields) == 3 else (*fields, [])
        self.require(type(kind) is str and kind in CONTAINER_KINDS, "a container of an unknown kind")
        self.require(type(length) is int and 0 <= length < 2**63, "a container with an invalid length")
        self.require(
            type(keys) is list and all(type(key) in (str, int) for key in keys), "a container with invalid keys"
        )
        self.require(not keys or kind in MAPPINGS, "a container with keys that is not a mapping")
        check_hashes(keys)
        self.require(len(set(keys)) == len(keys), "a container with a key twice")
        return Container(kind, length, tuple(keys))

    def complex(self, payload: bytes) -> complex:
        self.require(len(payload) == 16, "a complex number that is not 16 bytes")
        return complex(*struct.unpack(">dd", payload))

    def text(self, payload: bytes) -> str:
        try:
            return payload.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise FormatError(f"{self.where}: text that is not UTF-8: {error}") from error

    def pickle(self, payload: bytes) -> Any:
        if not self.allow_pickle:
            raise StateError(
                f"{self.where} was stored as a pickle, and unpickling runs code that its author chose, so it was not "
                f"loaded. If you trust the author of this checkpoint, pass allow_pickle=True to load"
            )
        return unpickle(payload, self.where)


_DECODERS: dict[int, Callable[[_Decoder, bytes, int], Any]] = {
    Ext.UNREAD: lambda decoder, payload, depth: UnreadObject(payload.decode("utf-8", "replace")),
    Ext.BIG_INT: lambda decoder, payload, depth: int.from_bytes(payload, "little", signed=True),
    Ext.COMPLEX: lambda decoder, payload, depth: decoder.complex(payload),
    Ext.TEXT: lambda decoder, payload, depth: decoder.text(payload),
    Ext.BYTEARRAY: lambda decoder, payload, depth: bytearray(payload),
    Ext.TUPLE: lambda decoder, payload, depth: tuple(decoder.array(payload, depth)),
    Ext.SET: lambda decoder, payload, depth: set(decoder.elements(payload, depth)),
    Ext.FROZENSET: lambda decoder, payload, depth: decoder.elements(payload, depth),
    Ext.ORDERED_DICT: lambda decoder, payload, depth: OrderedDict(unique_pairs(decoder.pairs(payload, depth))),
    Ext.COUNTER: lambda decoder, payload, depth: Counter(unique_pairs(decoder.pairs(payload, depth))),
    Ext.DEQUE: _Decoder.deque,
    Ext.RANGE: _Decoder.range,
    Ext.SLICE: lambda decoder, payload, depth: slice(*decoder.array(payload, depth, 3)),
    Ext.NDARRAY: _Decoder.ndarray,
    Ext.NUMPY_SCALAR: _Decoder.numpy_scalar,
    Ext.TORCH_DTYPE: lambda decoder, payload, depth: decoder.torch_dtype(payload),
    Ext.TORCH_DEVICE: _Decoder.torch_device,
    Ext.TORCH_SIZE: _Decoder.torch_size,
    Ext.CONTAINER: _Decoder.container,
    Ext.KIND: _Decoder.of_kind,
    Ext.PATH: lambda decoder, payload, depth: Path(decoder.text(payload)),
    Ext.DATETIME: _Decoder.datetime,
    Ext.DATE: lambda decoder, payload, depth: decoder.parsed(lambda: date.fromisoformat(decoder.text(payload))),
    Ext.TIMEDELTA: _Decoder.timedelta,
    Ext.NAMESPACE: _Decoder.namespace,
    Ext.BYTES_IO: _Decoder.bytes_io,
    Ext.PICKLE: lambda decoder, payload, depth: decoder.pickle(payload),
}
