"""Map a parameter's local memory to global boxes.

The module adapters make one ``ParamLayout`` for each parameter. The optimizer adapter applies it to every state tensor
(``exp_avg``, ``momentum_buffer``, ...) that has the local parameter's shape, so it needs no other knowledge of FSDP-1,
DDP or plain modules. DTensors describe themselves (see ``dtensor.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..tensors.geometry import Box
from ..tensors.metadata import BasicMeta
from ..tensors.shards import IrregularShard, Shard, basic_meta

__all__ = ["ParamLayout", "ParamPart"]


class ParamPart(NamedTuple):
    """Consecutive elements of the flattened local memory, which hold ``box`` of the tensor ``fqn``.

    ``shape`` is the global shape. ``start`` counts elements from the beginning of the local tensor's row-major memory.
    ``order`` lists the dimensions from the slowest to the fastest in memory, if that is not the usual order (for a
    channels-last parameter, which FSDP-1 flattens in memory order).
    """

    fqn: str
    shape: tuple[int, ...]
    box: Box
    start: int
    order: tuple[int, ...] | None = None

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """The part's elements in the 1-D ``flat``, shaped like the box."""
        piece = flat.narrow(0, self.start, self.box.numel)
        if self.order is None:
            return piece.view(self.box.lengths)
        in_memory = piece.view([self.box.lengths[d] for d in self.order])
        return in_memory.permute([self.order.index(d) for d in range(len(self.order))])


class ParamLayout(NamedTuple):
    """What one local parameter holds. A whole parameter has one part, a flat parameter has many with several names.

    ``local_shape`` is the local tensor's shape. ``fqns`` maps every name in the parameter to its global shape,
    including names of which this rank holds no element. With ``is_replica``, all ranks hold the same elements;
    otherwise a part may cover a tensor completely by chance, and is not a replica. ``replica_ranks`` are the ranks of
    the default process group that the model declares to hold replicas; None if it declares nothing.
    """

    local_shape: tuple[int, ...]
    parts: tuple[ParamPart, ...]
    fqns: dict[str, tuple[int, ...]]
    is_replica: bool = False
    replica_ranks: tuple[int, ...] | None = None

    @classmethod
    def whole(cls, fqn: str, shape: tuple[int, ...], *, replica_ranks: tuple[int, ...] | None = None) -> ParamLayout:
        """A replicated parameter."""
        box = Box.unchecked((0,) * len(shape), shape)
        part = ParamPart(fqn, shape, box, 0)
        return cls(shape, (part,), {fqn: shape}, is_replica=True, replica_ranks=replica_ranks)

    @property
    def one_whole(self) -> str | None:
        """The name, if the layout is one replicated parameter in its usual memory order; None for any other layout."""
        if not self.is_replica or len(self.parts) != 1 or len(self.fqns) != 1:
            return None
        part = self.parts[0]
        whole = part.order is None and part.shape == self.local_shape == part.box.lengths
        return part.fqn if whole and part.fqn in self.fqns else None

    def renamed(self, rename: Callable[[str], str]) -> ParamLayout:
        """The same layout under other names."""
        parts = tuple(part._replace(fqn=rename(part.fqn)) for part in self.parts)
        return self._replace(parts=parts, fqns={rename(fqn): shape for fqn, shape in self.fqns.items()})

    def describe(self, tensor: torch.Tensor, rename: Callable[[str], str]) -> tuple[dict[str, BasicMeta], list[Shard]]:
        """Metadata of every name, and views of ``tensor`` (of ``local_shape``), under new names. Never copies."""
        if len(self.parts) == 1 and self.parts[0].order is None and self.parts[0].box.lengths == tuple(tensor.shape):
            views = [tensor]
        else:
            flat = tensor.view(-1)
            views = [part.view(flat) for part in self.parts]
        kind = Shard if self.is_replica else IrregularShard
        names = {fqn: rename(fqn) for fqn in self.fqns}
        metas = {names[fqn]: basic_meta(tensor.dtype, shape) for fqn, shape in self.fqns.items()}
        placed = [(names[part.fqn], part.box, view) for part, view in zip(self.parts, views)]
        return metas, [kind(name, metas[name], box, view) for name, box, view in placed]
