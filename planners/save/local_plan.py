"""What one rank holds, and the forms in which it travels to the rank that plans.

Most of it many ranks hold alike, or could work out for each other: names, shapes, replicas, parts of a mesh. That is a
``PlanTable``, of which ranks need but compare a digest. The rest are boxes that only their holder knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress

import numpy as np

from ..dtypes import DTYPES
from ..mesh_layout import MeshLayout
from ..tables import BoxTable, Int64, TensorTable, ragged_starts
from .wire import Bool, Fields, check_within, column, flags, malformed, pack, pack_words, unpack_words

__all__ = [
    "OWN_BOXES",
    "WHOLE",
    "LocalPlan",
    "PlanTable",
    "ValueEntry",
    "ValueKey",
    "ValueNames",
    "pack_boxes",
    "unpack_boxes",
]

OWN_BOXES, WHOLE = -1, 0
"""How ranks with one ``PlanTable`` hold a tensor, other than cut by a mesh: each as it says; each all of it."""

_TABLE, _BOXES = "plan table", "boxes"
_MAX_NDIM = 64
_MAX_LENGTH = 2**62


ValueKey = tuple[str, bytes]
"""Section and encoded path of a plain value."""


@dataclass(eq=False)
class ValueNames:
    """Plain values, in their order: section and path, an opaque encoded key, of each. Those ``per_rank`` are never
    replicas."""

    sections: list[str]
    paths: list[bytes]
    per_rank: Bool

    def __len__(self) -> int:
        return len(self.paths)

    def keys(self) -> list[ValueKey]:
        """Section and path of each."""
        return list(zip(self.sections, self.paths))


@dataclass(frozen=True)
class ValueEntry:
    """One plain value that a rank holds. ``path`` is an opaque encoded key, ``digest`` stands for the content,
    ``size`` is in bytes; ``per_rank`` values are never taken for replicas."""

    section: str
    path: bytes
    digest: bytes
    size: int
    per_rank: bool = False


@dataclass(eq=False)
class PlanTable:
    """What the plans of many ranks have in common.

    Tensors marked ``own`` belong to each rank alone; their names lack the ``@<rank>`` that they are stored under.
    ``held`` is by tensor: ``OWN_BOXES``, ``WHOLE``, or a number ``k`` above: each rank holds the one box that
    ``layouts[k - 1]`` gives it. ``aliases`` are ``(name, name it stands for)``, full names; ``sections`` are
    ``(name, adapter kind)``; ``pinned`` are tensors that the lowest rank writes. The contents of tensors marked
    ``compared`` tell whether they are replicas.
    """

    tensors: TensorTable
    own: Bool
    pinned: Bool
    compared: Bool
    held: Int64
    layouts: list[MeshLayout]
    values: ValueNames
    aliases: list[tuple[str, str]]
    sections: list[tuple[str, str]]

    def to_bytes(self) -> bytes:
        """For ``from_bytes``, on any machine. Equal for equal tables."""
        tensors, values = self.tensors, self.values
        return pack(
            _TABLE,
            {
                "names": tensors.names,
                "tensor_sections": tensors.sections,
                "section": column(tensors.section),
                "dtypes": list(DTYPES),
                "dtype": column(tensors.dtype),
                "ndim": column(tensors.ndim),
                "shape": column(tensors.shape),
                "own": flags(self.own),
                "pinned": flags(self.pinned),
                "compared": flags(self.compared),
                "held": column(self.held - OWN_BOXES),
                "layouts": [part for layout in self.layouts for part in _pack_layout(layout)],
                "value_section": values.sections,
                "value_path": values.paths,
                "value_per_rank": flags(values.per_rank),
                "aliases": [name for pair in self.aliases for name in pair],
                "sections": [name for pair in self.sections for name in pair],
            },
        )

    def compared_items(self) -> list[str | ValueKey]:
        """What the contents of a rank are of: values by section and path, then tensors by full name."""
        names = self.tensors.names
        tensors = [names[row] for row in np.flatnonzero(self.compared).tolist()]
        return [*compress(self.values.keys(), (~self.values.per_rank).tolist()), *tensors]

    @classmethod
    def from_bytes(cls, data: bytes) -> PlanTable:
        """A peer's table. Raises ``PlanError`` for bytes that ``to_bytes`` would not have written."""
        fields = Fields(_TABLE, data)
        tensors = _tensors(fields)
        layouts = _layouts(fields)
        held = OWN_BOXES + fields.within("held", fields.integers("held", len(tensors)), 0, len(layouts) + 2)
        dims = np.array([0, *(len(layout.cuts) for layout in layouts)], np.int64)
        if (dims[np.maximum(held, 0)] != tensors.ndim)[held > WHOLE].any():
            raise fields.malformed("a layout is of another number of dimensions than its tensor")
        return cls(
            tensors,
            fields.flags("own", len(tensors)),
            fields.flags("pinned", len(tensors)),
            fields.flags("compared", len(tensors)),
            held,
            layouts,
            _values(fields),
            fields.pairs("aliases"),
            fields.pairs("sections"),
        )


