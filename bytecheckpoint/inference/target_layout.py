"""What one rank of an inference engine is made of: which part of which stored tensor goes to which part of which
parameter. Learned once from the engine's own loader, then plain data: compared, packed, sent, cached.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import msgpack
import numpy as np
import torch
import xxhash
from torch import nn

from ..dtypes import DType, dtype_named
from ..errors import FormatError, StateError, UnsupportedVersionError
from ..geometry import Box
from ..shards import basic_meta
from .layout_columns import compress, expand, name_columns, number_column, read_name_columns, read_number_column
from .parts import Part
from .recording import Copy, Recorder
from .strided import StridedView, box_of

__all__ = ["LAYOUT_VERSION", "Figures", "LayoutTensor", "Placement", "TargetLayout"]

LAYOUT_VERSION = 1
_MARK = "bytecheckpoint target layout"
_MAX_DIMENSIONS = 64


class LayoutTensor(NamedTuple):
    """A stored tensor, or a parameter of the rank."""

    name: str
    shape: tuple[int, ...]
    dtype: DType

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Placement(NamedTuple):
    """``view`` of the stored tensor with this number becomes ``target`` of the parameter with that number, cast to
    its type. Both views have one shape; where placements overlap, the later one holds."""

    stored: int
    view: StridedView
    parameter: int
    target: StridedView


@dataclass(frozen=True)
class Figures:
    """Bytes: of all stored tensors, of the rank's parameters, of what has to reach the rank, and of that which is
    exactly what parameters hold (the *fast path*: no whole tensor is sent for a part of it, or to compute with)."""

    stored: int
    parameters: int
    wanted: int
    fast: int

    @property
    def share(self) -> float:
        """Of the wanted bytes, those on the fast path."""
        return self.fast / self.wanted if self.wanted else 1.0


@dataclass(frozen=True)
class TargetLayout:
    """``seen``: numbers of stored tensors whose values the loader computes with. They are wanted whole, and what it
    makes of them only it knows: no placement says so."""

    stored: tuple[LayoutTensor, ...]
    parameters: tuple[LayoutTensor, ...]
    placements: tuple[Placement, ...]
    seen: tuple[int, ...] = ()

    @classmethod
    def from_recording(
        cls, recorder: Recorder, stored: Iterable[tuple[str, Sequence[int], torch.dtype]], model: nn.Module
    ) -> TargetLayout:
        """What ``recorder`` noted while ``model``'s loader took the tensors ``stored`` from it. Raises ``StateError``
        for a copy into anything but elements of the model's own contiguous parameters and buffers."""
        sources = tuple(_described(name, dtype, shape) for name, shape, dtype in stored)
        row = {tensor.name: number for number, tensor in enumerate(sources)}
        places = _Places(model, recorder.copies)
        placements = tuple(
            Placement(row[copy.name], copy.view, *places.of(copy)) for copy in recorder.copies if copy.view.numel
        )
        seen = tuple(sorted({row[name] for name, _ in recorder.seen}))
        return cls(sources, places.tensors, placements, seen)

    def parts(self) -> list[Part]:
        """What has to reach the rank, in the order of the stored tensors, nothing twice."""
        return [
            Part(self.stored[number].name, self.stored[number].shape, box, dtype)
            for number in sorted(self._boxes)
            for box, dtype in sorted(self._boxes[number])
        ]

    @cached_property
    def _boxes(self) -> dict[int, set[tuple[Box, DType]]]:
        """By stored tensor. One that is wanted whole as it is stored is wanted once, in that form."""
        found: dict[int, set[tuple[Box, DType]]] = {}
        for number in self.seen:
            tensor = self.stored[number]
            found[number] = {(Box.whole(tensor.shape), tensor.dtype)}
        for placement in self.placements:
            if placement.stored in self.seen:
                continue
            shape = self.stored[placement.stored].shape
            view = _box_of(shape, placement.view)
            box = Box.whole(shape) if view is None else view.box
            found.setdefault(placement.stored, set()).add((box, self.parameters[placement.parameter].dtype))
        for number, boxes in found.items():
            for whole, dtype in list(boxes):
                if whole == Box.whole(self.stored[number].shape):
                    found[number] = {other for other in found[number] if other[1] != dtype} | {(whole, dtype)}
        return found

    def figures(self) -> Figures:
        exact = set()
        for placement in self.placements:
            view = _box_of(self.stored[placement.stored].shape, placement.view)
            if view is not None and placement.stored not in self.seen:
                exact.add((placement.stored, view.box, self.parameters[placement.parameter].dtype))
        boxes = [(number, box, dtype) for number, found in self._boxes.items() for box, dtype in found]
        return Figures(
            stored=sum(tensor.nbytes for tensor in self.stored),
            parameters=sum(tensor.nbytes for tensor in self.parameters),
            wanted=sum(box.numel * dtype.itemsize for _, box, dtype in boxes),
            fast=sum(box.numel * dtype.itemsize for number, box, dtype in boxes if (number, box, dtype) in exact),
        )

    def digest(self) -> str:
        """Of everything above: equal digests, equal layouts. Not against forgery."""
        return xxhash.xxh3_128_hexdigest(self._payload)

    def pack(self) -> bytes:
        """Small: a few bytes a tensor."""
        return compress(self._payload)

    @cached_property
    def _payload(self) -> bytes:
        views: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        form = [views.setdefault((p.view.shape, p.view.strides), len(views)) for p in self.placements]
        target_form = [views.setdefault((p.target.shape, p.target.strides), len(views)) for p in self.placements]
        document = {
            "what": _MARK,
            "version": LAYOUT_VERSION,
            "stored": _pack_tensors(self.stored),
            "parameters": _pack_tensors(self.parameters),
            "forms": [[list(shape), list(strides)] for shape, strides in views],
            "placements": {
                "stored": number_column([p.stored for p in self.placements]),
                "offset": number_column([p.view.offset for p in self.placements]),
                "form": number_column(form),
                "parameter": number_column([p.parameter for p in self.placements]),
                "target offset": number_column([p.target.offset for p in self.placements]),
                "target form": number_column(target_form),
            },
            "seen": number_column(self.seen),
        }
        packed: bytes = msgpack.packb(document)
        return packed

    @classmethod
    def unpack(cls, data: bytes) -> TargetLayout:
        """Raises ``FormatError`` for what is no layout: wrong numbers, views outside their tensors, names twice."""
        document = expand("target layout", data)
        if not isinstance(document, dict) or document.get("what") != _MARK:
            raise FormatError("this is no packed target layout")
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
            raise FormatError("target layout: seen tensors are not in order")
        return cls(stored, parameters, placements, tuple(seen))


