"""Which files the ranks wrote: patterns of file names whose captures are the coordinates of a rank."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from .faults import Faults

__all__ = ["FilePattern", "RankFile", "rank_files"]

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
