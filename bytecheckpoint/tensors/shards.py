"""The meeting point of frameworks and engine: local memory with a global address.

An adapter (``frameworks/``) turns any object into a list of ``Shard``s and a set of plain values; saving reads the
shards' memory, loading writes into it. Nobody else needs to know what FSDP, tensor parallel or ZeRO mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from .dtypes import DTYPES, DType
from .errors import StateError, UnsupportedTensorError
from .geometry import Box
from .mesh_layout import MeshPlace
from .metadata import BasicMeta, Path

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "IrregularShard",
    "MeshShard",
    "Path",
    "SectionSource",
    "SectionTarget",
    "Shard",
    "StoredSection",
    "basic_meta",
    "torch_dtype",
    "whole_tensor",
]

# Those that this torch has.
_DTYPES: dict[torch.dtype, DType] = {
    found: dtype for name, dtype in DTYPES.items() if isinstance(found := getattr(torch, name, None), torch.dtype)
}


def torch_dtype(meta: BasicMeta) -> torch.dtype:
    """The torch element type of ``meta``. Raises ``UnsupportedTensorError`` where this torch has no such type."""
    dtype = getattr(torch, meta.dtype.name, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedTensorError(
            f"torch {torch.__version__} has no dtype {meta.dtype.name}; a newer torch is needed"
        )
    return dtype


def basic_meta(dtype: torch.dtype, shape: tuple[int, ...] | torch.Size) -> BasicMeta:
    """Dtype and global shape as this library writes them. Raises ``UnsupportedTensorError`` for quantised dtypes."""
    known = _DTYPES.get(dtype)
    if known is None:
        raise UnsupportedTensorError(f"dtype {dtype} cannot be stored: it has no plain bytes of its own")
    return BasicMeta(known, tuple(map(int, shape)))


@lru_cache(maxsize=1 << 14)  # a model has few shapes, an optimizer the same ones again
def whole_tensor(dtype: torch.dtype, shape: torch.Size) -> tuple[BasicMeta, Box]:
    """``basic_meta``, and the box that is all of the tensor."""
    meta = basic_meta(dtype, shape)
    return meta, Box.whole(meta.shape)


@dataclass(eq=False, slots=True)
class Shard:
    """A box of the global tensor ``fqn`` that lies in this process's memory. Not to be changed once made.

    ``tensor`` has exactly the box's shape and the meta's dtype, on any device; it may be a non-contiguous view, never
    a copy: loading fills it. A replica is simply the same box on several ranks. Raises ``StateError`` for a tensor
    that is not the box, ``UnsupportedTensorError`` for one without dense bytes.
    """

    fqn: str
    meta: BasicMeta
    box: Box
    tensor: torch.Tensor

    def __post_init__(self) -> None:
        if tuple(self.tensor.shape) != self.box.lengths or not Box.whole(self.meta.shape).contains(self.box):
            raise StateError(
                f"{self.fqn}: local tensor of shape {tuple(self.tensor.shape)} is not the box {self.box} of {self.meta}"
            )
        if self.tensor.layout != torch.strided or self.tensor.is_quantized:
            raise UnsupportedTensorError(
                f"{self.fqn}: layout {self.tensor.layout} cannot be stored; convert it first (for example .to_dense())"
            )

    @classmethod
    def proved(cls, fqn: str, meta: BasicMeta, box: Box, tensor: torch.Tensor) -> Self:
        """A shard of which it is known already that the tensor is dense and is the box."""
        shard = object.__new__(cls)
        shard.fqn, shard.meta, shard.box, shard.tensor = fqn, meta, box, tensor
        return shard


@dataclass(eq=False, slots=True)
class IrregularShard(Shard):
    """A shard that is where flat memory, or a plan of its own, happened to be cut. Where it is all of a tensor, that
    does not make it a replica."""


@dataclass(eq=False, slots=True)
class MeshShard(Shard):
    """A shard that is where it is because of its rank's place in a mesh, which ``find_place`` tells; None where the
    mesh cuts in a way that is not put down in a ``MeshLayout``. Only ranks that plan anew ask."""

    find_place: Callable[[], MeshPlace | None]


@dataclass
class SectionSource:
    """One section of the state, ready to be saved: what ``capture`` of an adapter returns.

    ``metas`` names every tensor of the section of which this rank knows, also those it holds no element of.
    ``values`` are plain (see ``values.py``), each under its path; a value that differs between ranks is stored once
    for each. ``aliases`` maps a tied name to the name its bytes are stored under. Names in ``per_rank`` (tensors, by
    fqn; values, by path) belong to this rank alone and are never taken for replicas. ``digests`` stands for the content
    of plain tensors that nothing but their name says are replicas (tensors of trees, an optimizer's scalars): where
    ranks differ, saving stores each rank's own instead of taking one for all. ``pinned`` names tensors whose replicas
    may differ although one will do for all (buffers): the lowest rank's is stored, so that all come from one rank.
    """

    metas: dict[str, BasicMeta] = field(default_factory=dict)
    shards: list[Shard] = field(default_factory=list)
    values: dict[Path, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    per_rank: set[str | Path] = field(default_factory=set)
    digests: dict[str, bytes] = field(default_factory=dict)
    pinned: set[str] = field(default_factory=set)

    def make_per_rank(self, fqn: str) -> None:
        """Turn a tensor into this rank's own; names tied to it become tensors of their own, of the same memory."""
        names = [fqn, *(alias for alias, name in self.aliases.items() if name == fqn)]
        local = [shard for shard in self.shards if shard.fqn == fqn]
        for alias in names[1:]:
            del self.aliases[alias]
            self.metas[alias] = self.metas[fqn]
            self.shards.extend(replace(shard, fqn=alias) for shard in local)
        self.per_rank.update(names)


@dataclass(frozen=True)
class StoredSection:
    """What a checkpoint holds of one section, as an adapter sees it when it makes room for a load.

    ``values`` are those meant for this rank: shared ones, and its own where values were stored for each rank.
    ``metas`` has aliases resolved: a tied name is listed too, with the meta of what it stands for.
    """

    metas: Mapping[str, BasicMeta]
    values: Mapping[Path, Any]
    aliases: Mapping[str, str]


@dataclass
class SectionTarget:
    """Where one section's bytes and values go: what ``target`` of an adapter returns.

    ``shards`` are filled in place, their dtypes being those wanted (expanded ones too, where the stored values allow
    it). ``wanted_values`` are the paths the object needs (missing ones are reported); ``apply`` is called once, on the
    main thread, when every byte of every section has arrived and been verified, with the stored values by path: it puts
    plain values (and state created for the load) into the object. ``metas`` and ``aliases`` are as in
    ``SectionSource``.
    ``optional`` names tensors and value paths that may be missing from the checkpoint (lazily created optimizer
    state); ``ignorable`` those stored names that the object has no use for and that may be left unread.
    """

    metas: dict[str, BasicMeta] = field(default_factory=dict)
    shards: list[Shard] = field(default_factory=list)
    wanted_values: set[Path] = field(default_factory=set)
    aliases: dict[str, str] = field(default_factory=dict)
    optional: set[str | Path] = field(default_factory=set)
    ignorable: set[str | Path] = field(default_factory=set)
    apply: Callable[[Mapping[Path, Any]], None] = lambda values: None
