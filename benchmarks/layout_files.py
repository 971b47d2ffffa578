"""The form of golden layouts: columns of numbers and names that compress well, so that a rank takes a few kB.

Names differ in a few numbers (``model.layers.17.mlp.experts.203.up_proj.weight``): the text around the numbers is
stored once, and the numbers become columns. A column of numbers is stored as differences between neighbours, all lowest
bytes first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np
import xxhash
import zstandard

from benchmarks.target_layout import LayoutTensor, Placement, TargetLayout
from bytecheckpoint.inference.layouts.parts import StridedView
from bytecheckpoint.tensors.dtypes import find_dtype

_MOST_NUMBERS = 16  # in one name
# Without numbers that have leading zeros, which printing would not restore.
_NUMBER = re.compile(r"(?<![0-9])(0|[1-9][0-9]{0,14})(?![0-9])")


def pack(layout: TargetLayout) -> bytes:
    return zstandard.ZstdCompressor(level=19).compress(_payload(layout))


def digest(layout: TargetLayout) -> str:
    """Equal layouts have equal digests."""
    return xxhash.xxh3_128_hexdigest(_payload(layout))


def unpack(data: bytes) -> TargetLayout:
    document = msgpack.unpackb(zstandard.ZstdDecompressor().decompress(data))
    stored, parameters = (_read_tensors(document[key]) for key in ("stored", "parameters"))
    forms = [(tuple(shape), tuple(strides)) for shape, strides in document["forms"]]
    columns = {name: _read_numbers(column) for name, column in document["placements"].items()}
    made: dict[tuple[int, int], StridedView] = {}  # layers are identical, so most views repeat
    views, targets = (
        [made.get(key) or made.setdefault(key, StridedView(key[0], *forms[key[1]])) for key in zip(offset, form)]
        for offset, form in (
            (columns["offset"], columns["form"]),
            (columns["target offset"], columns["target form"]),
        )
    )
    placements = tuple(map(Placement, columns["stored"], views, columns["parameter"], targets))
    return TargetLayout(stored, parameters, placements, tuple(_read_numbers(document["seen"])))


def _payload(layout: TargetLayout) -> bytes:
    forms: dict[Any, int] = {}
    placements = layout.placements
    form = [forms.setdefault((p.view.shape, p.view.strides), len(forms)) for p in placements]
    target_form = [forms.setdefault((p.target.shape, p.target.strides), len(forms)) for p in placements]
    document = {
        "what": "bytecheckpoint target layout",
        "version": 1,
        "stored": _tensors(layout.stored),
        "parameters": _tensors(layout.parameters),
        "forms": [[list(shape), list(strides)] for shape, strides in forms],
        "placements": {
            "stored": _numbers([p.stored for p in placements]),
            "offset": _numbers([p.view.offset for p in placements]),
            "form": _numbers(form),
            "parameter": _numbers([p.parameter for p in placements]),
            "target offset": _numbers([p.target.offset for p in placements]),
            "target form": _numbers(target_form),
        },
        "seen": _numbers(layout.seen),
    }
    packed: bytes = msgpack.packb(document)
    return packed


def _tensors(tensors: Sequence[LayoutTensor]) -> dict[str, Any]:
    shapes: dict[tuple[int, ...], int] = {}
    dtypes: dict[str, int] = {}
    return {
        "names": _names([tensor.name for tensor in tensors]),
        "shape": _numbers([shapes.setdefault(tensor.shape, len(shapes)) for tensor in tensors]),
        "dtype": _numbers([dtypes.setdefault(tensor.dtype.name, len(dtypes)) for tensor in tensors]),
        "shapes": [list(shape) for shape in shapes],
        "dtypes": list(dtypes),
    }


def _read_tensors(columns: dict[str, Any]) -> tuple[LayoutTensor, ...]:
    shapes, dtypes = [tuple(shape) for shape in columns["shapes"]], [find_dtype(name) for name in columns["dtypes"]]
    rows = zip(_read_names(columns["names"]), _read_numbers(columns["shape"]), _read_numbers(columns["dtype"]))
    return tuple(LayoutTensor(name, shapes[shape], dtypes[dtype]) for name, shape, dtype in rows)


def _numbers(values: Sequence[int]) -> bytes:
    steps = np.diff(np.asarray(values, np.int64), prepend=np.int64(0)).astype("<i8")
    return np.ascontiguousarray(steps.view(np.uint8).reshape(-1, 8).T).tobytes()


def _read_numbers(data: bytes) -> list[int]:
    shuffled = np.frombuffer(data, np.uint8).reshape(8, -1)
    found: list[int] = np.cumsum(np.ascontiguousarray(shuffled.T).view("<i8").reshape(-1)).tolist()
    return found


def _names(names: Sequence[str]) -> dict[str, Any]:
    patterns: dict[tuple[str, ...], int] = {}
    pattern: list[int] = []
    numbers: list[list[int]] = []
    for name in names:
        pieces = _NUMBER.split(name, maxsplit=_MOST_NUMBERS)
        pattern.append(patterns.setdefault(tuple(pieces[::2]), len(patterns)))
        for position, number in enumerate(pieces[1::2]):
            if position == len(numbers):
                numbers.append([])
            numbers[position].append(int(number))
    return {
        "patterns": [list(pieces) for pieces in patterns],
        "pattern": _numbers(pattern),
        "numbers": [_numbers(column) for column in numbers],
    }


def _read_names(columns: dict[str, Any]) -> list[str]:
    values = [iter(_read_numbers(column)) for column in columns["numbers"]]
    return [
        "".join(
            piece + (str(next(values[position])) if position < len(pieces) - 1 else "")
            for position, piece in enumerate(pieces)
        )
        for pieces in (columns["patterns"][index] for index in _read_numbers(columns["pattern"]))
    ]
