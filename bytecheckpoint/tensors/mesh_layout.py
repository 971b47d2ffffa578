"""How a mesh of ranks cuts a tensor: with it and a place in the mesh, anybody can tell what the rank there holds."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["MeshLayout", "MeshPlace"]


@dataclass(frozen=True)
class MeshLayout:
    """The ``shape`` of a mesh, and for every dimension of a tensor the mesh dimensions that cut it, in this order, each
    like ``torch.chunk``. Mesh dimensions that cut nothing hold replicas. Raises ``ValueError`` for what is no such
    layout."""

    shape: tuple[int, ...]
    cuts: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        cutting = [dim for axis in self.cuts for dim in axis]
        if len(set(cutting)) != len(cutting) or not all(0 <= dim < len(self.shape) for dim in cutting):
            raise ValueError(f"{self.cuts} do not name dimensions of a mesh of {self.shape}, each at most once")
        if min(self.shape, default=1) < 1:
            raise ValueError(f"no mesh is of shape {self.shape}")


class MeshPlace(NamedTuple):
    """A tensor's layout, and where this rank stands in the mesh. ``mesh`` tells meshes of one shape apart."""

    layout: MeshLayout
    coordinate: tuple[int, ...]
    mesh: Hashable
