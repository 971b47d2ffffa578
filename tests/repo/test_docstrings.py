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
    "bytecheckpoint.codecs",
    "bytecheckpoint.data",
    "bytecheckpoint.frameworks",
    "bytecheckpoint.frameworks.base",
    "bytecheckpoint.inference.push",
    "bytecheckpoint.manager",
    "bytecheckpoint.rules",
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


def documented_functions() -> Iterator[tuple[str, Callable[..., Any], Any]]:
    """Yield a name, the function with the parameters, and the object with the docstring."""
    for name, value in public_names():
        if inspect.isfunction(value):
            yield name, value, value
            continue
        if not issubclass(value, BaseException):
            constructor = value if dataclasses.is_dataclass(value) else vars(value).get("__init__")
            if constructor is not None and value.__name__ not in MADE_BY_THE_LIBRARY:
                yield name, constructor, value
        for member, function in public_members(value):
            yield f"{name}.{member}", function, function


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


def test_the_arguments_are_those_of_the_signature() -> None:
    found = list(faults(argument_fault))
    assert not found, "\n".join(found)


def test_results_are_described() -> None:
    found = list(faults(result_fault))
    assert not found, "\n".join(found)


def test_the_exceptions_exist() -> None:
    found = list(faults(exception_fault))
    assert not found, "\n".join(found)


def faults(check: Callable[[Callable[..., Any], Any], str | None]) -> Iterator[str]:
    for name, function, documented in documented_functions():
        fault = check(function, documented)
        if fault is not None:
            yield f"{name}: {fault}"


def argument_fault(function: Callable[..., Any], documented: Any) -> str | None:
    if is_test(function):  # its name states what it checks
        return None
    text = inspect.getdoc(documented) or ""
    if not text:
        return "no docstring"
    if documented is not function and function.__doc__:  # a constructor with a docstring
        text += "\n\n" + inspect.cleandoc(function.__doc__)
    expected = parameters(function)
    if (other := same_as(text)) is not None:
        return None if expected == parameters(other) else f"its parameters are not those of {other.__name__}"
    described = sections(text)
    names = entries(described.get("Args", ""))
    if is_one_line(text) and all(f"``{name}``" in text for name in expected):
        return None
    if inspect.isclass(function):  # a dataclass may describe its fields as attributes, and further attributes
        names += entries(described.get("Attributes", ""))
        names = [name for name in names if name in expected]
    return None if names == expected else f"describes {names}, and its parameters are {expected}"


def result_fault(function: Callable[..., Any], documented: Any) -> str | None:
    if inspect.isclass(function) or function.__name__ == "__init__" or is_test(function):
        return None
    annotation = inspect.signature(function).return_annotation
    text = inspect.getdoc(documented) or ""
    if (is_one_line(text) and text.startswith(("Return ", "Yield ", "Whether "))) or same_as(text) is not None:
        return None
    has_result = annotation not in (None, "None", "NoReturn", inspect.Signature.empty)
    return f"does not describe {annotation}" if has_result and not {"Returns", "Yields"} & set(sections(text)) else None


def exception_fault(function: Callable[..., Any], documented: Any) -> str | None:
    names = entries(sections(inspect.getdoc(documented) or "").get("Raises", ""))
    known = {**vars(builtins), **vars(errors), **(function.__globals__ if inspect.isfunction(function) else {})}
    unknown = [name for name in names if not _is_exception(known.get(name.rpartition(".")[2]))]
    return f"raises {', '.join(unknown)}, which does not exist" if unknown else None


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("Do it.", "describes [], and its parameters are ['a']"),
        ("Do it.\n\nArgs:\n    b: More.\n\nReturns:\n    It.\n", "describes ['b'], and its parameters are ['a']"),
        ("Return ``a``.\n\nArgs:\n    a: One.\n", "does not describe int"),
        (
            "Return ``a``.\n\nArgs:\n    a: One.\n\nReturns:\n    It.\n\nRaises:\n    NoError: Never.\n",
            "raises NoError",
        ),
        ("", "no docstring"),
        ("Return ``a``.", None),
    ],
)
def test_what_the_checks_find(text: str, fault: str | None) -> None:
    def function(a: int) -> int:
        return a

    function.__doc__ = text
    found = [check(function, function) for check in (argument_fault, result_fault, exception_fault)]
    if fault is None:
        assert found == [None] * 3
    else:
        assert any(one and one.startswith(fault) for one in found), found


def _is_exception(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, BaseException)
