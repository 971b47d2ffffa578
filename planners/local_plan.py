"""What one rank holds, in the form in which it travels to the rank that plans."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..dtypes import DTYPES
from ..tables import BoxTable, Int64, TensorTable
from .wire import Bool, Fields, column, flags, pack

__all__ = ["LocalPlan", "ValueEntry"]

_KIND = "local plan"
_MAX_NDIM = 64
_MAX_LENGTH = 2**62


@dataclass(frozen=True)
class ValueEntry:
    """One plain value that a rank holds. ``path`` is an opaque encoded key, ``digest`` stands for the content,
    ``size`` is in bytes; ``per_rank`` values are never taken for replicas."""

    section: str
    path: bytes
    digest: bytes
    size: int
    per_rank: bool = False


@dataclass(eq=False)
class LocalPlan:
    """What one rank holds: row ``i`` of ``shards`` is its ``i``-th shard.

    ``scope`` has one number a tensor: -1 for a tensor that ranks share, else the rank that alone has it (whose name
    already ends in ``@<rank>``); None where all are shared. ``pinned`` (None: none) marks tensors whose replicas may
    differ, so that the lowest rank writes them: all of them then come from one and the same rank. ``aliases`` are
    ``(name, name it stands for)``, full names; ``sections`` are ``(name, adapter kind)``.
    """

    tensors: TensorTable
    shards: BoxTable
    values: list[ValueEntry] = field(default_factory=list)
    scope: Int64 | None = None
    aliases: list[tuple[str, str]] = field(default_factory=list)
    sections: list[tuple[str, str]] = field(default_factory=list)
    pinned: Bool | None = None

    def scopes(self) -> Int64:
        """``scope`` with None spelled out."""
        return np.full(len(self.tensors), -1, np.int64) if self.scope is None else self.scope

    def to_bytes(self) -> bytes:
        """For ``from_bytes``, on any machine."""
        tensors, shards, values = self.tensors, self.shards, self.values
        return pack(
            _KIND,
            {
                "names": tensors.names,
                "tensor_sections": tensors.sections,
                "section": column(tensors.section),
                "dtypes": list(DTYPES),
                "dtype": column(tensors.dtype),
                "ndim": column(tensors.ndim),
                "shape": column(tensors.shape),
                "scope": column(self.scopes()),
                "pinned": flags(np.zeros(len(tensors), np.bool_) if self.pinned is None else self.pinned),
                "shard_tensor": column(shards.tensor),
                "offsets": column(shards.offsets),
                "lengths": column(shards.lengths),
                "value_section": [value.section for value in values],
                "value_path": [value.path for value in values],
                "value_digest": [value.digest for value in values],
                "value_size": column(np.array([value.size for value in values], np.int64)),
                "value_per_rank": flags(np.array([value.per_rank for value in values], np.bool_)),
                "aliases": [name for pair in self.aliases for name in pair],
                "sections": [name for pair in self.sections for name in pair],
            },
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> LocalPlan:
        """A peer's plan. Raises ``PlanError`` for bytes that ``to_bytes`` would not have written."""
        fields = Fields(_KIND, data)
        tensors = _tensors(fields)
        scope = fields.within("scope", fields.integers("scope", len(tensors)), -1, 2**31)
        return cls(
            tensors,
            _shards(fields, tensors),
            _values(fields),
            scope,
            fields.pairs("aliases"),
            fields.pairs("sections"),
            fields.flags("pinned", len(tensors)),
        )


def _tensors(fields: Fields) -> TensorTable:
    names = fields.strings("names")
    sections = fields.strings("tensor_sections")
    count = len(names)
    if len(set(names)) != count:
        raise fields.malformed("a tensor is listed twice")
    # Codes are positions in the sender's table; another version of the library may have another.
    if fields.strings("dtypes") != list(DTYPES):
        raise fields.malformed("the sender knows other dtypes")
    section = fields.within("section", fields.integers("section", count), 0, len(sections))
    dtype = fields.within("dtype", fields.integers("dtype", count), 0, len(DTYPES))
    ndim = fields.within("ndim", fields.integers("ndim", count), 0, _MAX_NDIM + 1)
    shape = fields.within("shape", fields.integers("shape", int(ndim.sum())), 0, _MAX_LENGTH)
    for name, code in zip(names, section.tolist()):
        if not name.startswith(sections[code] + "."):
            raise fields.malformed(f"tensor {name!r} is not of section {sections[code]!r}")
    return TensorTable(names, sections, section, dtype, ndim, shape)


def _shards(fields: Fields, tensors: TensorTable) -> BoxTable:
    tensor = fields.within("shard_tensor", fields.integers("shard_tensor"), 0, len(tensors))
    total = int(tensors.ndim[tensor].sum())
    offsets = fields.within("offsets", fields.integers("offsets", total), 0, _MAX_LENGTH)
    lengths = fields.within("lengths", fields.integers("lengths", total), 0, _MAX_LENGTH)
    return BoxTable.from_columns(tensors, tensor, offsets, lengths)


def _values(fields: Fields) -> list[ValueEntry]:
    paths = fields.blobs("value_path")
    count = len(paths)
    sizes = fields.within("value_size", fields.integers("value_size", count), 0, _MAX_LENGTH)
    rows = zip(
        fields.strings("value_section", count),
        paths,
        fields.blobs("value_digest", count),
        sizes.tolist(),
        fields.flags("value_per_rank", count).tolist(),
    )
    return [ValueEntry(*row) for row in rows]
