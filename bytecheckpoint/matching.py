"""Names wanted against names stored: what is missing, unexpected, of another shape or type - all of it, at once.

Pure: knows names, metas and the caller's rules, neither tensors nor files.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from .dtypes import casts_at_all, casts_losslessly
from .errors import MismatchError, StateError
from .metadata import BasicMeta

__all__ = [
    "Cast",
    "Fault",
    "Rename",
    "Rules",
    "Strictness",
    "dtype_fault",
    "fault_lines",
    "mismatch_error",
    "renaming",
]

Cast = Literal["exact", "widen", "any"]
"""``exact``: dtypes must be equal. ``widen``: casts that keep every value. ``any``: also those that round."""

Strictness = Literal["exact", "strict", "lenient"]
"""``strict``: what the adapter calls optional or ignorable may be missing or left over (lazily created optimizer
state). ``exact``: nothing may. ``lenient``: anything may, and is reported."""

Rename = Mapping[str, str] | Callable[[str], str]
"""From old names to new ones; names that a mapping does not have stay as they are."""

Fault = tuple[str, str, str]
"""``(kind, full name, detail)``, as in ``MismatchError.faults``."""

_SHOWN = 40  # faults of one kind that a message spells out


@dataclass(frozen=True)
class Rules:
    """What the caller of ``load`` asked for, in terms of full names (``<section>.<name in it>``).

    ``include`` and ``exclude`` are shell patterns on the target's names, or on those of whole sections; ``rename``
    takes a stored full name to the name the target knows it by.
    """

    include: Sequence[str] = ("*",)
    exclude: Sequence[str] = ()
    rename: Rename | None = None
    strict: bool | Strictness | Mapping[str, bool | Strictness] = "strict"
    cast: Cast = "widen"

    @cached_property
    def selects_all(self) -> bool:
        """Whether every name takes part in the load, whatever it is."""
        return "*" in self.include and not self.exclude

    def selects(self, full_name: str) -> bool:
        """Whether this target name takes part in the load."""
        if self.selects_all:
            return True
        return _matches(full_name, self.include) and not _matches(full_name, self.exclude)

    def selects_some_of(self, section: str) -> bool:
        """Whether the section takes part at all; False only where the patterns leave out everything below it."""
        below = f"{section}."
        included = _matches(below, self.include) or any(_may_match_below(below, p) for p in self.include)
        return included and not any(_matches_all_below(below, p) for p in self.exclude)

    def renamed(self, full_name: str) -> str:
        """The target's name of a stored one."""
        return renaming(self.rename)(full_name)

    def strictness(self, section: str) -> Strictness:
        rule = self.strict.get(section, "strict") if isinstance(self.strict, Mapping) else self.strict
        if isinstance(rule, bool):
            return "strict" if rule else "lenient"
        return rule

    def check(self, sections: Iterable[str]) -> None:
        """Raise ``StateError`` for rules that cannot mean anything."""
        names = set(sections)
        if isinstance(self.strict, Mapping) and not self.strict.keys() <= names:
            raise StateError(f"strict names sections that are not in the state: {sorted(self.strict.keys() - names)}")
        for section in names:
            if self.strictness(section) not in ("exact", "strict", "lenient"):
                raise StateError(
                    f"strict must be a bool, 'exact', 'strict' or 'lenient', not {self.strictness(section)!r}"
                )
        if self.cast not in ("exact", "widen", "any"):
            raise StateError(f"cast must be 'exact', 'widen' or 'any', not {self.cast!r}")
        for patterns in (self.include, self.exclude):
            if isinstance(patterns, str) or not all(isinstance(p, str) for p in patterns):
                raise StateError(f"include and exclude are lists of patterns, not {patterns!r}")


def renaming(rename: Rename | None) -> Callable[[str], str]:
    """A rename argument as a function. That raises ``StateError`` where the caller's returns what is no name."""
    if rename is None:
        return lambda name: name
    change = rename if callable(rename) else lambda name: rename.get(name, name)

    def renamed(name: str) -> str:
        new: object = change(name)
        if not isinstance(new, str):
            raise StateError(f"rename returned {new!r} for {name!r}; return the name itself to leave it as is")
        return new

    return renamed


