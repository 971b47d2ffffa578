"""Options of a load: which names take part, what may differ, and how bytes are read."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from ..errors import UsageError
from ..frameworks.per_rank import OnResize
from ..runtime.choices import check_choice
from ..runtime.limits import DEFAULT_DEADLINE_S
from .shared_reads.negotiation import ShareReads

__all__ = ["Cast", "Fault", "LoadOptions", "Rename", "Strictness", "renaming"]

Cast = Literal["exact", "widen", "any"]
"""``exact``: dtypes must be equal. ``widen``: casts that keep every value are allowed. ``any``: casts may round."""

Strictness = Literal["exact", "strict", "lenient"]
"""``exact``: every name must match. ``strict``: names that the adapter calls optional or ignorable (such as lazily
created optimizer state) may be missing or unused. ``lenient``: any name may, and the report lists it."""

Rename = Mapping[str, str] | Callable[[str], str]
"""Maps old names to new ones. Names that a mapping does not contain stay as they are."""


class Fault(NamedTuple):
    """One name that does not fit, as listed in ``MismatchError.faults``."""

    kind: str
    name: str
    detail: str


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """The caller's choices for one load, in terms of full names (``<section>.<name>``).

    ``include`` and ``exclude`` are shell patterns on the target's names or on section names. ``rename`` maps a stored
    full name to the target's. ``per_rank`` is the policy for values of single ranks when the world size differs.
    ``device`` is where meta tensors get memory. ``deadline_s`` bounds each wait for another rank.
    """

    framework: str | None = None
    strict: bool | Strictness | Mapping[str, bool | Strictness] = True
    include: Sequence[str] = ("*",)
    exclude: Sequence[str] = ()
    rename: Rename | None = None
    cast: Cast = "widen"
    per_rank: OnResize = "error"
    allow_pickle: bool = False
    verify: bool = True
    device: torch.device | None = None
    share_reads: ShareReads = "auto"
    deadline_s: float = DEFAULT_DEADLINE_S

    def check(self, sections: Iterable[str]) -> None:
        """Raise ``UsageError`` for an option that is invalid for a state with these sections."""
        names = set(sections)
        if isinstance(self.strict, Mapping) and not self.strict.keys() <= names:
            raise UsageError(f"strict names sections that are not in the state: {sorted(self.strict.keys() - names)}")
        for section in names:
            check_choice("strict", self.strictness(section), Strictness)
        check_choice("cast", self.cast, Cast)
        check_choice("per_rank", self.per_rank, OnResize)
        check_choice("share_reads", self.share_reads, ShareReads)
        for patterns in (self.include, self.exclude):
            if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
                raise UsageError(f"include and exclude are lists of patterns, not {patterns!r}")

    def strictness(self, section: str) -> Strictness:
        """The strictness of one section."""
        rule = self.strict.get(section, "strict") if isinstance(self.strict, Mapping) else self.strict
        if isinstance(rule, bool):
            return "strict" if rule else "lenient"
        return rule

    @property
    def selects_all(self) -> bool:
        """Whether every name takes part in the load."""
        return "*" in self.include and not self.exclude

    def selects(self, full_name: str) -> bool:
        """Whether the target's ``full_name`` takes part in the load."""
        if self.selects_all:
            return True
        return _matches(full_name, self.include) and not _matches(full_name, self.exclude)

    def selects_section(self, section: str) -> bool:
        """Whether any name of the section may take part; False only if the patterns certainly exclude all of them."""
        prefix = f"{section}."
        included = _matches(prefix, self.include) or any(_may_match_below(prefix, p) for p in self.include)
        return included and not any(_matches_all_below(prefix, p) for p in self.exclude)


def renaming(rename: Rename | None) -> Callable[[str], str]:
    """A rename argument as a function, which raises ``UsageError`` if the caller's function does not return a name."""
    if rename is None:
        return lambda name: name
    change = rename if callable(rename) else lambda name: rename.get(name, name)

    def renamed(name: str) -> str:
        new: object = change(name)
        if not isinstance(new, str):
            raise UsageError(f"rename returned {new!r} for {name!r}; return the name itself to leave it as is")
        return new

    return renamed


def _matches(full_name: str, patterns: Sequence[str]) -> bool:
    section = full_name.partition(".")[0]
    return any(fnmatch.fnmatchcase(full_name, p) or fnmatch.fnmatchcase(section, p) for p in patterns)


def _may_match_below(prefix: str, pattern: str) -> bool:
    """Whether a name that begins with ``prefix`` may match; True if in doubt."""
    literal = re.split(r"[*?\[]", pattern, maxsplit=1)[0]
    return literal.startswith(prefix) or (literal != pattern and prefix.startswith(literal))


def _matches_all_below(prefix: str, pattern: str) -> bool:
    """Whether every name that begins with ``prefix`` matches; False if in doubt."""
    is_section = fnmatch.fnmatchcase(prefix[:-1], pattern)
    return is_section or (pattern.endswith("*") and fnmatch.fnmatchcase(prefix, pattern))
