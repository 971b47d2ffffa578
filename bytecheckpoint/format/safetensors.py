"""The safetensors container: build headers that every reader opens, and parse untrusted ones.

A file is an 8-byte little-endian header length, a JSON header, and the data area. A header that is built here is padded
with spaces so that the data area begins on a 4096-byte boundary; tensors lie in file order without gaps, as the format
requires. This module does no I/O and does not use torch.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

from ..errors import FormatError
from ..tensors.dtypes import DTYPES, DType
from ..tensors.geometry import Box
from ..tensors.metadata import BasicMeta

DATA_ALIGNMENT = 4096
"""The alignment of the data area in bytes, in files that this library writes."""

_MAX_HEADER = 100_000_000  # bytes: the limit of the stock library
_MAX_NAME = 1 << 16
_MAX_NDIM = 64
_MAX_INT = (1 << 63) - 1
_METADATA = "__metadata__"
_ENTRY_KEYS = frozenset(("dtype", "shape", "data_offsets"))

_PACKED = "F4"  # two elements of the format are one of torch
_BY_CODE = {dtype.safetensors: dtype for dtype in DTYPES.values() if dtype.safetensors is not None}
# Bits per element of every code of the format. torch has no dtypes for the last two.
_CODE_BITS = {code: 8 * dtype.itemsize for code, dtype in _BY_CODE.items()} | {_PACKED: 4, "F6_E2M3": 6, "F6_E3M2": 6}


@dataclass(frozen=True)
class HeaderRecord:
    """A tensor found in a header.

    ``dtype`` is the safetensors code; ``begin`` and ``end`` count bytes from the start of the data area.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class SafetensorsHeader:
    """A parsed header. ``data_start`` is the data area's first byte in the file; ``entries`` are in file order."""

    data_start: int
    entries: tuple[HeaderRecord, ...]
    metadata: dict[str, str]


def shard_name(fqn: str, box: Box, *, whole: bool) -> str:
    """Return a shard's name inside its file: the plain fqn of a whole tensor, else a name such as ``fqn[0:2,3:4]``."""
    return fqn if whole else f"{fqn}{box}"


def code_and_shape(dtype: DType, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]] | None:
    """Return the code and the shape by which the format describes such a tensor; None if it cannot."""
    if dtype.safetensors == _PACKED:
        return (_PACKED, (*shape[:-1], 2 * shape[-1])) if shape else None
    return None if dtype.safetensors is None else (dtype.safetensors, shape)


