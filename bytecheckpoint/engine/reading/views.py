"""Shards that are boxes of other stored tensors, under other names: what rules make of a checkpoint.

Nothing is copied. A read of such a shard becomes a read of the box of the stored shard that has its elements, which is
checked like any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ...errors import StateError
from ...format.manifest.document import Manifest
from ...tensors.geometry import moved_box
from ...tensors.tables import BoxTable, Int64
from .placement import ReadPart

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class StoredViews:
    """Where the elements of the shards of one manifest are, in terms of another one that describes the same files.

    Attributes:
        stored: The tables of what the files hold. The same elements may occur in several rows, as tensors of several
            shapes; a shard that begins before its file stands for a part that lies in the file.
        row: The row of the shard in ``stored`` that has the elements of each shard.
        within: The same elements as a box of the stored tensor. The lengths are those of the shard, except for
            dimensions of length 1. ``BoxTable.tensor`` is not used.
        others: Further views, if the value of a shard is the mean of several. Their ``row`` is -1 for all
            other shards. A reader refuses to read a mean; a rewrite computes it.
    """

    stored: Manifest
    row: Int64
    within: BoxTable
    others: tuple[StoredViews, ...] = ()

    @property
    def averaged(self) -> BoolArray:
        """Whether the value of each shard is a mean, which is in no file."""
        found = np.zeros(len(self.row), bool)
        for other in self.others:
            found |= other.row >= 0
        return found

    def alone(self) -> list[StoredViews]:
        """Return these views and the others, each to be read separately. A row of -1 has no shard."""
        return [replace(self, others=()), *self.others]

    def stored_parts(self, shards: BoxTable, parts: Iterable[ReadPart]) -> Iterator[ReadPart]:
        """Yield the reads of stored shards that do what ``parts``, reads of ``shards``, ask for."""
        averaged = self.averaged
        for part in parts:
            if averaged[part.row]:
                raise StateError("a value is the mean of what several ranks stored, which only bcp reshard computes")
            if part.out.numel():
                within = moved_box(shards.box_of(part.row), self.within.box_of(part.row), part.box)
                yield ReadPart(int(self.row[part.row]), within, part.out.view(within.lengths))

    def take(self, rows: Int64) -> StoredViews:
        """Return the views of these shards, in this order."""
        others = tuple(other.take(rows) for other in self.others)
        return StoredViews(self.stored, self.row[rows], self.within.take(rows), others)
