"""What rank 0 sends each rank of a save plan: the shards and values that it writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...tensors.tables import Int64
from ..wire import Bool, Fields, pack_column, pack_flags, pack_message
from .local_plan import LocalPlan

__all__ = ["Assignment", "pack_assignment"]

_KIND = "save assignment"


@dataclass(eq=False)
class Assignment:
    """What one rank writes.

    Attributes:
        files: For each tensor file, the section and the rows of the rank's ``LocalPlan.shards`` in file order.
            ``consecutive_offsets`` of their sizes gives their offsets.
        values: Rows of the rank's ``LocalPlan.values``.
        shared: Whether the rank writes a value for all ranks, by row of ``values``.
    """

    files: list[tuple[str, Int64]]
    values: Int64
    shared: Bool

    def to_bytes(self) -> bytes:
        """Pack for ``from_bytes``.

        Returns:
            Bytes that any machine can unpack.
        """
        sections = [section for section, _ in self.files]
        rows = [pack_column(rows) for _, rows in self.files]
        return pack_assignment(sections, rows, pack_column(self.values), pack_flags(self.shared))

    @classmethod
    def from_bytes(cls, data: bytes, plan: LocalPlan | None = None) -> Assignment:
        """Unpack what the planning rank sent.

        Args:
            data: What ``to_bytes`` has returned.
            plan: The plan to whose rows the assignment refers; None to skip this check.

        Returns:
            The assignment.

        Raises:
            PlanError: ``to_bytes`` cannot have written the bytes.
        """
        fields = Fields(_KIND, data)
        shards, held = (2**62, 2**62) if plan is None else (len(plan.shards), len(plan.values))
        sections = fields.strings("sections")
        rows = fields.columns("rows", len(sections))
        values = fields.in_range("values", fields.integers("values"), 0, held)
        files = [(section, fields.in_range("rows", part, 0, shards)) for section, part in zip(sections, rows)]
        return cls(files, values, fields.flags("shared", len(values)))


def pack_assignment(sections: Sequence[str], rows: Sequence[object], values: object, shared: bytes) -> bytes:
    """Pack an ``Assignment`` whose columns and flags are already packed."""
    return pack_message(_KIND, {"sections": sections, "rows": rows, "values": values, "shared": shared})