def dtype_and_shape(record: HeaderRecord) -> tuple[DType, tuple[int, ...]] | None:
    """Return dtype and shape of the tensor as torch describes it; None if it cannot."""
    dtype, shape = _BY_CODE.get(record.dtype), record.shape
    if record.dtype == _PACKED:
        return (DTYPES["float4_e2m1fn_x2"], (*shape[:-1], shape[-1] // 2)) if shape and not shape[-1] % 2 else None
    return None if dtype is None else (dtype, shape)


def build_header(entries: Iterable[tuple[str, BasicMeta]], metadata: dict[str, str]) -> bytes:
    """Return the first bytes of a file, up to the data area.

    ``entries`` are the tensors' names in the file, with dtypes and shapes, in file order. They lie back to back.

    Raises ``FormatError`` for a duplicate name, and for a header that exceeds the 100 MB that stock readers accept.
    """
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    begin = 0
    for name, meta in entries:
        _check_name(name, is_taken=name in header)
        code, shape = code_and_shape(*meta) or ("U8", (*meta.shape, meta.dtype.itemsize))
        end = begin + meta.nbytes
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    padded = -(-(8 + len(text)) // DATA_ALIGNMENT) * DATA_ALIGNMENT
    if padded - 8 > _MAX_HEADER:
        raise FormatError(
            f"a header of {padded - 8} bytes is over the {_MAX_HEADER} that readers accept; use more files"
        )
    return (padded - 8).to_bytes(8, "little") + text.ljust(padded - 8)


def parse_header(read: Callable[[int, int], bytes], file_size: int) -> SafetensorsHeader:
    """Read and validate a header.

    ``read(offset, length)`` returns exactly those bytes of a file of ``file_size`` bytes.

    Raises ``FormatError`` for anything that breaks the format. Nothing is allocated for a header that cannot be valid.
    """
    if file_size < 8:
        raise FormatError(f"not a safetensors file: {file_size} bytes")
    length = int.from_bytes(read(0, 8), "little")
    if length > _MAX_HEADER or length > file_size - 8:
        raise FormatError(f"safetensors header of {length} bytes in a file of {file_size} (at most {_MAX_HEADER})")
    header = _parse_json(read(8, length))
    metadata = _metadata_of(header.pop(_METADATA, None))
    records = [_record(name, entry) for name, entry in header.items()]
    records.sort(key=lambda record: (record.begin, record.end))
    data_start, position = 8 + length, 0
    for record in records:
        if record.begin != position:
            raise FormatError(f"{record.name!r} begins at data offset {record.begin}, not {position}: overlap or hole")
        position = record.end
    if position != file_size - data_start:
        raise FormatError(f"tensors end at data offset {position}, the file at {file_size - data_start}")
    return SafetensorsHeader(data_start, tuple(records), metadata)


def _parse_json(raw: bytes) -> dict[str, Any]:
    # The format requires this first byte, so that no other kind of file is taken for a header.
    if not raw.startswith(b"{"):
        raise FormatError("safetensors header does not begin with '{'")
    try:
        header = json.loads(
            raw.decode("utf-8"), object_pairs_hook=_unique, parse_float=_reject_number, parse_constant=_reject_number
        )
    except (ValueError, RecursionError) as error:
        raise FormatError(f"safetensors header is not valid JSON: {error}") from None
    if not isinstance(header, dict):
        raise FormatError("safetensors header is not a JSON object")
    return header


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise FormatError(f"key {twice!r:.200} occurs twice in one object of the safetensors header")
    return found


def _reject_number(text: str) -> Any:
    raise ValueError(f"number {text} is not an integer")


def _metadata_of(found: object) -> dict[str, str]:
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise FormatError(f"{_METADATA} of the safetensors header is not a map of strings")
    return found


def _record(name: str, entry: object) -> HeaderRecord:
    _check_name(name, is_taken=False)
    if not isinstance(entry, dict) or set(entry) != _ENTRY_KEYS:
        raise FormatError(f"{name!r}: a safetensors entry has exactly dtype, shape and data_offsets")
    dtype = entry["dtype"]
    shape = _integers(name, "shape", entry["shape"])
    offsets = _integers(name, "data_offsets", entry["data_offsets"])
    if not isinstance(dtype, str) or dtype not in _CODE_BITS:
        raise FormatError(f"{name!r}: unknown safetensors dtype {dtype!r:.80}")
    if len(shape) > _MAX_NDIM or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise FormatError(f"{name!r}: shape of {len(shape)} dimensions, data_offsets {offsets[:3]}")
    bits = prod(shape) * _CODE_BITS[dtype]
    if bits != 8 * (offsets[1] - offsets[0]):
        raise FormatError(f"{name!r}: {dtype}{list(shape)} does not take {offsets[1] - offsets[0]} bytes")
    return HeaderRecord(name, dtype, shape, offsets[0], offsets[1])


def _integers(name: str, what: str, found: object) -> tuple[int, ...]:
    # bool is an int to isinstance, and JSON's true is not a number
    if not isinstance(found, list) or not all(type(n) is int and 0 <= n <= _MAX_INT for n in found):
        raise FormatError(f"{name!r}: {what} is not a list of whole numbers of 0 to 2^63-1")
    return tuple(found)


def _check_name(name: str, *, is_taken: bool) -> None:
    if is_taken or name == _METADATA:
        raise FormatError(f"name {name!r:.200} is taken in this safetensors file")
    if len(name) > _MAX_NAME or "\0" in name or not _is_text(name):
        raise FormatError(f"name {name!r:.200} cannot be used in a safetensors file: it is too long, or not text")


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON escapes can spell
        return False
    return True
