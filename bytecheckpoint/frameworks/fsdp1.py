"""The adapter for FSDP-1 (``FullyShardedDataParallel``): saves and fills flat shards in place, without all-gather.

Names are those of the unwrapped model. So a checkpoint loads under any wrap policy and world size, with FSDP-2 or in a
plain module, and theirs load here.

A flat parameter concatenates several parameters, with padding between and after them, and splits them into equal 1-D
pieces, one for each rank. Each piece is decomposed into boxes in place; nothing is gathered. Only this module reads
private attributes of FSDP-1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from ..errors import StateError, UnsupportedTensorError
from ..tensors.geometry import Box, row_major_strides
from .dtensor import is_dtensor, loaded_class, sharding_of
from .layout import ParamLayout, ParamPart
from .module import ModuleAdapter, Packed
from .module_tree import Slot, has_fsdp1, modules_of, named_submodules
from .tensors import dense_view


class FSDP1Adapter(ModuleAdapter):
    """Modules that contain ``FullyShardedDataParallel``, with every sharding strategy and ``use_orig_params`` setting.

    Parameters that FSDP manages come from its flat parameters, in full precision. Everything else (buffers, ignored
    modules, extra state) is handled as in a plain module. Raises ``StateError`` while the flat parameters are not
    sharded.
    """

    name: ClassVar[str] = "fsdp1"
    priority: ClassVar[int] = 10

    def recognizes(self, obj: object) -> bool:
        return any(map(has_fsdp1, modules_of(obj)))

    def slots(self, modules: Sequence[nn.Module]) -> list[Slot]:
        flats = flat_params(modules)
        infos = [info for flat in flats for info in (*flat.flat._param_infos, *flat.flat._shared_param_infos)]
        managed = {(id(info.module), info.param_name) for info in infos}
        own = {id(flat.flat) for flat in flats}
        return [
            slot
            for slot in super().slots(modules)
            if id(slot.tensor) not in own and not (slot.is_parameter and (id(slot.owner), slot.attribute) in managed)
        ]

    def parameter_layouts(self, obj: Any) -> dict[int, ParamLayout]:
        layouts = super().parameter_layouts(obj)
        for flat in flat_params(modules_of(obj)):
            layouts.update(flat.parameter_layouts())
        return layouts

    def packed(self, modules: Sequence[nn.Module]) -> Sequence[Packed]:
        return flat_params(modules)


class OriginalParam(NamedTuple):
    """One parameter inside a flat one. It is stored under the first of its names.

    ``whole`` is the memory that FSDP flattened: the parameter, or a tensor-parallel rank's part of it. ``held`` is what
    this rank's shard has of it, from the element ``start`` of the shard on.
    """

    fqns: tuple[str, ...]
    whole: ParamLayout
    held: ParamLayout
    start: int


class FlatParam(Packed):
    """What this rank holds of one ``FlatParamHandle``. ``names`` are its modules' clean names, by ``id``."""

    def __init__(self, handle: Any, names: dict[int, list[tuple[int, str]]]) -> None:
        self.handle = handle
        self.flat = handle.flat_param
        self.is_sharded = bool(handle.uses_sharded_strategy)
        self.originals = [self._original(i, names) for i in range(len(self.flat._param_infos))]
        self.ties = [original.fqns for original in self.originals]
        params = self.flat._params if self.flat._params is not None else [self.flat] * len(self.originals)
        pairs = zip(self.ties, params, strict=True)
        self.frozen = frozenset(fqns[0] for fqns, param in pairs if not param.requires_grad)
        self.layout = self._layout()

    def _original(self, i: int, names: dict[int, list[tuple[int, str]]]) -> OriginalParam:
        flat, info = self.flat, self.flat._param_infos[i]
        places = [(info.module, info.param_name)]
        places += [
            (shared.module, shared.param_name)
            for shared in flat._shared_param_infos
            if shared.prim_module is info.module and shared.prim_param_name == info.param_name
        ]
        found = sorted(
            (position, f"{prefix}.{name}" if prefix else name)
            for module, name in places
            for position, prefix in names.get(id(module), [])
        )
        fqns = tuple(dict.fromkeys(name for _, name in found))
        if not fqns:
            raise StateError(
                f"FSDP flattened the parameter {flat._fqns[i]!r}, whose module is no longer part of the model; wrap "
                "the model again"
            )
        local_shape = tuple(flat._shapes[i])
        shape, corner = _placed(fqns[0], flat._param_extensions[i], local_shape)
        strides = None if flat._contiguities[i] else _dense_strides(fqns[0], local_shape, tuple(flat._strides[i]))
        parts = () if corner is None else (ParamPart(fqns[0], shape, Box(corner, local_shape), 0, strides),)
        whole = ParamLayout(local_shape, parts, {fqns[0]: shape})
        info = flat._shard_param_infos[i]
        if not info.in_shard:
            return OriginalParam(fqns, whole, whole.narrowed(0, 0), 0)
        held = whole.narrowed(info.intra_param_start_idx, info.numel_in_shard)
        return OriginalParam(fqns, whole, held, info.offset_in_shard)

    def _layout(self) -> ParamLayout:
        """The layout of the complete local shard. Padding belongs to no part."""
        parts: list[ParamPart] = []
        fqns: dict[str, tuple[int, ...]] = {}
        for original in self.originals:
            parts += [part._replace(start=part.start + original.start) for part in original.held.parts]
            fqns |= original.whole.fqns
        return ParamLayout(tuple(self.flat._sharded_size), tuple(parts), fqns)

    def parameter_layouts(self) -> dict[int, ParamLayout]:
        """Layouts by ``id`` of what an optimizer steps: the flat parameter, or the originals as views of the shard."""
        if self.flat._params is None:
            return {id(self.flat): self.layout}
        layouts: dict[int, ParamLayout] = {}
        for param, original in zip(self.flat._params, self.originals, strict=True):
            unflattened = tuple(part._replace(strides=None) for part in original.whole.parts)
            layouts[id(param)] = original.held if self.is_sharded else original.whole._replace(parts=unflattened)
        return layouts

    def local_shard(self) -> torch.Tensor:
        """This rank's full-precision memory, including padding.

        Raises ``StateError`` while the model does not compute with the shard: parameters are summoned, a forward or
        backward pass is running, or a parameter was given other memory.
        """
        state = self.handle._training_state.name
        if state != "IDLE":
            raise StateError(
                f"FSDP parameters ({self.originals[0].fqns[0]}, ...) are currently unsharded (handle state {state}); "
                "save and load outside forward and backward, and outside summon_full_params()"
            )
        data: torch.Tensor = self.flat.data
        shard: torch.Tensor = getattr(self.flat, "_local_shard", data)
        if shard.shape != self.flat._sharded_size or shard.data_ptr() != data.data_ptr():
            raise StateError(
                f"FSDP parameters ({self.originals[0].fqns[0]}, ...) are unsharded or were moved: their flat parameter "
                f"has {data.numel()} elements where its shard has {shard.numel()}. Save and load outside forward and "
                "backward; after .to() or .half(), run one forward pass first"
            )
        self._check_views(shard)
        if shard.is_meta:
            raise UnsupportedTensorError(
                f"{self.originals[0].fqns[0]}: FSDP's flat parameter is on the meta device; materialize the model "
                "before saving or loading"
            )
        return dense_view(self.originals[0].fqns[0], shard)

    def _check_views(self, shard: torch.Tensor) -> None:
        """Raise ``StateError`` if a parameter was given memory that FSDP copies back only in the next forward pass."""
        if self.flat._params is None or self.handle._skipped_use_sharded_views:
            return
        for param, original in zip(self.flat._params, self.originals, strict=True):
            if not original.held.parts or is_dtensor(param):
                continue
            if param.data_ptr() != shard.data_ptr() + original.start * shard.element_size():
                raise StateError(
                    f"{original.fqns[0]}: the parameter was given new memory (param.data = ...), which FSDP copies "
                    "back only in the next forward pass; assign in place (param.copy_()) or run a forward pass first"
                )

    def free_gathered(self) -> None:
        if self.is_sharded and hasattr(self.flat, "_full_param_padded") and not self.handle.needs_unshard():
            self.handle.reshard(free_unsharded_flat_param=True)
            self.handle.post_reshard()


