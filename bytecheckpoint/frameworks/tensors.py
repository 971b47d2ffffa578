"""Classify a tensor, once, and describe it in global boxes. Refuse tensors without dense memory."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any, NamedTuple

import torch

from ..errors import UnsupportedTensorError
from ..tensors.derived import is_derived
from ..tensors.geometry import Box
from ..tensors.metadata import BasicMeta
from ..tensors.shards import IrregularShard, Shard, whole_tensor
from .dtensor import attached_local_tensor, dtensor_shards, is_dtensor, loaded_class, named_whole

# An attribute of every parameter that ZeRO-3 partitions. Even while its values are gathered, a load into it is lost.
# (Flat tensors of its optimizer have other attributes of such parameters.)
_ZERO3 = "ds_tensor"

# Types that override no operation and hold all of their elements on this rank.
_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})

# A view of freed memory has its offset as its address. No offset is that large; on 64-bit Linux, addresses are larger.
_MIN_ADDRESS = 1 << 40

_strided = torch.strided
_is_functional = torch._is_functional_tensor
_is_functorch = torch._C._functorch.is_functorch_wrapped_tensor


class TensorKind(NamedTuple):
    """What the type of a tensor says about its elements.

    ``is_plain``: the type overrides nothing. ``is_distributed``: it describes which part of the elements this rank
    holds, as a DTensor and a ``ShardedTensor`` do. ``is_wrapper``: it has no memory and consists of other tensors, as
    does a DTensor of such tensors (``wrapper_tensors``).
    """

    is_plain: bool = False
    is_dtensor: bool = False
    is_distributed: bool = False
    is_wrapper: bool = False


_PLAIN, _OTHER, _WRAPPER = TensorKind(is_plain=True), TensorKind(), TensorKind(is_wrapper=True)
DTENSOR, _SHARDED = TensorKind(is_dtensor=True, is_distributed=True), TensorKind(is_distributed=True)
_WRAPPED_DTENSOR = DTENSOR._replace(is_wrapper=True)


def tensor_kind(tensor: object) -> TensorKind:
    """Classify a tensor; anything else is of no kind. Imports nothing."""
    if type(tensor) in _PLAIN_TYPES:  # almost all tensors
        return _PLAIN
    if not isinstance(tensor, torch.Tensor):
        return _OTHER
    if is_dtensor(tensor):
        return _WRAPPED_DTENSOR if tensor_kind(tensor._local_tensor).is_wrapper else DTENSOR
    if isinstance(tensor, loaded_class("torch.distributed._shard.sharded_tensor", "ShardedTensor")):
        return _SHARDED
    if tensor.layout != torch.strided or tensor.is_nested or not hasattr(type(tensor), "__tensor_unflatten__"):
        return _OTHER
    # Subclasses of torch itself (functional tensors, collectives in progress) are not data.
    is_wrapper = hasattr(tensor, "__tensor_flatten__") and not type(tensor).__module__.startswith("torch.")
    return _WRAPPER if is_wrapper else _OTHER


def tensor_shards(
    fqn: str, tensor: torch.Tensor, kind: TensorKind | None = None
) -> tuple[dict[str, BasicMeta], list[Shard]]:
    """Dtype and global shape of a tensor by its name, and its local shards: the tensor itself, or views of its memory.

    A plain tensor is one whole box, a replica on every rank. Makes no copy and runs no collective. A meta tensor yields
    meta shards; the caller decides whether that is an error. Pass the ``kind`` if it is known. No shard requires a
    gradient. Raises ``UnsupportedTensorError`` for a tensor without dense memory.
    """
    kind = kind or tensor_kind(tensor)
    if kind.is_dtensor:
        return dtensor_shards(fqn, tensor, _dense(fqn, attached_local_tensor(tensor)))  # type: ignore[arg-type]
    if kind.is_distributed:
        return _sharded_tensor_shards(fqn, tensor)
    dense = _dense(fqn, tensor)
    meta, box = named_whole(fqn, dense.dtype, dense.shape)
    return {fqn: meta}, [Shard.unchecked(fqn, meta, box, dense)]


def describe_plain(
    names: Sequence[str], tensors: Sequence[torch.Tensor], taken: Set[int] = frozenset()
) -> list[Shard] | None:
    """Shards of plain tensors, none of which has the name or the first element of another one.

    This is ``tensor_shards`` for many tensors in a third of the time. ``taken`` are addresses of further tensors. None
    if any tensor is not of a plain type, has no memory, is refused, or shares its name or memory.
    """
    if not _PLAIN_TYPES.issuperset(map(type, tensors)) or len(set(names)) < len(names):
        return None
    try:
        addresses = [tensor.data_ptr() for tensor in tensors]
        whole = [whole_tensor(tensor.dtype, tensor.shape) for tensor in tensors]
    except (RuntimeError, UnsupportedTensorError):  # traced or nested tensors; quantized ones
        return None
    is_refused = min(addresses, default=_MIN_ADDRESS) < _MIN_ADDRESS or any(hasattr(one, _ZERO3) for one in tensors)
    if is_refused or len(set(addresses)) < len(addresses) or not taken.isdisjoint(addresses):
        return None
    shard = Shard.unchecked
    dense = [tensor.detach() if tensor.requires_grad else tensor for tensor in tensors]
    described = zip(names, whole, dense, strict=True)
    return [shard(name, meta, box, tensor) for name, (meta, box), tensor in described]


def _dense(fqn: str, tensor: torch.Tensor) -> torch.Tensor:
    """This tensor if possible, since detaching doubles the time for small ones."""
    if type(tensor) in _PLAIN_TYPES and not tensor.requires_grad and not _is_odd(tensor):
        return tensor
    return dense_view(fqn, tensor)


def dense_view(fqn: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as a plain detached ``torch.Tensor`` on the same memory, or a derived tensor itself.

    Raises ``UnsupportedTensorError``.
    """
    if type(tensor) in _PLAIN_TYPES:
        if not _is_odd(tensor):
            return tensor.detach()
    elif is_derived(tensor):
        return tensor
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
        way_out = ".unbind() as separate tensors" if tensor.is_nested else ".to_dense()"
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
    if tensor.is_nested or tensor.is_quantized or hasattr(tensor, _ZERO3):
        return True
    # Everything else without a block of memory has no address. This runs once for each of many thousand small tensors.
    return address_of(tensor) < _MIN_ADDRESS and (
        tensor.layout is not _strided or _is_functional(tensor) or _is_functorch(tensor) or _is_freed(tensor)
    )


