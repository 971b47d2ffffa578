"""The options of loads, and one load as the caller requests it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.location import Location
from ..checkpoint.renaming import Rename
from ..checkpoint.selection import Selection
from ..errors import KeyNotFoundError, UsageError
from ..foreign.source_path import open_parent
from ..format.values.types import path_name
from ..frameworks.per_rank import OnResize, choose_rank
from ..rules import Rules
from ..runtime import DEFAULT_DEADLINE_S
from ..runtime.arguments import check_arguments, check_choice, choice, options_of
from ..tensors.shards import Path
from .shared_reads.negotiation import ShareReads

GivenRules: TypeAlias = Rules | str | os.PathLike[str]
"""Rules, the path or URL of a TOML file, or the name of a set of rules that the library contains."""

_MAX_BYTES = 16 << 20


def read_rules(source: str, variables: Mapping[str, int] | None = None) -> Rules:
    """Return the rules of a file or of a set.

    Args:
        source: A path or URL that ends in ``.toml`` or contains a slash, or the name of a set.
        variables: The values of numbers that the rules state as names.

    Returns:
        The rules.

    Raises:
        UsageError: There is no such file.
        RuleError: The rules are not valid, or there is no such set.
        StorageError: The file cannot be read.
    """
    if not source.endswith(".toml") and "/" not in source:
        return Rules.shipped(source, **dict(variables or {}))
    try:
        text = open_parent(Location(source)).get(source.rpartition("/")[2], max_size=_MAX_BYTES)
    except KeyNotFoundError as error:
        raise UsageError(f"there is no file of rules {source}; check the path") from error
    try:
        return Rules.from_toml(text.decode(), variables)
    except UnicodeDecodeError as error:
        raise UsageError(f"{source} is no file of rules: it is not UTF-8 text ({error})") from error


def rules_argument(name: str, value: Any) -> Rules | None:
    """Return the argument ``name`` as rules. Raises as ``read_rules``, and ``UsageError`` for another type."""
    if value is None or isinstance(value, Rules):
        return value
    if isinstance(value, (str, os.PathLike)):
        return read_rules(os.fspath(value))
    raise UsageError(f"{name} must be Rules, the path of a TOML file, or the name of a set of rules, not {value!r:.80}")


Cast = Literal["exact", "widen", "any"]
"""``exact``: dtypes must be equal. ``widen``: casts that keep every value are allowed. ``any``: casts may round."""

Strictness = Literal["exact", "strict", "lenient", "skip_mismatched"]
"""``exact``: every name must match. ``strict``: names that the adapter calls optional or ignorable (such as lazily
created optimizer state) may be missing or unused. ``lenient``: any name may, and the report lists it.
``skip_mismatched``: like ``strict``, but tensors that are stored with another shape stay unchanged, and the report
lists them."""


class Fault(NamedTuple):
    """One name that does not fit, as listed in ``MismatchError.faults``."""

    kind: str
    name: str
    detail: str


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How checkpoints are read. A mapping of these names to values stands for it wherever it is accepted.

    ``bytecheckpoint.open`` uses ``verify``, ``rules`` and ``deadline_s``; the others state how a state is filled.

    Args:
        verify: Check all bytes that are read against their checksums.
        per_rank: What to do with values that were stored for each rank if the world size has changed. "error" raises.
            "lowest" gives rank 0's value to every rank. "modulo" gives rank ``r`` the value of saved rank
            ``r % saved_world_size``. "skip" leaves the present value.
        device: Where meta tensors get memory.
        rules: What the stored tensors are (``docs/rules.md``): ``bytecheckpoint.rules.Rules``, the path of a TOML file,
            or the name of a set of rules of this library. The tensors then have the names and shapes that the rules
            make; ``rename`` sees these names. Nothing is copied: reads go to the stored bytes.
        share_reads: Whether one rank reads bytes that several ranks need and forwards them to the others. "auto" does
            so where it is likely to be faster: always among ranks on several hosts; on a single host only if the files
            are not in its page cache, and for files on its own disk only among four or more ranks. Ranks that need
            different columns of the same matrices each read some of the rows and exchange their parts. "always" and
            "never" override this.
        framework: Name of the adapter to use for all sections; by default it is inferred from each object.
        allow_pickle: Load values that are stored as pickles. Unpickling can run arbitrary code: use it only if you
            trust the author of the checkpoint.
        deadline_s: Seconds that each single wait may take: for another rank or for storage. By default 600, or what
            ``JobOptions`` of a ``CheckpointManager`` say.

    Example:
        >>> bcp.load("runs/7b/step-1000", state, options=bcp.LoadOptions(per_rank="lowest"))
    """

    verify: bool = True
    per_rank: OnResize = "error"
    device: Any = None  # a torch.device, or what names one
    rules: GivenRules | None = None
    share_reads: ShareReads = "auto"
    framework: str | None = None
    allow_pickle: bool = False
    deadline_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class LoadRequest(LoadOptions):
    """One load: its options, and the caller's other choices, in terms of full names (``<section>.<name>``).

    ``source`` is where the checkpoint is, or one that is open. ``selection`` selects among the target's names. The
    ``optional`` sections stay unchanged if they are not stored.
    ``rename`` maps a stored full name to the target's. ``device`` and ``rules`` have the types that the code expects.
    """

    source: Location | Checkpoint
    device: torch.device | None = None
    rules: Rules | None = None
    deadline_s: float = DEFAULT_DEADLINE_S
    strict: bool | Strictness | Mapping[str, bool | Strictness] = True
    selection: Selection = field(default_factory=Selection)
    rename: Rename | None = None
    cast: Cast = "widen"
    optional: frozenset[str] = frozenset()

    @classmethod
    def of(cls, options: LoadOptions | Mapping[str, Any] | None, **rest: Any) -> LoadRequest:
        """Return a load with these options and other fields, checked. Raises ``UsageError`` if one is invalid."""
        given = options_of(LoadOptions, options)
        values = {one.name: getattr(given, one.name) for one in fields(LoadOptions)} | rest
        if values["deadline_s"] is None:
            values["deadline_s"] = DEFAULT_DEADLINE_S
        if values["rules"] is not None and isinstance(values["source"], Checkpoint):
            raise UsageError("rules do not apply to an open Checkpoint; pass them to bcp.open")
        choices = {"per_rank": choice(OnResize), "share_reads": choice(ShareReads), "cast": choice(Cast)}
        request = cls(**check_arguments(values, **choices, rules=rules_argument))
        request.selection.check()
        return request

    @property
    def location(self) -> Location:
        """The location of the checkpoint."""
        assert isinstance(self.source, Location)
        return self.source

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


