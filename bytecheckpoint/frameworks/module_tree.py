"""List the tensors of modules under names without wrappers, without running hooks or copying."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ..errors import NameCollisionError
from .dtensor import is_dtensor, loaded_class, local_tensor
from .tensors import DTENSOR, TensorKind, address_of, tensor_kind

EXTRA_STATE = "_extra_state"
"""A module's extra state has the path ``(EXTRA_STATE, fqn, ...)``. In torch's state dicts this ends its name."""

# torch.compile, activation checkpointing and FSDP-1 insert these components into the names of modules.
_WRAPPER_NAMES = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


class Slot(NamedTuple):
    """One name of a parameter or buffer. ``tensor`` is the object that an optimizer steps (FSDP-2: the sharded one)."""

    fqn: str
    owner: nn.Module
    attribute: str
    tensor: torch.Tensor
    kind: TensorKind
    is_parameter: bool
    persistent: bool = True


def modules_of(obj: object) -> list[nn.Module]:
    """The modules of ``obj``, a module, a pipeline stage or a list of these; empty for any other object."""
    if isinstance(obj, nn.Module):
        return [obj]
    if isinstance(obj, (list, tuple)):
        found = [modules_of(item) for item in obj]
        return [module for part in found for module in part] if all(found) else []
    if isinstance(obj, loaded_class("torch.distributed.pipelining.stage", "_PipelineStageBase")):
        return modules_of(getattr(obj, "submod", None))
    return []


def named_submodules(modules: Iterable[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Every module with its clean name (``""`` for a root), parents first; a shared one under each of its names."""
    found: list[tuple[str, nn.Module]] = []
    for module in modules:
        _add_submodules(module, "", found)
    return found


def _add_submodules(module: nn.Module, prefix: str, found: list[tuple[str, nn.Module]]) -> None:
    found.append((prefix, module))
    children: dict[str, nn.Module | None] = module._modules
    if children:
        wraps = isinstance(module, (nn.parallel.DistributedDataParallel, nn.parallel.DataParallel)) or is_engine(module)
        for name, child in children.items():
            if child is not None:
                transparent = name in _WRAPPER_NAMES or (wraps and name == "module")
                _add_submodules(child, prefix if transparent else join_names(prefix, name), found)


def submodules(module: nn.Module) -> Sequence[nn.Module]:
    """Every module once, parents first; faster than ``module.modules()``."""
    found = [module]
    seen = {module}
    for parent in found:  # which grows
        for child in parent._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                found.append(child)
    return found


def clean_name(name: str) -> str:
    """A dotted name from ``named_parameters()`` without the components of known wrappers."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_NAMES)


def named_slots(modules: Iterable[nn.Module]) -> list[Slot]:
    """Every name of every parameter and buffer, in the modules' order. Raises ``NameCollisionError``."""
    slots: dict[str, Slot] = {}
    for module in modules:
        unsharded = {
            place: param.sharded_param
            for param in fsdp2_params(module)
            if param.sharded_state.name != "SHARDED"
            for place in _places(param)
        }
        for slot in _slots(module, unsharded):
            other = slots.setdefault(slot.fqn, slot)
            if other is not slot and tie_key(other.tensor) != tie_key(slot.tensor):
                raise NameCollisionError(
                    f"the name {slot.fqn} belongs to two different tensors (shapes {tuple(other.tensor.shape)} in "
                    f"{type(other.owner).__name__} and {tuple(slot.tensor.shape)} in {type(slot.owner).__name__}); "
                    "give their modules separate sections in the state"
                )
    return list(slots.values())


def _slots(module: nn.Module, unsharded: dict[tuple[int, str], torch.Tensor]) -> Iterator[Slot]:
    for prefix, owner in named_submodules([module]):
        for name, param in owner._parameters.items():
            if param is not None:
                held = unsharded.get((id(owner), name), param)
                yield Slot(join_names(prefix, name), owner, name, held, tensor_kind(held), True)
        if owner._buffers:
            transient = getattr(owner, "_non_persistent_buffers_set", frozenset[str]())
            for name, buffer in owner._buffers.items():
                if buffer is not None:
                    kind, persistent = tensor_kind(buffer), name not in transient
                    yield Slot(join_names(prefix, name), owner, name, buffer, kind, False, persistent)


def join_names(prefix: str, name: str) -> str:
    """A dotted name below ``prefix``, which may be empty. ``name`` may be empty too: the module itself."""
    if not name:
        return prefix
    return f"{prefix}.{name}" if prefix else name


