"""The tensors that DeepSpeed's optimizers step: flat partitions of the model's parameters in higher precision.

Each class of optimizer keeps them in other attributes; ``partitions_of`` describes all of them in one form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ...errors import StateError, UnsupportedTensorError
from ..base import Context
from ..dtensor import loaded_class
from ..layout import ParamLayout
from ..module import Packed
from ..module_tree import named_slots
from ..tensors import dense_view


class FlatRange(NamedTuple):
    """``length`` elements of a model's parameter, or of its local memory, from ``first`` on, at ``start``."""

    param: Any
    first: int
    start: int
    length: int


@dataclass(frozen=True, eq=False)
class Partition:
    """One tensor that the inner optimizer steps.

    ``low`` is the model's memory of the same elements. ``ranges`` are the parameters' elements in ``stepped``; those
    parameters of the group without an element here have ranges of length 0. What is between the ranges is padding.
    ``entries`` are the ranges of state entries of another size, by key. Without ``is_partial``, every data-parallel
    rank steps all elements.
    """

    stepped: torch.Tensor
    low: torch.Tensor
    group: MutableMapping[str, Any]
    ranges: Sequence[FlatRange]
    is_partial: bool = True
    entries: dict[str, Sequence[FlatRange]] = field(default_factory=dict)

    @property
    def is_copy(self) -> bool:
        """Whether the optimizer steps a copy, and not the model's own memory."""
        return self.stepped.data_ptr() != self.low.data_ptr() or self.stepped.dtype != self.low.dtype

    @property
    def is_master(self) -> bool:
        """Whether the copy has another precision than the model."""
        return self.stepped.dtype != self.low.dtype


def partitions_of(optimizer: Any, context: Context) -> list[Partition]:
    """What one of DeepSpeed's optimizers steps on this rank. Raises ``StateError`` for one that is not supported."""
    where = f"section {context.section!r}: {type(optimizer).__module__}.{type(optimizer).__qualname__}"
    for (module, name), find in _FINDERS.items():
        if type(optimizer) is loaded_class(module, name):
            _require_in_memory(optimizer, where)
            return list(find(optimizer))
    raise StateError(
        f"{where} is not supported, because where it keeps its state is unknown. Supported are: "
        + ", ".join(name for _, name in _FINDERS)
    )


def take_changes(partitions: Iterable[Partition]) -> None:
    """Give the stepped copies the values of the model's memory where they do not round to these.

    So a copy keeps its precision wherever the model did not change.
    """
    with torch.no_grad():
        for part in partitions:
            if part.is_copy:
                low = part.low.detach().to(part.stepped.device)
                changed = part.stepped.detach().to(low.dtype) != low
                part.stepped.detach().copy_(torch.where(changed, low.to(part.stepped.dtype), part.stepped.detach()))


def _require_in_memory(optimizer: Any, where: str) -> None:
    """Raise ``StateError`` if the optimizer's state is not in its usual memory."""
    if getattr(optimizer, "swap_optimizer", False) or getattr(optimizer, "params_in_nvme_and_cpu", False):
        raise StateError(f"{where} offloads to NVMe, which is not supported; offload to the CPU instead")
    if getattr(optimizer, "offloaded_states", None):
        raise StateError(f"{where}: engine.offload_states() moved its states; call engine.reload_states() first")
    if hasattr(optimizer, "backup_optimizer"):
        raise StateError(
            f"{where} steps a part of the parameters with a second optimizer (offload_optimizer.ratio below 1), which "
            "is not supported; set the ratio to 1"
        )


def _zero_1_and_2(optimizer: Any) -> Iterator[Partition]:
    for number, params in enumerate(optimizer.bit16_groups):
        flat, whole = optimizer.single_partition_of_fp32_groups[number], optimizer.bit16_groups_flat[number]
        low = optimizer.parallel_partitioned_bit16_groups[number][
            dist.get_rank(optimizer.real_dp_process_group[number])
        ]
        ranges = _flat_ranges(low, whole, [(param, param) for param in params])
        group = _group_of(optimizer, flat, number)
        yield Partition(flat, low, group, ranges, entries=_muon_entries(optimizer, number))


def _bf16(optimizer: Any) -> Iterator[Partition]:
    for number, params in enumerate(optimizer.bf16_groups):
        flat, whole = optimizer.fp32_groups_flat_partition[number], optimizer.bf16_groups_flat[number]
        low = optimizer.bf16_partitioned_groups[number][dist.get_rank(optimizer.real_dp_process_group[number])]
        ranges = _flat_ranges(low, whole, [(param, param) for param in params])
        yield Partition(flat, low, _group_of(optimizer, flat, number), ranges)


def _fused(optimizer: Any) -> Iterator[Partition]:
    for number, params in enumerate(optimizer.fp16_groups):
        flat, low = optimizer.fp32_groups_flat[number], optimizer.fp16_groups_flat[number]
        ranges = _flat_ranges(low, low, [(param, param) for param in params])
        yield Partition(flat, low, _group_of(optimizer, flat, number), ranges, is_partial=False)


def _unfused(optimizer: Any) -> Iterator[Partition]:
    for number, (params, copies) in enumerate(zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)):
        for param, copy in zip(params, copies, strict=True):
            group = _group_of(optimizer, copy, number)
            yield Partition(copy, param, group, [FlatRange(param, 0, 0, param.numel())], is_partial=False)


def _zero_3(optimizer: Any) -> Iterator[Partition]:
    for number, params in enumerate(optimizer.fp16_groups):
        flat, low = optimizer.fp32_partitioned_groups_flat[number], optimizer.fp16_partitioned_groups_flat[number]
        ranges = _flat_ranges(low, low, [(param, param.ds_tensor) for param in params])
        yield Partition(flat, low, _group_of(optimizer, flat, optimizer.sub_group_to_group_id[number]), ranges)