@dataclass(eq=False)
class LocalPlan:
    """What one rank holds: row ``i`` of ``shards`` is its ``i``-th shard.

    ``scope`` has one number a tensor: -1 for a tensor that ranks share, else the rank that alone has it (whose name
    already ends in ``@<rank>``); None where all are shared. ``pinned`` (None: none) marks tensors whose replicas may
    differ, so that the lowest rank writes them: all of them then come from one and the same rank. ``aliases`` are
    ``(name, name it stands for)``, full names; ``sections`` are ``(name, adapter kind)``.

    ``held`` (None: all ``OWN_BOXES``), ``layouts`` and ``compared`` (None: none) are as in ``PlanTable``;
    ``coordinates`` is the rank's place in the mesh of each layout. The first shards are those of tensors that are not
    held as ``OWN_BOXES``, one each, in the order of tensors.
    """

    tensors: TensorTable
    shards: BoxTable
    values: list[ValueEntry] = field(default_factory=list)
    scope: Int64 | None = None
    aliases: list[tuple[str, str]] = field(default_factory=list)
    sections: list[tuple[str, str]] = field(default_factory=list)
    pinned: Bool | None = None
    held: Int64 | None = None
    layouts: list[MeshLayout] = field(default_factory=list)
    coordinates: list[tuple[int, ...]] = field(default_factory=list)
    compared: Bool | None = None

    def places(self) -> Int64:
        """``coordinates``, one after the other."""
        return np.array([number for coordinate in self.coordinates for number in coordinate], np.int64)

    def table(self) -> PlanTable:
        """What other ranks may have in common with this one."""
        tensors = self.tensors
        own = np.zeros(len(tensors), np.bool_) if self.scope is None else self.scope >= 0
        if self.scope is not None and own.any():
            names = list(tensors.names)
            for row in np.flatnonzero(own).tolist():
                names[row] = names[row].removesuffix(f"@{int(self.scope[row])}")
            tensors = TensorTable(names, tensors.sections, tensors.section, tensors.dtype, tensors.ndim, tensors.shape)
        return PlanTable(
            tensors,
            own,
            np.zeros(len(tensors), np.bool_) if self.pinned is None else self.pinned,
            np.zeros(len(tensors), np.bool_) if self.compared is None else self.compared,
            np.full(len(tensors), OWN_BOXES, np.int64) if self.held is None else self.held,
            self.layouts,
            ValueNames(
                [value.section for value in self.values],
                [value.path for value in self.values],
                np.array([value.per_rank for value in self.values], np.bool_),
            ),
            self.aliases,
            self.sections,
        )

    def own_boxes(self) -> BoxTable:
        """The shards that no other rank could know of."""
        common = 0 if self.held is None else int((self.held != OWN_BOXES).sum())
        if common == 0:
            return self.shards
        first = int(self.shards.starts[common])
        return BoxTable(
            self.shards.tensor[common:],
            self.shards.offsets[first:],
            self.shards.lengths[first:],
            self.shards.starts[common:] - first,
        )


