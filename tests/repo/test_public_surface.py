"""Check the shape of the package: exports, error tree, banned calls and imports."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

import pytest

import bytecheckpoint as bcp
from bytecheckpoint import errors
from bytecheckpoint.testing import time_limit

PACKAGE = Path(bcp.__file__).parent

# Pickles that a caller requests explicitly, when saving and again when loading; messages between a test and its own
# processes; and messages to checkpoint-engine's workers, from which nothing is unpickled.
MAY_PICKLE = {
    "bytecheckpoint.dcp.export",  # writes the metadata of DCP, which is a pickle
    "bytecheckpoint.format.values.pickled",
    "bytecheckpoint.inference.push.checkpoint_engine_update",
    "bytecheckpoint.testing.rank_process",
    "bytecheckpoint.testing.ranks",
}
# CONTRIBUTING.md gives the reasons for these.
MAY_HAVE_GLOBALS = {"bytecheckpoint.control.communicator", "bytecheckpoint.runtime.gc_pause"}
MAY_START_THREADS = ("bytecheckpoint.inference.push.", "bytecheckpoint.runtime.threads")
PUBLIC_MODULES = {"bytecheckpoint.codecs", "bytecheckpoint.errors", "bytecheckpoint.frameworks.base"}
SERIALISERS = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle"}


# Modules that need a package which is not installed with this one.
NEEDS = {
    "bytecheckpoint.inference.vllm.adapters": "vllm",
    "bytecheckpoint.inference.vllm.peers": "vllm",
    "bytecheckpoint.inference.vllm.transfer": "vllm",
    "bytecheckpoint.inference.vllm.trainer": "vllm",
    "bytecheckpoint.inference.vllm.model": "vllm",
    "bytecheckpoint.inference.vllm.loader": "vllm",
    "bytecheckpoint.integrations.accelerate": "accelerate",
    "bytecheckpoint.integrations.lightning": "lightning",
    "bytecheckpoint.integrations.torchft": "torchft",
    "bytecheckpoint.integrations.torchtitan": "torchtitan",
    "bytecheckpoint.integrations.transformers": "accelerate",
    "bytecheckpoint.integrations.verl": "verl",
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


def repeated_class_names(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the modules of each public class name that several modules define."""
    found: dict[str, list[str]] = {}
    for module, source in sources.items():
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(module)
    return {name: modules for name, modules in found.items() if len(modules) > 1}


def test_a_class_name_has_one_meaning() -> None:
    assert repeated_class_names({name: path.read_text() for name, path in module_files().items()}) == {}


def test_a_repeated_class_name_is_found() -> None:
    sources = {"a": "class Part: ...\nclass _Own: ...", "b": "class Part: ...\nclass _Own: ..."}
    assert repeated_class_names(sources) == {"Part": ["a", "b"]}


MODULES = module_files()


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
    assert {"save", "load", "latest", "SaveHandle", "LoadReport", "Checkpoint"} <= set(bcp.__all__)
    assert {"path", "state", "async_save", "step", "options"} <= set(inspect.signature(bcp.save).parameters)
    assert {"path", "state", "strict", "options"} <= set(inspect.signature(bcp.load).parameters)


def test_the_public_functions_fit_on_a_card() -> None:
    """What else can be chosen belongs into the options, which all of them accept."""
    most = {
        bcp.save: 9,
        bcp.load: 9,
        bcp.warmup: 6,
        bcp.open: 4,
        bcp.latest: 4,
        bcp.watch: 6,
        bcp.CheckpointManager: 12,
    }
    found = {function.__name__: len(inspect.signature(function).parameters) for function in most}
    assert found == {function.__name__: count for function, count in most.items()}


def test_the_names_of_the_package() -> None:
    assert set(dir(bcp)) == {*bcp.__all__, "open"}
    assert bcp.open.__module__ == "bytecheckpoint.api"
    names: dict[str, object] = {}
    exec("from bytecheckpoint import *\nchosen = open", names)
    assert names["chosen"] is open, "the builtin is replaced"


