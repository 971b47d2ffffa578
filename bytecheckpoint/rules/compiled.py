"""Check a rule by itself, and prepare it for use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from .dims import WHOLE, Parts
from .kinds import Averaged, Flat, Ignored, Replicated, Rule, Shaped, Sharded, Split
from .patterns import MEMBER, PART, Captures, Pattern, PatternError

_MAX_ATOMS = 1 << 20


@dataclass(frozen=True, eq=False)
class Compiled:
    """A rule that contradicts nothing.

    ``label`` names it in messages, ``pattern`` and ``template`` are its two names, ``joined`` and ``spread`` are the
    stacked captures that the stored and the global name has.
    """

    rule: Rule
    label: str
    pattern: Pattern
    template: Pattern | None = None
    joined: tuple[str, ...] = ()
    spread: tuple[str, ...] = ()
    parts: Parts = field(default_factory=Parts)

    def __str__(self) -> str:
        return f"{self.label} ({self.rule.match!r})"

    def match(self, name: str) -> Captures | None:
        return self.pattern.match(name, self.parts.names)

    @property
    def joins_parts(self) -> bool:
        """Whether the stored tensors are parts of the global one."""
        return PART in self.pattern.fields

    @property
    def splits_parts(self) -> bool:
        """Whether the parts of the stored tensor are global tensors."""
        return self.template is not None and PART in self.template.fields

    @cached_property
    def splits(self) -> tuple[Split, ...]:
        """Which axes divide which dimensions."""
        if not isinstance(self.rule, Sharded):
            return ()
        return (Split(dim=self.rule.dim, axis=self.rule.axis), *self.rule.also)

    @property
    def replicas(self) -> tuple[str, ...] | None:
        """The axes whose ranks may hold copies; None for all."""
        if isinstance(self.rule, Averaged):
            return (*self.rule.axis, *self.rule.replicas)
        if isinstance(self.rule, Replicated):
            return None
        return self.rule.replicas if isinstance(self.rule, Sharded) else ()


def compile_rule(rule: Rule, label: str) -> Compiled | list[str]:
    """Return the rule, or what is wrong with it."""
    try:
        pattern = Pattern.parse(rule.match)
    except PatternError as error:
        return [f"match {rule.match!r} {error}"]
    if isinstance(rule, Flat):
        return _compile_flat(rule, label, pattern)
    if isinstance(rule, Shaped):
        return _compile_shaped(rule, label, pattern)
    assert isinstance(rule, Ignored)
    return _reserved(pattern, MEMBER, PART) or Compiled(rule, label, pattern)


def inverse_rule(rule: Rule) -> Rule | str:
    """Return the rule with both names swapped, or why there is none."""
    if isinstance(rule, Ignored):
        return "ignores tensors, which cannot be made"
    if not isinstance(rule, Shaped) or isinstance(rule, (Sharded, Averaged)):
        return "describes ranks"
    if rule.indexed or rule.padded_from is not None:
        return f"has {'indexed' if rule.indexed else 'padded_from'}, which loses what the inverse needs"
    rule = replace(rule, pairs=rule.halves, halves=rule.pairs)
    if rule.rename is None:
        return rule
    pattern, template = Pattern.parse(rule.match), Pattern.parse(rule.rename)
    kinds: dict[str, Literal["text", "int", "path"]] = {**template.fields, **pattern.fields}
    kinds |= dict.fromkeys(rule.stacked, "int")
    text = pattern.retyped(dict.fromkeys(pattern.fields, "text"))
    return replace(rule, match=str(template.retyped(kinds)), rename=str(text))


def _compile_flat(rule: Flat, label: str, pattern: Pattern) -> Compiled | list[str]:
    try:
        template = Pattern.parse(rule.rename)
    except PatternError as error:
        return [f"rename {rule.rename!r} {error}"]
    found = _reserved(pattern, MEMBER, PART)
    if MEMBER not in template.fields:
        found.append(f"rename {rule.rename!r} lacks {{member}}, so that all members would have one name")
    found += _unknown(template, {*pattern.fields, MEMBER})
    return found or Compiled(rule, label, pattern, template.retyped({**pattern.fields, MEMBER: "path"}))


def _compile_shaped(rule: Shaped, label: str, pattern: Pattern) -> Compiled | list[str]:
    if rule.rename is None and pattern.has_wildcards:
        template = None
    else:
        text = rule.match if rule.rename is None else rule.rename
        try:
            template = Pattern.parse(text)
        except PatternError as error:
            return [f"rename {text!r} is not invertible: it {error}"]
    found = [*_reserved(pattern, MEMBER), *_name_faults(rule, pattern, template), *_shape_faults(rule)]
    if found:
        return found
    there = set(template.fields) if template else set()
    parts = _parts(rule)
    if template is not None:
        kinds: dict[str, Literal["text", "int", "path"]] = {**dict.fromkeys(rule.stacked, "int"), **pattern.fields}
        kinds[PART] = "text"
        template = template.retyped(kinds)
        try:
            Pattern.parse(str(template))
        except PatternError as error:
            return [f"rename {rule.rename!r} is not invertible: with its captures, it {error}"]
    joined = tuple(name for name in rule.stacked if name not in there)
    spread = tuple(name for name in rule.stacked if name in there)
    return Compiled(rule, label, pattern, template, joined, spread, parts)


def _parts(rule: Shaped) -> Parts:
    sizes = rule.parts
    if isinstance(sizes, Mapping):
        sizes = {part: size * rule.unit for part, size in sizes.items()}
    widths = rule.widths if isinstance(rule, Sharded) else {}
    if not isinstance(widths, Mapping):
        widths = {WHOLE: widths} if widths else {}
    return Parts(sizes or (WHOLE,), rule.groups, rule.interleaved, rule.shared, widths)


def _name_faults(rule: Shaped, pattern: Pattern, template: Pattern | None) -> Iterator[str]:
    """What keeps the two names from determining each other."""
    here = set(pattern.fields)
    if template is None:
        changes = [name for name in ("stacked", "indexed") if getattr(rule, name)] + ["{part}"] * (PART in here)
        if changes:
            yield f"match {rule.match!r} has wildcards, so {changes[0]} needs a rename; capture what '*' and '**' match"
        return
    there = set(template.fields)
    if rule.rename is not None and pattern.has_wildcards:
        yield (
            f"rename {rule.rename!r} is not invertible: match {rule.match!r} has '*' or '**', which are not captured; "
            "write {name} or {name:path}"
        )
    if template.has_wildcards:
        yield f"rename {rule.rename!r} has '*' or '**', which stand for no name"
    digits = {name for axes in rule.indexed.values() for name in axes}
    changed = {*rule.stacked, PART}
    yield from _unknown(template, here | changed)
    lost = here - there - changed - digits
    if lost:
        yield f"rename {rule.rename!r} is not invertible: it lacks {{{min(lost)}}} of match {rule.match!r}"
    if PART in here & there:
        yield "has {part} in both names; it must be in the one whose tensors are the parts"
    if PART in here | there and not rule.parts:
        yield "has {part} in a name, but no parts"
    for name in rule.stacked:
        if (name in here) == (name in there):
            both = "both names have it" if name in here else "neither name has it"
            yield f"stacks {{{name}}}, but {both}; only the one without the dimension has it"
    if len({name in here for name in rule.stacked}) > 1:
        yield f"stacks {', '.join(rule.stacked)}, of which some are in match and some in rename"
    if len(set(rule.stacked)) != len(rule.stacked):
        yield "stacks a capture twice"
    numbers = {*rule.stacked, *rule.indexed, *(name for name, shift in template.shifts.items() if shift)}
    numbers |= digits & here
    for name in sorted(numbers & here):
        if pattern.fields[name] != "int":
            yield f"uses {{{name}}} as a number; write {{{name}:int}} in match"
    for name in rule.indexed:
        if name not in here | set(rule.stacked):
            yield f"indexed names {name!r}, which match {rule.match!r} does not capture"


def _shape_faults(rule: Shaped) -> Iterator[str]:
    """What the numbers of a rule contradict."""
    parts = rule.parts
    if isinstance(parts, tuple) and (len(set(parts)) != len(parts) or rule.unit != 1):
        yield "names a part twice" if rule.unit == 1 else "has a unit, but parts without sizes"
    for part in parts:
        if not part or "." in part:
            yield f"has a part {part!r}; a part is named by a text without dots"
    if isinstance(parts, Mapping) and rule.groups:
        for part, size in parts.items():
            if size * rule.unit % rule.groups:
                yield f"has groups = {rule.groups}, which does not divide the size {size * rule.unit} of part {part!r}"
    unknown = [part for part in rule.shared if part not in parts]
    if unknown:
        yield f"shares {unknown[0]!r}, which is not a part; parts: {', '.join(parts) or 'none'}"
    if (rule.shared or not rule.interleaved) and not rule.groups:
        yield f"has {'shared' if rule.shared else 'interleaved'}, which needs groups"
    if max(1, rule.groups) * max(1, len(parts)) > _MAX_ATOMS:
        yield f"has {rule.groups} groups, which is more than any model has"
    if rule.padded_from is not None and (parts or rule.groups):
        yield "has padded_from with parts or groups; state the sizes without padding"
    head = rule.pairs or rule.halves
    if head % 2 or (rule.pairs and rule.halves) or (head and (parts or rule.groups or rule.padded_from is not None)):
        yield "has pairs or halves, which are one even size of a head in a dimension without parts, groups and padding"
    if isinstance(rule, Sharded):
        yield from _split_faults(rule)


def _split_faults(rule: Sharded) -> Iterator[str]:
    dims = [rule.dim, *(split.dim for split in rule.also)]
    axes = [*rule.axis, *(axis for split in rule.also for axis in split.axis)]
    if len(set(dims)) != len(dims):
        yield f"divides dimension {max(dims, key=dims.count)} twice; list both axes in one axis, outermost first"
    if len(set(axes)) != len(axes):
        yield f"divides along axis {max(axes, key=axes.count)!r} twice"
    both = set(axes) & set(rule.replicas)
    if both:
        yield f"has replicas on axis {min(both)!r}, along which it divides"
    if not rule.axis:
        yield "has no axis"
    if rule.widths and rule.groups:
        yield "has widths and groups; the stored shapes determine the groups of each rank"
    elif isinstance(rule.widths, Mapping):
        unknown = [part for part in rule.widths if part not in rule.parts]
        if unknown:
            yield f"has widths of {unknown[0]!r}, which is not a part; parts: {', '.join(rule.parts) or 'none'}"
        elif not isinstance(rule.parts, Mapping):
            yield "has widths by part, but parts without sizes"
    elif rule.widths and rule.parts:
        yield "has widths of a tensor with parts; state them by part: widths = { part = [...] }"


def _reserved(pattern: Pattern, *names: str) -> list[str]:
    return [
        f"captures {{{name}}}, which has another meaning; choose another name"
        for name in names
        if name in pattern.fields
    ]


def _unknown(template: Pattern, known: set[str]) -> list[str]:
    return [
        f"rename uses {{{name}}}, which match does not capture; known: {', '.join(sorted(known)) or 'none'}"
        for name in template.fields
        if name not in known
    ]