class _Places:
    """The model's parameters, and its buffers that were copied to, by the memory that they lie in."""

    def __init__(self, model: nn.Module, copies: Sequence[Copy]) -> None:
        self._kept = [copy.target.untyped_storage() for copy in copies]  # their identities must not be given to others
        touched = {_identity(copy.target) for copy in copies}
        named: list[tuple[str, torch.Tensor]] = list(model.named_parameters())
        named += [(name, buffer) for name, buffer in model.named_buffers() if _identity(buffer) in touched]
        self.tensors = tuple(_described(name, tensor.dtype, tensor.shape) for name, tensor in named)
        self._names = [name for name, _ in named]
        self._by_memory: dict[int, list[tuple[int, torch.Tensor]]] = {}
        for number, (_, tensor) in enumerate(named):
            self._by_memory.setdefault(_identity(tensor), []).append((number, tensor))

    def of(self, copy: Copy) -> tuple[int, StridedView]:
        target = copy.target
        first = int(target.storage_offset())
        last = first + sum((n - 1) * stride for n, stride in zip(target.shape, target.stride()))
        for number, tensor in self._by_memory.get(_identity(target), ()):
            begin = int(tensor.storage_offset())
            if not begin <= first <= last < begin + tensor.numel() or tensor.dtype != target.dtype:
                continue
            if not tensor.is_contiguous():
                raise StateError(f"parameter {self._names[number]} is not contiguous; its layout cannot be noted")
            return number, StridedView(first - begin, tuple(target.shape), tuple(target.stride()))
        raise StateError(
            f"the loader copies {copy.name} into a tensor of shape {tuple(target.shape)} and {target.dtype} that is no "
            "part of a parameter or buffer of the model"
        )