def _is_freed(tensor: torch.Tensor) -> bool:
    """Whether a tensor with elements has no memory for them, so that reading it would crash the process."""
    if address_of(tensor) != tensor.storage_offset() * tensor.element_size():  # it begins at some address
        return False
    return tensor.numel() > 0 and not tensor.is_meta and tensor.untyped_storage().nbytes() == 0


def has_no_dense_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor keeps its elements in other tensors, as quantized or traced tensors do."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    if type(tensor) in _PLAIN_TYPES:
        return _is_functional(tensor) or _is_functorch(tensor)
    wrapper: bool = is_traceable_wrapper_subclass(tensor)
    if isinstance(tensor, FakeTensor) or wrapper:
        return True
    if type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        return False
    # A subclass that implements operations itself may have no memory.
    return not tensor.is_meta and tensor.numel() > 0 and address_of(tensor) == 0


def address_of(tensor: torch.Tensor) -> int:
    """Where a tensor's elements begin; 0 if it has none, or no memory for them."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def _sharded_tensor_shards(fqn: str, tensor: Any) -> tuple[dict[str, BasicMeta], list[Shard]]:
    meta, _ = named_whole(fqn, tensor.dtype, tensor.size())
    shards: list[Shard] = [
        IrregularShard(
            fqn,
            meta,
            Box(tuple(local.metadata.shard_offsets), tuple(local.metadata.shard_sizes)),
            dense_view(fqn, local.tensor),
        )
        for local in tensor.local_shards()
    ]
    return {fqn: meta}, shards
