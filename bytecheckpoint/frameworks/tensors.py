"""Any tensor in global boxes: plain, DTensor, ShardedTensor; and a clear refusal of what has no dense bytes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ..errors import StateError, UnsupportedTensorError
from ..geometry import Box
from ..metadata import BasicMeta
from ..shards import Shard
from .dtensor import dtensor_shards, is_dtensor, local_tensor, tensor_meta

if TYPE_CHECKING:
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from typing_extensions import TypeIs

__all__ = ["dense_view", "fillable_shards", "is_sharded_tensor", "tensor_shards"]

_ADVICE = {
    torch.sparse_coo: ".to_dense()",
    torch.sparse_csr: ".to_dense()",
    torch.sparse_csc: ".to_dense()",
    torch.sparse_bsr: ".to_dense()",
    torch.sparse_bsc: ".to_dense()",
    torch.jagged: ".values() and .offsets() as tensors of their own",
}


def is_sharded_tensor(tensor: object) -> TypeIs[ShardedTensor]:
    """Whether this is a ``ShardedTensor`` of torch. Imports nothing."""
    cls = getattr(sys.modules.get("torch.distributed._shard.sharded_tensor"), "ShardedTensor", None)
    return isinstance(cls, type) and isinstance(tensor, cls)


def tensor_shards(fqn: str, tensor: torch.Tensor) -> tuple[BasicMeta, list[Shard]]:
    """Dtype and global shape of a tensor, and what this process holds of it, as views of its memory.

    A plain tensor is one whole box (the same on every rank: a replica). No copy is made and no collective runs. A meta
    tensor yields meta shards: the caller decides whether that is an error. Raises ``UnsupportedTensorError`` for what
    has no dense bytes of its own, naming ``fqn`` and the way out.
    """
    if is_sharded_tensor(tensor):
        return _sharded_tensor_shards(fqn, tensor)
    if is_dtensor(tensor):
        dense_view(fqn, local_tensor(tensor))
        return dtensor_shards(fqn, tensor)
    dense = dense_view(fqn, tensor)
    meta = tensor_meta(fqn, dense.dtype, dense.shape)
    return meta, [Shard(fqn, meta, Box.whole(meta.shape), dense)]


def fillable_shards(fqn: str, tensor: torch.Tensor) -> tuple[BasicMeta, list[Shard], Callable[[], None] | None]:
    """``tensor_shards`` for a load: every shard can be written.

    An expanded tensor cannot (its elements share memory), so its shard is memory of its own, and the function returned
    with it puts the loaded values into the tensor; it raises ``StateError`` where they do not fit into one element.
    """
    meta, shards = tensor_shards(fqn, tensor)
    finish: list[Callable[[], None]] = []
    for i, shard in enumerate(shards):
        if any(step == 0 and n > 1 for step, n in zip(shard.tensor.stride(), shard.tensor.shape)):
            loaded = torch.empty(shard.tensor.shape, dtype=shard.tensor.dtype, device=shard.tensor.device)
            shards[i] = Shard(fqn, meta, shard.box, loaded)
            finish.append(_Collapse(fqn, loaded, shard.tensor))
    return meta, shards, _all(finish) if finish else None


def dense_view(fqn: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as a plain detached ``torch.Tensor`` over the same memory. Raises ``UnsupportedTensorError``."""
    if torch.nn.parameter.is_lazy(tensor):
        raise UnsupportedTensorError(
            f"{fqn}: a lazy parameter or buffer has no shape yet; run one forward pass, or give the module its sizes"
        )
    if _has_no_memory_of_its_own(tensor):
        raise UnsupportedTensorError(
            f"{fqn}: a {type(tensor).__module__}.{type(tensor).__qualname__} has no dense memory of its own; convert "
            "it to a plain tensor first, or store its parts as tensors of their own"
        )
    if tensor.layout != torch.strided or tensor.is_nested:
        way_out = ".unbind() as tensors of their own" if tensor.is_nested else _ADVICE.get(tensor.layout, ".to_dense()")
        kind = "nested" if tensor.is_nested else str(tensor.layout)
        raise UnsupportedTensorError(f"{fqn}: a tensor of layout {kind} cannot be stored; store {way_out} instead")
    if tensor.is_quantized:
        raise UnsupportedTensorError(
            f"{fqn}: a quantised tensor cannot be stored; store .dequantize(), or .int_repr() with its scales"
        )
    with torch._C.DisableTorchFunctionSubclass():
        dense = tensor.detach()
    if dense.is_conj() or dense.is_neg():
        raise UnsupportedTensorError(
            f"{fqn}: a lazily conjugated or negated view is not what lies in its memory; call .resolve_conj() "
            "or .resolve_neg() first"
        )
    return dense


def _has_no_memory_of_its_own(tensor: torch.Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    if type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter:
        return torch._is_functional_tensor(tensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    wrapper: bool = is_traceable_wrapper_subclass(tensor)
    if isinstance(tensor, FakeTensor) or wrapper:
        return True
    if type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        return False
    # A subclass that answers operations itself: its memory counts only if there is some.
    return not tensor.is_meta and tensor.numel() > 0 and _address(tensor) == 0


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def _sharded_tensor_shards(fqn: str, tensor: ShardedTensor) -> tuple[BasicMeta, list[Shard]]:
    meta = tensor_meta(fqn, tensor.dtype, tensor.size())
    shards = [
        Shard(
            fqn,
            meta,
            Box(tuple(local.metadata.shard_offsets), tuple(local.metadata.shard_sizes)),
            dense_view(fqn, local.tensor),
        )
        for local in tensor.local_shards()
    ]
    return meta, shards


def _all(steps: list[Callable[[], None]]) -> Callable[[], None]:
    def run() -> None:
        for step in steps:
            step()

    return run


class _Collapse:
    """Writes loaded values into an expanded tensor once they prove to be all the same where it shares memory."""

    def __init__(self, fqn: str, loaded: torch.Tensor, expanded: torch.Tensor) -> None:
        self.fqn = fqn
        self.loaded = loaded
        self.expanded = expanded

    def __call__(self) -> None:
        base, values = self.expanded, self.loaded
        for d, (step, n) in enumerate(zip(self.expanded.stride(), self.expanded.shape)):
            if step == 0 and n > 1:
                base, values = base.narrow(d, 0, 1), values.narrow(d, 0, 1)
        if not _same_bits(values.expand(self.loaded.shape), self.loaded):
            raise StateError(
                f"{self.fqn}: the target is an expanded tensor (shape {tuple(self.expanded.shape)}, strides "
                f"{self.expanded.stride()}), whose elements share memory, but the stored values differ among them; "
                "give the target memory of its own first: .contiguous()"
            )
        base.copy_(values)


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    def bits(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().view(-1).view(torch.uint8)

    return torch.equal(bits(left), bits(right))
