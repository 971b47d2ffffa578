"""What one rank holds, and how it is sent to the rank that plans.

Most of it is equal on many ranks, or can be computed for other ranks: names, shapes, replicas, parts of a mesh. That is
a ``PlanTable``, of which ranks compare only a digest. The rest are boxes that only their holder can list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress

import numpy as np

from ..tensors.dtypes import DTYPES
from ..tensors.mesh_layout import MeshLayout
from ..tensors.tables import BoxTable, Int64, TensorTable, ragged_starts
from .wire import (
    MAX_LENGTH,
    Bool,
    Fields,
    check_range,
    malformed,
    pack_column,
    pack_flags,
    pack_message,
    pack_words,
    tensor_fields,
    unpack_words,
)

OWN_BOXES, WHOLE = -1, 0
"""How ranks with the same ``PlanTable`` hold a tensor that no mesh splits: each lists its boxes, or holds it all."""

_TABLE, _BOXES = "plan table", "boxes"


ValueKey = tuple[str, bytes]
"""Section and encoded path of a plain value."""


@dataclass(eq=False)
class ValueNames:
    """Section and path (an opaque encoded key) of plain values, in order.

    Values marked ``per_rank`` are never replicas.
    """

    sections: list[str]
    paths: list[bytes]
    per_rank: Bool

    def __len__(self) -> int:
        return len(self.paths)

    def keys(self) -> list[ValueKey]:
        """Section and path of each value."""
        return list(zip(self.sections, self.paths, strict=True))


@dataclass(frozen=True)
class ValueEntry:
    """One plain value that a rank holds.

    Attributes:
        section: The section of the value.
        path: An opaque encoded key.
        digest: Identifies the content.
        size: The size of the encoded value in bytes.
        per_rank: If true, the value is never a replica.
    """

    section: str
    path: bytes
    digest: bytes
    size: int
    per_rank: bool = False


@dataclass(eq=False)
class PlanTable:
    """What the plans of many ranks have in common.

    Attributes:
        tensors: The tensors. The names of own tensors lack the suffix ``@<rank>`` under which they are stored.
        own: Whether a tensor belongs to each rank alone, by tensor.
        pinned: Whether the lowest rank writes a tensor, by tensor.
        compared: Whether the contents of a tensor decide if it is a replica, by tensor.
        must_match: Whether the contents of a compared tensor must be equal on all holders, by tensor.
        held: By tensor ``OWN_BOXES``, ``WHOLE``, or a number ``k`` above: each rank holds the boxes that ``layouts[k -
            1]`` assigns to it.
        layouts: How meshes split tensors.
        values: Section and path of the plain values.
        aliases: Pairs of full names (alias, target).
        sections: Pairs (name, kind of adapter).
    """

    tensors: TensorTable
    own: Bool
    pinned: Bool
    compared: Bool
    must_match: Bool
    held: Int64
    layouts: list[MeshLayout]
    values: ValueNames
    aliases: list[tuple[str, str]]
    sections: list[tuple[str, str]]

    def to_bytes(self) -> bytes:
        """Pack for ``from_bytes``. Equal tables give equal bytes.

        Returns:
            Bytes that any machine can unpack.
        """
        values = self.values
        return pack_message(
            _TABLE,
            {
                **tensor_fields(self.tensors),
                "dtypes": list(DTYPES),
                "own": pack_flags(self.own),
                "pinned": pack_flags(self.pinned),
                "compared": pack_flags(self.compared),
                "must_match": pack_flags(self.must_match),
                "held": pack_column(self.held - OWN_BOXES),
                "layouts": [part for layout in self.layouts for part in _pack_layout(layout)],
                "value_section": values.sections,
                "value_path": values.paths,
                "value_per_rank": pack_flags(values.per_rank),
                "aliases": [name for pair in self.aliases for name in pair],
                "sections": [name for pair in self.sections for name in pair],
            },
        )

    def common_boxes(self) -> Int64:
        """Return how many boxes of each tensor a rank holds that other ranks can compute.

        Returns:
            The numbers, by tensor.
        """
        return _common_boxes(self.held, self.layouts)

    def compared_items(self) -> list[str | ValueKey]:
        """Return what a rank's content digests refer to.

        Returns:
            Values by section and path, then tensors by full name.
        """
        names = self.tensors.names
        tensors = [names[row] for row in np.flatnonzero(self.compared).tolist()]
        return [*compress(self.values.keys(), (~self.values.per_rank).tolist()), *tensors]

    @classmethod
    def from_bytes(cls, data: bytes) -> PlanTable:
        """Unpack a peer's table.

        Args:
            data: What ``to_bytes`` has returned.

        Returns:
            The table.

        Raises:
            PlanError: ``to_bytes`` cannot have written the bytes.
        """
        fields = Fields(_TABLE, data)
        # Codes are positions in the sender's dtype table, which depends on the version of the library.
        if fields.strings("dtypes") != list(DTYPES):
            raise fields.malformed("the sender has another list of dtypes")
        tensors = fields.tensors()
        layouts = _layouts(fields)
        held = OWN_BOXES + fields.in_range("held", fields.integers("held", len(tensors)), 0, len(layouts) + 2)
        dims = np.array([0, *(len(layout.cuts) for layout in layouts)], np.int64)
        if (dims[np.maximum(held, 0)] != tensors.ndim)[held > WHOLE].any():
            raise fields.malformed("a layout and its tensor have different numbers of dimensions")
        return cls(
            tensors,
            fields.flags("own", len(tensors)),
            fields.flags("pinned", len(tensors)),
            fields.flags("compared", len(tensors)),
            fields.flags("must_match", len(tensors)),
            held,
            layouts,
            _values(fields),
            fields.pairs("aliases"),
            fields.pairs("sections"),
        )


@dataclass(eq=False)
class LocalPlan:
    """What one rank holds.

    The first shards are those of tensors that are not held as ``OWN_BOXES``, in the order of tensors: the whole tensor,
    or the boxes of its layout.

    Attributes:
        tensors: The tensors that this rank has or describes.
        shards: The boxes in this rank's memory.
        values: The plain values.
        scope: By tensor, -1 if ranks share it, else the rank that alone has it (its name ends in ``@<rank>``). None if
            all are shared.
        aliases: Pairs of full names (alias, target).
        sections: Pairs (name, kind of adapter).
        pinned: Whether replicas of a tensor may differ, so that the lowest rank writes them all consistently. None if
            none may.
        held: As in ``PlanTable``; None if all are ``OWN_BOXES``.
        layouts: As in ``PlanTable``.
        coordinates: This rank's coordinates in the mesh of each layout.
        compared: As in ``PlanTable``; None if no tensor is compared.
        must_match: As in ``PlanTable``; None if no tensor must match.
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
    must_match: Bool | None = None

    def flat_coordinates(self) -> Int64:
        """Return ``coordinates`` as one array.

        Returns:
            The coordinates of all layouts, one after the other.
        """
        return np.array([number for coordinate in self.coordinates for number in coordinate], np.int64)

    def table(self) -> PlanTable:
        """Return the part of this plan that other ranks may have in common.

        Returns:
            The table.
        """
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
            np.zeros(len(tensors), np.bool_) if self.must_match is None else self.must_match,
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
        """Return the shards that other ranks cannot compute.

        Returns:
            The boxes, in the order of ``shards``.
        """
        common = 0 if self.held is None else int(_common_boxes(self.held, self.layouts).sum())
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
    """Pack boxes for ``unpack_boxes``.

    Args:
        boxes: The boxes.

    Returns:
        Bytes that any machine can unpack; empty if there are no boxes.
    """
    return pack_words(boxes.tensor, boxes.offsets, boxes.lengths) if len(boxes) else b""


