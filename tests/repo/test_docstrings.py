"""Compare the docstrings of public names with their signatures, which ruff cannot do.

A docstring describes every parameter under ``Args`` and the result under ``Returns`` or ``Yields``. A single line is
enough if it mentions all parameters in double backticks and starts with "Return", "Yield" or "Whether" for a result.
"""

from __future__ import annotations

import builtins
import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import bytecheckpoint
from bytecheckpoint import errors

MODULES = (
    "bytecheckpoint",
    "bytecheckpoint.checkpoint",
    "bytecheckpoint.codecs",
    "bytecheckpoint.frameworks",
    "bytecheckpoint.frameworks.base",
    "bytecheckpoint.inference.push",
    "bytecheckpoint.manager",
    "bytecheckpoint.planners",
    "bytecheckpoint.storage_backends",
    "bytecheckpoint.testing",
)
# Users do not call the constructors of these classes.
MADE_BY_THE_LIBRARY = ("Checkpoint", "SaveHandle", "StoredTensor", "Timings")
SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises", "Example", "Examples", "Note", "Notes")


def public_names() -> Iterator[tuple[str, Any]]:
    seen = set()
    for module in MODULES:
        exported = importlib.import_module(module)
        for name in exported.__all__:
            value = getattr(exported, name)
            is_documented = inspect.isclass(value) or inspect.isfunction(value)
            if is_documented and id(value) not in seen:
                seen.add(id(value))
                yield f"{module}.{name}", value


def public_members(cls: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    fields = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    for name, member in vars(cls).items():
        if name in fields:  # its default may be a function
            continue
        function = getattr(member, "__func__", member)
        # An override without a docstring inherits that of the base class.
        if inspect.isfunction(function) and not name.startswith("_") and not is_inherited(cls, name, function):
            yield name, function


def is_inherited(cls: type, name: str, function: Callable[..., Any]) -> bool:
    return function.__doc__ is None and any(hasattr(base, name) for base in cls.__bases__)


def cases() -> Iterator[Any]:
    for name, value in public_names():
        if inspect.isfunction(value):
            yield pytest.param(value, value, id=name)
            continue
        if not issubclass(value, BaseException):
            constructor = value if dataclasses.is_dataclass(value) else vars(value).get("__init__")
            if constructor is not None and value.__name__ not in MADE_BY_THE_LIBRARY:
                yield pytest.param(constructor, value, id=name)
        for member, function in public_members(value):
            yield pytest.param(function, function, id=f"{name}.{member}")


def sections(docstring: str) -> dict[str, str]:
    """Return the text of each Google-style section."""
    parts = re.split(rf"^({'|'.join(SECTIONS)}):[ \t]*$", docstring, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def entries(section: str) -> list[str]:
    """Return the names that a section describes, one per entry."""
    return re.findall(r"^    (\*{0,2}[A-Za-z_][\w.]*)(?: \([^)]*\))?:", section, re.MULTILINE)


def parameters(function: Callable[..., Any]) -> list[str]:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    found = inspect.signature(function).parameters.values()
    return [
        stars.get(one.kind, "") + one.name for one in found if one.name not in ("self", "cls") and one.name[0] != "_"
    ]


def is_one_line(docstring: str) -> bool:
    return "\n" not in docstring


def same_as(docstring: str) -> Callable[..., Any] | None:
    """Return the public function that a docstring refers to for its whole contract."""
    found = re.fullmatch(r"See ``bytecheckpoint\.(\w+)``\.", docstring)
    return getattr(bytecheckpoint, found[1]) if found else None


def is_test(function: Callable[..., Any]) -> bool:
    return function.__name__.startswith("test_") or hasattr(function, "_pytestfixturefunction")


CASES = list(cases())


@pytest.mark.parametrize(("function", "documented"), CASES)
def test_the_arguments_are_those_of_the_signature(function: Callable[..., Any], documented: Any) -> None:
    if is_test(function):  # its name states what it checks
        return
    text = inspect.getdoc(documented) or ""
    assert text, "no docstring"
    if documented is not function and function.__doc__:  # a constructor with a docstring
        text += "\n\n" + inspect.cleandoc(function.__doc__)
    if (other := same_as(text)) is not None:
        assert parameters(function) == parameters(other)
        return
    described = sections(text)
    names = entries(described.get("Args", ""))
    if is_one_line(text) and all(f"``{name}``" in text for name in parameters(function)):
        return
    if inspect.isclass(function):  # a dataclass may describe its fields as attributes, and further attributes
        names += entries(described.get("Attributes", ""))
        names = [name for name in names if name in parameters(function)]
    assert names == parameters(function)


@pytest.mark.parametrize(("function", "documented"), CASES)
def test_a_result_is_described(function: Callable[..., Any], documented: Any) -> None:
    if inspect.isclass(function) or function.__name__ == "__init__" or is_test(function):
        return
    annotation = inspect.signature(function).return_annotation
    text = inspect.getdoc(documented) or ""
    described = sections(text)
    if (is_one_line(text) and text.startswith(("Return ", "Yield ", "Whether "))) or same_as(text) is not None:
        return
    if annotation not in (None, "None", "NoReturn", inspect.Signature.empty):
        assert {"Returns", "Yields"} & set(described), f"returns {annotation}"


@pytest.mark.parametrize(("function", "documented"), CASES)
def test_the_exceptions_exist(function: Callable[..., Any], documented: Any) -> None:
    names = entries(sections(inspect.getdoc(documented) or "").get("Raises", ""))
    known = {**vars(builtins), **vars(errors), **(function.__globals__ if inspect.isfunction(function) else {})}
    assert [name for name in names if not _is_exception(known.get(name.rpartition(".")[2]))] == []


def _is_exception(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, BaseException)