def pack_boxes(boxes: BoxTable) -> bytes:
    """For ``unpack_boxes``, on any machine; nothing where there are none."""
    return pack_words(boxes.tensor, boxes.offsets, boxes.lengths) if len(boxes) else b""


def unpack_boxes(told: Sequence[bytes], tensors: TensorTable) -> tuple[BoxTable, Int64]:
    """The own boxes of several peers one after the other, all of ``tensors``, and how many each has.

    Raises ``PlanError`` for bytes that ``pack_boxes`` would not have written.
    """
    telling = [peer for peer, data in enumerate(told) if data]
    counts = np.zeros(len(told), np.int64)
    (tensor, rows), (offsets, numbers), (lengths, as_many) = unpack_words(_BOXES, [told[peer] for peer in telling], 3)
    counts[telling] = rows
    check_within(_BOXES, "tensor", tensor, 0, len(tensors))
    check_within(_BOXES, "offsets", offsets, 0, _MAX_LENGTH)
    check_within(_BOXES, "lengths", lengths, 0, _MAX_LENGTH)
    boxes = BoxTable.from_columns(tensors, tensor, offsets, lengths)
    # Each must bring as many numbers as its own boxes have, or they would be taken for those of another's.
    expected = np.diff(boxes.starts[ragged_starts(rows)])
    if (numbers != expected).any() or (as_many != expected).any():
        raise malformed(_BOXES, "boxes of another number of dimensions than their tensors")
    return boxes, counts


def _pack_layout(layout: MeshLayout) -> tuple[object, object]:
    cuts = [number for axis in layout.cuts for number in (len(axis), *axis)]
    return column(np.array(layout.shape, np.int64)), column(np.array(cuts, np.int64))


def _layouts(fields: Fields) -> list[MeshLayout]:
    columns = [one.tolist() for one in fields.columns("layouts")]
    if len(columns) % 2:
        raise fields.malformed("half a layout")
    layouts = []
    for shape, numbers in zip(columns[::2], columns[1::2]):
        cuts = []
        at = 0
        while at < len(numbers):
            stop = at + 1 + max(numbers[at], 0)
            cuts.append(tuple(numbers[at + 1 : stop]))
            at = stop
        try:
            layouts.append(MeshLayout(tuple(shape), tuple(cuts)))
        except ValueError as error:
            raise fields.malformed(str(error)) from error
    return layouts


def _tensors(fields: Fields) -> TensorTable:
    names = fields.strings("names")
    sections = fields.strings("tensor_sections")
    count = len(names)
    if len(set(names)) != count:
        raise fields.malformed("a tensor is listed twice")
    # Codes are positions in the sender's table; another version of the library may have another.
    if fields.strings("dtypes") != list(DTYPES):
        raise fields.malformed("the sender knows other dtypes")
    section = fields.within("section", fields.integers("section", count), 0, len(sections))
    dtype = fields.within("dtype", fields.integers("dtype", count), 0, len(DTYPES))
    ndim = fields.within("ndim", fields.integers("ndim", count), 0, _MAX_NDIM + 1)
    shape = fields.within("shape", fields.integers("shape", int(ndim.sum())), 0, _MAX_LENGTH)
    prefixes = [f"{section}." for section in sections]
    of_name = [prefixes[code] for code in section.tolist()]
    if not all(map(str.startswith, names, of_name)):
        name = next(name for name, prefix in zip(names, of_name) if not name.startswith(prefix))
        raise fields.malformed(f"tensor {name!r} is not of its section")
    return TensorTable(names, sections, section, dtype, ndim, shape)


def _values(fields: Fields) -> ValueNames:
    paths = fields.blobs("value_path")
    return ValueNames(fields.strings("value_section", len(paths)), paths, fields.flags("value_per_rank", len(paths)))
