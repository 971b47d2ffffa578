"""Columnar tables of tensors and boxes, as numpy arrays, for millions of rows.

Planners and the manifest use the same two tables. A *ragged* column holds ``ndim`` numbers per row back to back;
``starts`` is where each row begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np

from .dtypes import DTYPES, DType
from .geometry import Box, Int64
from .metadata import BasicMeta

__all__ = ["BoxTable", "Int64", "TensorTable", "ragged_positions", "ragged_starts"]

_BY_CODE: tuple[DType, ...] = tuple(DTYPES.values())
_ITEMSIZE: Int64 = np.array([dtype.itemsize for dtype in _BY_CODE], np.int64)


def ragged_starts(counts: Int64) -> Int64:
    """Return where rows of these lengths begin when they lie back to back, and, last, where all end."""
    starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


@dataclass(eq=False)
class TensorTable:
    """Every tensor by name: section, dtype and global shape.

    A row number identifies a tensor within one plan or manifest. ``names`` are full (``<section>.<fqn>``) and unique;
    ``sections`` lists section names, and ``section`` is an index of it; ``dtype`` holds ``DType.code``; ``shape`` is
    ragged by ``ndim``.
    """

    names: list[str]
    sections: list[str]
    section: Int64
    dtype: Int64
    ndim: Int64
    shape: Int64

    def __post_init__(self) -> None:
        self.starts = ragged_starts(self.ndim)

    @classmethod
    def build(cls, rows: Iterable[tuple[str, str, BasicMeta]]) -> TensorTable:
        """Create a table from ``(section, fqn, meta)`` rows."""
        names: list[str] = []
        sections: dict[str, int] = {}
        indices: list[int] = []
        metas: list[BasicMeta] = []
        for section, fqn, meta in rows:
            names.append(f"{section}.{fqn}")
            indices.append(sections.setdefault(section, len(sections)))
            metas.append(meta)
        shapes = [meta.shape for meta in metas]
        return cls(
            names,
            list(sections),
            np.array(indices, np.int64),
            np.array([meta.dtype.code for meta in metas], np.int64),
            np.array(list(map(len, shapes)), np.int64),
            np.array(list(chain.from_iterable(shapes)), np.int64),
        )

    def __len__(self) -> int:
        return len(self.names)

    def shape_of(self, row: int) -> tuple[int, ...]:
        return tuple(self.shape[self.starts[row] : self.starts[row + 1]].tolist())

    def meta_of(self, row: int) -> BasicMeta:
        return BasicMeta(_BY_CODE[int(self.dtype[row])], self.shape_of(row))

    def metas(self, rows: Int64) -> list[BasicMeta]:
        """Return ``meta_of`` for many rows."""
        shape = self.shape.tolist()
        columns = (self.dtype[rows].tolist(), self.starts[rows].tolist(), self.starts[rows + 1].tolist())
        return [BasicMeta(_BY_CODE[code], tuple(shape[begin:end])) for code, begin, end in zip(*columns, strict=True)]

    def section_of(self, row: int) -> str:
        return self.sections[int(self.section[row])]

    def fqn_of(self, row: int) -> str:
        """Return the name within its section."""
        return self.names[row][len(self.section_of(row)) + 1 :]

    def itemsize(self) -> Int64:
        """Bytes per element, by row."""
        return _ITEMSIZE[self.dtype]

    def numel(self) -> Int64:
        """Elements, by row."""
        return _ragged_product(self.shape, self.starts)


@dataclass(eq=False)
class BoxTable:
    """Boxes of the tensors of a ``TensorTable``.

    ``tensor`` is the row in that table; ``offsets`` and ``lengths`` are ragged by the tensor's ndim.
    """

    tensor: Int64
    offsets: Int64
    lengths: Int64
    starts: Int64

    @classmethod
    def build(cls, rows: Sequence[tuple[int, Box]]) -> BoxTable:
        """Create a table from ``(tensor row, box)`` pairs."""
        return cls(
            np.array([row for row, _ in rows], np.int64),
            np.array(list(chain.from_iterable([box.offsets for _, box in rows])), np.int64),
            np.array(list(chain.from_iterable([box.lengths for _, box in rows])), np.int64),
            ragged_starts(np.array([len(box.offsets) for _, box in rows], np.int64)),
        )

    @classmethod
    def from_columns(cls, tensors: TensorTable, tensor: Int64, offsets: Int64, lengths: Int64) -> BoxTable:
        return cls(tensor, offsets, lengths, ragged_starts(tensors.ndim[tensor]))

    def __len__(self) -> int:
        return len(self.tensor)

    def __iter__(self) -> Iterator[Box]:
        """``box_of`` every row."""
        offsets, lengths = self.offsets.tolist(), self.lengths.tolist()
        valid = int(self.offsets.min(initial=0)) >= 0 and int(self.lengths.min(initial=0)) >= 0
        make = Box.unchecked if valid else Box
        for begin, end in pairwise(self.starts.tolist()):
            yield make(tuple(offsets[begin:end]), tuple(lengths[begin:end]))

    def box_of(self, row: int) -> Box:
        part = slice(int(self.starts[row]), int(self.starts[row + 1]))
        return Box(tuple(self.offsets[part].tolist()), tuple(self.lengths[part].tolist()))

    def numel(self) -> Int64:
        """Elements, by row."""
        return _ragged_product(self.lengths, self.starts)

    def nbytes(self, tensors: TensorTable) -> Int64:
        """Bytes, by row."""
        return self.numel() * tensors.itemsize()[self.tensor]

    def take(self, rows: Int64) -> BoxTable:
        """Return these rows, in this order."""
        counts = self.starts[rows + 1] - self.starts[rows]
        picked = ragged_positions(self.starts[rows], counts)
        return BoxTable(self.tensor[rows], self.offsets[picked], self.lengths[picked], ragged_starts(counts))


def ragged_positions(starts: Int64, counts: Int64) -> Int64:
    """Return the flat positions of rows that begin at ``starts`` and hold ``counts`` numbers each."""
    total = int(counts.sum())
    ends = np.cumsum(counts)
    positions: Int64 = np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - counts), counts)
    return positions


def _ragged_product(values: Int64, starts: Int64) -> Int64:
    """Return the product of each row's numbers; 1 for an empty row."""
    padded = np.append(values, 1)
    product: Int64 = np.empty(len(starts) - 1, np.int64)
    if len(product):
        np.multiply.reduceat(padded, starts[:-1], out=product)
    product[starts[1:] == starts[:-1]] = 1
    return product
