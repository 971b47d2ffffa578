"""What rules say: which files the ranks wrote, and which boxes of global tensors the stored tensors hold, and where."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import mul
from typing import Literal, NamedTuple

from ..tensors.dtypes import DType
from ..tensors.geometry import Box, moved_box, row_major_strides
from ..tensors.metadata import BasicMeta
from .faults import Faults
from .kinds import Rule


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


@dataclass(frozen=True)
class GlobalTensor:
    """A global tensor that stored tensors make up.

    Attributes:
        meta: Its dtype and shape.
        regions: Its boxes, and where they are stored. Together they cover the tensor. If several ranks hold copies,
            each has its region.
        rule: The rule of the stored tensors, or of the members of their flat buffers.
        copies: What regions of the same elements are: ``same`` (any may be used), ``compare`` (the reader must compare
            them), ``mean`` (the value is their mean).
    """

    meta: BasicMeta
    regions: tuple[Region, ...]
    rule: Rule
    copies: Literal["same", "compare", "mean"] = "same"


@dataclass(frozen=True)
class Resolution:
    """Which global tensors a list of stored tensors holds. The tensors are in the order in which they are stored.

    Attributes:
        sources: The stored tensors. ``Region.source`` is a position in this list.
        tensors: The global tensors by name.
    """

    sources: tuple[Source, ...]
    tensors: dict[str, GlobalTensor]

    def by_source(self) -> list[list[tuple[str, Region]]]:
        """Return what each stored tensor holds.

        Returns:
            For each source, global names and regions in the order of the source's elements. It is empty for tensors
            that are ignored, or are padding.
        """
        found: list[list[tuple[str, Region]]] = [[] for _ in self.sources]
        for name, tensor in self.tensors.items():
            for region in tensor.regions:
                found[region.source].append((name, region))
        for held in found:
            held.sort(key=lambda one: one[1].position)
        return found


def in_stored_order(tensors: dict[str, GlobalTensor]) -> dict[str, GlobalTensor]:
    def key(name: str) -> tuple[int, int]:
        regions: Sequence[Region] = tensors[name].regions
        return min(((region.source, region.position) for region in regions), default=(-1, 0))

    return {name: tensors[name] for name in sorted(tensors, key=key)}


def place_text(place: Mapping[str, int]) -> str:
    """Return the coordinates of a rank, for messages."""
    return ", ".join(f"{axis}={index}" for axis, index in place.items()) or "the only rank"


_AXIS = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
_MAX_SHOWN = 3


@dataclass(frozen=True)
class RankFile:
    """A file of one rank.

    Attributes:
        key: Its path below the folder.
        pattern: The number of the pattern that it matches.
        place: The coordinates of the rank by axis.
    """

    key: str
    pattern: int
    place: dict[str, int]


@dataclass(frozen=True)
class FilePattern:
    """The path of a file below the folder, in which ``{axis}`` is a decimal number, such as ``rank{tp}-{dp}.pt``."""

    text: str

    def fault(self) -> str | None:
        """Return what is wrong with the text; None if nothing is."""
        rest = _AXIS.sub("", self.text)
        axes = _AXIS.findall(self.text)
        if not self.text or any(part in ("", ".", "..") for part in self.text.split("/")):
            return "is no path below the folder"
        if "{" in rest or "}" in rest:
            return "has a part that is no axis; write {axis}"
        if len(set(axes)) != len(axes):
            return "has an axis twice"
        if re.search(r"\}[0-9]*\{", self.text):
            return "has two axes without text between them, so that it is unclear where one number ends"
        return None

    def match(self, key: str) -> dict[str, int] | None:
        """Return the coordinates in a file's key; None if it does not match."""
        found = self._expression.fullmatch(key)
        return None if found is None else {axis: int(number) for axis, number in found.groupdict().items()}

    @cached_property
    def _expression(self) -> re.Pattern[str]:
        parts = re.split(r"\{|\}", self.text)  # literal text and axes in turn
        return re.compile(
            "".join(f"(?P<{one}>[0-9]{{1,9}})" if n % 2 else re.escape(one) for n, one in enumerate(parts))
        )


def rank_files(patterns: Sequence[str], keys: Iterable[str], faults: Faults) -> list[RankFile]:
    """Return the files of all ranks, by pattern and coordinates. Adds what is wrong to ``faults``."""
    parsed = [FilePattern(text) for text in patterns]
    keys = list(keys)
    found: list[RankFile] = []
    used: set[int] = set()
    for key in keys:
        matches = [(n, place) for n, one in enumerate(parsed) if (place := one.match(key)) is not None]
        used.update(n for n, _ in matches)
        if len(matches) > 1:
            both = " and ".join(repr(patterns[n]) for n, _ in matches)
            faults.add("file", key, f"is matched by {both}; change one of the patterns")
        found += [RankFile(key, n, place) for n, place in matches[:1]]
    seen: dict[tuple[object, ...], str] = {}
    for one in found:
        other = seen.setdefault((one.pattern, *one.place.values()), one.key)
        if other != one.key:
            faults.add("file", one.key, f"has the same coordinates as {other!r}; remove one of them")
    for n, text in enumerate(patterns):
        if n not in used:
            shown = ", ".join(keys[:_MAX_SHOWN]) + (", ..." if len(keys) > _MAX_SHOWN else "")
            faults.add("file", "", f"files {text!r} matches no file; the folder has {shown or 'no files'}")
    return sorted(found, key=lambda one: (one.pattern, list(one.place.values())))
