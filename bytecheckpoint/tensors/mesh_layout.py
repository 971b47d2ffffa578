"""How a mesh of ranks splits a tensor. With the coordinates of a rank, it determines the rank's box."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import PlanError

__all__ = ["MeshLayout", "MeshPlace"]


@dataclass(frozen=True)
class MeshLayout:
    """The ``shape`` of a mesh, and for every dimension of a tensor the mesh dimensions that split it.

    Each mesh dimension splits like ``torch.chunk``, in the order given. Mesh dimensions that split nothing hold
    replicas. Raises ``PlanError`` if ``cuts`` does not name mesh dimensions, each at most once.
    """

    shape: tuple[int, ...]
    cuts: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        cutting = [dim for axis in self.cuts for dim in axis]
        if len(set(cutting)) != len(cutting) or not all(0 <= dim < len(self.shape) for dim in cutting):
            raise PlanError(f"{self.cuts} do not name dimensions of a mesh of {self.shape}, each at most once")
        if min(self.shape, default=1) < 1:
            raise PlanError(f"a mesh cannot have the shape {self.shape}")


class MeshPlace(NamedTuple):
    """A tensor's layout and this rank's coordinate in the mesh. ``mesh`` distinguishes meshes of the same shape."""

    layout: MeshLayout
    coordinate: tuple[int, ...]
    mesh: Hashable
