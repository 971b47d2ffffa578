"""How a mesh of ranks splits a tensor. With the coordinates of a rank, it determines the rank's box."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from ..errors import PlanError


@dataclass(frozen=True)
class MeshLayout:
    """The ``shape`` of a mesh, and for every dimension of a tensor the mesh dimensions that split it.

    Each mesh dimension splits like ``torch.chunk``, in the order given. Mesh dimensions that split nothing hold
    replicas. ``blocks`` is the number of equal blocks in each dimension of a tensor that consists of several parts,
    each of which the mesh splits: tensor parallelism splits both halves of a gated linear unit. Empty for one block.

    Raises ``PlanError`` if ``cuts`` does not name mesh dimensions, each at most once.
    """

    shape: tuple[int, ...]
    cuts: tuple[tuple[int, ...], ...]
    blocks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        cutting = [dim for axis in self.cuts for dim in axis]
        if len(set(cutting)) != len(cutting) or not all(0 <= dim < len(self.shape) for dim in cutting):
            raise PlanError(f"{self.cuts} do not name dimensions of a mesh of {self.shape}, each at most once")
        if min(self.shape, default=1) < 1:
            raise PlanError(f"a mesh cannot have the shape {self.shape}")
        if self.blocks and (len(self.blocks) != len(self.cuts) or min(self.blocks) < 1):
            raise PlanError(f"blocks {self.blocks} of a tensor of {len(self.cuts)} dimensions that a mesh splits")

    @property
    def boxes(self) -> int:
        """The number of boxes that a rank holds: one in each block."""
        return prod(self.blocks)


class MeshPlace(NamedTuple):
    """A tensor's layout and this rank's coordinate in the mesh. ``mesh`` distinguishes meshes of the same shape."""

    layout: MeshLayout
    coordinate: tuple[int, ...]
    mesh: Hashable
