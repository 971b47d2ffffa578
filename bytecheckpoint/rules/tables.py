"""Convert rules from and to TOML, and check the types of their fields."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from .faults import Faults
from .kinds import KINDS, Rule, Split
from .resolution import FilePattern

Variables = Mapping[str, int]

_AXES = ("axis", "replicas", "stacked", "shared")  # a single text may stand for a list of one
_HEADER = re.compile(r"^\s*\[\[\s*rule\s*\]\]", re.MULTILINE)
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


class _WrongType(Exception):
    """A field has a value of another type. The message begins with "must be"."""


def parse_rules(text: str, variables: Variables, faults: Faults) -> tuple[list[tuple[str, Rule]], tuple[str, ...]]:
    """Parse a document.

    Return a label of each rule, with its line, and the rule; then the patterns of files. Adds what is wrong to
    ``faults``.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        faults.add("syntax", "", f"this is not TOML: {error}")
        return [], ()
    for key in document.keys() - {"rule", "files"}:
        faults.add("syntax", "", f"unknown table {key!r}; a rule begins with [[rule]]")
    files = check_files(document.get("files", ()), faults)
    tables = document.get("rule", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        faults.add("syntax", "", "'rule' is not an array of tables; a rule begins with [[rule]]")
        return [], files
    lines = [text.count("\n", 0, found.end()) + 1 for found in _HEADER.finditer(text)]
    found = []
    for number, table in enumerate(tables, 1):
        where = f" (line {lines[number - 1]})" if len(lines) == len(tables) else ""
        label = f"rule {number}{where}"
        rule = read_table(table, label, variables, faults)
        if rule is not None:
            found.append((label, rule))
    return found, files


def check_files(value: object, faults: Faults) -> tuple[str, ...]:
    """Return patterns of files, from one or a list of them. Adds what is wrong to ``faults``."""
    try:
        files = _texts(value, {})
    except _WrongType as error:
        faults.add("syntax", "", f"files {error}")
        return ()
    for text in files:
        fault = FilePattern(text).fault()
        if fault is not None:
            faults.add("syntax", "", f"files {text!r} {fault}")
    return files


def read_table(table: Mapping[str, Any], label: str, variables: Variables, faults: Faults) -> Rule | None:
    """Return the rule of a table; None, with what is wrong added to ``faults``, if it is none."""
    kind = table.get("kind")
    cls = KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        found = "has no kind" if kind is None else f"has the unknown kind {kind!r}"
        close = f"; did you mean {get_close_matches(kind, KINDS, 1, 0)[0]!r}?" if isinstance(kind, str) else ""
        faults.add("syntax", label, f"{found}; kinds: {', '.join(KINDS)}{close}")
        return None
    fields = {one.name: one for one in dataclasses.fields(cls)}
    values: dict[str, Any] = {}
    before = len(faults.found)
    for key, value in table.items():
        if key == "kind":
            continue
        if key not in fields:
            close = get_close_matches(key, fields, 1, 0)[0]
            faults.add("syntax", label, f"unknown key {key!r} of kind {kind!r}; did you mean {close!r}?")
            continue
        try:
            values[key] = _READERS[key](value, variables)
        except _WrongType as error:
            faults.add("syntax", label, f"{key} {error}")
    for name, one in fields.items():
        required = one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
        if required and name not in table:
            faults.add("syntax", label, f"has no {name}, which kind {kind!r} needs")
    return cls(**values) if len(faults.found) == before else None


def rule_table(rule: Rule) -> dict[str, Any]:
    """Return the table of a rule, without the fields that have their defaults."""
    table: dict[str, Any] = {"match": rule.match, "kind": rule.kind}
    for one in dataclasses.fields(rule):
        value = getattr(rule, one.name)
        default = one.default_factory() if one.default_factory is not dataclasses.MISSING else one.default
        if one.name != "match" and value != default:
            table[one.name] = _plain(value, short=one.name in _AXES)
    return table


def write_rules(rules: Iterable[Rule], files: Sequence[str] = ()) -> str:
    """Return the document of these rules."""
    blocks = [f"files = {_toml(_plain(files, short=True))}"] if files else []
    for rule in rules:
        table = rule_table(rule)
        width = max(map(len, table))
        blocks.append("\n".join(["[[rule]]", *(f"{key:{width}} = {_toml(value)}" for key, value in table.items())]))
    return "\n\n".join(blocks) + "\n" if blocks else ""


# ------------------------------------------------------------------------------------------------------------- reading


def _text(value: Any, variables: Variables) -> str:
    if not isinstance(value, str):
        raise _WrongType(f"must be a text, found {_show(value)}")
    return value


def _flag(value: Any, variables: Variables) -> bool:
    if not isinstance(value, bool):
        raise _WrongType(f"must be true or false, found {_show(value)}")
    return value


def _number(least: int) -> Callable[[Any, Variables], int]:
    def read(value: Any, variables: Variables) -> int:
        if isinstance(value, str):
            if value not in variables:
                known = ", ".join(map(repr, variables)) or "none"
                raise _WrongType(
                    f"is the variable {value!r}, which has no value; pass variables={{{value!r}: ...}} "
                    f"(passed: {known})"
                )
            value = variables[value]
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise _WrongType(f"must be a number of at least {least}, found {_show(value)}")
        return value

    return read


def _texts(value: Any, variables: Variables) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, (list, tuple)) or not all(isinstance(one, str) for one in value):
        raise _WrongType(f"must be a text or a list of texts, found {_show(value)}")
    return tuple(value)