def group_tied(slots: Sequence[Slot]) -> list[list[Slot]]:
    """Group the slots that share memory, in order of first appearance."""
    groups: dict[object, list[Slot]] = {}
    addresses = [_address(slot) for slot in slots]
    counts = Counter(addresses)
    for slot, address in zip(slots, addresses, strict=True):
        alone = address and counts[address] == 1  # few tensors share an address, and a number is the cheapest key
        groups.setdefault(address if alone else tie_key(slot.tensor, slot.kind), []).append(slot)
    return list(groups.values())


def _address(slot: Slot) -> int:
    """Where the elements that this rank holds begin; 0 if that is unknown, or if there are none."""
    if slot.kind.is_plain:
        return address_of(slot.tensor)
    return address_of(slot.tensor._local_tensor) if slot.kind is DTENSOR else 0  # type: ignore[attr-defined]


def tie_key(tensor: torch.Tensor, kind: TensorKind | None = None) -> tuple[object, ...]:
    """A key that is equal for tensors that are the same view of the same memory, also on the meta device.

    An empty tensor is tied only to itself: two empty shards with the same address on this rank may be two different
    tensors on another rank.
    """
    kind = kind or tensor_kind(tensor)
    if tensor.layout != torch.strided or nn.parameter.is_lazy(tensor) or (kind.is_distributed and not kind.is_dtensor):
        return ("object", id(tensor))
    cut: tuple[object, ...] = ()
    dense = tensor
    if is_dtensor(tensor):
        dense = local_tensor(tensor)
        cut = (tensor.shape, tensor.placements, id(tensor.device_mesh))
    try:
        storage = dense.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):
        return ("object", id(tensor))
    if dense.numel() == 0:
        return ("object", id(tensor))
    lazy = (dense.is_conj(), dense.is_neg())  # such views have other values in the same memory
    return ("memory", storage, dense.storage_offset(), dense.shape, dense.stride(), dense.dtype, lazy, *cut)


def declared_replicas(modules: Iterable[nn.Module]) -> dict[int, tuple[int, ...]]:
    """By ``id`` of each parameter that DDP or a DeepSpeed engine keeps in sync, the ranks of its process group."""
    declared: dict[int, tuple[int, ...]] = {}
    for module in modules if dist.is_initialized() else ():
        for sub in submodules(module):
            if isinstance(sub, nn.parallel.DistributedDataParallel):
                ranks = tuple(dist.get_process_group_ranks(sub.process_group))
                ignored = sub.parameters_to_ignore
                for name, param in sub.module.named_parameters():
                    if name not in ignored:
                        declared[id(param)] = ranks
            elif is_engine(sub):
                declared.update(_engine_replicas(sub))
    return declared


def _engine_replicas(engine: Any) -> Iterator[tuple[int, tuple[int, ...]]]:
    for param in engine.module.parameters():
        is_expert = getattr(param, "allreduce", True) is False
        group = engine.expert_data_parallel_group[param.group_name] if is_expert else engine.seq_data_parallel_group
        yield id(param), tuple(dist.get_process_group_ranks(group))


def is_engine(module: object) -> bool:
    """Whether this is a DeepSpeed engine. Imports nothing."""
    return isinstance(module, loaded_class("deepspeed.runtime.engine", "DeepSpeedEngine"))


def has_fsdp1(module: nn.Module) -> bool:
    """Whether the tree contains an FSDP-1 wrapper."""
    return bool(_instances(module, "FullyShardedDataParallel"))


def fsdp2_modules(module: nn.Module) -> list[Any]:
    """The submodules that ``fully_shard`` was applied to."""
    return _instances(module, "FSDPModule")


def _instances(module: nn.Module, name: str) -> list[Any]:
    """The modules of the tree that are instances of a class of FSDP, each once. Imports nothing."""
    cls = loaded_class("torch.distributed.fsdp", name)
    return [sub for sub in submodules(module) if isinstance(sub, cls)] if cls else []


def fsdp2_params(module: nn.Module) -> Iterator[Any]:
    """FSDP-2's internal records of its parameters.

    Between a forward pass without resharding and the next backward pass, modules show gathered copies in the compute
    dtype, which FSDP drops later. Only these records refer to the sharded parameters.
    """
    for sub in fsdp2_modules(module):
        state = sub._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:
            groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
        for group in groups:
            yield from group.fsdp_params


def _places(param: Any) -> Iterator[tuple[int, str]]:
    info = param._module_info
    yield id(info.module), info.param_name
    for owner, name in zip(info.shared_modules, info.shared_param_names, strict=True):
        yield id(owner), name
