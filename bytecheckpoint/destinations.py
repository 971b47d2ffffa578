"""Where loaded elements go: into the shard's own memory, or through a buffer where its elements share memory."""

from __future__ import annotations

import torch

from .engine.tensor_bytes import as_bytes, copy_elements
from .errors import StateError
from .shards import Shard

__all__ = ["Destination"]


class Destination:
    """``memory`` has the shard's shape and dtype and is to be filled; ``settle`` then puts it into place.

    Raises ``StateError`` for a shard on the meta device.
    """

    def __init__(self, shard: Shard) -> None:
        self._fqn = shard.fqn
        self._tensor = shard.tensor.detach() if shard.tensor.requires_grad else shard.tensor
        if self._tensor.is_meta:
            raise StateError(f"{shard.fqn} is on the meta device and has no memory to load into; call to_empty() first")
        self._shared: list[int] = []
        if not self._tensor.is_contiguous():
            steps = zip(self._tensor.stride(), self._tensor.shape)
            self._shared = [d for d, (stride, size) in enumerate(steps) if stride == 0 and size > 1]
        self.memory = torch.empty(self._tensor.shape, dtype=self._tensor.dtype) if self._shared else self._tensor

    def settle(self) -> None:
        """Give an expanded tensor its values. Raises ``StateError`` where they differ among elements that share memory.

        Call it when all bytes have been read and verified; for any other tensor it has nothing to do.
        """
        if not self._shared:
            return
        first = self._first(self.memory)
        if not torch.equal(as_bytes(first.expand(self.memory.shape).contiguous()), as_bytes(self.memory)):
            raise StateError(
                f"{self._fqn}: the tensor in memory is expanded (shape {tuple(self._tensor.shape)}, strides "
                f"{self._tensor.stride()}), so that its elements share memory, but the stored values differ among "
                f"them; give it memory of its own before loading: .contiguous()"
            )
        copy_elements(self._first(self._tensor), first)

    def _first(self, tensor: torch.Tensor) -> torch.Tensor:
        for d in self._shared:
            tensor = tensor.narrow(d, 0, 1)
        return tensor
