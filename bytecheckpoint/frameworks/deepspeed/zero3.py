"""Parameters that ZeRO-3 has partitioned: each rank holds one flat range of every parameter.

The partition is authoritative. The gathered parameter, which modules show while they compute, is a copy of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ...errors import StateError, UnsupportedTensorError
from ..layout import ParamLayout
from ..module_tree import named_slots
from ..tensors import dense_view

__all__ = ["PartitionedParam", "is_partitioned", "partitioned_params", "release"]

_GATHERED_DEPTH = "_ds_z3_gathered_param_context_depth"


class PartitionedParam(NamedTuple):
    """One parameter under all of its names."""

    fqns: tuple[str, ...]
    param: Any

    @property
    def layout(self) -> ParamLayout:
        """The layout of this rank's partition, whose end may be padding."""
        param, size = self.param, int(self.param.ds_tensor.ds_numel)
        start = min(size * dist.get_rank(param.ds_process_group), param.ds_numel)
        held = ParamLayout.whole(self.fqns[0], tuple(param.ds_shape)).narrowed(start, min(size, param.ds_numel - start))
        return held._replace(local_shape=(size,))

    def local_partition(self) -> torch.Tensor:
        """This rank's memory, including padding.

        Raises ``StateError`` if the model computes with gathered copies now, or if the partition is not in memory.
        """
        param, fqn = self.param, self.fqns[0]
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


def release(params: Sequence[PartitionedParam]) -> None:
    """Drop gathered copies, with which the next forward pass would compute otherwise. It gathers them again."""
    gathered = [one.param for one in params if one.param.ds_status.name == "AVAILABLE"]
    if gathered:
        gathered[0].partition(param_list=gathered)
    for one in params:
        if getattr(one.param, "ds_secondary_tensor", None) is not None:
            one.param.ds_secondary_tensor = None  # a copy for gathers within a node