def test_type_checkers_find_misspelt_names(tmp_path: Path) -> None:
    """The package imports ``dcp`` on first use, by a function that would have every name for a type checker."""
    (tmp_path / "bytecheckpoint").mkdir()
    (tmp_path / "bytecheckpoint" / "__init__.py").write_text((PACKAGE / "__init__.py").read_text())
    (tmp_path / "program.py").write_text("import bytecheckpoint as bcp\n\nbcp.save\nbcp.dcp\nbcp.svae\n")
    options = ("--config-file=", "--ignore-missing-imports", "--no-site-packages", f"--cache-dir={os.devnull}")
    command = [sys.executable, "-m", "mypy", *options, "program.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=time_limit(120))
    faults = [line for line in done.stdout.splitlines() if line.startswith("program.py")]
    assert faults == ['program.py:5: error: Module has no attribute "svae"  [attr-defined]'], done.stdout + done.stderr


def test_modules_declare_what_they_export() -> None:
    faults = [
        f"{name}: {fault}"
        for name, path in MODULES.items()
        if name not in NEEDS or importlib.util.find_spec(NEEDS[name])
        for fault in export_faults(importlib.import_module(name), path.read_text())
    ]
    assert not faults, "\n".join(faults)


def export_faults(module: ModuleType, source: str) -> Iterator[str]:
    """What is wrong with a module's docstring or ``__all__``, which it has only if other names are not enough."""
    names = getattr(module, "__all__", [])
    nodes = [node for node in ast.parse(source).body if isinstance(node, ast.ImportFrom)]
    imported = {alias.asname or alias.name for node in nodes if node.level for alias in node.names}
    if not module.__doc__:
        yield "no docstring"
    if len(set(names)) < len(names):
        yield "__all__ has a name twice"
    yield from (f"{name} is in __all__ and does not exist" for name in names if not hasattr(module, name))
    if hasattr(module, "__path__"):
        if imported and not names:
            yield "a package that imports names has no __all__"
    elif names and module.__name__ not in PUBLIC_MODULES and not imported & set(names):
        yield "__all__ is for packages, public modules, and modules that pass on names of others"


def test_what_the_check_of_exports_finds() -> None:
    def faults(source: str, **attributes: object) -> list[str]:
        module = ModuleType("a.module", "A docstring.")
        exec(source.replace("from .b import c", "c = 1"), vars(module))
        vars(module).update(attributes)
        return [fault.partition(" is for")[0] for fault in export_faults(module, source)]

    assert faults("from .b import c\n__all__ = ['c']") == faults("def f(): ...") == faults("", __path__=[]) == []
    assert faults("def f(): ...\n__all__ = ['f']") == ["__all__"]
    assert faults("from .b import c", __path__=[]) == ["a package that imports names has no __all__"]
    assert faults("from .b import c\n__all__ = ['c', 'c', 'd']", __doc__=None) == [
        "no docstring",
        "__all__ has a name twice",
        "d is in __all__ and does not exist",
    ]


def test_library_code_neither_prints_nor_pickles() -> None:
    faults = list(faults_in_modules(print_or_pickle))
    assert not faults, "\n".join(faults)


def test_threads_patches_and_globals_only_where_they_are_allowed() -> None:
    faults = list(faults_in_modules(thread_patch_or_global))
    assert not faults, "\n".join(faults)


def faults_in_modules(check: Callable[[str, ast.AST], str | None]) -> Iterator[str]:
    """Yield the place and the text of each fault that ``check`` finds in a node of a module."""
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            fault = check(name, node)
            if fault is not None:
                yield f"{name}:{getattr(node, 'lineno', 0)}: {fault}"


def print_or_pickle(name: str, node: ast.AST) -> str | None:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("print", "eval", "exec"):
        return f"{node.func.id}()"
    imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        imported = [node.module]
    found = SERIALISERS & {path.partition(".")[0] for path in imported}
    return f"imports {', '.join(sorted(found))}" if found and name not in MAY_PICKLE else None


def thread_patch_or_global(name: str, node: ast.AST) -> str | None:
    if isinstance(node, ast.Global) and name not in MAY_HAVE_GLOBALS:
        return "global"
    called = node.func if isinstance(node, ast.Call) else None
    if isinstance(called, ast.Name) and called.id == "setattr":
        return "setattr()"
    bases = node.bases if isinstance(node, ast.ClassDef) else []
    for one in filter(None, [called, *bases]):
        is_thread = isinstance(one, ast.Attribute) and one.attr in ("Thread", "Timer")
        if is_thread and not name.startswith(MAY_START_THREADS):
            return "a thread"
    return None


@pytest.mark.parametrize(
    ("check", "source", "fault"),
    [
        (print_or_pickle, "print(1)", "print()"),
        (print_or_pickle, "eval('1')", "eval()"),
        (print_or_pickle, "import pickle.x", "imports pickle"),
        (print_or_pickle, "from marshal import loads", "imports marshal"),
        (thread_patch_or_global, "def f():\n    global x", "global"),
        (thread_patch_or_global, "setattr(a, 'b', 1)", "setattr()"),
        (thread_patch_or_global, "threading.Thread()", "a thread"),
        (thread_patch_or_global, "class A(threading.Timer): pass", "a thread"),
    ],
)
def test_what_the_checks_of_modules_find(check: Callable[[str, ast.AST], str | None], source: str, fault: str) -> None:
    assert [found for node in ast.walk(ast.parse(source)) if (found := check("a.module", node))] == [fault]


def test_no_module_has_a_vague_name() -> None:
    vague = {"utils", "util", "common", "helpers", "helper", "misc"}
    assert not [name for name in MODULES if vague & set(name.split("."))]


def drawn_tree(text: str) -> dict[str, list[str]]:
    """Return ``{class: [parent, builtin base]}`` from the drawing at the top of ``errors.py``."""
    parents: dict[str, list[str]] = {}
    stack: list[tuple[int, str]] = []
    for line in text.splitlines():
        found = re.match(r"    ([│ ├└─]*)([A-Z]\w+(?:Error|Warning))\b(?: \((\w+)\))?", line)
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