@dataclass(eq=False, kw_only=True)
class RankChoices:
    """Which saved rank's own values this rank loads into one section, by the policy with the longest matching path.

    ``skipped`` collects the names that the policies leave unchanged, ``faults`` those that they refuse to load.
    """

    section: str
    options: LoadRequest
    policies: Mapping[Path, str]
    saved_world_size: int
    rank: int
    world_size: int
    skipped: set[str | Path] = field(default_factory=set, init=False)
    faults: list[Fault] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        sizes = self.saved_world_size, self.rank, self.world_size
        self._policies = {(): self.options.per_rank, **self.policies}
        self._chosen = {policy: choose_rank(*sizes, policy) for policy in self._policies.values()}

    @property
    def ranks(self) -> set[int]:
        """The saved ranks whose values must be read."""
        ranks = {rank for rank in self._chosen.values() if rank is not None}
        # Under the policy "error", rank 0's values are read to name those that the load would lose.
        return ranks | {0} if self.saved_world_size != self.world_size else ranks

    def choose(self, name: str | Path, path: Path) -> int | None:
        """The saved rank whose ``name`` is loaded; None, which is recorded, if its policy selects no rank."""
        policy = next(self._policies[path[:n]] for n in range(len(path), -1, -1) if path[:n] in self._policies)
        rank = self._chosen[policy]
        if rank is None:
            self.skipped.add(name)
            if policy == "error":
                self._refuse(name)
        return rank

    def _refuse(self, name: str | Path) -> None:
        full = f"{self.section}.{name if isinstance(name, str) else path_name(name)}"
        fault = Fault("per_rank", full, f"saved by {self.saved_world_size} rank(s), loaded by {self.world_size}")
        if fault not in self.faults and self.options.selection.selects(full):
            self.faults.append(fault)
