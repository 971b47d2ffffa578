"""Tensors that transformers, from version 5 on, joins in memory: of the experts of a layer, each is one on the hub.

The parts of such a tensor are found with the conversion by which ``save_pretrained`` divides it. A load reads each part
from the stored tensor of its name.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from math import prod
from operator import mul
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..tensors.derived import is_derived
from ..tensors.geometry import Box, row_major_strides
from ..tensors.metadata import BasicMeta
from ..tensors.shards import SectionTarget, Shard
from .base import Context
from .dtensor import loaded_class
from .layout import ParamLayout, ParamPart
from .module_tree import named_submodules

_log = logging.getLogger(__name__)
_COPIES = frozenset({torch.ops.aten.clone.default, torch.ops.aten.contiguous.default})


class Part(NamedTuple):
    """A tensor on the hub that is ``box`` of one in memory. Its dimensions are ``dims`` there, the others of length 1.

    ``shape`` is its own.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    dims: tuple[int, ...]

    def within(self, held: Box) -> tuple[Box, Box] | None:
        """What a box of the tensor in memory has of this part: as a box there, and as one of the part."""
        both = held.intersect(self.box)
        if both is None:
            return None
        offsets = tuple(both.offsets[dim] - self.box.offsets[dim] for dim in self.dims)
        return both, Box(offsets, tuple(both.lengths[dim] for dim in self.dims))


Joined = Mapping[str, Sequence[Part]]
"""The parts of tensors by their names in memory."""


def transformers_models(modules: Sequence[nn.Module]) -> Iterator[tuple[str, Any]]:
    """The outermost models of transformers among the modules and in them, with the prefixes of their names."""
    kind = loaded_class("transformers.modeling_utils", "PreTrainedModel")
    for root in modules:
        above: list[str] = []
        for name, module in named_submodules([root]):
            prefix = f"{name}." if name else ""
            if isinstance(module, kind) and not any(prefix.startswith(one) for one in above):
                above.append(prefix)
                yield prefix, module


def original_model(model: Any) -> Any:
    """The model, or one of its own class: FSDP-2 replaces classes, and transformers finds conversions by class."""
    kind = next(one for one in type(model).__mro__ if one.__module__.startswith("transformers."))
    if kind is type(model):
        return model
    with torch.device("meta"):
        return kind(model.config)


def find_joined(
    modules: Sequence[nn.Module], lacking: Mapping[str, tuple[int, ...]], stored: Container[str], context: Context
) -> Joined:
    """The parts of those tensors whose parts are all stored. ``lacking`` has the shapes of tensors that are not."""
    found: dict[str, list[Part]] = {}
    for prefix, model in transformers_models(modules if lacking else ()):
        shapes = {name[len(prefix) :]: shape for name, shape in lacking.items() if name.startswith(prefix)}
        for name, parts in _parts(model, shapes).items():
            named = [part._replace(name=prefix + part.name) for part in parts]
            is_complete = sum(prod(part.shape) for part in named) == prod(shapes[name])
            if is_complete and all(part.name in stored for part in named):
                found[prefix + name] = named
    if found:
        (name, parts), *others = found.items()
        what = f"{name} is read from {parts[0].name} and {len(parts) - 1} more, and so are {len(others)} more tensors"
        context.notes.append(f"{context.section}: {what}, as transformers does when it loads")
        _log.info("%s", context.notes[-1])
    return found