_box_of = lru_cache(maxsize=1 << 14)(box_of)  # layers are alike, and so are experts


def _identity(tensor: torch.Tensor) -> int:
    # Tensors on the meta device have no address, but views share the storage object.
    return int(tensor.untyped_storage()._cdata)


def _described(name: str, dtype: torch.dtype, shape: Sequence[int]) -> LayoutTensor:
    meta = basic_meta(dtype, tuple(shape))
    return LayoutTensor(name, meta.shape, meta.dtype)


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
    dtypes = [dtype_named(name) for name in map(str, _list(what, fields["dtypes"]))]
    shape = read_number_column(f"{what}, shape", fields["shape"], len(names), below=max(len(shapes), 1))
    dtype = read_number_column(f"{what}, dtype", fields["dtype"], len(names), below=max(len(dtypes), 1))
    if names and not (shapes and dtypes):
        raise FormatError(f"{what}: tensors of no shape or dtype")
    return tuple(LayoutTensor(name, shapes[s], dtypes[d]) for name, s, d in zip(names, shape, dtype))


def _read_forms(value: object) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    forms = []
    for form in _list("forms", value):
        pair = _list("form", form)
        if len(pair) != 2:
            raise FormatError("target layout: a form of a view is not [shape, strides]")
        shape, strides = _shape("form's shape", pair[0]), _numbers("form's strides", pair[1])
        if len(shape) != len(strides) or 0 in shape:
            raise FormatError(f"target layout: {shape} with strides {strides} is no view")
        forms.append((shape, strides))
    return forms


def _read_placements(
    columns: object,
    forms: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
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
        raise FormatError("target layout: placements of nothing")
    _check_reach("stored tensor", stored, column["stored"], column["offset"], column["form"], forms)
    targets = (column["parameter"], column["target offset"], column["target form"])
    _check_reach("parameter", parameters, *targets, forms)
    for form, target_form in set(zip(column["form"], column["target form"])):
        if forms[form][0] != forms[target_form][0]:
            raise FormatError(f"target layout: {forms[form][0]} is placed into {forms[target_form][0]}")
    made: dict[tuple[int, int], StridedView] = {}  # layers are alike, and so are most of their views
    views, into = (
        [made.get(key) or made.setdefault(key, StridedView(key[0], *forms[key[1]])) for key in zip(offset, form)]
        for offset, form in ((column["offset"], column["form"]), targets[1:])
    )
    return tuple(map(Placement, column["stored"], views, column["parameter"], into))


def _check_reach(
    what: str,
    tensors: Sequence[LayoutTensor],
    rows: Sequence[int],
    offsets: Sequence[int],
    form: Sequence[int],
    forms: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
) -> None:
    top = 1 << 62  # of all numbers, so that two of them fit
    reach = [min(sum((n - 1) * stride for n, stride in zip(*one)), top) for one in forms]
    numel = [math.prod(tensor.shape) for tensor in tensors]
    last = np.asarray(offsets, np.int64) + np.asarray(reach, np.int64)[np.asarray(form, np.int64)]
    outside = np.flatnonzero(last >= np.asarray(numel, np.int64)[np.asarray(rows, np.int64)])
    if len(outside):
        name = tensors[rows[int(outside[0])]].name
        raise FormatError(f"target layout: a placement reaches outside of the {what} {name}")


def _fields(what: str, value: object, names: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict) or set(value) != names:
        raise FormatError(f"target layout: {what} have not the fields {', '.join(sorted(names))}")
    return value


def _list(what: str, value: object) -> list[Any]:
    if not isinstance(value, list):
        raise FormatError(f"target layout: {what} is no list")
    return value


def _shape(what: str, value: object) -> tuple[int, ...]:
    found = _numbers(what, value)
    if math.prod(found) >= 1 << 62:
        raise FormatError(f"target layout: {what} {found!r:.80} is not possible")
    return found


def _numbers(what: str, value: object) -> tuple[int, ...]:
    found = tuple(_list(what, value))
    if len(found) > _MAX_DIMENSIONS or any(type(n) is not int or not 0 <= n < 1 << 62 for n in found):
        raise FormatError(f"target layout: {what} {found!r:.80} is not possible")
    return found
