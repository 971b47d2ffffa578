"""Encode and decode target layouts. Decoding validates untrusted bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgpack
import numpy as np

from ...errors import FormatError, UnsupportedVersionError
from ...tensors.dtypes import DType, find_dtype
from .columns import expand, name_columns, number_column, read_name_columns, read_number_column
from .strided import StridedView

__all__ = ["LAYOUT_VERSION", "LayoutTensor", "Placement", "pack_layout", "unpack_layout"]

LAYOUT_VERSION = 1
_MARK = "bytecheckpoint target layout"
_MAX_DIMENSIONS = 64

_Form = tuple[tuple[int, ...], tuple[int, ...]]  # a view's shape and strides


class LayoutTensor(NamedTuple):
    """Name, shape and dtype of a stored tensor or of one of the rank's parameters."""

    name: str
    shape: tuple[int, ...]
    dtype: DType

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Placement(NamedTuple):
    """A copy from ``view`` of stored tensor number ``stored`` to ``target`` of parameter number ``parameter``.

    Both views have the same shape. The copy casts to the parameter's dtype. If placements overlap, the later one wins.
    """

    stored: int
    view: StridedView
    parameter: int
    target: StridedView


def pack_layout(
    stored: Sequence[LayoutTensor],
    parameters: Sequence[LayoutTensor],
    placements: Sequence[Placement],
    seen: Sequence[int],
) -> bytes:
    """Encode a layout; equal layouts give equal bytes."""
    forms: dict[_Form, int] = {}
    form = [forms.setdefault((p.view.shape, p.view.strides), len(forms)) for p in placements]
    target_form = [forms.setdefault((p.target.shape, p.target.strides), len(forms)) for p in placements]
    document = {
        "what": _MARK,
        "version": LAYOUT_VERSION,
        "stored": _pack_tensors(stored),
        "parameters": _pack_tensors(parameters),
        "forms": [[list(shape), list(strides)] for shape, strides in forms],
        "placements": {
            "stored": number_column([p.stored for p in placements]),
            "offset": number_column([p.view.offset for p in placements]),
            "form": number_column(form),
            "parameter": number_column([p.parameter for p in placements]),
            "target offset": number_column([p.target.offset for p in placements]),
            "target form": number_column(target_form),
        },
        "seen": number_column(seen),
    }
    packed: bytes = msgpack.packb(document)
    return packed


def unpack_layout(
    data: bytes,
) -> tuple[tuple[LayoutTensor, ...], tuple[LayoutTensor, ...], tuple[Placement, ...], tuple[int, ...]]:
    """Decode stored tensors, parameters, placements and the numbers of seen tensors.

    Raises ``FormatError`` or ``UnsupportedVersionError``.
    """
    document = expand("target layout", data)
    if not isinstance(document, dict) or document.get("what") != _MARK:
        raise FormatError("this is not a packed target layout")
    if document.get("version") != LAYOUT_VERSION:
        raise UnsupportedVersionError(
            f"target layout of version {document.get('version')!r:.40}; this library reads {LAYOUT_VERSION}"
        )
    if set(document) != {"what", "version", "stored", "parameters", "forms", "placements", "seen"}:
        raise FormatError(f"target layout has the fields {', '.join(map(str, document)):.400}")
    stored = _read_tensors("stored tensors", document["stored"])
    parameters = _read_tensors("parameters", document["parameters"])
    placements = _read_placements(document["placements"], _read_forms(document["forms"]), stored, parameters)
    seen = read_number_column("seen", document["seen"], below=max(len(stored), 1))
    if sorted(set(seen)) != seen or (seen and not stored):
        raise FormatError("target layout: the numbers of seen tensors are not in ascending order")
    return stored, parameters, placements, tuple(seen)


def _pack_tensors(tensors: Sequence[LayoutTensor]) -> dict[str, Any]:
    shapes: dict[tuple[int, ...], int] = {}
    dtypes: dict[str, int] = {}
    return {
        "names": name_columns([tensor.name for tensor in tensors]),
        "shape": number_column([shapes.setdefault(tensor.shape, len(shapes)) for tensor in tensors]),
        "dtype": number_column([dtypes.setdefault(tensor.dtype.name, len(dtypes)) for tensor in tensors]),
        "shapes": [list(shape) for shape in shapes],
        "dtypes": list(dtypes),
    }


