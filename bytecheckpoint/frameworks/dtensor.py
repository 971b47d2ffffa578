"""Describe DTensors in global boxes, computed from mesh, placements and coordinate.

torch's helpers return wrong offsets for uneven strided shards (pytorch#168134), so this module does not use them. It
checks the computed boxes against the local tensor's shape.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from copy import copy
from functools import lru_cache, partial
from math import prod
from operator import mul
from typing import TYPE_CHECKING, NamedTuple
from weakref import ReferenceType, ref

import torch

from ..errors import UnsupportedTensorError
from ..tensors.geometry import Box, row_major_strides
from ..tensors.mesh_layout import MeshLayout, MeshPlace
from ..tensors.metadata import BasicMeta
from ..tensors.shards import MeshShard, Shard, whole_tensor
from .layout import ParamLayout, ParamPart
from .placements import LocalBox, MeshSharding

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from typing_extensions import TypeIs


def loaded_class(module: str, name: str) -> type | tuple[()]:
    """A class for ``isinstance``; if its module is not loaded, no object is an instance. Imports nothing."""
    cls = getattr(sys.modules.get(module), name, None)
    return cls if isinstance(cls, type) else ()


def is_dtensor(tensor: object) -> TypeIs[DTensor]:
    """Whether this is a DTensor. Imports nothing."""
    kind = type(tensor)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return False
    cls = loaded_class("torch.distributed.tensor", "DTensor")
    return kind is cls or isinstance(tensor, cls)


def local_tensor(dtensor: DTensor) -> torch.Tensor:
    """The local tensor, detached. Makes no copy and starts no collective, but waits for one in progress."""
    return attached_local_tensor(dtensor).detach()


def attached_local_tensor(dtensor: DTensor) -> torch.Tensor:
    """``local_tensor``, but not detached: detaching costs as much as all else that is done for a small tensor."""
    local: torch.Tensor = dtensor._local_tensor
    if type(local) is not torch.Tensor and isinstance(
        local, loaded_class("torch.distributed._functional_collectives", "AsyncCollectiveTensor")
    ):
        waited: torch.Tensor = local.wait()  # type: ignore[attr-defined]
        return waited
    return local


class _Held(NamedTuple):
    """What this rank holds of the tensors with a spec, which ``refers_to`` if it still exists."""

    refers_to: ReferenceType[DTensorSpec]
    local_shape: tuple[int, ...]
    boxes: tuple[LocalBox, ...]


# By id of the spec. torch replaces a DTensor's spec and never changes it; a parameter keeps its own for all saves.
_held_by_spec: dict[int, _Held] = {}


def dtensor_boxes(fqn: str, dtensor: DTensor) -> Sequence[LocalBox]:
    """The boxes of a DTensor, checked against its local shape. Raises ``UnsupportedTensorError``."""
    spec = dtensor._spec
    held = _held_by_spec.get(id(spec))
    if held is None or held.refers_to() is not spec:
        sharding = sharding_of(spec)
        if sharding is None:
            return ()
        key = id(spec)
        refers_to = ref(spec, lambda _: _held_by_spec.pop(key, None))
        held = _held_by_spec[key] = _Held(refers_to, *_held(fqn, sharding))
    expected, actual = held.local_shape, dtensor._local_tensor.shape
    # Empty parts are spelled differently by different torch code ([0], [0, n], [m, 0]); they hold the same nothing.
    if expected != actual and not (prod(expected) == 0 and prod(actual) == 0):
        raise UnsupportedTensorError(
            f"{fqn}: the DTensor of global shape {list(dtensor.shape)} with placements {dtensor.placements} on a "
            f"mesh of {list(spec.mesh.shape)} should hold a local tensor of shape {list(expected)} at coordinate "
            f"{spec.mesh.get_coordinate()}, but holds {list(actual)}; which elements these are cannot be known. "
            "Distribute it with distribute_tensor, parallelize_module or fully_shard, or correct the shape given to "
            "from_local"
        )
    return held.boxes


def _held(fqn: str, sharding: MeshSharding) -> tuple[tuple[int, ...], tuple[LocalBox, ...]]:
    try:
        return _remembered(sharding)
    except (UnsupportedTensorError, TypeError):  # again, for the tensor's name; or for what cannot be remembered
        return sharding.held(fqn)


_remembered = lru_cache(maxsize=1 << 14)(MeshSharding.held)  # layers share their sharding, so does optimizer state


def sharding_of(spec: DTensorSpec) -> MeshSharding | None:
    """How the mesh shards a DTensor; None if this rank is not in the mesh."""
    coordinate = spec.mesh.get_coordinate()
    if coordinate is None:
        return None
    strided_is_order = getattr(spec, "use_strided_shard_as_shard_order", None) is not False
    return MeshSharding(
        tuple(spec.shape),
        tuple(spec.mesh.shape),
        tuple(coordinate),
        spec.placements,
        getattr(spec, "shard_order", None),
        strided_is_order or all(getattr(placement, "split_factor", 1) == 1 for placement in spec.placements),
    )


def dtensor_shards(fqn: str, dtensor: DTensor, local: torch.Tensor) -> tuple[dict[str, BasicMeta], list[Shard]]:
    """Dtype and global shape of a DTensor, and this rank's shards as views of ``local``, its dense local tensor."""
    meta, _ = named_whole(fqn, dtensor.dtype, dtensor.shape)
    boxes = dtensor_boxes(fqn, dtensor)
    if len(boxes) == 1:
        shard = MeshShard.unchecked(fqn, meta, boxes[0].box, local)
        shard.find_place = partial(_place, dtensor)
        return {fqn: meta}, [shard]
    return {fqn: meta}, [Shard(fqn, meta, part.box, local[part.local_slices()]) for part in boxes]


