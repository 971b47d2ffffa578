"""Decode untrusted bytes to plain values."""

from __future__ import annotations

import math
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np

from ...errors import FormatError, StateError
from .pickled import unpickle
from .types import CONTAINER_KINDS, MAX_DEPTH, NUMPY_DTYPES, Container, Ext
from .unpacking import unique_pairs, unpack

__all__ = ["decode_value"]


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
        return list(zip(flat[::2], flat[1::2]))

    def elements(self, payload: bytes, depth: int) -> frozenset[Any]:
        flat = self.array(payload, depth)
        try:
            result = frozenset(flat)
        except TypeError as error:
            raise FormatError(f"{self.where}: a set has an element that cannot be one ({error})") from error
        self.require(len(result) == len(flat), "a set has an element twice")
        return result

    def ndarray(self, payload: bytes, depth: int) -> np.ndarray[Any, Any]:
        name, shape, raw = self.array(payload, depth, 3)
        self.require(type(name) is str and name in NUMPY_DTYPES, "an array of an unknown dtype")
        self.require(type(raw) is bytes and type(shape) is list, "an array without bytes or shape")
        self.require(all(type(n) is int and 0 <= n < 2**63 for n in shape), "an array with an invalid shape")
        dtype = np.dtype(name)
        self.require(math.prod(shape) * dtype.itemsize == len(raw), "an array whose bytes do not fit its shape")
        try:
            array: np.ndarray[Any, Any] = np.frombuffer(bytearray(raw), dtype).reshape(shape)
        except ValueError as error:
            raise FormatError(f"{self.where}: numpy refuses an array of shape {shape}: {error}") from error
        return array

    def numpy_scalar(self, payload: bytes, depth: int) -> Any:
        name, raw = self.array(payload, depth, 2)
        self.require(type(name) is str and name in NUMPY_DTYPES, "a numpy scalar of an unknown dtype")
        dtype = np.dtype(name)
        self.require(type(raw) is bytes and len(raw) == dtype.itemsize, "a numpy scalar of the wrong size")
        return np.frombuffer(raw, dtype)[0]

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
        kind, length = self.array(payload, depth, 2)
        self.require(type(kind) is str and kind in CONTAINER_KINDS, "a container of an unknown kind")
        self.require(type(length) is int and 0 <= length < 2**63, "a container with an invalid length")
        return Container(kind, length)

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
    Ext.PICKLE: lambda decoder, payload, depth: decoder.pickle(payload),
}
