"""Patterns on dotted names, and the templates that build new names from what a pattern captured.

A name is a list of segments, separated by dots. Matching takes one pass over the name and has at most one result.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Literal, NamedTuple

Captures = dict[str, "str | int"]
"""What a pattern captured. Captures of the type ``int`` are numbers."""

PART = "part"
"""The capture that stands for the name of a part of a fused tensor."""

MEMBER = "member"
"""The capture that stands for the name of a tensor in a flat buffer."""

_Kind = Literal["text", "int", "path"]
_FIELD = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)(?::(int|path))?([+-][0-9]+)?\}")
_KINDS: dict[str, _Kind] = {"text": "text", "int": "int", "path": "path"}
_EXPRESSIONS: dict[_Kind, str] = {"text": "[^.]+", "int": "0|[1-9][0-9]{0,17}", "path": ".+"}


class PatternError(ValueError):
    """A text is not a pattern. The caller adds the rule to the message."""


class _Field(NamedTuple):
    """A variable part of a pattern. ``name`` is empty for ``*`` and ``**``."""

    name: str
    kind: _Kind
    shift: int = 0

    def text(self) -> str:
        if not self.name:
            return "**" if self.kind == "path" else "*"
        kind = "" if self.kind == "text" else f":{self.kind}"
        shift = f"{self.shift:+}" if self.shift else ""
        return f"{{{self.name}{kind}{shift}}}"


class _Segment(NamedTuple):
    """``prefix``, then the field if there is one, then ``suffix``."""

    prefix: str
    field: _Field | None = None
    suffix: str = ""

    def text(self) -> str:
        return self.prefix + (self.field.text() if self.field else "") + self.suffix

    def expression(self) -> str:
        """The regular expression of what it matches, with a group if that is captured."""
        if self.field is None:
            return re.escape(self.prefix)
        inner = _EXPRESSIONS[self.field.kind]
        inner = f"({inner})" if self.field.name else inner
        return f"{re.escape(self.prefix)}{inner}{re.escape(self.suffix)}"


@dataclass(frozen=True)
class Pattern:
    """A parsed pattern or template: literal text, and at most one variable part per segment.

    ``{x}`` is text without a dot, ``{x:int}`` a decimal number, ``{x:path}`` one or more segments; ``*`` is any one
    segment, ``**`` one or more. ``{x+3}`` is a number that a name states 3 too high. At most one part matches several
    segments.
    """

    segments: tuple[_Segment, ...]

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """Parse a text. Raises ``PatternError``."""
        if not text:
            raise PatternError("is empty")
        segments = tuple(_parse_segment(part) for part in text.split("."))
        names = [segment.field.name for segment in segments if segment.field and segment.field.name]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise PatternError(f"captures {{{twice[0]}}} twice")
        if sum(segment.field is not None and segment.field.kind == "path" for segment in segments) > 1:
            raise PatternError("has more than one part that matches several segments ('**' or '{x:path}')")
        return cls(segments)

    @cached_property
    def fields(self) -> dict[str, _Kind]:
        """The type of each capture."""
        return {one.field.name: one.field.kind for one in self.segments if one.field and one.field.name}

    @property
    def shifts(self) -> dict[str, int]:
        """What the template adds to each number."""
        return {one.field.name: one.field.shift for one in self.segments if one.field and one.field.name}

    @property
    def has_wildcards(self) -> bool:
        """Whether some of what it matches is not captured."""
        return any(one.field is not None and not one.field.name for one in self.segments)

    @property
    def end(self) -> str:
        """The last two segments, or the last one, if they are literal; otherwise empty."""
        literal = list(takewhile(lambda one: one.field is None, reversed(self.segments[-2:])))
        return ".".join(one.prefix for one in reversed(literal))

    def __str__(self) -> str:
        return ".".join(segment.text() for segment in self.segments)

    def match(self, name: str, parts: Collection[str] = ()) -> Captures | None:
        """Return the captures, or None. ``parts`` are the texts that ``{part}`` may match."""
        matched = self._expression.fullmatch(name)
        if matched is None:
            return None
        found: Captures = {}
        for field, text in zip(self._captured, matched.groups(), strict=True):
            if field.name == PART and text not in parts:
                return None
            if field.kind != "int":
                found[field.name] = text
            elif (number := int(text) - field.shift) >= 0:
                found[field.name] = number
            else:
                return None
        return found

    @cached_property
    def _captured(self) -> list[_Field]:
        return [one.field for one in self.segments if one.field is not None and one.field.name]

    @cached_property
    def _expression(self) -> re.Pattern[str]:
        return re.compile(r"\.".join(segment.expression() for segment in self.segments), re.DOTALL)

    def format(self, values: Mapping[str, str | int]) -> str:
        """Return the name with these captures. Raises ``PatternError`` if a number becomes negative."""
        return ".".join(_format_segment(segment, values) for segment in self.segments)

    def retyped(self, kinds: Mapping[str, _Kind]) -> Pattern:
        """The same pattern with other types of its captures, as the other side of a rule needs them."""
        return Pattern(
            tuple(
                one._replace(field=one.field._replace(kind=kinds[one.field.name])) if one.field is not None else one
                for one in self.segments
            )
        )


def _parse_segment(text: str) -> _Segment:
    if text in ("*", "**"):
        return _Segment("", _Field("", "path" if text == "**" else "text"))
    found = list(_FIELD.finditer(text))
    if len(found) > 1:
        raise PatternError(f"has two captures in the segment {text!r}, which could be separated in several ways")
    rest = _FIELD.sub("", text)
    if any(character in rest for character in "{}*"):
        raise PatternError(f"has a part that is no capture in {text!r}; write {{name}}, {{name:int}}, {{name:path}}")
    if not text:
        raise PatternError("has an empty segment")
    if not found:
        return _Segment(text)
    name, kind, shift = found[0].groups()
    field = _Field(name, _KINDS[kind or ("int" if shift else "text")], int(shift or 0))
    segment = _Segment(text[: found[0].start()], field, text[found[0].end() :])
    if field.shift and field.kind == "path":
        raise PatternError(f"adds to a text in {text!r}")
    if field.kind == "path" and (segment.prefix or segment.suffix):
        raise PatternError(f"has other text next to {{{name}:path}} in {text!r}, which must be between dots")
    return segment


def _format_segment(segment: _Segment, values: Mapping[str, str | int]) -> str:
    field = segment.field
    if field is None:
        return segment.prefix
    value = values[field.name]
    if isinstance(value, int):
        value += field.shift
        if value < 0:
            raise PatternError(
                f"makes {{{field.name}{field.shift:+}}} negative for {field.name} = {value - field.shift}"
            )
    return f"{segment.prefix}{value}{segment.suffix}"


def numbered(names: Iterable[str]) -> dict[str, list[str]]:
    """Group names that differ only in numbers, for messages: ``layers.0.w`` and ``layers.1.w`` as ``layers.#.w``."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"[0-9]+", "#", name), []).append(name)
    return groups
