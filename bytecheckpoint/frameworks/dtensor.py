"""DTensors in global boxes, computed here from mesh, placements and coordinate.

torch's own helpers are not asked: they return wrong offsets for uneven strided shards (pytorch#168134). What is
computed is proved against the local tensor's shape before it is used.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from copy import copy
from itertools import product
from math import prod
from typing import TYPE_CHECKING

import torch

from ..errors import UnsupportedTensorError
from ..geometry import Box
from ..metadata import BasicMeta
from ..shards import Shard, basic_meta
from .layout import ParamLayout, ParamPart
from .placements import LocalBox, boxes_of_runs, held_runs, split_factor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

__all__ = [
    "dtensor_boxes",
    "dtensor_layout",
    "dtensor_shards",
    "empty_like_dtensor",
    "is_dtensor",
    "local_tensor",
    "tensor_meta",
]


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


def dtensor_boxes(fqn: str, dtensor: DTensor) -> list[LocalBox]:
    """``local_boxes`` of a DTensor, proved against its local shape. Raises ``UnsupportedTensorError``."""
    spec, mesh = dtensor._spec, dtensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return []
    shape, mesh_shape = tuple(dtensor.shape), tuple(mesh.shape)
    runs = held_runs(
        fqn,
        shape,
        mesh_shape,
        coordinate,
        dtensor.placements,
        getattr(spec, "shard_order", None),
        getattr(spec, "use_strided_shard_as_shard_order", None) is not False
        or not any(split_factor(placement) > 1 for placement in dtensor.placements),
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
    return list(boxes_of_runs(runs)) if all(runs) else []


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
