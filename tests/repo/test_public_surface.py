"""Check the shape of the package: exports, error tree, banned calls and imports."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
from pathlib import Path
from types import ModuleType

import pytest

import bytecheckpoint as bcp
from bytecheckpoint import errors

PACKAGE = Path(bcp.__file__).parent

# Pickles that a caller requests explicitly, when saving and again when loading; messages between a test and its own
# processes; and messages to checkpoint-engine's workers, from which nothing is unpickled.
MAY_PICKLE = {
    "bytecheckpoint.format.values.pickled",
    "bytecheckpoint.inference.push.engines.ipc_update",
    "bytecheckpoint.testing.rank_process",
    "bytecheckpoint.testing.ranks",
}
# CONTRIBUTING.md gives the reasons for these.
MAY_HAVE_GLOBALS = {"bytecheckpoint.control.current", "bytecheckpoint.runtime.gc_pause"}
MAY_PATCH = {"bytecheckpoint.inference.vllm.layout"}
MAY_START_THREADS = ("bytecheckpoint.inference.push.",)
SERIALISERS = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle"}


# Modules that need a package which is not installed with this one.
NEEDS = {
    "bytecheckpoint.inference.vllm.adapters": "vllm",
    "bytecheckpoint.inference.vllm.layout": "vllm",
    "bytecheckpoint.inference.vllm.transfer": "vllm",
    "bytecheckpoint.inference.vllm.worker": "vllm",
    "bytecheckpoint.inference.vllm.loader": "vllm",
}


def module_files() -> dict[str, Path]:
    found: dict[str, Path] = {}
    for folder, _, files in os.walk(PACKAGE, followlinks=True):
        for file in files:
            if file.endswith(".py"):
                path = Path(folder) / file
                parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
                found[".".join(part for part in parts if part != "__init__")] = path
    return dict(sorted(found.items()))


MODULES = module_files()


@pytest.fixture(params=MODULES)
def module(request: pytest.FixtureRequest) -> ModuleType:
    if request.param in NEEDS:
        pytest.importorskip(NEEDS[request.param])
    return importlib.import_module(request.param)


def test_public_names_exist_and_are_documented() -> None:
    assert len(set(bcp.__all__)) == len(bcp.__all__)
    for name in bcp.__all__:
        value = getattr(bcp, name)
        if inspect.isclass(value) or inspect.isroutine(value):
            assert inspect.getdoc(value), f"bytecheckpoint.{name} has no docstring"
            for method, function in inspect.getmembers(value, inspect.isfunction):
                if not method.startswith("_") and function.__module__.startswith("bytecheckpoint"):
                    assert inspect.getdoc(function), f"bytecheckpoint.{name}.{method} has no docstring"


def test_the_public_functions_and_their_parameters_exist() -> None:
    assert {"save", "load", "open", "latest", "SaveHandle", "LoadReport", "Checkpoint"} <= set(bcp.__all__)
    assert {"path", "state", "framework", "async_save", "step"} <= set(inspect.signature(bcp.save).parameters)
    assert {"path", "state", "framework", "strict"} <= set(inspect.signature(bcp.load).parameters)


def test_module_declares_what_it_exports(module: ModuleType) -> None:
    names = getattr(module, "__all__", None)
    assert isinstance(names, list), f"{module.__name__} has no __all__"
    assert len(set(names)) == len(names)
    assert not [name for name in names if not hasattr(module, name)]
    assert module.__doc__, f"{module.__name__} has no docstring"


@pytest.mark.parametrize("name", MODULES)
def test_library_code_neither_prints_nor_pickles(name: str) -> None:
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("print", "eval", "exec"), f"{name}:{node.lineno}: {node.func.id}()"
        imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imported = [node.module]
        if name not in MAY_PICKLE:
            assert not SERIALISERS & {path.partition(".")[0] for path in imported}, f"{name}:{node.lineno}"


@pytest.mark.parametrize("name", MODULES)
def test_threads_patches_and_globals_only_where_they_are_allowed(name: str) -> None:
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        place = f"{name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Global):
            assert name in MAY_HAVE_GLOBALS, place
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "setattr" or name in MAY_PATCH, place
        called = node.func if isinstance(node, ast.Call) else None
        bases = node.bases if isinstance(node, ast.ClassDef) else []
        for one in filter(None, [called, *bases]):
            is_thread = isinstance(one, ast.Attribute) and one.attr in ("Thread", "Timer")
            assert not is_thread or name.startswith(MAY_START_THREADS), place


def test_no_module_has_a_vague_name() -> None:
    vague = {"utils", "util", "common", "helpers", "helper", "misc"}
    assert not [name for name in MODULES if vague & set(name.split("."))]


def drawn_tree(text: str) -> dict[str, list[str]]:
    """Return ``{class: [parent, builtin base]}`` from the drawing at the top of ``errors.py``."""
    parents: dict[str, list[str]] = {}
    stack: list[tuple[int, str]] = []
    for line in text.splitlines():
        found = re.match(r"    ([│ ├└─]*)([A-Z]\w+Error)\b(?: \((\w+)\))?", line)
        if found:
            depth, name = len(found[1]), found[2]
            while stack and stack[-1][0] >= depth:
                stack.pop()
            parents[name] = [*([stack[-1][1]] if stack else []), *([found[3]] if found[3] else [])]
            stack.append((depth, name))
    return parents


def test_the_drawing_of_the_error_tree_is_correct() -> None:
    classes = [value for value in vars(errors).values() if inspect.isclass(value)]
    actual = {c.__name__: [base.__name__ for base in c.__bases__ if base is not Exception] for c in classes}
    assert drawn_tree(errors.__doc__ or "") == actual
    assert sorted(actual) == sorted(errors.__all__)


def test_every_error_is_documented() -> None:
    for name in errors.__all__:
        assert vars(errors)[name].__doc__, name