def _numbers(value: Any, variables: Variables) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)):
        raise _WrongType(f"must be a list of numbers, found {_show(value)}")
    return tuple(_number(0)(one, variables) for one in value)


def _table_of(read: Callable[[Any, Variables], Any]) -> Callable[[Any, Variables], Any]:
    def read_all(value: Any, variables: Variables) -> dict[str, Any]:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise _WrongType(f"must be a table, found {_show(value)}")
        found = {}
        for key, one in value.items():
            try:
                found[key] = read(one, variables)
            except _WrongType as error:
                raise _WrongType(f"has an entry {key!r} that {error}") from None
        return found

    return read_all


def _either(
    table: Callable[[Any, Variables], Any], other: Callable[[Any, Variables], Any]
) -> Callable[[Any, Variables], Any]:
    return lambda value, variables: (table if isinstance(value, Mapping) else other)(value, variables)


def _order(value: Any, variables: Variables) -> str | tuple[str, ...]:
    if isinstance(value, str):
        if value not in ("listed", "sorted", "reversed"):
            raise _WrongType(f"must be 'listed', 'sorted', 'reversed' or a list of names, found {value!r}")
        return value
    return _texts(value, variables)


def _splits(value: Any, variables: Variables) -> tuple[Split, ...]:
    message = f"must be a list of tables like {{ dim = 1, axis = 'tp' }}, found {_show(value)}"
    if not isinstance(value, (list, tuple)):
        raise _WrongType(message)
    found = []
    for one in value:
        if not isinstance(one, Mapping) or set(one) != {"dim", "axis"}:
            raise _WrongType(message)
        found.append(Split(dim=_number(0)(one["dim"], variables), axis=_texts(one["axis"], variables)))
    return tuple(found)


def _show(value: Any) -> str:
    return f"{value!r:.60}"


_READERS: dict[str, Callable[[Any, Variables], Any]] = {
    "match": _text,
    "optional": _flag,
    "rename": _text,
    "stacked": _texts,
    "indexed": _table_of(_texts),
    "dim": _number(0),
    "parts": _either(_table_of(_number(0)), _texts),
    "unit": _number(1),
    "groups": _number(1),
    "interleaved": _flag,
    "shared": _texts,
    "padded_from": _number(0),
    "pairs": _number(2),
    "halves": _number(2),
    "compare": _flag,
    "axis": _texts,
    "replicas": _texts,
    "widths": _either(_table_of(_numbers), _numbers),
    "also": _splits,
    "order": _order,
    "members": _text,
    "alignment": _number(1),
    "padding": _number(1),
    "each": _flag,
}


# ------------------------------------------------------------------------------------------------------------- writing


def _plain(value: Any, *, short: bool = False) -> Any:
    """A value of a field in the types of TOML."""
    if isinstance(value, Split):
        return {"dim": value.dim, "axis": _plain(value.axis, short=True)}
    if isinstance(value, Mapping):
        return {key: _plain(one, short=True) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return value[0] if short and len(value) == 1 and isinstance(value[0], str) else [_plain(one) for one in value]
    return value


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(key)} = {_toml(one)}" for key, one in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    # Texts, numbers and truth values have the same form in JSON, except for one character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _toml(key)
