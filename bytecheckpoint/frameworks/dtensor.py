"""DTensors in global boxes, computed here from mesh, placements and coordinate.

torch's own helpers are not asked: they return wrong offsets for uneven strided shards (pytorch#168134). What is
computed is proved against the local tensor's shape before it is used.

The rules. ``Shard(d)`` cuts like ``torch.chunk``: pieces of ``ceil(n / size)``, the last ones shorter or empty. Mesh
dims that shard one tensor dim are applied one after the other, each to what the one before left: left to right, but
for ``_StridedShard(d, split_factor=f)``, which comes *after* mesh dims to its right whose sizes multiply to ``f``.
That is what ``fully_shard`` does to a tensor-parallel parameter: tensor parallelism cuts first, FSDP cuts the piece.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from ..errors import UnsupportedTensorError
from ..geometry import Box
from ..metadata import BasicMeta
from ..shards import Shard, basic_meta
from .layout import ParamLayout, ParamPart

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

__all__ = [
    "LocalBox",
    "dtensor_boxes",
    "dtensor_layout",
    "dtensor_shards",
    "empty_like_dtensor",
    "is_dtensor",
    "local_boxes",
    "local_tensor",
    "tensor_meta",
]

_Run = tuple[int, int]  # start and length along one tensor dimension, in global coordinates


@dataclass(frozen=True)
class LocalBox:
    """A box of the global tensor, and where its first element lies in the local one."""

    box: Box
    local: tuple[int, ...]

    def local_slices(self) -> tuple[slice, ...]:
        return tuple(slice(o, o + n) for o, n in zip(self.local, self.box.lengths))


@dataclass(frozen=True)
class _Cut:
    """One mesh dimension that shards the tensor dimension at hand. ``factor`` is 1 for a plain ``Shard``."""

    mesh_dim: int
    size: int
    index: int
    factor: int


def is_dtensor(tensor: object) -> TypeIs[DTensor]:
    """Whether this is a DTensor. Imports nothing: without its module loaded there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    cls = getattr(module, "DTensor", None)
    return isinstance(cls, type) and isinstance(tensor, cls)


def local_tensor(dtensor: DTensor) -> torch.Tensor:
    """The live local tensor, detached: no copy, no collective (one already under way is waited for)."""
    local: torch.Tensor = dtensor._local_tensor
    functional = sys.modules.get("torch.distributed._functional_collectives")
    pending = getattr(functional, "AsyncCollectiveTensor", None)
    if isinstance(pending, type) and isinstance(local, pending):
        local = local.wait()  # type: ignore[attr-defined]
    return local.detach()


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

    One box, unless a strided shard interleaves (more, in local row-major order of their corners); none where the rank
    is not in the mesh or its part is empty. ``shard_order`` and ``strided_is_order`` are ``DTensorSpec``'s
    (torch 2.13). Raises ``UnsupportedTensorError`` for partial sums, unknown placements and strided shards whose
    contents cannot be proved; the message names ``name``.
    """
    if coordinate is None:
        return []
    runs = _runs(name, shape, mesh_shape, coordinate, placements, shard_order, strided_is_order)
    return list(_cross(runs)) if all(runs) else []


def dtensor_boxes(fqn: str, dtensor: DTensor) -> list[LocalBox]:
    """``local_boxes`` of a DTensor, proved against its local shape. Raises ``UnsupportedTensorError``."""
    spec, mesh = dtensor._spec, dtensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return []
    shape, mesh_shape = tuple(dtensor.shape), tuple(mesh.shape)
    runs = _runs(
        fqn,
        shape,
        mesh_shape,
        coordinate,
        dtensor.placements,
        getattr(spec, "shard_order", None),
        getattr(spec, "use_strided_shard_as_shard_order", None) is not False
        or not any(_factor(placement) > 1 for placement in dtensor.placements),
    )
    expected = tuple(sum(length for _, length in axis) for axis in runs)
    actual = tuple(dtensor._local_tensor.shape)
    # Empty parts are spelled differently by different torch code ([0], [0, n], [m, 0]); they hold the same nothing.
    if expected != actual and not (prod(expected) == 0 and prod(actual) == 0):
        raise UnsupportedTensorError(
            f"{fqn}: the DTensor of global shape {list(shape)} with placements {tuple(dtensor.placements)} on a mesh "
            f"of {list(mesh_shape)} should hold a local tensor of shape {list(expected)} at coordinate "
            f"{list(coordinate)}, but holds {list(actual)}; which elements these are cannot be known. Distribute it "
            "with distribute_tensor, parallelize_module or fully_shard, or correct the shape given to from_local"
        )
    return list(_cross(runs)) if all(runs) else []


def dtensor_shards(fqn: str, dtensor: DTensor) -> tuple[BasicMeta, list[Shard]]:
    """Dtype and global shape, and this rank's shards as views of the local memory (none where it holds nothing)."""
    meta = tensor_meta(fqn, dtensor.dtype, dtensor.shape)
    boxes = dtensor_boxes(fqn, dtensor)
    local = local_tensor(dtensor)
    if len(boxes) == 1:
        return meta, [Shard(fqn, meta, boxes[0].box, local)]
    return meta, [Shard(fqn, meta, part.box, local[part.local_slices()]) for part in boxes]


