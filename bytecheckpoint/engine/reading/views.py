"""Shards that are boxes of other stored tensors, under other names: what rules make of a checkpoint.

Nothing is copied. A read of such a shard becomes a read of the box of the stored shard that has its elements, which is
checked like any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ...format.manifest.document import Manifest
from ...tensors.geometry import moved_box
from ...tensors.tables import BoxTable, Int64
from .placement import ReadPart


@dataclass(frozen=True, eq=False)
class StoredViews:
    """Where the elements of the shards of one manifest are, in terms of another one that describes the same files.

    Attributes:
        stored: The tables of what the files hold. The same elements may occur in several rows, as tensors of several
            shapes; a shard that begins before its file stands for a part that lies in the file.
        row: The row of the shard in ``stored`` that has the elements of each shard.
        within: The same elements as a box of the stored tensor. The lengths are those of the shard, except for
            dimensions of length 1. ``BoxTable.tensor`` is not used.
    """

    stored: Manifest
    row: Int64
    within: BoxTable

    def stored_parts(self, shards: BoxTable, parts: Iterable[ReadPart]) -> Iterator[ReadPart]:
        """Yield the reads of stored shards that do what ``parts``, reads of ``shards``, ask for."""
        for part in parts:
            if part.out.numel():
                within = moved_box(shards.box_of(part.row), self.within.box_of(part.row), part.box)
                yield ReadPart(int(self.row[part.row]), within, part.out.view(within.lengths))

    def take(self, rows: Int64) -> StoredViews:
        """Return the views of these shards, in this order."""
        return StoredViews(self.stored, self.row[rows], self.within.take(rows))