def flat_params(modules: Sequence[nn.Module]) -> list[FlatParam]:
    """Every flat parameter in these modules, in their order."""
    wrapper = loaded_class("torch.distributed.fsdp", "FullyShardedDataParallel")
    names: dict[int, list[tuple[int, str]]] = {}
    handles: dict[int, Any] = {}
    for position, (name, module) in enumerate(named_submodules(modules)):
        names.setdefault(id(module), []).append((position, name))
        if isinstance(module, wrapper) and module._handle is not None:
            handles[id(module._handle)] = module._handle
    return [FlatParam(handle, names) for handle in handles.values()]


def _placed(fqn: str, spec: Any, local_shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Global shape and first corner of a parameter. ``spec`` is its DTensor spec before FSDP flattened it, if any."""
    if spec is None:
        return local_shape, (0,) * len(local_shape)
    if not hasattr(spec, "placements") or not hasattr(spec, "mesh"):
        raise UnsupportedTensorError(
            f"{fqn}: FSDP flattened a {type(spec).__name__}, which this library does not support; use a DTensor instead"
        )
    sharding = sharding_of(spec)
    boxes = sharding.held(fqn)[1] if sharding is not None else ()
    if len(boxes) > 1 or (boxes and boxes[0].box.lengths != local_shape) or (not boxes and 0 not in local_shape):
        raise UnsupportedTensorError(
            f"{fqn}: the tensor-parallel part {local_shape} of {tuple(spec.shape)} that FSDP flattened is not one box"
        )
    return tuple(spec.shape), boxes[0].box.offsets if boxes else None


def _dense_strides(fqn: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """The strides, if the elements fill the memory that FSDP flattened in some order of the dimensions."""
    order = sorted(range(len(shape)), key=lambda d: (-strides[d], -shape[d], d))
    dense = row_major_strides([shape[d] for d in order])
    if any(strides[d] != step and shape[d] > 1 for d, step in zip(order, dense, strict=True)):
        raise UnsupportedTensorError(
            f"{fqn}: FSDP flattened a parameter of shape {shape} and strides {strides}, which is not dense; make it "
            "contiguous before wrapping"
        )
    return strides