def _read_tensors(what: str, columns: object) -> tuple[LayoutTensor, ...]:
    fields = _fields(what, columns, {"names", "shape", "dtype", "shapes", "dtypes"})
    names = read_name_columns(what, fields["names"])
    shapes = [_shape(f"{what}, shape", shape) for shape in _list(what, fields["shapes"])]
    dtypes = [find_dtype(name) for name in map(str, _list(what, fields["dtypes"]))]
    shape = read_number_column(f"{what}, shape", fields["shape"], len(names), below=max(len(shapes), 1))
    dtype = read_number_column(f"{what}, dtype", fields["dtype"], len(names), below=max(len(dtypes), 1))
    if names and not (shapes and dtypes):
        raise FormatError(f"{what}: there are tensors but no shapes or dtypes")
    return tuple(LayoutTensor(name, shapes[s], dtypes[d]) for name, s, d in zip(names, shape, dtype))


def _read_forms(value: object) -> list[_Form]:
    forms = []
    for form in _list("forms", value):
        pair = _list("form", form)
        if len(pair) != 2:
            raise FormatError("target layout: a form of a view is not [shape, strides]")
        shape, strides = _shape("form's shape", pair[0]), _numbers("form's strides", pair[1])
        if len(shape) != len(strides) or 0 in shape:
            raise FormatError(f"target layout: {shape} with strides {strides} is not a view")
        forms.append((shape, strides))
    return forms


def _read_placements(
    columns: object,
    forms: Sequence[_Form],
    stored: Sequence[LayoutTensor],
    parameters: Sequence[LayoutTensor],
) -> tuple[Placement, ...]:
    sizes = {"stored": len(stored), "offset": None, "form": len(forms)}
    sizes |= {"parameter": len(parameters), "target offset": None, "target form": len(forms)}
    fields = _fields("placements", columns, set(sizes))
    count = len(read_number_column("placements, stored", fields["stored"]))
    column = {
        name: read_number_column(
            f"placements, {name}", fields[name], count, below=1 << 62 if top is None else max(top, 1)
        )
        for name, top in sizes.items()
    }
    if count and not (stored and parameters and forms):
        raise FormatError("target layout: there are placements but no tensors, parameters or forms")
    _check_reach("stored tensor", stored, column["stored"], column["offset"], column["form"], forms)
    _check_reach("parameter", parameters, column["parameter"], column["target offset"], column["target form"], forms)
    for form, target_form in set(zip(column["form"], column["target form"])):
        if forms[form][0] != forms[target_form][0]:
            raise FormatError(f"target layout: {forms[form][0]} is placed into {forms[target_form][0]}")
    made: dict[tuple[int, int], StridedView] = {}  # layers are identical, so most views repeat
    views, targets = (
        [made.get(key) or made.setdefault(key, StridedView(key[0], *forms[key[1]])) for key in zip(offset, form)]
        for offset, form in (
            (column["offset"], column["form"]),
            (column["target offset"], column["target form"]),
        )
    )
    return tuple(map(Placement, column["stored"], views, column["parameter"], targets))


def _check_reach(
    what: str,
    tensors: Sequence[LayoutTensor],
    rows: Sequence[int],
    offsets: Sequence[int],
    form: Sequence[int],
    forms: Sequence[_Form],
) -> None:
    top = 1 << 62  # the sum of two such numbers fits into 64 bits
    reach = [min(sum((n - 1) * stride for n, stride in zip(*one)), top) for one in forms]
    numel = [math.prod(tensor.shape) for tensor in tensors]
    last = np.asarray(offsets, np.int64) + np.asarray(reach, np.int64)[np.asarray(form, np.int64)]
    outside = np.flatnonzero(last >= np.asarray(numel, np.int64)[np.asarray(rows, np.int64)])
    if len(outside):
        name = tensors[rows[int(outside[0])]].name
        raise FormatError(f"target layout: a placement reaches outside the {what} {name}")


def _fields(what: str, value: object, names: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict) or set(value) != names:
        raise FormatError(f"target layout: {what} do not have the fields {', '.join(sorted(names))}")
    return value


def _list(what: str, value: object) -> list[Any]:
    if not isinstance(value, list):
        raise FormatError(f"target layout: {what} is not a list")
    return value


def _shape(what: str, value: object) -> tuple[int, ...]:
    found = _numbers(what, value)
    if math.prod(found) >= 1 << 62:
        raise FormatError(f"target layout: {what} {found!r:.80} is out of range")
    return found


def _numbers(what: str, value: object) -> tuple[int, ...]:
    found = tuple(_list(what, value))
    if len(found) > _MAX_DIMENSIONS or any(type(n) is not int or not 0 <= n < 1 << 62 for n in found):
        raise FormatError(f"target layout: {what} {found!r:.80} is out of range")
    return found
