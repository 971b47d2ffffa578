"""Select names with shell patterns, find patterns that select nothing, and suggest similar names."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..errors import MismatchError, UsageError

_MAX_COMPARED_NAMES = 2000  # bounds the time to find similar names
_MIN_SIMILARITY = 0.6  # difflib's ratio below which a suggestion would only confuse
_MAX_NEAREST = 3


@dataclass(frozen=True)
class Selection:
    """Shell patterns on full names (``<section>.<name>``) or section names. ``exclude`` applies after ``include``."""

    include: Sequence[str] = ("*",)
    exclude: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name, patterns in vars(self).copy().items():
            if isinstance(patterns, (list, set)):  # which the caller may change
                object.__setattr__(self, name, tuple(patterns))

    def check(self) -> None:
        """Raise ``UsageError`` unless both are lists of patterns, and ``include`` has one."""
        for patterns in (self.include, self.exclude):
            is_list = isinstance(patterns, Collection) and not isinstance(patterns, (str, bytes))
            if not is_list or not all(isinstance(pattern, str) for pattern in patterns):
                raise UsageError(f"include and exclude are lists of patterns, not {patterns!r}")
        if not self.include:
            raise UsageError("include is empty, which selects nothing; leave it out to select everything")

    @cached_property
    def selects_all(self) -> bool:
        """Whether every name is selected."""
        return not self.exclude and all(pattern == "*" for pattern in self.include)

    @cached_property
    def _included(self) -> re.Pattern[str]:
        return _union(self.include)

    @cached_property
    def _excluded(self) -> re.Pattern[str]:
        return _union(self.exclude)

    def selects(self, full_name: str) -> bool:
        """Whether ``full_name`` is selected."""
        return self.selects_all or (_matches(full_name, self._included) and not _matches(full_name, self._excluded))

    def selects_section(self, section: str) -> bool:
        """Whether any name of the section may be selected; False only if the patterns certainly select none."""
        prefix = f"{section}."
        included = _matches(prefix, self._included) or any(_may_match_below(prefix, p) for p in self.include)
        return included and not any(_matches_all_below(prefix, p) for p in self.exclude)

    def selects_all_of(self, section: str) -> bool:
        """Whether every name of the section is selected; False if in doubt."""
        prefix = f"{section}."
        included = any(_matches_all_below(prefix, p) for p in self.include)
        return (
            included
            and not _matches(prefix, self._excluded)
            and not any(_may_match_below(prefix, p) for p in self.exclude)
        )

    def unmatched(self, sections: Iterable[str], names: Iterable[str], unlisted: Iterable[str] = ()) -> list[list[str]]:
        """Return ``["include" or "exclude", pattern]`` for each pattern that matches nothing.

        If all match, but together they select none of the names, the patterns of ``exclude`` are returned. A pattern
        may match one of the full ``names``, or a section or everything in it. The names of the sections ``unlisted``
        are unknown; whatever may match one of them passes.
        """
        names = list(names)
        known = [*(f"{section}." for section in sections), *names]
        hidden = [f"{section}." for section in unlisted]
        found = []
        for argument, patterns in (("include", self.include), ("exclude", self.exclude)):
            for pattern in patterns:
                expression = _union([pattern])
                if not any(_matches(name, expression) for name in known) and not any(
                    _may_match_below(prefix, pattern) for prefix in hidden
                ):
                    found.append([argument, pattern])
        if not found and names and not any(map(self.selects, names)):
            return [["exclude, which leaves nothing", pattern] for pattern in self.exclude]
        return found


class Exclusion:
    """Shell patterns of names to leave out. It remembers which of them have matched none so far."""

    def __init__(self, patterns: Sequence[str]) -> None:
        Selection(exclude=patterns).check()
        self._patterns, self._unused = tuple(patterns), set(patterns)

    def __call__(self, name: str) -> bool:
        """Whether ``name`` is left out."""
        found = [pattern for pattern in self._patterns if fnmatch.fnmatchcase(name, pattern)]
        self._unused.difference_update(found)
        return bool(found)

    @property
    def unused(self) -> list[str]:
        """The patterns that have matched nothing."""
        return sorted(self._unused)

    def require_matches(self, url: str, names: Iterable[str]) -> None:
        """Raise ``MismatchError`` if a pattern has matched nothing. ``names`` are suggested."""
        if self._unused:
            similar, unused = SimilarNames(names), self.unused
            lines = [f"  {pattern}{similar.nearest(pattern)}" for pattern in unused]
            head = f"{url}: exclude has patterns that match nothing; nothing was written:"
            raise MismatchError("\n".join([head, *lines]), [("pattern", pattern, "exclude") for pattern in unused])


class SimilarNames:
    """Finds the names that are most similar to a given one."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = list(dict.fromkeys(names))
        self._by_leaf: dict[str, list[str]] = {}
        for name in self._names:
            self._by_leaf.setdefault(name.rpartition(".")[2], []).append(name)

    def suggestion(self, name: str) -> str:
        """Return `` (did you mean 'x'?)`` with the most similar name, or nothing if none is similar enough."""
        # Names of one network differ in the middle, so those with the same last component come first.
        pool = self._by_leaf.get(name.rpartition(".")[2]) or self._names
        close = difflib.get_close_matches(name, pool[:_MAX_COMPARED_NAMES], n=1, cutoff=_MIN_SIMILARITY)
        return f" (did you mean {close[0]!r}?)" if close else ""

    def nearest(self, pattern: str) -> str:
        """Return `` (nearest: 'x', 'y')`` with the names most similar to a pattern, however different they are."""
        leaf = self._by_leaf.get(pattern.rpartition(".")[2], [])
        pool = [*leaf[:_MAX_COMPARED_NAMES], *self._names[:_MAX_COMPARED_NAMES]]
        close = difflib.get_close_matches(pattern, dict.fromkeys(pool), n=_MAX_NEAREST, cutoff=0.0)
        return f" (nearest: {', '.join(map(repr, close))})" if close else ""


def _union(patterns: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(fnmatch.translate, patterns)) or r"(?!)")


def _matches(full_name: str, pattern: re.Pattern[str]) -> bool:
    return bool(pattern.match(full_name) or pattern.match(full_name.partition(".")[0]))


def _may_match_below(prefix: str, pattern: str) -> bool:
    """Whether a name that begins with ``prefix`` may match; True if in doubt."""
    literal = re.split(r"[*?\[]", pattern, maxsplit=1)[0]
    return literal.startswith(prefix) or (literal != pattern and prefix.startswith(literal))


def _matches_all_below(prefix: str, pattern: str) -> bool:
    """Whether every name that begins with ``prefix`` matches; False if in doubt."""
    is_section = fnmatch.fnmatchcase(prefix[:-1], pattern)
    return is_section or (pattern.endswith("*") and fnmatch.fnmatchcase(prefix, pattern))
