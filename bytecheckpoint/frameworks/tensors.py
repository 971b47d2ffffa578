"""Describe plain tensors, DTensors and ShardedTensors in global boxes, and refuse tensors without dense memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..errors import UnsupportedTensorError
from ..tensors.derived import is_derived
from ..tensors.geometry import Box
from ..tensors.metadata import BasicMeta
from ..tensors.shards import IrregularShard, Shard, whole_tensor
from .dtensor import dtensor_shards, is_dtensor, loaded_class, local_tensor, tensor_meta

if TYPE_CHECKING:
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from typing_extensions import TypeIs

__all__ = ["dense_view", "has_no_dense_memory", "is_sharded_tensor", "tensor_shards", "whole_shard"]

_ADVICE = {
    torch.sparse_coo: ".to_dense()",
    torch.sparse_csr: ".to_dense()",
    torch.sparse_csc: ".to_dense()",
    torch.sparse_bsr: ".to_dense()",
    torch.sparse_bsc: ".to_dense()",
    torch.jagged: ".values() and .offsets() as separate tensors",
}


# An attribute of every parameter that ZeRO-3 partitions. Even while its values are gathered, a load into it is lost.
# (Flat tensors of its optimizer have other attributes of such parameters.)
_ZERO3 = "ds_tensor"

# Types that override no operation and hold all of their elements on this rank.
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def is_sharded_tensor(tensor: object) -> TypeIs[ShardedTensor]:
    """Whether this is a ``ShardedTensor`` of torch. Imports nothing."""
    if type(tensor) in _PLAIN:
        return False
    return isinstance(tensor, loaded_class("torch.distributed._shard.sharded_tensor", "ShardedTensor"))


def tensor_shards(fqn: str, tensor: torch.Tensor) -> tuple[BasicMeta, list[Shard]]:
    """Dtype and global shape of a tensor, and its local shards as views of its memory.

    A plain tensor is one whole box, a replica on every rank. Makes no copy and runs no collective. A meta tensor yields
    meta shards; the caller decides whether that is an error. Raises ``UnsupportedTensorError`` for a tensor without
    dense memory.
    """
    if type(tensor) in _PLAIN:  # almost all tensors
        return whole_shard(fqn, tensor)
    if is_dtensor(tensor):
        return dtensor_shards(fqn, tensor, dense_view(fqn, local_tensor(tensor)))
    if is_sharded_tensor(tensor):
        return _sharded_tensor_shards(fqn, tensor)
    return whole_shard(fqn, tensor)


def whole_shard(fqn: str, tensor: torch.Tensor) -> tuple[BasicMeta, list[Shard]]:
    """``tensor_shards`` of a tensor of which this rank holds all elements."""
    dense = dense_view(fqn, tensor)
    try:
        meta, box = whole_tensor(dense.dtype, dense.shape)
    except UnsupportedTensorError as error:
        raise UnsupportedTensorError(f"{fqn}: {error}") from None
    return meta, [Shard.unchecked(fqn, meta, box, dense)]


def dense_view(fqn: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as a plain detached ``torch.Tensor`` on the same memory, or a derived tensor itself.

    Raises ``UnsupportedTensorError``.
    """
    if is_derived(tensor):
        return tensor
    if type(tensor) in _PLAIN and not _is_odd(tensor):
        return tensor.detach()
    if hasattr(tensor, _ZERO3):
        raise UnsupportedTensorError(
            f"{fqn}: DeepSpeed ZeRO-3 partitioned this parameter of shape {tuple(getattr(tensor, 'ds_shape', ()))} and "
            "keeps it elsewhere. Pass the engine or its module as a separate section; otherwise save a state dict of "
            "plain tensors, gathered with deepspeed.zero.GatheredParameters"
        )
    if torch.nn.parameter.is_lazy(tensor):
        raise UnsupportedTensorError(
            f"{fqn}: a lazy parameter or buffer has no shape yet; run a forward pass, or pass sizes to the module"
        )
    if has_no_dense_memory(tensor):
        raise UnsupportedTensorError(
            f"{fqn}: a {type(tensor).__module__}.{type(tensor).__qualname__} has no dense memory; convert "
            "it to a plain tensor first, or store its parts as separate tensors"
        )
    if tensor.layout != torch.strided or tensor.is_nested:
        way_out = ".unbind() as separate tensors" if tensor.is_nested else _ADVICE.get(tensor.layout, ".to_dense()")
        kind = "nested" if tensor.is_nested else str(tensor.layout)
        raise UnsupportedTensorError(f"{fqn}: a tensor of layout {kind} cannot be stored; store {way_out} instead")
    if tensor.is_quantized:
        raise UnsupportedTensorError(
            f"{fqn}: a quantized tensor cannot be stored; store .dequantize(), or .int_repr() with its scales"
        )
    if _is_freed(tensor):
        raise UnsupportedTensorError(
            f"{fqn}: the memory of this tensor was freed, so its values are elsewhere, for example in a buffer of the "
            "wrapper that shards or offloads the model; gather it first"
        )
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach()


def _is_odd(tensor: torch.Tensor) -> bool:
    """Whether a tensor of a plain type is more than one strided block of memory."""
    return (
        tensor.layout != torch.strided
        or tensor.is_nested
        or tensor.is_quantized
        or torch._is_functional_tensor(tensor)
        or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        or hasattr(tensor, _ZERO3)
        or _is_freed(tensor)
    )


def _is_freed(tensor: torch.Tensor) -> bool:
    """Whether a tensor with elements has no memory for them, so that reading it would crash the process."""
    start = _address(tensor) - tensor.storage_offset() * tensor.element_size()
    return start == 0 and tensor.numel() > 0 and not tensor.is_meta and tensor.untyped_storage().nbytes() == 0


def has_no_dense_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor keeps its elements in other tensors, as quantized or traced tensors do."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    if type(tensor) in _PLAIN:
        return torch._is_functional_tensor(tensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    wrapper: bool = is_traceable_wrapper_subclass(tensor)
    if isinstance(tensor, FakeTensor) or wrapper:
        return True
    if type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        return False
    # A subclass that implements operations itself may have no memory.
    return not tensor.is_meta and tensor.numel() > 0 and _address(tensor) == 0


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def _sharded_tensor_shards(fqn: str, tensor: ShardedTensor) -> tuple[BasicMeta, list[Shard]]:
    meta = tensor_meta(fqn, tensor.dtype, tensor.size())
    shards: list[Shard] = [
        IrregularShard(
            fqn,
            meta,
            Box(tuple(local.metadata.shard_offsets), tuple(local.metadata.shard_sizes)),
            dense_view(fqn, local.tensor),
        )
        for local in tensor.local_shards()
    ]
    return meta, shards
