"""Regions: which elements of a stored tensor are a box of a global tensor."""

from __future__ import annotations

from operator import mul
from typing import NamedTuple

from ..tensors.dtypes import DType
from ..tensors.geometry import Box, moved_box, row_major_strides

__all__ = ["Region", "Source"]


class Source(NamedTuple):
    """A tensor as it is stored: what the rules explain.

    Attributes:
        name: Its name in the file.
        shape: Its shape in the file.
        dtype: Its dtype.
        place: The coordinates of the rank that stored it, by axis, such as ``{"tp": 1, "pp": 0}``. Axes that the
            tensor does not depend on may be missing.
        members: Of a flat buffer, the names and shapes of the tensors that the ranks of its axis divide, in order, if
            the file lists them.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    place: dict[str, int] = {}  # noqa: RUF012 - never changed
    members: tuple[tuple[str, tuple[int, ...]], ...] | None = None


class Region(NamedTuple):
    """A box of a global tensor, and the elements of one source that it consists of.

    The source's elements, from ``start`` on, are viewed as a row-major tensor of ``shape``. ``within`` is a box of this
    view that has the same elements as ``box`` in the same order. The lengths of the two boxes are equal except for
    dimensions of length 1, which either may have more of (a layer of a stacked tensor).

    Attributes:
        box: The box of the global tensor.
        source: The position of the source in the list that was resolved.
        within: The same elements in the view.
        shape: The shape of the view. It is the source's shape, unless the source is a flat buffer.
        start: The position of the view's first element in the source. It is 0, unless the source is a flat buffer. It
            is negative where the buffer holds only a later part of the view, which contains ``within``.
    """

    box: Box
    source: int
    within: Box
    shape: tuple[int, ...]
    start: int = 0

    @property
    def position(self) -> int:
        """The position of the first element in the source, in elements."""
        offset: int = sum(map(mul, self.within.offsets, row_major_strides(self.shape)))
        return self.start + offset

    @property
    def strides(self) -> tuple[int, ...]:
        """The distances in the source between neighbours along each dimension of ``box``, in elements; 0 for one."""
        steps = [s for s, n in zip(row_major_strides(self.shape), self.within.lengths) if n != 1]
        return tuple(0 if n == 1 else steps.pop(0) for n in self.box.lengths)

    @property
    def is_dense(self) -> bool:
        """Whether the elements are consecutive in the source, from ``position`` on."""
        dense = row_major_strides(self.box.lengths)
        return all(n == 1 or a == b for n, a, b in zip(self.box.lengths, self.strides, dense))

    def held_in(self, part: Box) -> Region | None:
        """Return the part of the region that lies in a box of the view.

        Use it for a source that is itself stored as several boxes.

        Args:
            part: A box of the view, such as a stored box of the source.

        Returns:
            The smaller region, in the coordinates of this one, or None if it has no element.
        """
        common = self.within.intersect(part)
        return None if common is None else self._replace(box=moved_box(self.within, self.box, common), within=common)

    def needed_for(self, part: Box) -> Region | None:
        """Return the part of the region that lies in a box of the global tensor.

        Args:
            part: A box of the global tensor, such as one that a load requests.

        Returns:
            The smaller region, or None if it has no element.
        """
        common = self.box.intersect(part)
        return None if common is None else self._replace(box=common, within=moved_box(self.box, self.within, common))