_FINDERS: dict[tuple[str, str], Callable[[Any], Iterator[Partition]]] = {
    ("deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer"): _zero_1_and_2,
    ("deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3"): _zero_3,
    ("deepspeed.runtime.bf16_optimizer", "BF16_Optimizer"): _bf16,
    ("deepspeed.runtime.fp16.fused_optimizer", "FP16_Optimizer"): _fused,
    ("deepspeed.runtime.fp16.unfused_optimizer", "FP16_UnfusedOptimizer"): _unfused,
}


def _group_of(optimizer: Any, stepped: torch.Tensor, number: int) -> MutableMapping[str, Any]:
    """The inner group of a stepped tensor. ZeRO-3 puts the tensor into it only during a step."""
    groups: list[MutableMapping[str, Any]] = optimizer.optimizer.param_groups
    for group in groups:
        if any(param is stepped for param in group["params"]):
            return group
    return groups[number]


def _flat_ranges(low: torch.Tensor, whole: torch.Tensor, held: Iterable[tuple[Any, torch.Tensor]]) -> list[FlatRange]:
    """Where the memory of each parameter lies in this rank's partition ``low`` of the flat tensor ``whole``.

    Addresses are the only reliable source: DeepSpeed's own links (``_hp_mapping``) point to the wrong elements if
    ``round_robin_gradients`` reorders the parameters.
    """
    found = []
    width, begin, end = whole.element_size(), whole.data_ptr(), whole.data_ptr() + whole.nbytes
    for param, memory in held:
        if memory.nbytes and not (begin <= memory.data_ptr() and memory.data_ptr() + memory.nbytes <= end):
            raise StateError(
                f"a parameter of shape {tuple(getattr(param, 'ds_shape', param.shape))} was moved out of the memory "
                "that DeepSpeed's optimizer updates; assign to parameters in place (param.copy_())"
            )
        at = (memory.data_ptr() - low.data_ptr()) // width
        start, stop = max(at, 0), min(at + memory.numel(), low.numel())
        found.append(FlatRange(param, start - at, start, stop - start) if start < stop else FlatRange(param, 0, 0, 0))
    return found


def _consecutive(params: Sequence[Any], lengths: Sequence[int]) -> Iterator[FlatRange]:
    start = 0
    for param, length in zip(params, lengths, strict=True):
        yield FlatRange(param, 0, start, length)
        start += length


def _muon_entries(optimizer: Any, number: int) -> dict[str, Sequence[FlatRange]]:
    """Muon's momentum at ZeRO-1 and 2: one buffer of the complete parameters of which the partition has a fragment."""
    params = optimizer.params_in_partition[number]
    if not params or not getattr(params[0], "use_muon", False):
        return {}
    return {"momentum_buffer": list(_consecutive(params, [param.numel() for param in params]))}


_GATHERED_DEPTH = "_ds_z3_gathered_param_context_depth"


class PartitionedParam(Packed):
    """One parameter under all of its names."""

    def __init__(self, fqns: tuple[str, ...], param: Any) -> None:
        self.param, self.ties = param, [fqns]
        self.frozen = frozenset(() if param.requires_grad else fqns)
        size = int(param.ds_tensor.ds_numel)  # the end may be padding
        start = min(size * dist.get_rank(param.ds_process_group), param.ds_numel)
        held = ParamLayout.whole(fqns[0], tuple(param.ds_shape)).narrowed(start, min(size, param.ds_numel - start))
        self.layout = held._replace(local_shape=(size,))

    def local_shard(self) -> torch.Tensor:
        """This rank's memory. Raises ``StateError`` also if the partition is not in memory."""
        param, fqn = self.param, self.ties[0][0]
        if param.ds_active_sub_modules or param.ds_status.name == "INFLIGHT" or getattr(param, _GATHERED_DEPTH, 0):
            raise StateError(
                f"{fqn}: ZeRO-3 has gathered this parameter for a forward or backward pass, or in GatheredParameters; "
                "save and load outside of these, best after engine.step()"
            )
        if param.ds_tensor.status.name != "AVAILABLE" or param.nvme_swapper is not None:
            raise StateError(
                f"{fqn}: ZeRO-3 offloads parameters to NVMe, which is not supported; offload to the CPU instead"
            )
        if hasattr(param.ds_tensor, "ds_quant_scale"):
            raise UnsupportedTensorError(
                f"{fqn}: ZeRO-3 quantizes this frozen parameter; set zero_quantized_nontrainable_weights to false"
            )
        return dense_view(fqn, param.ds_tensor)

    def free_gathered(self) -> None:
        if self.param.ds_status.name == "AVAILABLE":
            self.param.partition()
        if getattr(self.param, "ds_secondary_tensor", None) is not None:
            self.param.ds_secondary_tensor = None  # a copy for gathers within a node


def is_partitioned(param: object) -> bool:
    """Whether ZeRO-3 has partitioned a parameter."""
    return getattr(param, "ds_tensor", None) is not None


def partitioned_params(modules: Iterable[nn.Module]) -> list[PartitionedParam]:
    """The partitioned parameters of the modules, in their order."""
    found: dict[int, list[Any]] = {}
    for slot in named_slots(modules):
        if slot.is_parameter and is_partitioned(slot.tensor):
            found.setdefault(id(slot.tensor), [slot.tensor]).append(slot.fqn)
    return [PartitionedParam(tuple(names), param) for param, *names in found.values()]