def dtensor_layout(fqn: str, dtensor: DTensor) -> ParamLayout:
    """The layout of a plain tensor that is shaped like the local tensor and cut as it is."""
    shape, local_shape = tuple(dtensor.shape), tuple(dtensor._local_tensor.shape)
    parts = [
        ParamPart(fqn, shape, box, start)
        for part in dtensor_boxes(fqn, dtensor)
        for box, start in _contiguous(part, local_shape)
    ]
    return ParamLayout(local_shape, tuple(sorted(parts, key=lambda part: part.start)), {fqn: shape})


def empty_like_dtensor(
    dtensor: DTensor, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> DTensor:
    """A DTensor of the same mesh, placements and shape, its memory not yet filled and no gradient asked for.

    Without ``device`` it lives where ``dtensor`` does, or, if that is on the meta device, where the mesh does. No
    collective runs.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import TensorMeta

    local, spec = dtensor._local_tensor, copy(dtensor._spec)
    if device is None:
        device = torch.device(dtensor.device_mesh.device_type) if local.is_meta else local.device
    dtype = dtype or dtensor.dtype
    # Not from_local: it would move a CPU-offloaded tensor to the mesh's device.
    spec.tensor_meta = TensorMeta(dtensor.shape, dtensor.stride(), dtype)
    empty = torch.empty_like(local.detach(), dtype=dtype, device=device)
    return DTensor(empty, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def tensor_meta(fqn: str, dtype: torch.dtype, shape: Sequence[int]) -> BasicMeta:
    """``basic_meta`` whose error names the tensor."""
    try:
        return basic_meta(dtype, tuple(shape))
    except UnsupportedTensorError as error:
        raise UnsupportedTensorError(f"{fqn}: {error}") from None


def _runs(
    name: str,
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Any],
    shard_order: Sequence[Any] | None,
    strided_is_order: bool,
) -> list[list[_Run]]:
    """For every tensor dimension, the non-empty ranges held, in the order in which they lie in local memory."""
    where = f"{name}: placements {tuple(placements)} on a mesh of {list(mesh_shape)}"
    cuts: list[list[_Cut]] = [[] for _ in shape]
    for mesh_dim, placement in enumerate(placements):
        dim = _tensor_dim(where, placement, len(shape))
        if dim is not None:
            factor = _factor(placement)
            cuts[dim].append(_Cut(mesh_dim, mesh_shape[mesh_dim], coordinate[mesh_dim], factor))
    ranks = {mesh_dim: position for entry in shard_order or () for position, mesh_dim in enumerate(entry.mesh_dims)}
    runs: list[list[_Run]] = []
    for size, axis in zip(shape, cuts):
        order = _execution_order(axis, ranks) if strided_is_order else None
        runs.append(_interleave(where, size, axis) if order is None else _chunk_all([(0, size)], order))
    return runs


def _tensor_dim(where: str, placement: Any, ndim: int) -> int | None:
    """The tensor dimension that a placement shards; None for replicas."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor import Shard as ShardPlacement

    if isinstance(placement, Replicate):
        return None
    if placement.is_partial():
        raise UnsupportedTensorError(
            f"{where}: a partial sum has no bytes of its own; reduce it first: "
            "tensor.redistribute(placements=[Replicate() or Shard(dim) for each mesh dimension])"
        )
    if not isinstance(placement, ShardPlacement) and not hasattr(placement, "split_factor"):
        raise UnsupportedTensorError(
            f"{where}: placement {placement!r} is not known; redistribute the tensor to Shard or Replicate first"
        )
    dim = int(placement.dim)
    if not -ndim <= dim < ndim:
        raise UnsupportedTensorError(f"{where}: {placement!r} shards a dimension that a {ndim}-d tensor has not")
    return dim % ndim


def _factor(placement: Any) -> int:
    return int(getattr(placement, "split_factor", 1))


def _execution_order(cuts: list[_Cut], ranks: dict[int, int]) -> list[_Cut] | None:
    """The cuts in the order in which they were made; None where a split factor fits no such order."""
    if all(cut.factor == 1 for cut in cuts):
        return sorted(cuts, key=lambda cut: ranks.get(cut.mesh_dim, cut.mesh_dim))
    order: list[_Cut] = []
    for cut in reversed(cuts):
        before = [prod(earlier.size for earlier in order[:i]) for i in range(len(order) + 1)]
        if cut.factor not in before:
            return None
        order.insert(before.index(cut.factor), cut)
    return order


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


def _chunk_all(runs: list[_Run], order: list[_Cut]) -> list[_Run]:
    for cut in order:
        runs = _chunk(runs, cut.size, cut.index)
    return [(start, length) for start, length in runs if length]


def _interleave(where: str, size: int, cuts: list[_Cut]) -> list[_Run]:
    """Left to right, a strided shard taking its piece of each of ``factor`` parts.

    torch releases differ in how they do this to parts of unequal length, so only equal ones are taken.
    """
    runs: list[_Run] = [(0, size)]
    for cut in cuts:
        held = sum(length for _, length in runs)
        if cut.factor > 1 and held % (cut.factor * cut.size):
            raise UnsupportedTensorError(
                f"{where}: split factor {cut.factor} stands for no order of the cuts, and {held} elements do not "
                f"divide by {cut.factor} x {cut.size}, so what each rank holds cannot be proved; "
                "redistribute the tensor to Shard or Replicate first"
            )
        parts = [_chunk(runs, cut.factor, part) for part in range(cut.factor)]
        runs = [run for part in parts for run in _chunk(part, cut.size, cut.index)]
    return _joined(run for run in runs if run[1])


def _joined(runs: Iterator[_Run]) -> list[_Run]:
    joined: list[_Run] = []
    for start, length in runs:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((start, length))
    return joined


def _cross(runs: list[list[_Run]]) -> Iterator[LocalBox]:
    placed: list[list[tuple[int, int, int]]] = []
    for axis in runs:
        position = 0
        placed.append([])
        for start, length in axis:
            placed[-1].append((start, length, position))
            position += length
    for choice in product(*placed):
        yield LocalBox(Box(tuple(c[0] for c in choice), tuple(c[1] for c in choice)), tuple(c[2] for c in choice))


def _contiguous(part: LocalBox, local_shape: tuple[int, ...]) -> Iterator[tuple[Box, int]]:
    """Cut a box until each piece is one range of the local row-major memory; with the range's first element."""
    lengths = part.box.lengths
    partial = [d for d, (have, all_of) in enumerate(zip(lengths, local_shape)) if have != all_of]
    split = partial[-1] if partial else 0
    strides = [prod(local_shape[d + 1 :]) for d in range(len(local_shape))]
    for index in product(*(range(n) for n in lengths[:split])):
        inner = (*index, *(0 for _ in lengths[split:]))
        box = Box(tuple(o + i for o, i in zip(part.box.offsets, inner)), (*(1 for _ in index), *lengths[split:]))
        yield box, sum((o + i) * s for o, i, s in zip(part.local, inner, strides))
