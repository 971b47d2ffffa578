"""Encode plans as messages: msgpack, with columns of numbers in the narrowest words that hold them.

The ranks have agreed on the version of the library before one of them sends a plan.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from ..tensors.tables import Int64

Bool = npt.NDArray[np.bool_]

_TYPES = ("|b1", "<u1", "<u2", "<u4", "<i8")  # by the code of the extension


def pack(message: object) -> bytes:
    """Pack plain values and columns for ``unpack``. Equal messages give equal bytes."""
    packed: bytes = msgpack.packb(message, default=_packed)
    return packed


def unpack(data: bytes) -> Any:
    """Unpack what a peer has packed: its columns are of int64 or bool, and its tuples are lists."""
    return msgpack.unpackb(data, ext_hook=_unpacked)


def pack_slices(values: Int64 | Bool, starts: Int64) -> list[msgpack.ExtType]:
    """Return the columns ``values[starts[i] : starts[i + 1]]`` as parts of messages; faster than one by one."""
    code, data = _packed(values)
    size = np.dtype(_TYPES[code]).itemsize
    return [msgpack.ExtType(code, data[begin:end]) for begin, end in pairwise((starts * size).tolist())]


def _packed(values: Int64 | Bool) -> msgpack.ExtType:
    code = 0
    if values.dtype != np.bool_:
        low, high = int(values.min(initial=0)), int(values.max(initial=0))
        code = next((code for code, bits in ((1, 8), (2, 16), (3, 32)) if low >= 0 and high >> bits == 0), 4)
    return msgpack.ExtType(code, values.astype(_TYPES[code], copy=False).tobytes())


def _unpacked(code: int, data: bytes) -> Any:
    return np.frombuffer(data, _TYPES[code]).astype(np.int64 if code else np.bool_)