class _Views(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Copies that only make a tensor contiguous return the tensor itself."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func in _COPIES else func(*args, **(kwargs or {}))


def _parts(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[Part]]:
    found: defaultdict[str, list[Part]] = defaultdict(list)
    joined = {name: torch.empty(shape, dtype=torch.float32, device="meta") for name, shape in shapes.items()}
    names = {tensor.untyped_storage()._cdata: name for name, tensor in joined.items()}
    divided: Mapping[str, torch.Tensor] = {}
    try:
        from transformers.core_model_loading import revert_weight_conversion

        with _Views():  # type: ignore[no-untyped-call]
            divided = revert_weight_conversion(original_model(model), joined)
    except Exception as error:  # noqa: BLE001 - an older version, or a conversion that computes with values
        _log.debug("transformers divides no tensors of %s: %s", type(model).__name__, error)
    for name, view in divided.items():
        source = names.get(view.untyped_storage()._cdata)
        part = None if source is None or name in joined else _part(name, view, shapes[source])
        if source is not None and part is not None:
            found[source].append(part)
    return found


def _part(name: str, view: torch.Tensor, shape: tuple[int, ...]) -> Part | None:
    """The part that a view of a tensor of this shape is; None if it is no box."""
    strides = row_major_strides(shape)
    dims: list[int] = []
    for length, step in zip(view.shape, view.stride(), strict=True):
        free = (dim for dim in range(len(shape)) if dim not in dims and length <= shape[dim])
        with suppress(StopIteration):
            dims.append(next(dim for dim in free if strides[dim] == step))
    at = view.storage_offset()
    offsets = tuple(at // step % length if length else 0 for step, length in zip(strides, shape, strict=True))
    lengths = [1] * len(shape)
    for dim, length in zip(dims, view.shape, strict=False):
        lengths[dim] = length
    box = Box(offsets, tuple(lengths))
    is_box = len(dims) == view.ndim and Box.whole(shape).contains(box)
    return Part(name, tuple(view.shape), box, tuple(dims)) if is_box else None


def divide_target(target: SectionTarget, joined: Joined) -> None:
    """Let the target read the parts of tensors."""
    for name, parts in joined.items():
        dtype = target.metas.pop(name).dtype
        target.metas.update({part.name: BasicMeta(dtype, part.shape) for part in parts})
        target.aliases = {alias: name for alias, name in target.aliases.items() if name not in joined}
    shards: list[Shard] = []
    for shard in target.shards:
        shards += _divided(shard, joined[shard.fqn]) if shard.fqn in joined else [shard]
    target.shards[:] = shards


def _divided(shard: Shard, parts: Sequence[Part]) -> Iterator[Shard]:
    for part in parts:
        found = part.within(shard.box)
        if found is not None:
            both, box = found
            cut = _cut(both.relative_to(shard.box), part.dims)
            view = shard.tensor.part(box.lengths, cut) if is_derived(shard.tensor) else cut(shard.tensor)
            yield Shard(part.name, BasicMeta(shard.meta.dtype, part.shape), box, view)


def _cut(box: Box, dims: Sequence[int]) -> Callable[[torch.Tensor], torch.Tensor]:
    others = [dim for dim in range(box.ndim) if dim not in dims]

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        for dim, (offset, length) in enumerate(zip(box.offsets, box.lengths, strict=True)):
            tensor = tensor.narrow(dim, offset, length)
        return tensor.permute(*others, *dims)[(0,) * len(others)]

    return cut


def divided_layout(layout: ParamLayout, joined: Joined) -> ParamLayout:
    """The layout of a parameter under the names of the parts."""
    fqns: dict[str, tuple[int, ...]] = {}
    for fqn, shape in layout.fqns.items():
        fqns.update({part.name: part.shape for part in joined[fqn]} if fqn in joined else {fqn: shape})
    parts: list[ParamPart] = []
    for held in layout.parts:
        parts += _divided_part(held, joined[held.fqn]) if held.fqn in joined else [held]
    return layout._replace(parts=tuple(parts), fqns=fqns, place=None)


def _divided_part(held: ParamPart, parts: Sequence[Part]) -> Iterator[ParamPart]:
    strides = held.strides or row_major_strides(held.box.lengths)
    for part in parts:
        found = part.within(held.box)
        if found is not None:
            both, box = found
            start = held.start + sum(map(mul, both.relative_to(held.box).offsets, strides))
            yield ParamPart.strided(part.name, part.shape, box, start, tuple(strides[dim] for dim in part.dims))
