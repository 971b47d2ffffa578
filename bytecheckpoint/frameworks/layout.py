"""Map a parameter's local memory to global boxes.

The module adapters make one ``ParamLayout`` for each parameter. The optimizer adapter applies it to every state tensor
(``exp_avg``, ``momentum_buffer``, ...) that has the local parameter's shape, so it needs no other knowledge of FSDP-1,
DDP or plain modules. DTensors describe themselves (see ``dtensor.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from operator import mul
from typing import NamedTuple

import torch

from ..errors import PlanError
from ..tensors.derived import is_derived
from ..tensors.geometry import Box, decompose_strided, row_major_strides
from ..tensors.mesh_layout import MeshPlace
from ..tensors.metadata import BasicMeta
from ..tensors.shards import IrregularShard, MeshShard, Shard, basic_meta


class ParamPart(NamedTuple):
    """Elements of the local memory that hold ``box`` of the tensor ``fqn``.

    ``shape`` is the global shape. ``start`` is the position of the box's first element, counted in elements from the
    beginning of the local tensor's memory. ``strides`` are the distances between neighbours along each dimension of the
    box, in elements; None if the elements are consecutive and row-major. Strides describe a part whose rows lie apart
    (a half of a fused weight, a block of columns), or whose dimensions are in another order (a channels-last parameter,
    which FSDP-1 flattens in memory order).
    """

    fqn: str
    shape: tuple[int, ...]
    box: Box
    start: int
    strides: tuple[int, ...] | None = None

    @classmethod
    def strided(cls, fqn: str, shape: tuple[int, ...], box: Box, start: int, strides: tuple[int, ...]) -> ParamPart:
        """A part in memory with these strides, which may be those of row-major order."""
        runs = row_major_strides(box.lengths)
        dense = all(n == 1 or step == run for n, step, run in zip(box.lengths, strides, runs, strict=True))
        return cls(fqn, shape, box, start, None if dense else strides)

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """The part's elements in a contiguous tensor, shaped like the box."""
        flat = flat.view(-1)
        lengths = self.box.lengths
        if self.strides is None:
            return flat.narrow(0, self.start, self.box.numel).view(lengths)
        extent = 1 + sum((n - 1) * step for n, step in zip(lengths, self.strides, strict=True)) if self.box.numel else 0
        memory = flat.narrow(0, self.start, extent)  # raises where as_strided would leave ``flat`` unnoticed
        steps = [step * flat.stride(0) for step in self.strides]
        return memory.as_strided(lengths, steps, memory.storage_offset())

    def narrowed(self, start: int, length: int) -> Iterator[ParamPart]:
        """What ``length`` elements of the local memory from ``start`` on hold of this part, relative to ``start``."""
        strides = self.strides or row_major_strides(self.box.lengths)
        for piece in decompose_strided(start - self.start, length, self.box.lengths, strides):
            position = self.start + sum(map(mul, piece.offsets, strides)) - start
            yield ParamPart.strided(self.fqn, self.shape, piece.shift(self.box.offsets), position, strides)


class ParamLayout(NamedTuple):
    """What one local parameter holds. A whole parameter has one part, a flat parameter has many with several names.

    ``local_shape`` is the local tensor's shape. ``fqns`` maps every name in the parameter to its global shape,
    including names of which this rank holds no element. With ``is_replica``, all ranks hold the same elements;
    otherwise a part may cover a tensor completely by chance, and is not a replica. ``replica_ranks`` are the ranks of
    the default process group that the model declares to hold replicas; None if it declares nothing. With
    ``ends_with_padding``, the first dimension of the only tensor may have another length elsewhere (a vocabulary); the
    parts are then in memory order. ``place`` is how a mesh splits the only tensor, if one does, with all parts in the
    order of its boxes.
    """

    local_shape: tuple[int, ...]
    parts: tuple[ParamPart, ...]
    fqns: dict[str, tuple[int, ...]]
    is_replica: bool = False
    replica_ranks: tuple[int, ...] | None = None
    ends_with_padding: bool = False
    place: MeshPlace | None = None

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
        whole = part.strides is None and part.shape == self.local_shape == part.box.lengths
        return part.fqn if whole and part.fqn in self.fqns else None

    def renamed(self, rename: Callable[[str], str]) -> ParamLayout:
        """The same layout under other names."""
        parts = tuple(part._replace(fqn=rename(part.fqn)) for part in self.parts)
        return self._replace(parts=parts, fqns={rename(fqn): shape for fqn, shape in self.fqns.items()})

    def narrowed(self, start: int, length: int) -> ParamLayout:
        """The layout of a 1-D tensor that holds ``length`` elements of the local memory from ``start`` on.

        This is what a distributed optimizer keeps of a parameter. All names remain, also those without an element in
        the range. Raises ``PlanError`` if the local memory does not contain the range.
        """
        size = prod(self.local_shape)
        if start < 0 or length < 0 or start + length > size:
            raise PlanError(
                f"flat range [{start}, {start + length}) is outside the {size} local elements of "
                f"{next(iter(self.fqns), 'a parameter')}"
            )
        parts = [piece for part in self.parts for piece in part.narrowed(start, length)]
        parts.sort(key=lambda part: part.start)
        return ParamLayout((length,), tuple(parts), self.fqns, ends_with_padding=self.ends_with_padding)

    def describe(self, tensor: torch.Tensor, rename: Callable[[str], str]) -> tuple[dict[str, BasicMeta], list[Shard]]:
        """Metadata of every name, and views of ``tensor`` (of ``local_shape``), under new names. Never copies."""
        if len(self.parts) == 1 and self.parts[0].strides is None and self.parts[0].box.lengths == tuple(tensor.shape):
            views = [tensor]
        elif is_derived(tensor):
            views = [tensor.part(part.box.lengths, part.view) for part in self.parts]
        else:
            flat = tensor.view(-1)
            views = [part.view(flat) for part in self.parts]
        names = {fqn: rename(fqn) for fqn in self.fqns}
        metas = {names[fqn]: basic_meta(tensor.dtype, shape) for fqn, shape in self.fqns.items()}
        placed = [(names[part.fqn], part.box, view) for part, view in zip(self.parts, views, strict=True)]
        if self.place is not None:
            place = self.place
            return metas, [MeshShard(name, metas[name], box, view, lambda: place) for name, box, view in placed]
        kind = Shard if self.is_replica else IrregularShard
        return metas, [kind(name, metas[name], box, view) for name, box, view in placed]
