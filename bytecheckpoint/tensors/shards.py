"""The interface between frameworks and the engine: local memory with a global address.

An adapter (``frameworks/``) turns an object into a list of ``Shard``s and a set of plain values. A save reads the
shards' memory; a load writes to it. No other module depends on FSDP, tensor parallelism or ZeRO.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from ..errors import StateError, UnsupportedTensorError
from .dtypes import DTYPES, DType
from .geometry import Box
from .mesh_layout import MeshPlace
from .metadata import BasicMeta, Path

if TYPE_CHECKING:
    from typing import Self

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

# The dtypes that this version of torch has.
_DTYPES: dict[torch.dtype, DType] = {
    found: dtype for name, dtype in DTYPES.items() if isinstance(found := getattr(torch, name, None), torch.dtype)
}


def torch_dtype(meta: BasicMeta) -> torch.dtype:
    """Return the torch dtype of a tensor.

    Args:
        meta: The tensor's metadata.

    Returns:
        The dtype.

    Raises:
        UnsupportedTensorError: This version of torch does not have the dtype.
    """
    dtype = getattr(torch, meta.dtype.name, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedTensorError(
            f"torch {torch.__version__} has no dtype {meta.dtype.name}; use a newer version of torch"
        )
    return dtype


def basic_meta(dtype: torch.dtype, shape: tuple[int, ...] | torch.Size) -> BasicMeta:
    """Return the metadata of a tensor.

    Args:
        dtype: The element type.
        shape: The global shape.

    Returns:
        The metadata.

    Raises:
        UnsupportedTensorError: The dtype cannot be stored, because it is quantized.
    """
    known = _DTYPES.get(dtype)
    if known is None:
        raise UnsupportedTensorError(f"dtype {dtype} cannot be stored, because its elements are not plain bytes")
    return BasicMeta(known, tuple(map(int, shape)))


@lru_cache(maxsize=1 << 14)  # a model has few shapes, an optimizer the same ones again
def whole_tensor(dtype: torch.dtype, shape: torch.Size) -> tuple[BasicMeta, Box]:
    """Return the metadata of a tensor, and the box that covers it completely.

    Args:
        dtype: The element type.
        shape: The global shape.

    Returns:
        The metadata and the box, both of them cached.

    Raises:
        UnsupportedTensorError: The dtype cannot be stored, because it is quantized.

    Example:
        >>> meta, box = whole_tensor(rows.dtype, rows.shape)
        >>> shard = Shard("rows", meta, box, rows)
    """
    meta = basic_meta(dtype, shape)
    return meta, Box.whole(meta.shape)


@dataclass(eq=False, slots=True)
class Shard:
    """A box of a global tensor in this process's memory. Do not change an instance.

    Shards of several ranks with the same ``fqn`` and ``box`` are replicas: the save writes one of them.

    Attributes:
        fqn: The tensor's name in its section.
        meta: The dtype and the shape of the global tensor.
        box: The box in global coordinates.
        tensor: The local memory, on any device, with exactly the box's shape and the dtype of ``meta``. It may be a
            non-contiguous view, but not a copy, because a load fills it. A ``DerivedTensor`` represents values that the
            object only hands out as copies.

    Raises:
        StateError: The tensor does not match the box, or the box exceeds the global shape.
        UnsupportedTensorError: The tensor is sparse or quantized.
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
    def unchecked(cls, fqn: str, meta: BasicMeta, box: Box, tensor: torch.Tensor) -> Self:
        """Create a shard without validation.

        Args:
            fqn: As in the constructor.
            meta: As in the constructor.
            box: As in the constructor.
            tensor: A dense tensor that matches the box.

        Returns:
            The shard.
        """
        shard = object.__new__(cls)
        shard.fqn, shard.meta, shard.box, shard.tensor = fqn, meta, box, tensor
        return shard


