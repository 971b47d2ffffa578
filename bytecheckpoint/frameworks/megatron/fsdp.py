"""Find what Megatron-FSDP leaves of each parameter on this rank.

It shards flat buffers of several parameters, so a rank holds some rows of a parameter that no placement of a DTensor
describes. Its buffers know which: the range of the flattened parameter is read from their index, and compared with the
list of chunks that Megatron-FSDP computed when it made the DTensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from math import prod
from typing import Any

import torch

from ...errors import UnsupportedTensorError
from ..dtensor import local_tensor


@contextlib.contextmanager
def as_raw_parameters(fsdp: Any) -> Iterator[None]:
    """Let the module show its parameters as they were before they were sharded, of which only shapes are valid.

    A hook of ``state_dict()``, which Megatron's ``sharded_state_dict()`` calls, would replace them by DTensors.
    """
    was_sharded = fsdp.is_param_fsdp_distributed
    fsdp._replace_param_with_raw_if_needed()
    fsdp.is_param_fsdp_distributed = True  # keeps the hook from it
    try:
        yield
    finally:
        fsdp.is_param_fsdp_distributed = False
        if was_sharded:
            fsdp._replace_param_with_distributed_if_needed()


def model_part(fsdp: Any, fqn: str, param: torch.Tensor) -> tuple[torch.Tensor, int, int] | None:
    """This rank's flat memory of a parameter that computes, and its range; None if no rank has less than all of it.

    If every rank keeps all parameters and a part of the optimizer, a step changes only that part here. The rest is old
    until the next forward pass gathers it, and may be written at any time until then.

    Raises ``UnsupportedTensorError`` for a buffer of another dtype (fp8), and for experts that are divided among the
    ranks of other experts.
    """
    if fsdp.dist_index.use_hybrid_fsdp and not getattr(param, "allreduce", True):
        raise UnsupportedTensorError(
            f"{fqn}: with several optimizer instances, Megatron-FSDP ignores expert parallelism, and divides this "
            "parameter among ranks that hold other experts; set num_distributed_optimizer_instances=1"
        )
    buffer = _group(fsdp.param_and_grad_buffer, param).model_weight_buffer
    if buffer is None:
        return None
    if buffer.dtype != param.dtype:
        raise UnsupportedTensorError(
            f"{fqn}: Megatron-FSDP keeps this {param.dtype} parameter in a buffer of {buffer.dtype}, which is not "
            "supported; set fp8_param_gather=False"
        )
    item = buffer.param_idx[param]
    start, stop = buffer._get_item_slice_in_shard(item)
    return buffer.get_item(item, only_shard=True), start, stop


def stepped_range(fqn: str, chunks: Any, stepped: Any) -> tuple[int, int]:
    """The range of the flattened parameter that an optimizer's DTensor holds.

    Raises ``UnsupportedTensorError`` if the DTensor is not in the memory of the buffers, or if they contradict the list
    of chunks.
    """
    param = stepped.orig_param
    owner = next(buffers for chunk in chunks if param in (buffers := chunk.param_and_grad_buffer).param_to_param_group)
    group = _group(owner, param)
    buffer = group.main_weight_buffer or group.model_weight_buffer
    local = local_tensor(stepped)
    start, stop, memory = 0, param.numel(), param
    if buffer is not None:
        is_part = group.model_weight_buffer is not None
        item = buffer.param_idx[param]
        memory = buffer.get_item(item, only_shard=is_part)
        if is_part:
            start, stop = buffer._get_item_slice_in_shard(item)
    chunks_of = getattr(owner.dist_main_weight[owner.param_to_name[param]]._local_tensor, "__create_chunk_list__", None)
    listed = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks_of()] if chunks_of is not None else []
    row = prod(param.shape[1:])  # the memory may be freed
    expected = start // row % param.shape[0] if stop > start else None
    if (
        stop - start != local.numel()
        or (local.numel() and memory.data_ptr() != local.data_ptr())
        or any(
            sizes != tuple(local.shape) or (expected is not None and offsets[0] % param.shape[0] != expected)
            for offsets, sizes in listed
        )
    ):
        raise UnsupportedTensorError(
            f"{fqn}: Megatron-FSDP's buffers contain elements [{start}, {stop}) of this parameter of shape "
            f"{tuple(param.shape)}, but its DTensor has the local shape {tuple(local.shape)}, the chunks {listed} and "
            f"{'the same' if memory.data_ptr() == local.data_ptr() else 'other'} memory"
        )
    return start, stop


def update_master_weights(fsdp: Any) -> None:
    """Set the master weights to the parameters that compute."""
    buffers = fsdp.param_and_grad_buffer
    if all(group.model_weight_buffer is not None for group in buffers.parameter_groups):
        buffers.copy_model_weights_to_main_weights()
        return
    for group in buffers.parameter_groups:  # not sharded, for which Megatron-FSDP's function fails
        if group.main_weight_buffer is not None:
            for param in group.params:
                group.main_weight_buffer.set_item(group.main_weight_buffer.param_idx[param], param.detach())


def _group(buffers: Any, param: torch.Tensor) -> Any:
    return buffers.parameter_groups[buffers.param_to_param_group[param]]
