"""Compute the boxes that a rank holds of a tensor sharded over a mesh, from sizes alone.

``Shard(d)`` splits like ``torch.chunk``: into pieces of ``ceil(n / size)``, the last ones shorter or empty. Mesh
dimensions that shard the same tensor dimension apply one after the other, each to the piece of the previous one: from
left to right, except that ``_StridedShard(d, split_factor=f)`` applies *after* the mesh dimensions to its right whose
sizes multiply to ``f``. ``fully_shard`` does this to a tensor-parallel parameter: tensor parallelism splits first, and
FSDP splits its piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from ..errors import UnsupportedTensorError
from ..tensors.geometry import Box

__all__ = ["LocalBox", "Run", "boxes_of_runs", "cut_order", "held_runs", "local_boxes", "split_factor"]

Run = tuple[int, int]
"""Start and length along one tensor dimension, in global coordinates."""


@dataclass(frozen=True)
class LocalBox:
    """A box of the global tensor, and the position of its first element in the local tensor."""

    box: Box
    local: tuple[int, ...]

    def local_slices(self) -> tuple[slice, ...]:
        return tuple(slice(o, o + n) for o, n in zip(self.local, self.box.lengths))


@dataclass(frozen=True)
class _Cut:
    """One mesh dimension that shards a given tensor dimension. ``factor`` is 1 for a plain ``Shard``."""

    mesh_dim: int
    size: int
    index: int
    factor: int


def local_boxes(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int] | None,
    placements: Sequence[Any],
    *,
    name: str = "tensor",
    shard_order: Sequence[Any] | None = None,
    strided_is_order: bool = True,
) -> list[LocalBox]:
    """The boxes that the rank at ``coordinate`` of the mesh holds of a tensor of this global shape.

    There is one box, unless a strided shard interleaves (then several, in local row-major order of their corners), and
    none if the rank is not in the mesh or its part is empty. ``shard_order`` and ``strided_is_order`` are those of
    ``DTensorSpec`` (torch 2.13). Raises ``UnsupportedTensorError`` for partial sums, unknown placements, and strided
    shards whose contents are ambiguous.
    """
    if coordinate is None:
        return []
    runs = held_runs(name, shape, mesh_shape, coordinate, placements, shard_order, strided_is_order)
    return list(boxes_of_runs(runs)) if all(runs) else []


def held_runs(
    name: str,
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Any],
    shard_order: Sequence[Any] | None,
    strided_is_order: bool,
) -> list[list[Run]]:
    """For every tensor dimension, the non-empty ranges that the rank holds, in local memory order."""
    where = f"{name}: placements {tuple(placements)} on a mesh of {list(mesh_shape)}"
    cuts: list[list[_Cut]] = [[] for _ in shape]
    for mesh_dim, placement in enumerate(placements):
        dim = _tensor_dim(where, placement, len(shape))
        if dim is not None:
            factor = split_factor(placement)
            cuts[dim].append(_Cut(mesh_dim, mesh_shape[mesh_dim], coordinate[mesh_dim], factor))
    ranks = {mesh_dim: position for entry in shard_order or () for position, mesh_dim in enumerate(entry.mesh_dims)}
    runs: list[list[Run]] = []
    for size, axis in zip(shape, cuts):
        order = _execution_order(axis, ranks) if strided_is_order else None
        runs.append(_interleave(where, size, axis) if order is None else _chunk_all([(0, size)], order))
    return runs


def cut_order(
    ndim: int, mesh_shape: Sequence[int], placements: Sequence[Any], shard_order: Sequence[Any] | None
) -> tuple[tuple[int, ...], ...] | None:
    """For every tensor dimension, the mesh dimensions that shard it, in the order in which they apply.

    None if no such order is known. Assumes ``strided_is_order``.
    """
    cuts: list[list[_Cut]] = [[] for _ in range(ndim)]
    for mesh_dim, placement in enumerate(placements):
        dim = _tensor_dim("tensor", placement, ndim)
        if dim is not None:
            cuts[dim].append(_Cut(mesh_dim, mesh_shape[mesh_dim], 0, split_factor(placement)))
    ranks = {mesh_dim: position for entry in shard_order or () for position, mesh_dim in enumerate(entry.mesh_dims)}
    found: list[tuple[int, ...]] = []
    for axis in cuts:
        order = _execution_order(axis, ranks)
        if order is None:
            return None
        found.append(tuple(cut.mesh_dim for cut in order))
    return tuple(found)


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


def split_factor(placement: Any) -> int:
    """The split factor of a strided shard; 1 for any other placement."""
    return int(getattr(placement, "split_factor", 1))


def _execution_order(cuts: list[_Cut], ranks: dict[int, int]) -> list[_Cut] | None:
    """The cuts in the order in which they apply; None if a split factor fits no order."""
    if all(cut.factor == 1 for cut in cuts):
        return sorted(cuts, key=lambda cut: ranks.get(cut.mesh_dim, cut.mesh_dim))
    order: list[_Cut] = []
    for cut in reversed(cuts):
        before = [prod(earlier.size for earlier in order[:i]) for i in range(len(order) + 1)]
        if cut.factor not in before:
            return None
        order.insert(before.index(cut.factor), cut)
    return order


def _chunk(runs: list[Run], pieces: int, index: int) -> list[Run]:
    """Piece ``index`` of ``torch.chunk`` of the elements of ``runs``."""
    total = sum(length for _, length in runs)
    each = -(-total // pieces)
    first, stop = min(index * each, total), min((index + 1) * each, total)
    taken: list[Run] = []
    position = 0
    for start, length in runs:
        low, high = max(first - position, 0), min(stop - position, length)
        if low < high:
            taken.append((start + low, high - low))
        position += length
    return taken


def _chunk_all(runs: list[Run], order: list[_Cut]) -> list[Run]:
    for cut in order:
        runs = _chunk(runs, cut.size, cut.index)
    return [(start, length) for start, length in runs if length]


def _interleave(where: str, size: int, cuts: list[_Cut]) -> list[Run]:
    """Apply cuts from left to right, where a strided shard gets a piece of each of ``factor`` parts.

    Releases of torch split parts of unequal length differently, so only equal parts are accepted.
    """
    runs: list[Run] = [(0, size)]
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
    return _joined(run for run in runs if run[1])


def _joined(runs: Iterator[Run]) -> list[Run]:
    joined: list[Run] = []
    for start, length in runs:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((start, length))
    return joined


def boxes_of_runs(runs: list[list[Run]]) -> Iterator[LocalBox]:
    """The boxes at the crossings of all dimensions' ranges, in local row-major order of their corners."""
    placed: list[list[tuple[int, int, int]]] = []
    for axis in runs:
        position = 0
        placed.append([])
        for start, length in axis:
            placed[-1].append((start, length, position))
            position += length
    for choice in product(*placed):
        yield LocalBox(Box(tuple(c[0] for c in choice), tuple(c[1] for c in choice)), tuple(c[2] for c in choice))
