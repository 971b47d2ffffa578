"""What rank 0 tells each rank of a save plan: what it is to write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..tables import Int64
from .local_plan import LocalPlan
from .wire import Bool, Fields, column, flags, pack

__all__ = ["Assignment", "pack_assignment"]

_KIND = "save assignment"


@dataclass(eq=False)
class Assignment:
    """What one rank is told to write: for each of its tensor files the section and the rows of its
    ``LocalPlan.shards`` in file order (``layout`` of their sizes gives the offsets), and which of its values."""

    files: list[tuple[str, Int64]]
    values: Int64
    shared: Bool

    def to_bytes(self) -> bytes:
        """For ``from_bytes``, on any machine."""
        sections = [section for section, _ in self.files]
        rows = [column(rows) for _, rows in self.files]
        return pack_assignment(sections, rows, column(self.values), flags(self.shared))

    @classmethod
    def from_bytes(cls, data: bytes, plan: LocalPlan | None = None) -> Assignment:
        """What the planning rank sent in answer to ``plan``, whose rows it must speak of.

        Raises ``PlanError`` for bytes that ``to_bytes`` would not have written.
        """
        fields = Fields(_KIND, data)
        shards, held = (2**62, 2**62) if plan is None else (len(plan.shards), len(plan.values))
        sections = fields.strings("sections")
        rows = fields.columns("rows", len(sections))
        values = fields.within("values", fields.integers("values"), 0, held)
        files = [(section, fields.within("rows", part, 0, shards)) for section, part in zip(sections, rows)]
        return cls(files, values, fields.flags("shared", len(values)))


def pack_assignment(sections: Sequence[str], rows: Sequence[object], values: object, shared: bytes) -> bytes:
    """An ``Assignment`` for ``from_bytes``, of which all columns and flags are packed already."""
    return pack(_KIND, {"sections": sections, "rows": rows, "values": values, "shared": shared})