@dataclass(eq=False, slots=True)
class IrregularShard(Shard):
    """A shard at a position that a flat 1-D range, or a separate plan, determines (ZeRO, FSDP-1).

    It is never a replica of a shard of another rank, even if it covers the whole tensor.

    Attributes:
        fqn: As in ``Shard``.
        meta: As in ``Shard``.
        box: As in ``Shard``. Use ``tensors.geometry.decompose`` to convert a flat range to boxes.
        tensor: As in ``Shard``.
    """


@dataclass(eq=False, slots=True)
class MeshShard(Shard):
    """A shard at a position that the rank's coordinates in a mesh determine.

    Attributes:
        find_place: Returns these coordinates, or None if the mesh splits in a way that ``MeshLayout`` cannot express.
            It is called only when ranks plan again.
    """

    find_place: Callable[[], MeshPlace | None]


@dataclass
class SectionTensors:
    """What this rank has to do with the tensors of a section.

    Attributes:
        metas: Every tensor by name, including those of which this rank holds no element.
        shards: The shards of this rank. Each name is a key of ``metas``.
    """

    metas: dict[str, BasicMeta] = field(default_factory=dict)
    shards: list[Shard] = field(default_factory=list)

    def add(self, metas: Mapping[str, BasicMeta], shards: Iterable[Shard]) -> None:
        """Add tensors, with this rank's shards of them."""
        self.metas.update(metas)
        self.shards.extend(shards)


