"""Rules for the tensors of a checkpoint: read, written, checked, and applied."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from importlib import resources
from typing import Literal

from ..errors import RuleError
from ..tensors.metadata import BasicMeta
from .compiled import Compiled, compile_rule, inverse_rule
from .faults import Faults
from .flat import add_flat_tensors
from .kinds import KINDS, Averaged, Flat, Ignored, Replicated, Rule, Shaped
from .patterns import Captures, numbered
from .placing import Matched
from .resolution import GlobalTensor, RankFile, Resolution, Source, in_stored_order, rank_files
from .shaping import Draft, shape_tensors
from .tables import check_files, parse_rules, read_table, rule_table, write_rules

_SETS = "sets"
_MAX_SUGGESTED = 256  # names among which the nearest are searched


class Rules:
    """A set of rules, whose order has no effect.

    Args:
        rules: The rules.
        files: The files that the ranks wrote, for a folder of another system: patterns of paths below the folder, in
            which ``{axis}`` is a coordinate of the rank, such as ``"rank{tp}-{dp}.pt"``. Empty if the rules describe
            the tensors of a checkpoint that the library can read without rules.

    Attributes:
        files: As in the arguments.

    Raises:
        RuleError: A rule contradicts itself. The error lists all that do.

    Example:
        >>> rules = Rules([Sharded(match="{name:path}.weight", dim=0, axis=("tp",))])
        >>> rules.to_toml() == Rules.from_toml(rules.to_toml()).to_toml()
        True
    """

    def __init__(self, rules: Iterable[Rule], files: str | Sequence[str] = ()) -> None:
        faults = Faults()
        self.files = check_files(files, faults)
        found = []
        for number, rule in enumerate(rules, 1):
            label = f"rule {number}"
            if type(rule) not in KINDS.values():
                faults.add("syntax", label, f"is {rule!r:.60}, which is no rule; kinds: {', '.join(KINDS)}")
                continue
            checked = read_table(rule_table(rule), label, {}, faults)
            if checked is not None:
                found.append((label, checked))
        self._compile(found, faults)

    @classmethod
    def from_toml(cls, text: str, variables: Mapping[str, int] | None = None) -> Rules:
        """Read rules.

        Args:
            text: A TOML document that consists of ``files``, if they are needed, and ``[[rule]]`` tables.
            variables: The values of numbers that the document states as a name, such as ``groups = "kv_heads"``.

        Returns:
            The rules.

        Raises:
            RuleError: The text is not such a document, or a rule contradicts itself. The error lists everything that is
                wrong, with line numbers.
        """
        faults = Faults()
        rules = cls.__new__(cls)
        found, rules.files = parse_rules(text, dict(variables or {}), faults)
        rules._compile(found, faults)
        return rules

    @classmethod
    def shipped(cls, *names: str, **variables: int) -> Rules:
        """Return rules that this library contains.

        Args:
            *names: The names of sets, whose rules are added up. ``docs/rules.md`` lists them.
            **variables: The numbers that the sets need, such as ``heads``.

        Returns:
            The rules.

        Raises:
            RuleError: There is no such set, or a number is missing.
        """
        folder = resources.files(__package__).joinpath(_SETS)
        known = sorted(file.name[: -len(".toml")] for file in folder.iterdir() if file.name.endswith(".toml"))
        unknown = [name for name in names if name not in known]
        if unknown:
            raise RuleError(f"there is no set of rules {unknown[0]!r}; sets: {', '.join(known)}")
        texts = [folder.joinpath(f"{name}.toml").read_text(encoding="utf-8") for name in names]
        return cls(rule for text in texts for rule in cls.from_toml(text, variables))

    def to_toml(self) -> str:
        """Return the document that ``from_toml`` reads as equal rules."""
        return write_rules(self, self.files)

    def inverse(self) -> Rules:
        """Return the rules with ``match`` and ``rename`` swapped: the map of names in the other direction.

        Returns:
            The rules.

        Raises:
            RuleError: A rule describes ranks, or loses what its inverse needs.
        """
        faults = Faults()
        found = []
        if self.files:
            faults.add("rule", "", f"files = {list(self.files)} describes ranks")
        for one in self._rules:
            inverse = inverse_rule(one.rule)
            if isinstance(inverse, str):
                faults.add("rule", "", f"{one} {inverse}")
            else:
                found.append(inverse)
        faults.check("these rules have no inverse")
        return Rules(found)

    def __iter__(self) -> Iterator[Rule]:
        return iter(one.rule for one in self._rules)

    def __len__(self) -> int:
        return len(self._rules)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rules) and list(self) == list(other) and self.files == other.files

    def __repr__(self) -> str:
        return f"Rules({list(self)}, files={self.files})"

    def rule_of(self, name: str) -> Rule | None:
        """Return the rule for a stored tensor called ``name``, the first one if there are several; None for no rule."""
        return next((one.rule for one, _ in self._matching(name)), None)

    def _matching(self, name: str) -> Iterator[tuple[Compiled, Captures]]:
        ends = name.rsplit(".", 2)[-2:]
        for end in dict.fromkeys((".".join(ends), ends[-1], "")):
            for rule in self._by_end.get(end, ()):
                captures = rule.match(name)
                if captures is not None:
                    yield rule, captures

    def rank_files(self, keys: Iterable[str]) -> list[RankFile]:
        """Find the files of the ranks.

        Args:
            keys: The paths of all files below a folder.

        Returns:
            The files that match ``files``, in the order of patterns and coordinates.

        Raises:
            RuleError: A pattern matches nothing, or several match one file.
        """
        faults = Faults()
        found = rank_files(self.files, keys, faults)
        faults.check("the rules do not explain the files")
        return found

    def resolve(
        self,
        sources: Iterable[Source],
        mesh: Mapping[str, int] | None = None,
        *,
        average: Literal["mean"] | None = None,
    ) -> Resolution:
        """Put the stored tensors of all ranks together. Reads nothing.

        Args:
            sources: The stored tensors.
            mesh: The number of ranks along each axis.
            average: How the caller computes tensors whose ranks hold different values; None if it cannot.

        Returns:
            The global tensors, and where their boxes are stored.

        Raises:
            RuleError: The rules do not explain what is stored. The error lists everything that is wrong.
        """
        sources = tuple(sources)
        mesh = dict(mesh or {})
        faults = Faults()
        _check_places(sources, mesh, faults)
        finder = _Finder(self._rules, self._matching, faults)
        shaped: list[Matched] = []
        flat: list[Matched] = []
        stored: dict[str, list[Source]] = {}
        for number, source in enumerate(sources):
            stored.setdefault(source.name, []).append(source)
            found = finder.find(source.name)
            if found is not None and isinstance(found[0].rule, (Shaped, Flat)):
                (flat if isinstance(found[0].rule, Flat) else shaped).append(Matched(number, source, *found))
        drafts = shape_tensors(shaped, mesh, faults)
        add_flat_tensors(flat, finder.find_shaped, mesh, stored, faults, drafts)
        finder.check_unused()
        tensors = {name: _finished(name, draft, sources, average, faults) for name, draft in drafts.items()}
        faults.check("the rules do not explain the stored tensors")
        return Resolution(sources, in_stored_order(tensors))

    def _compile(self, rules: Iterable[tuple[str, Rule]], faults: Faults) -> None:
        self._rules: list[Compiled] = []
        for label, rule in rules:
            compiled = compile_rule(rule, label)
            if isinstance(compiled, Compiled):
                self._rules.append(compiled)
            else:
                for detail in compiled:
                    faults.add("rule", label, detail)
        faults.check("the rules are not valid")
        # Most patterns end with literal text, so that few must be tried for a name.
        self._by_end: dict[str, list[Compiled]] = {}
        for one in self._rules:
            self._by_end.setdefault(one.pattern.end, []).append(one)


class _Finder:
    """Finds the rule of each name once, and adds to ``faults`` if it has none or several."""

    def __init__(
        self,
        rules: Sequence[Compiled],
        matching: Callable[[str], Iterable[tuple[Compiled, Captures]]],
        faults: Faults,
    ) -> None:
        self._rules, self._matching, self._faults = rules, matching, faults
        self._found: dict[str, tuple[Compiled, Captures] | None] = {}
        self._missing: list[str] = []

    def find(self, name: str) -> tuple[Compiled, Captures] | None:
        if name not in self._found:
            self._found[name] = self._search(name)
        return self._found[name]

    def find_shaped(self, name: str) -> tuple[Compiled, Captures] | None:
        """The rule of a member of a flat buffer; None if it is ignored."""
        found = self.find(name)
        return None if found is None or isinstance(found[0].rule, Ignored) else found

    def _search(self, name: str) -> tuple[Compiled, Captures] | None:
        found = list(self._matching(name))
        if len(found) == 1:
            return found[0]
        if found:
            both = " and ".join(f"{rule} of kind {rule.rule.kind!r}" for rule, _ in found)
            self._faults.add("ambiguous", name, f"is matched by {both}; change one of the patterns")
        else:
            self._missing.append(name)
        return None

    def check_unused(self) -> None:
        """Add names without a rule, and rules without a name."""
        for names in numbered(self._missing).values():
            by_match = {rule.rule.match: str(rule) for rule in self._rules}
            near = get_close_matches(names[0], by_match, cutoff=0)
            hint = f"; nearest: {', '.join(by_match[one] for one in near)}" if near else ""
            for name in names:
                self._faults.add(
                    "missing", name, f'has no rule{hint}; add one, with kind = "ignored" if it is not needed'
                )
        used = {id(found[0]) for found in self._found.values() if found}
        names = [group[0] for group in numbered(self._found).values()][:_MAX_SUGGESTED]
        for rule in self._rules:
            if id(rule) not in used and not rule.rule.optional:
                near = get_close_matches(rule.rule.match, names, cutoff=0)
                hint = f" (nearest: {', '.join(near)})" if near else ""
                detail = f"{rule} matches no tensor{hint}; correct it, remove it, or add optional = true"
                self._faults.add("unused", "", detail)


def _check_places(sources: Iterable[Source], mesh: Mapping[str, int], faults: Faults) -> None:
    """Each rank of an axis must have stored something, or else what it stored is missing."""
    seen: dict[str, set[int]] = {axis: set() for axis in mesh}
    outside: set[tuple[str, int]] = set()
    for source in sources:
        for axis, index in source.place.items():
            if axis not in mesh or not 0 <= index < mesh[axis]:
                outside.add((axis, index))
            else:
                seen[axis].add(index)
    for axis, index in sorted(outside):
        size = f"{mesh[axis]} ranks" if axis in mesh else "no ranks"
        faults.add("rank", "", f"tensors are stored by {axis}={index}, but the mesh has {size} on this axis")
    for axis, found in seen.items():
        lost = next((index for index in range(mesh[axis]) if index not in found), None)
        if found and lost is not None:
            faults.add(
                "rank", "", f"no tensor is stored by {axis}={lost} of {mesh[axis]} ranks; are its files missing?"
            )


def _finished(name: str, draft: Draft, sources: Sequence[Source], average: str | None, faults: Faults) -> GlobalTensor:
    rule = draft.rule.rule
    copies: Literal["same", "compare", "mean"] = "same"
    if isinstance(rule, Averaged):
        held = {tuple(sources[one.source].place.get(axis) for axis in rule.axis) for one in draft.regions}
        copies = "mean" if len(held) > 1 else "same"
        if copies == "mean" and average is None:
            faults.add(
                "average",
                name,
                f"{draft.rule} has a value that is in no file, because the ranks of {' x '.join(rule.axis)} hold "
                "different ones; compute it with `bcp reshard` and a method",
            )
    elif isinstance(rule, Replicated) and rule.compare:
        copies = "compare"
    return GlobalTensor(BasicMeta(draft.dtype, draft.shape), tuple(draft.regions), rule, copies)