@lru_cache(maxsize=1 << 10)
def replica_ranks(place: MeshPlace) -> tuple[int, ...]:
    """The ranks of the default process group that hold the same box; none if the mesh is not a ``DeviceMesh``."""
    ranks = getattr(place.mesh, "mesh", None)
    if not isinstance(ranks, torch.Tensor):
        return ()
    cutting = {dim for axis in place.layout.cuts for dim in axis}
    index = tuple(at if dim in cutting else slice(None) for dim, at in enumerate(place.coordinate))
    return tuple(ranks[index].flatten().tolist())


def _place(dtensor: DTensor) -> MeshPlace | None:
    """How the mesh shards a DTensor, and this rank's coordinate; None if no ``MeshLayout`` describes it."""
    sharding = sharding_of(dtensor._spec)
    cuts = sharding.cut_order() if sharding is not None and sharding.strided_is_order else None
    if sharding is None or cuts is None:
        return None
    return MeshPlace(MeshLayout(sharding.mesh_shape, cuts), sharding.coordinate, dtensor.device_mesh)


def dtensor_layout(fqn: str, dtensor: DTensor) -> ParamLayout:
    """The layout of a plain tensor with the local tensor's shape and sharding."""
    shape, local_shape = tuple(dtensor.shape), tuple(dtensor._local_tensor.shape)
    boxes = dtensor_boxes(fqn, dtensor)
    if len(boxes) == 1 and boxes[0].box.lengths == local_shape:
        return ParamLayout(local_shape, (ParamPart(fqn, shape, boxes[0].box, 0),), {fqn: shape})
    strides = row_major_strides(local_shape)
    parts = [ParamPart(fqn, shape, box, sum(map(mul, local, strides)), strides) for box, local in boxes]
    return ParamLayout(local_shape, tuple(parts), {fqn: shape})


def empty_like_dtensor(
    dtensor: DTensor, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> DTensor:
    """An uninitialized DTensor of the same mesh, placements and shape, which requires no gradient.

    The default ``device`` is that of ``dtensor``, or of its mesh if ``dtensor`` is on the meta device. Runs no
    collective.
    """
    local = dtensor._local_tensor
    if device is None:
        device = torch.device(dtensor.device_mesh.device_type) if local.is_meta else local.device
    return dtensor_around(dtensor, torch.empty_like(local.detach(), dtype=dtype or dtensor.dtype, device=device))


def dtensor_around(like: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor with this local tensor and the mesh, placements and shape of ``like``, which requires no gradient."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import TensorMeta

    # Not from_local: it would move a CPU-offloaded tensor to the mesh's device.
    spec = copy(like._spec)
    spec.tensor_meta = TensorMeta(like.shape, like.stride(), local.dtype)
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def with_memory(meta: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    """An uninitialised tensor like a meta tensor. The default ``device`` is that of a DTensor's mesh, or the CPU."""
    if is_dtensor(meta):
        return empty_like_dtensor(meta, device=device)
    return torch.empty_like(meta.detach(), device=device or "cpu")


def named_whole(fqn: str, dtype: torch.dtype, shape: torch.Size) -> tuple[BasicMeta, Box]:
    """``whole_tensor`` whose error names the tensor."""
    try:
        return whole_tensor(dtype, shape)
    except UnsupportedTensorError as error:
        raise UnsupportedTensorError(f"{fqn}: {error}") from None
