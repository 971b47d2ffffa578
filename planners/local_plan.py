"""What one rank holds, and how it is sent to the rank that plans.

Most of it is equal on many ranks, or can be computed for other ranks: names, shapes, replicas, parts of a mesh. That is
a ``PlanTable``, of which ranks compare only a digest. The rest are boxes that only their holder can list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from functools import cached_property
from itertools import compress

import numpy as np

from ..tensors.mesh_layout import MeshLayout
from ..tensors.tables import BoxTable, Int64, TensorTable
from .wire import Bool, pack, unpack

OWN_BOXES, WHOLE = -1, 0
"""How ranks with the same ``PlanTable`` hold a tensor that no mesh splits: each lists its boxes, or holds it all."""

PackedBoxes = Sequence[bytes]
"""The columns of a ``BoxTable``: tensors, offsets and lengths."""

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
        layouts = [astuple(layout) for layout in self.layouts]
        return pack(
            [
                tensor_columns(self.tensors),
                [self.own, self.pinned, self.compared, self.must_match, self.held - OWN_BOXES],
                layouts,
                [self.values.sections, self.values.paths, self.values.per_rank],
                self.aliases,
                self.sections,
            ]
        )

    def common_boxes(self) -> Int64:
        """Return how many boxes of each tensor a rank holds that other ranks can compute.

        Returns:
            The numbers, by tensor.
        """
        counts: Int64 = np.array([0, 1, *(layout.boxes for layout in self.layouts)], np.int64)
        return counts[self.held - OWN_BOXES]

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
        """
        tensors, flags, layouts, values, aliases, sections = unpack(data)
        own, pinned, compared, must_match, held = flags
        return cls(
            TensorTable(*tensors),
            own,
            pinned,
            compared,
            must_match,
            OWN_BOXES + held,
            [MeshLayout(tuple(shape), tuple(map(tuple, cuts)), tuple(blocks)) for shape, cuts, blocks in layouts],
            ValueNames(*values),
            [(alias, target) for alias, target in aliases],
            [(name, kind) for name, kind in sections],
        )


@dataclass(eq=False)
class LocalPlan:
    """What one rank holds.

    The first shards are those of tensors that are not held as ``OWN_BOXES``, in the order of tensors: the whole tensor,
    or the boxes of its layout.

    Attributes:
        table: What other ranks may have in common with it.
        shards: The boxes in this rank's memory.
        coordinates: This rank's coordinates in the mesh of each layout.
        order: By shard, its position among the shards as the adapters list them. None if both orders are the same.
    """

    table: PlanTable
    shards: BoxTable
    coordinates: list[tuple[int, ...]] = field(default_factory=list)
    order: list[int] | None = None

    @cached_property
    def packed_table(self) -> bytes:
        """The table, packed."""
        return self.table.to_bytes()

    def flat_coordinates(self) -> Int64:
        """Return ``coordinates`` as one array.

        Returns:
            The coordinates of all layouts, one after the other.
        """
        return np.array([number for coordinate in self.coordinates for number in coordinate], np.int64)

    def own_boxes(self) -> BoxTable:
        """Return the shards that other ranks cannot compute.

        Returns:
            The boxes, in the order of ``shards``.
        """
        common = int(self.table.common_boxes().sum())
        if common == 0:
            return self.shards
        first = int(self.shards.starts[common])
        return BoxTable(
            self.shards.tensor[common:],
            self.shards.offsets[first:],
            self.shards.lengths[first:],
            self.shards.starts[common:] - first,
        )


def tensor_columns(tensors: TensorTable) -> list[object]:
    """Return the arguments of ``TensorTable``, to send them."""
    return [tensors.names, tensors.sections, tensors.section, tensors.dtype, tensors.ndim, tensors.shape]


def pack_boxes(boxes: BoxTable, tensors: TensorTable) -> PackedBoxes:
    """Pack boxes for ``unpack_boxes``.

    Args:
        boxes: The boxes.
        tensors: The tensors to which they refer.

    Returns:
        Their tensors, offsets and lengths.
    """
    word = _word(tensors)
    return [column.astype(word).tobytes() for column in (boxes.tensor, boxes.offsets, boxes.lengths)]


def unpack_boxes(messages: Sequence[PackedBoxes], tensors: TensorTable) -> tuple[BoxTable, Int64]:
    """Unpack the own boxes of several peers.

    Args:
        messages: What ``pack_boxes`` has returned on each peer.
        tensors: The tensors to which the boxes refer.

    Returns:
        The boxes of all peers one after the other, and the number of boxes of each peer.
    """
    word = np.dtype(_word(tensors))
    columns = [np.frombuffer(b"".join(part), word).astype(np.int64) for part in zip(*messages, strict=True)]
    counts = np.array([len(tensor) // word.itemsize for tensor, _, _ in messages], np.int64)
    return BoxTable.from_columns(tensors, *columns), counts


def _word(tensors: TensorTable) -> str:
    """The type of numbers that hold every row, offset and length of boxes of these tensors."""
    return "<u4" if max(len(tensors), int(tensors.shape.max(initial=0))) < 1 << 32 else "<i8"
