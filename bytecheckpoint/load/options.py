"""Options of a load: which names take part, what may differ, and how bytes are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

from ..checkpoint.selection import Selection
from ..errors import UsageError
from ..foreign.given_rules import GivenRules, rules_argument
from ..frameworks.per_rank import OnResize
from ..runtime.arguments import check_arguments, check_choice, choice
from ..runtime.limits import DEFAULT_DEADLINE_S
from .shared_reads.negotiation import ShareReads

__all__ = ["Cast", "Fault", "LoadOptions", "Rename", "Strictness", "renaming"]

Cast = Literal["exact", "widen", "any"]
"""``exact``: dtypes must be equal. ``widen``: casts that keep every value are allowed. ``any``: casts may round."""

Strictness = Literal["exact", "strict", "lenient", "skip_mismatched"]
"""``exact``: every name must match. ``strict``: names that the adapter calls optional or ignorable (such as lazily
created optimizer state) may be missing or unused. ``lenient``: any name may, and the report lists it.
``skip_mismatched``: like ``strict``, but tensors that are stored with another shape stay unchanged, and the report
lists them."""

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

    ``selection`` selects among the target's names. ``rename`` maps a stored full name to the target's. ``per_rank`` is
    the policy for values of single ranks when the world size differs. ``device`` is where meta tensors get memory.
    ``deadline_s`` bounds each wait for another rank. ``rules`` describe what is stored; ``checked`` reads them.
    """

    framework: str | None = None
    strict: bool | Strictness | Mapping[str, bool | Strictness] = True
    selection: Selection = field(default_factory=Selection)
    rename: Rename | None = None
    cast: Cast = "widen"
    per_rank: OnResize = "error"
    allow_pickle: bool = False
    verify: bool = True
    device: Any = None  # a torch.device, or what names one; `checked` turns it into a torch.device
    share_reads: ShareReads = "auto"
    deadline_s: float = DEFAULT_DEADLINE_S
    rules: GivenRules | None = None

    def checked(self) -> LoadOptions:
        """Return these options as the types that the code expects. Raises ``UsageError`` if one is invalid."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        choices = {"cast": choice(Cast), "per_rank": choice(OnResize), "share_reads": choice(ShareReads)}
        options = replace(self, **check_arguments(values, **choices, rules=rules_argument))
        options.selection.check()
        return options

    def check(self, sections: Iterable[str]) -> None:
        """Raise ``UsageError`` if ``strict`` is invalid for a state with these sections."""
        names = set(sections)
        if isinstance(self.strict, Mapping) and not self.strict.keys() <= names:
            raise UsageError(
                f"strict names sections that are not in the state: {sorted(self.strict.keys() - names, key=str)}"
            )
        for section in names:
            check_choice("strict", self.strictness(section), Strictness)

    def strictness(self, section: str) -> Strictness:
        """The strictness of one section."""
        rule = self.strict.get(section, "strict") if isinstance(self.strict, Mapping) else self.strict
        if isinstance(rule, bool):
            return "strict" if rule else "lenient"
        return rule


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