def _matches(full_name: str, patterns: Sequence[str]) -> bool:
    section = full_name.partition(".")[0]
    return any(fnmatch.fnmatchcase(full_name, p) or fnmatch.fnmatchcase(section, p) for p in patterns)


def _may_match_below(below: str, pattern: str) -> bool:
    """Whether some name that begins with ``below`` may match; True where that is not plain to see."""
    fixed = re.split(r"[*?\[]", pattern, maxsplit=1)[0]
    return fixed.startswith(below) or (fixed != pattern and below.startswith(fixed))


def _matches_all_below(below: str, pattern: str) -> bool:
    """Whether every name that begins with ``below`` matches; False where that is not plain to see."""
    whole = fnmatch.fnmatchcase(below[:-1], pattern)
    return whole or (pattern.endswith("*") and fnmatch.fnmatchcase(below, pattern))


def dtype_fault(stored: BasicMeta, wanted: BasicMeta, cast: Cast) -> str | None:
    """Why ``stored`` may not be cast to ``wanted`` under this policy; None if it may."""
    a, b = stored.dtype, wanted.dtype
    if a == b or (cast != "exact" and casts_losslessly(a, b)) or (cast == "any" and casts_at_all(a, b)):
        return None
    if not casts_at_all(a, b):
        return f"stored as {a}, wanted as {b}: no meaningful cast exists"
    hint = "cast='any' allows it" if not casts_losslessly(a, b) else "cast='widen' allows it"
    return f"stored as {a}, wanted as {b}: {hint}"


@dataclass
class _Suggestions:
    """Close matches among the stored names, looked up only for the faults that are shown."""

    names: Sequence[str]
    _by_leaf: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.names:
            self._by_leaf.setdefault(name.rpartition(".")[2], []).append(name)

    def near(self, name: str) -> str:
        # Names of one network differ in the middle, so those with the same last component are tried first.
        pool = self._by_leaf.get(name.rpartition(".")[2], []) or list(self.names)
        found = difflib.get_close_matches(name, pool[:2000], n=1, cutoff=0.6)
        return f" (did you mean {found[0]!r}?)" if found else ""


_ADVICE = {
    "missing": "not in the checkpoint; strict=False or exclude=[...] leaves them as they are, rename= maps other names",
    "unexpected": "stored, but nothing in the state takes them; strict=False or exclude=[...] leaves them unread",
    "shape": "stored with another shape",
    "dtype": "stored with another dtype",
    "value": "a stored value does not fit",
    "per_rank": "stored for each rank of another world size; per_rank='lowest', 'modulo' or 'skip' says what to take",
    "coverage": "not fully stored",
}


def mismatch_error(url: str, faults: Sequence[Fault], stored_names: Sequence[str]) -> MismatchError:
    """One error that lists every fault, by kind, with close matches for missing names."""
    head = f"{url} does not fit the state that was given ({len(faults)} fault(s)); nothing was changed:"
    return MismatchError("\n".join([head, *fault_lines(faults, stored_names, _ADVICE)]), list(faults))


def fault_lines(faults: Sequence[Fault], names: Sequence[str], advice: Mapping[str, str]) -> list[str]:
    """The faults for a message, by kind in the order of ``advice``; a missing one with its nearest in ``names``."""
    suggestions = _Suggestions(names)
    lines: list[str] = []
    for kind, what_to_do in advice.items():
        some = sorted({(name, detail) for k, name, detail in faults if k == kind})
        if not some:
            continue
        lines.append(f"  {kind}: {len(some)} {what_to_do}".rstrip())
        for name, detail in some[:_SHOWN]:
            near = suggestions.near(name) if kind == "missing" else ""
            lines.append(f"    {name}{': ' + detail if detail else ''}{near}")
        if len(some) > _SHOWN:
            lines.append(f"    ... and {len(some) - _SHOWN} more (all are in the error's .faults)")
    return lines
