"""Divide what a rank holds by section, for the rank that plans.

Ranks that hold the same of one section often hold different parts of another: data parallel ranks have the same model
and a part of the optimizer each. A table of each section is received, checked and merged once for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...errors import PlanError
from ...tensors.tables import BoxTable, Int64, TensorTable
from .local_plan import OWN_BOXES, WHOLE, LocalPlan, PlanTable, ValueNames

__all__ = ["SectionPlans"]


class SectionPlans:
    """A ``LocalPlan`` by section. Its tensors, own boxes and values are listed section by section."""

    def __init__(self, plan: LocalPlan) -> None:
        """Find the rows of each section.

        Args:
            plan: What a rank holds.

        Raises:
            PlanError: The plan's tensors are not listed section by section.
        """
        self._plan = plan
        listed = [value.section for value in plan.values]
        names = [*(name for name, _ in plan.sections), *plan.tensors.sections, *listed]
        self._number = {name: number for number, name in enumerate(dict.fromkeys(names))}
        of_section = np.array([self._number[name] for name in plan.tensors.sections], np.int64)
        self._section = of_section[plan.tensors.section]
        self._rows = self._stretches(self._section)
        held = np.full(len(plan.tensors), OWN_BOXES, np.int64) if plan.held is None else plan.held
        self._held = [held[rows] for rows in self._rows]
        self._layouts = [np.unique(held[held > WHOLE]) for held in self._held]

    def tables(self) -> list[PlanTable]:
        """Return what many ranks may have in common, by section.

        Returns:
            The tables.

        Raises:
            PlanError: The values are not listed section by section.
        """
        whole = self._plan.table()
        values, tensors = whole.values, whole.tensors
        value_rows = self._stretches(np.array([self._number[name] for name in values.sections], np.int64))
        aliases: dict[str, list[tuple[str, str]]] = {name: [] for name in self._number}
        for alias, target in whole.aliases:
            aliases[target.partition(".")[0]].append((alias, target))
        return [
            PlanTable(
                TensorTable(
                    tensors.names[rows],
                    [name],
                    np.zeros_like(tensors.section[rows]),
                    tensors.dtype[rows],
                    tensors.ndim[rows],
                    tensors.shape[int(tensors.starts[rows.start]) : int(tensors.starts[rows.stop])],
                ),
                whole.own[rows],
                whole.pinned[rows],
                whole.compared[rows],
                whole.must_match[rows],
                OWN_BOXES + np.searchsorted(np.concatenate(([OWN_BOXES, WHOLE], layouts)), held),
                [whole.layouts[number - 1] for number in layouts.tolist()],
                ValueNames(values.sections[named], values.paths[named], values.per_rank[named]),
                aliases[name],
                [pair for pair in whole.sections if pair[0] == name],
            )
            for name, rows, named, held, layouts in zip(self._number, self._rows, value_rows, self._held, self._layouts)
        ]

    def places(self) -> list[Int64]:
        """Return the rank's coordinates in the meshes of each section's layouts.

        Returns:
            By section, the coordinates in all meshes, one after the other.
        """
        coordinates = self._plan.coordinates
        return [
            np.array([one for number in layouts.tolist() for one in coordinates[number - 1]], np.int64)
            for layouts in self._layouts
        ]

    def boxes(self) -> list[BoxTable]:
        """Return the boxes that other ranks cannot compute, by section.

        Returns:
            The boxes, of tensors by their row in the section's table.

        Raises:
            PlanError: The boxes are not listed section by section.
        """
        boxes = self._plan.own_boxes()
        found = []
        for rows, listed in zip(self._rows, self._stretches(self._section[boxes.tensor])):
            part = boxes.part(listed)
            found.append(BoxTable(part.tensor - rows.start, part.offsets, part.lengths, part.starts))
        return found

    def _stretches(self, section: Int64) -> list[slice]:
        """Return the rows of each section."""
        if (section[1:] < section[:-1]).any():
            raise PlanError(f"a rank does not list what it holds in the order of its sections: {[*self._number]}")
        bounds: Sequence[int] = np.searchsorted(section, np.arange(len(self._number) + 1)).tolist()
        return list(map(slice, bounds, bounds[1:]))
