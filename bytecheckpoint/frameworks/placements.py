"""Compute the boxes that a rank holds of a tensor sharded over a mesh, from sizes alone.

``Shard(d)`` splits like ``torch.chunk``: into pieces of ``ceil(n / size)``, the last ones shorter or empty. Mesh
dimensions that shard the same tensor dimension apply one after the other, each to the piece of the previous one: from
left to right, except that ``_StridedShard(d, split_factor=f)`` applies *after* the mesh dimensions to its right whose
sizes multiply to ``f``. ``fully_shard`` does this to a tensor-parallel parameter: tensor parallelism splits first, and
FSDP splits its piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from operator import mul
from typing import Any, NamedTuple

from ..errors import UnsupportedTensorError
from ..tensors.geometry import Box

_Run = tuple[int, int]
"""Start and length along one tensor dimension, in global coordinates."""


class LocalBox(NamedTuple):
    """A box of the global tensor, and the position of its first element in the local tensor."""

    box: Box
    local: tuple[int, ...]

    def local_slices(self) -> tuple[slice, ...]:
        return Box.unchecked(self.local, self.box.lengths).slices()


@dataclass(frozen=True)
class _Cut:
    """One mesh dimension that shards a given tensor dimension. ``factor`` is 1 for a plain ``Shard``."""

    mesh_dim: int
    size: int
    index: int
    factor: int


class MeshSharding(NamedTuple):
    """How a mesh shards a tensor of the global ``shape``, and this rank's ``coordinate`` in the mesh.

    ``shard_order`` and ``strided_is_order`` are those of ``DTensorSpec`` (torch 2.13). The methods raise
    ``UnsupportedTensorError`` for partial sums, unknown placements, and strided shards whose contents are ambiguous.
    """

    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    coordinate: tuple[int, ...]
    placements: tuple[Any, ...]
    shard_order: tuple[Any, ...] | None = None
    strided_is_order: bool = True

    def held(self, name: str = "tensor") -> tuple[tuple[int, ...], tuple[LocalBox, ...]]:
        """The shape of this rank's local tensor, and the boxes in it. ``name`` is for errors.

        There is one box, unless a strided shard interleaves (then several, in local row-major order of their corners),
        and none if the rank's part is empty.
        """
        where = self._describe(name)
        local_shape = []
        placed: list[list[tuple[int, int, int]]] = []
        for size, cuts in zip(self.shape, self._cuts(where), strict=True):
            ordered = self._in_order(cuts) if self.strided_is_order else None
            runs = _apply(where, size, cuts if ordered is None else ordered)
            *begins, total = accumulate((length for _, length in runs), initial=0)
            local_shape.append(total)
            placed.append([(*run, begin) for run, begin in zip(runs, begins, strict=True)])
        boxes = (
            LocalBox(Box(tuple(c[0] for c in choice), tuple(c[1] for c in choice)), tuple(c[2] for c in choice))
            for choice in product(*placed)
        )
        return tuple(local_shape), tuple(boxes)

    def cut_order(self) -> tuple[tuple[int, ...], ...] | None:
        """For every tensor dimension, the mesh dimensions that shard it, in the order in which they apply.

        None if no such order is known. Assumes ``strided_is_order``.
        """
        found: list[tuple[int, ...]] = []
        for cuts in self._cuts(self._describe("tensor")):
            ordered = self._in_order(cuts)
            if ordered is None:
                return None
            found.append(tuple(cut.mesh_dim for cut in ordered))
        return tuple(found)

    def _describe(self, name: str) -> str:
        return f"{name}: placements {self.placements} on a mesh of {list(self.mesh_shape)}"

    def _cuts(self, where: str) -> list[list[_Cut]]:
        """The cuts of every tensor dimension."""
        cuts: list[list[_Cut]] = [[] for _ in self.shape]
        for mesh_dim, placement in enumerate(self.placements):
            dim = _tensor_dim(where, placement, len(self.shape))
            if dim is not None:
                factor = int(getattr(placement, "split_factor", 1))  # of a strided shard
                cuts[dim].append(_Cut(mesh_dim, self.mesh_shape[mesh_dim], self.coordinate[mesh_dim], factor))
        return cuts

    def _in_order(self, cuts: Sequence[_Cut]) -> list[_Cut] | None:
        """The cuts as plain shards in the order in which they apply; None if a split factor fits no order."""
        if all(cut.factor == 1 for cut in cuts):
            order = self.shard_order or ()
            ranks = {mesh_dim: position for entry in order for position, mesh_dim in enumerate(entry.mesh_dims)}
            return sorted(cuts, key=lambda cut: ranks.get(cut.mesh_dim, cut.mesh_dim))
        ordered: list[_Cut] = []
        for cut in reversed(cuts):
            before = list(accumulate((earlier.size for earlier in ordered), mul, initial=1))
            if cut.factor not in before:
                return None
            ordered.insert(before.index(cut.factor), replace(cut, factor=1))
        return ordered


def _tensor_dim(where: str, placement: Any, ndim: int) -> int | None:
    """The tensor dimension that a placement shards; None for a replica."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor import Shard as ShardPlacement

    if isinstance(placement, Replicate):
        return None
    if placement.is_partial():
        raise UnsupportedTensorError(
            f"{where}: a partial sum cannot be stored; reduce it first: "
            "tensor.redistribute(placements=[Replicate() or Shard(dim) for each mesh dimension])"
        )
    if not isinstance(placement, ShardPlacement) and not hasattr(placement, "split_factor"):
        raise UnsupportedTensorError(
            f"{where}: placement {placement!r} is not supported; redistribute the tensor to Shard or Replicate first"
        )
    dim = int(placement.dim)
    if not -ndim <= dim < ndim:
        raise UnsupportedTensorError(f"{where}: {placement!r} shards a dimension that a {ndim}-d tensor does not have")
    return dim % ndim


def _apply(where: str, size: int, cuts: Sequence[_Cut]) -> list[_Run]:
    """The non-empty ranges of ``size`` elements that remain after these cuts, in local memory order.

    The cuts apply from left to right, where a strided shard gets a piece of each of ``factor`` parts. Releases of torch
    split parts of unequal length differently, so only equal parts are accepted.
    """
    runs = [(0, size)] if size else []
    for cut in cuts:
        held = sum(length for _, length in runs)
        if cut.factor > 1 and held % (cut.factor * cut.size):
            raise UnsupportedTensorError(
                f"{where}: split factor {cut.factor} matches no order of the mesh dimensions, and {held} elements are "
                f"not divisible by {cut.factor} x {cut.size}, so what each rank holds is ambiguous; "
                "redistribute the tensor to Shard or Replicate first"
            )
        parts = [_chunk(runs, cut.factor, part) for part in range(cut.factor)]
        runs = [run for part in parts for run in _chunk(part, cut.size, cut.index)]
    joined: list[_Run] = []
    for start, length in runs:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((start, length))
    return joined


def _chunk(runs: list[_Run], pieces: int, index: int) -> list[_Run]:
    """Piece ``index`` of ``torch.chunk`` of the elements of ``runs``."""
    total = sum(length for _, length in runs)
    each = -(-total // pieces)
    first, stop = min(index * each, total), min((index + 1) * each, total)
    taken: list[_Run] = []
    position = 0
    for start, length in runs:
        low, high = max(first - position, 0), min(stop - position, length)
        if low < high:
            taken.append((start + low, high - low))
        position += length
    return taken