def unpack_boxes(messages: Sequence[bytes], tensors: TensorTable) -> tuple[BoxTable, Int64]:
    """Unpack the own boxes of several peers.

    Args:
        messages: What ``pack_boxes`` has returned on each peer.
        tensors: The tensors to which the boxes refer.

    Returns:
        The boxes of all peers one after the other, and the number of boxes of each peer.

    Raises:
        PlanError: ``pack_boxes`` cannot have written the bytes.
    """
    senders = [peer for peer, data in enumerate(messages) if data]
    counts = np.zeros(len(messages), np.int64)
    (tensor, rows), (offsets, numbers), (lengths, as_many) = unpack_words(
        _BOXES, [messages[peer] for peer in senders], 3
    )
    counts[senders] = rows
    check_range(_BOXES, "tensor", tensor, 0, len(tensors))
    check_range(_BOXES, "offsets", offsets, 0, MAX_LENGTH)
    check_range(_BOXES, "lengths", lengths, 0, MAX_LENGTH)
    boxes = BoxTable.from_columns(tensors, tensor, offsets, lengths)
    # Each peer must send as many numbers as its own boxes have, or they would be attributed to another peer.
    expected = np.diff(boxes.starts[ragged_starts(rows)])
    if (numbers != expected).any() or (as_many != expected).any():
        raise malformed(_BOXES, "boxes and their tensors have different numbers of dimensions")
    return boxes, counts


def _common_boxes(held: Int64, layouts: Sequence[MeshLayout]) -> Int64:
    counts: Int64 = np.array([0, 1, *(layout.boxes for layout in layouts)], np.int64)
    return counts[held - OWN_BOXES]


def _pack_layout(layout: MeshLayout) -> list[object]:
    cuts = [number for axis in layout.cuts for number in (len(axis), *axis)]
    return [pack_column(np.array(numbers, np.int64)) for numbers in (layout.shape, cuts, layout.blocks)]


def _layouts(fields: Fields) -> list[MeshLayout]:
    columns = [one.tolist() for one in fields.columns("layouts")]
    if len(columns) % 3:
        raise fields.malformed("a layout is incomplete")
    layouts = []
    for shape, numbers, blocks in zip(columns[::3], columns[1::3], columns[2::3], strict=True):
        cuts = []
        at = 0
        while at < len(numbers):
            stop = at + 1 + max(numbers[at], 0)
            cuts.append(tuple(numbers[at + 1 : stop]))
            at = stop
        try:
            layouts.append(MeshLayout(tuple(shape), tuple(cuts), tuple(blocks)))
        except ValueError as error:
            raise fields.malformed(str(error)) from error
    return layouts


def _values(fields: Fields) -> ValueNames:
    paths = fields.blobs("value_path")
    return ValueNames(fields.strings("value_section", len(paths)), paths, fields.flags("value_per_rank", len(paths)))
