"""Read checkpoints that earlier releases wrote, bit for bit."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import golden
import numpy as np
import pytest
import torch
from golden import CASES, ROOT, describe, describe_tensor, write_case
from independent_reader import read_checkpoint, read_tree, read_values

import bytecheckpoint as bcp
from bytecheckpoint.format.manifest.document import Manifest
from bytecheckpoint.format.manifest.envelope import decode
from bytecheckpoint.format.values.files import decode_values_file
from bytecheckpoint.testing.ranks import RankPool

# torch warns about every complex32 tensor.
EXPERIMENTAL = "ComplexHalf support is experimental"
pytestmark = pytest.mark.filterwarnings(f"ignore:{EXPERIMENTAL}:UserWarning")

every_case = pytest.mark.parametrize("name", CASES)


def expectation(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((ROOT / f"{name}.json").read_text())
    return content


def known(described: list[Any]) -> bool:
    """Whether this torch has the dtype of a described tensor."""
    return isinstance(getattr(torch, described[0], None), torch.dtype)


@every_case
def test_opens_and_verifies(name: str) -> None:
    checkpoint = bcp.open(ROOT / name)
    assert checkpoint.verify().ok
    assert checkpoint.step == golden.STEP
    assert checkpoint.metadata == golden.METADATA
    assert checkpoint.world_size == CASES[name].world_size
    assert checkpoint.created == "2025-01-31T00:00:00.000000Z"


@every_case
def test_contains_exactly_the_saved_state(name: str) -> None:
    expected, checkpoint = expectation(name), bcp.open(ROOT / name)
    assert dict(checkpoint.aliases) == expected["aliases"]
    assert set(checkpoint) == expected["tensors"].keys() | expected["aliases"].keys()
    for full, described in expected["tensors"].items():
        if known(described):
            assert describe_tensor(checkpoint[full].load()) == described, full
    for alias, full in expected["aliases"].items():
        assert describe_tensor(checkpoint[alias].load()) == expected["tensors"][full], alias
    for fqn, described in expected["options"].items():
        assert describe(checkpoint.section_values("optimizer")["param_groups", fqn]) == described
    for fqn in expected["stateless"]:
        assert checkpoint.section_values("optimizer")["state", fqn] == {}


@every_case
def test_an_independent_reader_reads_the_same(name: str) -> None:
    expected = expectation(name)
    found = read_checkpoint(ROOT / name)
    assert found.keys() == expected["tensors"].keys() | expected["aliases"].keys()
    for full, (_, shape, data) in expected["tensors"].items():
        assert (list(found[full].shape), found[full].tobytes().hex()) == (shape, data), full
    for rank in range(CASES[name].world_size):
        values = read_values(ROOT / name, rank)
        for fqn, described in expected["options"].items():
            assert describe(values["optimizer"]["param_groups", fqn]) == described
        for section, trees in expected["trees"].items():
            assert {p: describe(v) for p, v in values[section].items()} == dict(_leaves(trees[rank]))


@pytest.mark.parametrize("name", ["values", "per-rank-2", "dtypes"])
def test_an_independent_reader_rebuilds_the_trees(name: str) -> None:
    for section, trees in expectation(name)["trees"].items():
        for rank, tree in enumerate(trees):
            read = read_tree(ROOT / name, section, rank)
            assert _sorted_keys(_rebuilt(read["tree"], read["containers"])) == _sorted_keys(tree)


def _rebuilt(node: Any, containers: dict[Any, Any], path: tuple[Any, ...] = ()) -> Any:
    """Describe a tree that ``read_tree`` returned."""
    if isinstance(node, tuple) and node[:1] == ("tensor",):
        return list(node)
    kind, length = containers.get(path, ("dict", 0))
    if type(node) is not dict or (path and not node):
        return describe(node)
    if kind in ("list", "tuple"):
        return [kind, [_rebuilt(node[index], containers, (*path, index)) for index in range(length)]]
    return [kind, [[describe(key), _rebuilt(item, containers, (*path, key))] for key, item in node.items()]]


def _leaves(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], Any]]:
    """Return the plain values of a described tree by path; lists with tensors or mappings are branches."""
    kind, items = (tree[0], tree[1]) if isinstance(tree, list) else (None, [])
    if kind == "tensor":
        return []
    if kind == "OrderedDict" and not _holds_tensor(tree):
        return [(path, tree)]
    keys = [int(key[1]) if isinstance(key, list) else key for key, _ in items] if _is_mapping(tree) else []
    if keys:
        return [leaf for key, (_, item) in zip(keys, items) for leaf in _leaves(item, (*path, key))]
    if kind in ("list", "tuple") and any(_is_branch(item) for item in items):
        return [leaf for index, item in enumerate(items) for leaf in _leaves(item, (*path, index))]
    return [(path, tree)]


def _is_mapping(tree: Any) -> bool:
    if not isinstance(tree, list) or tree[:1] not in (["dict"], ["OrderedDict"]) or not tree[1]:
        return False
    return all(isinstance(key, str) or key[0] == "int" for key, _ in tree[1])


def _is_branch(tree: Any) -> bool:
    if not isinstance(tree, list):
        return False
    return tree[0] in ("tensor", "dict", "OrderedDict") or (
        tree[0] in ("list", "tuple") and any(_is_branch(item) for item in tree[1])
    )


@pytest.mark.parametrize("name", ["single", "fsdp2-4", "fsdp1-flat-3", "tp-2"])
def test_loads_into_a_plain_model(name: str) -> None:
    expected = expectation(name)
    model, optimizer = golden.plain_target(name)
    report = bcp.load(ROOT / name, {"model": model, "optimizer": optimizer})
    assert (report.missing, report.unexpected, report.lazy, report.cast) == ([], [], [], {})
    for key, tensor in model.state_dict().items():
        full = expected["aliases"].get(f"model.{key}", f"model.{key}")
        assert describe_tensor(tensor) == expected["tensors"][full], key
    parameters = dict(model.named_parameters())
    loaded = {
        f"optimizer.state.{fqn}.{key}": describe_tensor(tensor)
        for fqn, parameter in parameters.items()
        for key, tensor in optimizer.state.get(parameter, {}).items()
    }
    assert loaded == {full: d for full, d in expected["tensors"].items() if full.startswith("optimizer.")}
    for group in optimizer.param_groups:
        for fqn in (fqn for fqn, p in parameters.items() if any(p is other for other in group["params"])):
            stored = dict(expected["options"][fqn][1])
            assert {key: describe(group[key]) for key in stored} == stored


def _load_trees(rank: int, world_size: int, path: str, sections: list[str]) -> dict[str, Any]:
    state: dict[str, dict[str, Any]] = {section: {} for section in sections}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", EXPERIMENTAL, UserWarning)
        bcp.load(path, state)
    return {section: describe(tree) for section, tree in state.items()}


@pytest.mark.parametrize("name", ["values", "per-rank-2", "dtypes"])
def test_loads_as_trees(name: str, rank_pool: RankPool) -> None:
    expected = expectation(name)["trees"]
    if not all(known(item[1:]) for tree in expected.get("dtypes", [["dict", []]]) for _, item in tree[1]):
        pytest.skip("this torch lacks a type of the golden checkpoint")
    assert bcp.open(ROOT / name).verify().ok
    found = rank_pool.run(_load_trees, str(ROOT / name), list(expected), world_size=CASES[name].world_size)
    for section, trees in expected.items():
        assert [_sorted_keys(tree[section]) for tree in found] == [_sorted_keys(tree) for tree in trees]


def _sorted_keys(tree: Any) -> Any:
    """Sort the entries of mappings, because leaves are stored without an order."""
    if not _is_mapping(tree) or (tree[0] == "OrderedDict" and not _holds_tensor(tree)):
        return [_sorted_keys(item) for item in tree] if isinstance(tree, list) else tree
    return [tree[0], sorted(([key, _sorted_keys(item)] for key, item in tree[1]), key=repr)]


def _holds_tensor(tree: Any) -> bool:
    return isinstance(tree, list) and (tree[:1] == ["tensor"] or any(_holds_tensor(item) for item in tree))


@pytest.fixture(scope="module")
def again(tmp_path_factory: pytest.TempPathFactory, rank_pool: RankPool) -> Path:
    """Generate everything with the current library."""
    folder = tmp_path_factory.mktemp("golden")
    for name in CASES:
        write_case(rank_pool, name, folder)
    return folder


@every_case
def test_the_current_library_writes_the_same(name: str, again: Path) -> None:
    if expectation(name)["torch"] != golden.TORCH:
        pytest.skip("another torch has other types, and other hyper-parameters")
    assert json.loads((again / f"{name}.json").read_text()) == expectation(name)
    old, new = (decode((root / name / "manifest.msgpack").read_bytes()) for root in (ROOT, again))
    values = [row for row, kind in enumerate(old.files.kind) if kind.endswith("values")]
    assert _columns(new, values) == _columns(old, values)
    for row, file in enumerate(old.files.name):
        data = [(root / name / file).read_bytes() for root in (ROOT, again)]
        if row in values:
            assert decode_values_file(data[1]) == decode_values_file(data[0]), file
        else:
            assert data[1] == data[0], file


_VARYING = ("library_version", "save_times")


def _columns(manifest: Manifest, values: list[int]) -> dict[str, Any]:
    """Return every column as plain data, except the version, the times, and the sizes of the files ``values``."""
    found: dict[str, Any] = {}
    for part, table in {
        "": manifest,
        "files": manifest.files,
        "tensors": manifest.tensors,
        "shards": manifest.shards,
    }.items():
        for key, value in vars(table).items():
            if isinstance(value, np.ndarray):
                found[f"{part}.{key}"] = value.tolist()
            elif isinstance(value, (str, int, list, dict)) and key not in _VARYING and not key.startswith("_"):
                found[f"{part}.{key}"] = value
    for key in ("size", "head_length", "head_checksum"):
        found[f"files.{key}"] = [None if row in values else n for row, n in enumerate(found[f"files.{key}"])]
    return found