@dataclass
class SectionSource(SectionTensors):
    """One section of the state, ready to save: what an adapter's ``capture`` returns.

    Attributes:
        metas: Every tensor of the section by name, including those of which this rank holds no element.
        shards: The shards of this rank. Each name is a key of ``metas``.
        values: Plain values by path. A value that differs between ranks is stored once per rank.
        aliases: For each tied name, the name under which its bytes are stored. No name is a key of ``metas``.
        per_rank: Tensors (by name) and values (by path) that belong to this rank only, and are never replicas.
        digests: By name, identifiers of the contents of plain tensors that have the same name on all ranks but may
            differ (tensors of trees, an optimizer's scalars). If the digests differ, every rank's tensor is stored.
        unproven: Names of tensors that are replicas if ranks hold them under equal names, although nothing declares it
            (parameters of a module that no wrapper keeps in sync). If their contents differ, the save fails.
        replicated: By name, the ranks of the default process group that hold replicas of this rank's only shard of a
            tensor, because the object declares it (the parameters of ``DistributedDataParallel``). The shards of
            DTensors need no entry.
        pinned: Tensors whose replicas may differ although one suffices (buffers). The lowest rank's replica is stored,
            so that all pinned tensors come from one rank.
        left_out: Paths of the tensors (each a path of one component, its name) and values that the adapter left out,
            because the caller saves only what is trained (``Context.trainable_only``).
    """

    values: dict[Path, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    per_rank: set[str | Path] = field(default_factory=set)
    digests: dict[str, bytes] = field(default_factory=dict)
    unproven: set[str] = field(default_factory=set)
    replicated: dict[str, tuple[int, ...]] = field(default_factory=dict)
    pinned: set[str] = field(default_factory=set)
    left_out: set[Path] = field(default_factory=set)

    def mark_replicas(self, names: Iterable[str], ranks: tuple[int, ...] | None) -> None:
        """State that tensors that this rank holds completely are replicas.

        Args:
            names: The names of the tensors.
            ranks: The holders, as in ``replicated``; None adds the names to ``unproven``.
        """
        if ranks is None:
            self.unproven.update(names)
        else:
            self.replicated.update(dict.fromkeys(names, ranks))

    def tensors(self, names: Mapping[str, str]) -> SectionSource:
        """Return the tensors that are keys of ``names``, under the names there, without aliases and values."""
        return SectionSource(
            {name: self.metas[fqn] for fqn, name in names.items()},
            [
                shard if shard.fqn == names[shard.fqn] else replace(shard, fqn=names[shard.fqn])
                for shard in self.shards
                if shard.fqn in names
            ],
            digests={names[fqn]: digest for fqn, digest in self.digests.items() if fqn in names},
            replicated={names[fqn]: ranks for fqn, ranks in self.replicated.items() if fqn in names},
            unproven={names[fqn] for fqn in self.unproven & names.keys()},
            pinned={names[fqn] for fqn in self.pinned & names.keys()},
            per_rank={names[fqn] for fqn in names.keys() & self.per_rank},
        )

    def make_per_rank(self, fqn: str) -> None:
        """Mark a tensor as belonging to this rank only.

        Names that are tied to it become separate tensors with the same memory.

        Args:
            fqn: The name of a tensor in ``metas``.
        """
        names = [fqn, *(alias for alias, name in self.aliases.items() if name == fqn)]
        local = [shard for shard in self.shards if shard.fqn == fqn]
        for alias in names[1:]:
            del self.aliases[alias]
            self.metas[alias] = self.metas[fqn]
            self.shards.extend(replace(shard, fqn=alias) for shard in local)
        self.per_rank.update(names)
        self.unproven.difference_update(names)


@dataclass(frozen=True)
class StoredSection:
    """The stored contents of one section, as an adapter sees them when it prepares a load. Read-only.

    Attributes:
        metas: Every stored tensor by name. A tied name has the metadata of its target.
        values: The plain values for this rank by path: those of all ranks, and those that the per-rank policy chose.
        aliases: For each tied name, the name under which its bytes are stored.
    """

    metas: Mapping[str, BasicMeta]
    values: Mapping[Path, Any]
    aliases: Mapping[str, str]


@dataclass
class SectionTarget(SectionTensors):
    """Where one section's bytes and values go: what an adapter's ``target`` returns.

    Attributes:
        metas: The tensors that the object needs, by name, as in ``SectionSource``.
        shards: The memory of this rank to fill. The load fills it in place and casts to its dtypes. It also fills
            expanded tensors if the stored values allow it.
        requested_values: The paths of the values that the object needs. The load reports those that are missing.
        aliases: Tied names of the object, as in ``SectionSource``.
        optional: Tensors (by name) and values (by path) that the checkpoint may lack unless ``strict="exact"``, such as
            optimizer state that is created lazily.
        ignorable: Stored tensors and values that the object does not need. Only ``strict="exact"`` treats them as
            unexpected.
        fallbacks: By name, the section and name of another tensor of the state. If this section stores no tensor of the
            name, it is filled from the master weight of the other tensor, or else from what is stored of that tensor.
        derived: Sections and names of tensors that are only low-precision copies of master weights that this target
            holds. They may be rounded when they are loaded, whatever ``cast`` allows.
        resizable: By name, a dimension in which the stored length may differ from the requested one, because the end is
            padding. The common part is loaded, and the target fills the rest itself.
        apply: Puts the plain values, and state that was created for the load, into the object. The load calls it once,
            on the thread of the caller, with the stored values by path, after all bytes of all sections have been read
            and verified.
    """

    requested_values: set[Path] = field(default_factory=set)
    aliases: dict[str, str] = field(default_factory=dict)
    optional: set[str | Path] = field(default_factory=set)
    ignorable: set[str | Path] = field(default_factory=set)
    fallbacks: dict[str, tuple[str, str]] = field(default_factory=dict)
    derived: set[tuple[str, str]] = field(default_factory=set)
    resizable: dict[str, int] = field(default_factory=dict)
    apply: Callable[[Mapping[Path, Any]], None] = lambda values: None

    def rename(self, names: Mapping[str, str]) -> None:
        """Let tensors be read from the stored ones of other names.

        Args:
            names: Stored names by the target's. Several of these may be read from one stored tensor.
        """
        metas: dict[str, BasicMeta] = {}
        for name, meta in self.metas.items():
            metas.setdefault(names.get(name, name), meta)
        self.metas = metas
        for shard in self.shards:  # made for this target
            shard.fqn = names.get(shard.fqn, shard.fqn)
        self.optional = {names.get(one, one) if isinstance(one, str) else one for one in self.optional}
        self.ignorable = {names.get(one, one) if isinstance(one, str) else one for one in self.ignorable}
        self.fallbacks = {names.get(name, name): origin for name, origin in self.fallbacks.items()}
