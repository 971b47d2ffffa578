"""Attributes of vLLM that this library uses are listed, and one part that a release breaks leaves the others alone."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from vllm_attributes import ATTRIBUTES

import bytecheckpoint.inference.vllm as package
from bytecheckpoint.errors import StateError
from bytecheckpoint.inference.push.messages import decode, encode
from bytecheckpoint.inference.vllm import private
from bytecheckpoint.inference.vllm.private import keep_adapters
from bytecheckpoint.inference.vllm.worker import WorkerExtension, answer
from bytecheckpoint.testing import time_limit

ROOT = Path(__file__).parents[2]
_OWN = {"bcp_adapters", "bcp_source", "fqn"}  # attributes that this library sets
_COMMON = {"base_url", "input_size", "output_size", "output_sizes"}  # that each place can do without


def _modules() -> list[Path]:
    found = list(Path(package.__path__[0]).glob("*.py"))
    assert len(found) > 6
    return found


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            yield from (alias.name for alias in node.names)


def _private(tree: ast.AST) -> Iterator[str]:
    """Yield private attributes of other objects than ``self``, and those that are named by a text."""
    own = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_own(node)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or _is_own(node) or node.attr in own:
            continue
        if node.attr.startswith("_") and not node.attr.startswith("__"):
            yield node.attr
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            named = node.args[1]
            if isinstance(named, ast.Constant) and named.value not in _OWN | _COMMON:
                yield named.value


def _is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def test_every_attribute_is_listed() -> None:
    for path in _modules():
        tree = ast.parse(path.read_text())
        imported = set(_imported(tree))
        for attribute in set(_private(tree)) - imported:
            assert attribute in ATTRIBUTES, f"{path.name} uses {attribute}, which vllm_attributes.py does not list"


def test_a_part_that_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        StateError, match=r"lacks what 'a' of this library needs: cannot import name 'gone' from 'json'"
    ):
        with private.imports_of("a"):
            exec("from json import gone")
    monkeypatch.setitem(sys.modules, f"{package.__name__}.model", ModuleType("model"))
    found = decode(answer(None, None, encode({"kind": "describe", "nonce": "n"})))
    assert "'push' of this library needs: cannot import name 'receiver_of'" in found["failure"]["message"]
    assert found["nonce"] == "n"


def test_the_extra_allows_the_tested_releases() -> None:
    first, last = (int(release.removeprefix("0.")) for release in private.TESTED.split(" to "))
    (allowed,) = re.findall(r'^vllm = \["vllm(.+)"\]', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert allowed == f">=0.{first},<0.{last + 1}"
    pinned = (ROOT / "requirements" / "vllm.txt").read_text()
    assert f"\nvllm-cpu==0.{last}." in pinned
    assert f"0.3$$(($(SAMPLE_SEED) % {last - first}))" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("arguments", [(), (1,), ("a", "b"), (None,), ("no message",)])
def test_wrong_arguments_never_raise(arguments: tuple[object, ...]) -> None:
    """Nor does a worker that is not one."""
    assert decode(WorkerExtension().bcp_push(*arguments))["failure"]["message"]
    assert decode(WorkerExtension().bcp_push("a", other=1))["failure"]["message"]


class _Manager:
    """Of adapters. ``fails`` where vLLM's internals are not as expected."""

    def __init__(self, *, fails: bool) -> None:
        self._active_adapters = SimpleNamespace(pinned_items=[2]) if fails else _Slots([1, 2])
        self.calls: list[str] = []

    def remove_all_adapters(self) -> None:
        self.calls.append("remove all")

    def deactivate_adapter(self, number: int) -> None:
        self.calls.append(f"deactivate {number}")

    def pin_adapter(self, number: int) -> None:
        self.calls.append(f"pin {number}")


class _Slots(list[int]):
    pinned_items = (2,)


@pytest.mark.parametrize("fails", [False, True])
def test_adapters_that_cannot_be_kept_are_removed(fails: bool) -> None:
    """vLLM calls the manager at the end of its own requests, where an exception would reach ``collective_rpc``."""
    manager = _Manager(fails=fails)
    keep_adapters(SimpleNamespace(lora_manager=manager))
    manager.remove_all_adapters()
    assert manager.calls == (["remove all"] if fails else ["deactivate 1", "deactivate 2", "pin 2"])
    manager.remove_all_adapters()
    assert manager.calls[-1] == "remove all"


_CHECK = """
import sys
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
before = LRUCacheWorkerLoRAManager.add_adapter
from bytecheckpoint.inference.vllm import loader, private, worker
loader.register()
loader.register()
assert LRUCacheWorkerLoRAManager.add_adapter is before
loaded = [name for name in sys.modules if name.startswith("bytecheckpoint.inference.vllm.")]
assert sorted(name.rpartition(".")[2] for name in loaded) == ["loader", "private", "worker"], loaded
sys.path.append(sys.argv[1])
from vllm_attributes import missing_attributes
from bytecheckpoint.inference.vllm import adapters, model, peers
from vllm.v1.spec_decode.draft_model import DraftModelProposer
print("GONE", missing_attributes())
"""


@pytest.mark.vllm
def test_this_vllm_has_every_name_and_is_not_changed_by_the_plugin() -> None:
    pytest.importorskip("vllm")
    done = subprocess.run(
        [sys.executable, "-c", _CHECK, str(ROOT / "tests" / "support")],
        capture_output=True,
        text=True,
        timeout=time_limit(120),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "GONE []"
