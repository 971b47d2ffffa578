"""Scalars and arrays of numpy in a pickle. Only numbers, booleans and fixed-length text: no objects."""

from __future__ import annotations

import re
from math import prod
from typing import Any

import numpy as np

from ...errors import FormatError
from .records import Global, Instance

_CODES = re.compile(r"[biufc](1|2|4|8|16)|[SU][1-9][0-9]{0,6}")
_ORDERS = {"<": "<", ">": ">", "=": "<", "|": "|"}


def scalar(dtype: Any, data: Any = None) -> Any:
    """Return a scalar, or a placeholder if its type is not supported."""
    found = _dtype_of(dtype)
    if found is None or type(data) is not bytes:
        return Instance(Global("numpy._core.multiarray", "scalar"), (dtype, data))
    if len(data) != found.itemsize:
        raise FormatError(f"a scalar of type {found} has {len(data)} bytes")
    return np.frombuffer(data, found)[0]


def empty_array(cls: Any, shape: Any, code: Any) -> Any:
    """Return an array whose contents follow as its state."""
    if cls != Global("numpy", "ndarray"):
        return Instance(Global("numpy._core.multiarray", "_reconstruct"), (cls, shape, code))
    return np.empty(0, np.uint8)


def set_array(array: np.ndarray[Any, Any], state: Any) -> int:
    """Fill an array. Returns the memory in bytes that this takes."""
    if type(state) is not tuple or len(state) != 5:
        raise FormatError("the state of an array is no tuple of five")
    _, shape, dtype, is_fortran, data = state
    found = _dtype_of(dtype)
    if found is None:
        raise FormatError(f"an array has elements of type {dtype!r:.100}")
    _check(found, shape, data)
    checked: Any = (1, shape, found, is_fortran is True, bytes(data))
    array.__setstate__(checked)
    return 2 * len(data) + 200


def array_from_buffer(data: Any, dtype: Any, shape: Any, order: Any = "C", *rest: Any) -> Any:
    """Return an array as protocol 5 stores it."""
    found = _dtype_of(dtype)
    if found is None or order not in ("C", "F"):
        return Instance(Global("numpy._core.numeric", "_frombuffer"), (data, dtype, shape, order))
    _check(found, shape, data)
    array = np.empty(prod(shape), found)
    array.view(np.uint8)[:] = np.frombuffer(data, np.uint8) if data else []
    return array.reshape(shape, order=order)


def _check(dtype: np.dtype[Any], shape: Any, data: Any) -> None:
    if type(shape) is not tuple or len(shape) > 32 or not all(type(size) is int and size >= 0 for size in shape):
        raise FormatError(f"an array has the shape {shape!r:.100}")
    if type(data) not in (bytes, bytearray) or prod(shape) * dtype.itemsize != len(data):
        raise FormatError(f"an array of shape {shape!r:.100} and type {dtype} has bytes of another length")


def _dtype_of(dtype: Any) -> np.dtype[Any] | None:
    """The dtype that an ``Instance`` of ``numpy.dtype`` describes; None if it is none, or not supported."""
    if type(dtype) is not Instance or dtype.cls != Global("numpy", "dtype") or not dtype.args:
        return None
    code, state = dtype.args[0], dtype.state
    if type(code) is not str or not _CODES.fullmatch(code):
        return None
    order = state[1] if type(state) is tuple and len(state) > 1 else "|"
    if type(order) is not str or order not in _ORDERS:
        return None
    try:
        return np.dtype(_ORDERS[order] + code)
    except TypeError:
        return None  # such as f1
