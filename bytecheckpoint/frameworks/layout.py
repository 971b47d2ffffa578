"""How a parameter's local memory maps to global boxes, so that anything of the parameter's local shape does too.

The module adapters make one ``ParamLayout`` per parameter; the optimizer adapter applies it to every state tensor
(``exp_avg``, ``momentum_buffer``, ...) that is shaped like the local parameter. It is the only thing the optimizer
adapter has to know of FSDP-1, DDP or plain modules. (DTensors describe themselves, see ``dtensor.py``.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from ..geometry import Box
from ..metadata import BasicMeta
from ..shards import IrregularShard, Shard, basic_meta

__all__ = ["ParamLayout", "ParamPart"]


class ParamPart(NamedTuple):
    """Consecutive elements of the local (flattened) memory that are the contents of ``box`` of the tensor ``fqn``.

    ``start`` counts elements from the beginning of the local tensor's row-major memory. ``order`` lists the tensor's
    dimensions from the slowest to the fastest in memory where they are not in their own order (a channels-last
    parameter that FSDP-1 flattened as it lay).
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
    """What one local parameter holds. A whole parameter has one part; a flat parameter has many, of several names.

    ``local_shape`` is the local tensor's shape. ``fqns`` lists every name this parameter stands for with its global
    shape, also those of which this rank holds nothing. ``is_replica``: every rank that has the parameter holds the
    same; otherwise a part that is all of a tensor is so by chance.
    """

    local_shape: tuple[int, ...]
    parts: tuple[ParamPart, ...]
    fqns: dict[str, tuple[int, ...]]
    is_replica: bool = False

    @classmethod
    def whole(cls, fqn: str, shape: tuple[int, ...]) -> ParamLayout:
        """A replicated parameter."""
        box = Box.proved((0,) * len(shape), shape)
        return cls(shape, (ParamPart(fqn, shape, box, 0),), {fqn: shape}, True)

    @property
    def one_whole(self) -> str | None:
        """The name of the one parameter that is all here and a replica, in its own order; None for any other layout."""
        if not self.is_replica or len(self.parts) != 1 or len(self.fqns) != 1:
            return None
        part = self.parts[0]
        whole = part.order is None and part.shape == self.local_shape == part.box.lengths
        return part.fqn if whole and part.fqn in self.fqns else None

    def metas(self, dtype: torch.dtype, prefix: str = "", suffix: str = "") -> dict[str, BasicMeta]:
        """``BasicMeta`` of every name, for a tensor of this dtype laid out like the parameter."""
        return {f"{prefix}{fqn}{suffix}": basic_meta(dtype, shape) for fqn, shape in self.fqns.items()}

    def renamed(self, rename: Callable[[str], str]) -> ParamLayout:
        """The same layout under other names."""
        parts = tuple(part._replace(fqn=rename(part.fqn)) for part in self.parts)
        return self._replace(parts=parts, fqns={rename(fqn): shape for fqn, shape in self.fqns.items()})

    def shards(self, tensor: torch.Tensor, prefix: str = "", suffix: str = "") -> Iterator[Shard]:
        """Views of ``tensor`` (of ``local_shape``), each under ``prefix + fqn + suffix``. Never copies."""
        if len(self.parts) == 1 and self.parts[0].order is None and self.parts[0].box.lengths == tuple(tensor.shape):
            views = [tensor]
        else:
            flat = tensor.view(-1)
            views = [part.view(flat) for part in self.parts]
        kind = Shard if self.is_replica else IrregularShard
        for part, local in zip(self.parts, views):
            yield kind(f"{prefix}{part.fqn}{suffix}", basic_meta(tensor.dtype, part.shape), part.box, local)
