"""Checkpoints of format version 1 as they were once written: every later library reads them, bit by bit."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import golden
import msgpack
import numpy as np
import pytest
import torch
import xxhash
import zstandard
from golden import CASES, ROOT, describe, describe_tensor, write_case
from independent_reader import read_checkpoint, read_payload, read_values

import bytecheckpoint as bcp
from bytecheckpoint import errors
from bytecheckpoint.manifest import Manifest, decode
from bytecheckpoint.testing.ranks import RankPool

# torch says so of every complex32 tensor that is made.
EXPERIMENTAL = "ComplexHalf support is experimental"
pytestmark = pytest.mark.filterwarnings(f"ignore:{EXPERIMENTAL}:UserWarning")

every_case = pytest.mark.parametrize("name", CASES)


def expectation(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((ROOT / f"{name}.json").read_text())
    return content


def known(described: list[Any]) -> bool:
    """Whether this torch has the type of a described tensor."""
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
def test_holds_exactly_what_was_saved(name: str) -> None:
    expected, checkpoint = expectation(name), bcp.open(ROOT / name)
    assert dict(checkpoint.aliases) == expected["aliases"]
    assert set(checkpoint) == expected["tensors"].keys() | expected["aliases"].keys()
    for full, described in expected["tensors"].items():
        if known(described):
            assert describe_tensor(checkpoint[full].load()) == described, full
    for alias, full in expected["aliases"].items():
        assert describe_tensor(checkpoint[alias].load()) == expected["tensors"][full], alias
    for fqn, described in expected["options"].items():
        assert describe(checkpoint.values("optimizer")["param_groups", fqn]) == described
    for fqn in expected["stateless"]:
        assert checkpoint.values("optimizer")["state", fqn] == {}


@every_case
def test_a_reader_without_the_library_finds_the_same(name: str) -> None:
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


def _leaves(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], Any]]:
    """The described plain values of a described tree, by path; lists are branches where tensors or mappings are in."""
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
            stored = {key: value for key, value in expected["options"][fqn][1]}
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
    found = rank_pool.run(_load_trees, str(ROOT / name), list(expected), world_size=CASES[name].world_size)
    for section, trees in expected.items():
        assert [_sorted_keys(tree[section]) for tree in found] == [_sorted_keys(tree) for tree in trees]


def _sorted_keys(tree: Any) -> Any:
    """With the entries of mappings in one order, since those that are stored leaf by leaf have none."""
    if not _is_mapping(tree) or (tree[0] == "OrderedDict" and not _holds_tensor(tree)):
        return [_sorted_keys(item) for item in tree] if isinstance(tree, list) else tree
    return [tree[0], sorted(([key, _sorted_keys(item)] for key, item in tree[1]), key=repr)]


def _holds_tensor(tree: Any) -> bool:
    return isinstance(tree, list) and (tree[:1] == ["tensor"] or any(_holds_tensor(item) for item in tree))


@pytest.fixture(scope="module")
def again(tmp_path_factory: pytest.TempPathFactory, rank_pool: RankPool) -> Path:
    """Everything generated anew by today's library."""
    folder = tmp_path_factory.mktemp("golden")
    for name in CASES:
        write_case(rank_pool, name, folder)
    return folder


@every_case
def test_today_writes_the_same(name: str, again: Path) -> None:
    if golden.TORCH != expectation(name)["torch"]:
        pytest.skip("another torch has other types, and other hyper-parameters")
    assert json.loads((again / f"{name}.json").read_text()) == expectation(name)
    old, new = (decode((root / name / "manifest.msgpack").read_bytes()) for root in (ROOT, again))
    assert _columns(new) == _columns(old)
    for file in old.files.name:
        assert (again / name / file).read_bytes() == (ROOT / name / file).read_bytes(), file


def _columns(manifest: Manifest) -> dict[str, Any]:
    """Every column as plain data, but for the version of the library."""
    found: dict[str, Any] = {}
    for part, table in {"": manifest, "files": manifest.files, "tensors": manifest.tensors, "shards": manifest.shards}.items():
        for key, value in vars(table).items():
            if isinstance(value, np.ndarray):
                found[f"{part}.{key}"] = value.tolist()
            elif isinstance(value, (str, int, list, dict)) and key != "library_version" and not key.startswith("_"):
                found[f"{part}.{key}"] = value
    return found


# -- mutilated variants ------------------------------------------------------------------------------------------

MANIFEST = "manifest.msgpack"


def _file(root: Path, ending: str) -> Path:
    return next(file for file in sorted(root.rglob("*")) if file.name.endswith(ending))


def _edit(ending: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def mutilate(root: Path) -> None:
        file = _file(root, ending)
        file.write_bytes(change(file.read_bytes()))

    return mutilate


def _delete(ending: str) -> Callable[[Path], None]:
    return lambda root: _file(root, ending).unlink()


def _flip(at: int) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        position = at % len(data)
        return data[:position] + bytes([data[position] ^ 0x10]) + data[position + 1 :]

    return change


def _swap(one: str, other: str) -> Callable[[Path], None]:
    def mutilate(root: Path) -> None:
        first, second = _file(root, one), _file(root, other)
        data = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(data)

    return mutilate


def _resealed(change: Callable[[dict[str, Any]], None]) -> Callable[[bytes], bytes]:
    """Another payload under a checksum that holds."""

    def mutilate(data: bytes) -> bytes:
        document = read_payload(data)
        change(document)
        payload = msgpack.packb(document)
        return _envelope("bytecheckpoint", 1, "raw", len(payload), payload)

    return mutilate


def _envelope(*parts: Any) -> bytes:
    body = b"\x96" + b"".join(msgpack.packb(part) for part in parts) + b"\xc4\x10"
    return body + xxhash.xxh3_128_digest(body)


def _reopened(change: Callable[..., bytes]) -> Callable[[bytes], bytes]:
    """``change`` gets the codec, raw length and stored payload."""
    return lambda data: change(*msgpack.unpackb(data)[2:5])


def _number(table: str, column: str, row: int, value: int) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        packed = document[table][column]
        values = np.frombuffer(packed["d"], f"<u{packed['w']}").astype("<u8")
        values[row] = value
        document[table][column] = {"w": 8, "d": values.tobytes()}

    return change


def _text(table: str, column: str, old: bytes, new: bytes) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        part = document[table][column]
        part = part.get("of", part)
        assert old in part["d"]
        part["d"] = part["d"].replace(old, new, 1)

    return change


def _cut_zeros(data: bytes) -> bytes:
    return b"\0" * len(data)


OPEN: dict[str, tuple[Callable[[Path], None], type[Exception], str]] = {
    "nothing": (lambda root: shutil.rmtree(root), errors.CheckpointNotFoundError, "nothing is stored there"),
    "no manifest": (_delete(MANIFEST), errors.NotACheckpointError, "none was committed"),
    "empty manifest": (_edit(MANIFEST, lambda data: b""), errors.CorruptionError, "not a manifest, or damaged at its start"),
    "zeros": (_edit(MANIFEST, _cut_zeros), errors.CorruptionError, "not a manifest, or damaged at its start"),
    "cut in half": (_edit(MANIFEST, lambda data: data[: len(data) // 2]), errors.CorruptionError, "checksum mismatch in the manifest"),
    "one byte short": (_edit(MANIFEST, lambda data: data[:-1]), errors.CorruptionError, "checksum mismatch in the manifest"),
    "one byte more": (_edit(MANIFEST, lambda data: data + b"\0"), errors.CorruptionError, "checksum mismatch in the manifest"),
    "flipped magic": (_edit(MANIFEST, _flip(5)), errors.CorruptionError, "not a manifest, or damaged at its start"),
    "flipped version": (_edit(MANIFEST, _flip(16)), errors.CorruptionError, "checksum mismatch in the manifest"),
    "flipped payload": (_edit(MANIFEST, _flip(200)), errors.CorruptionError, "checksum mismatch in the manifest"),
    "flipped checksum": (_edit(MANIFEST, _flip(-1)), errors.CorruptionError, "checksum mismatch in the manifest"),
    "newer version": (
        _edit(MANIFEST, lambda data: _envelope("bytecheckpoint", 2, {"any": "thing"}, None, b"", 1)),
        errors.UnsupportedVersionError, "format version 2; this library reads version 1",
    ),
    "unknown manifest codec": (
        _edit(MANIFEST, _reopened(lambda codec, size, stored: _envelope("bytecheckpoint", 1, "lz9", size, stored))),
        errors.UnsupportedVersionError, "codec 'lz9'",
    ),
    "wrong length": (
        _edit(MANIFEST, _reopened(lambda codec, size, stored: _envelope("bytecheckpoint", 1, codec, size + 1, stored))),
        errors.FormatError, "announced",
    ),
    "bomb": (
        _edit(MANIFEST, _reopened(lambda *_: _envelope("bytecheckpoint", 1, "zstd", 1 << 31, zstandard.compress(b"")))),
        errors.FormatError, "claims to expand to 2147483648",
    ),
    "unknown field": (
        _edit(MANIFEST, _resealed(lambda document: document.update(more=1))), errors.FormatError, "does not have exactly the fields",
    ),
    "field missing": (
        _edit(MANIFEST, _resealed(lambda document: document.pop("aliases"))), errors.FormatError, "does not have exactly the fields",
    ),
    "unknown dtype": (
        _edit(MANIFEST, _resealed(_text("tensors", "dtype", b"float32", b"float33"))), errors.FormatError, "unknown dtype 'float33'",
    ),
    "unknown kind of file": (
        _edit(MANIFEST, _resealed(_text("files", "kind", b"values", b"pickle"))), errors.UnsupportedVersionError, "'pickle'",
    ),
    "unknown codec of a file": (
        _edit(MANIFEST, _resealed(_text("files", "codec", b"raw", b"lz9"))), errors.UnsupportedVersionError, "'lz9'",
    ),
    "path that climbs": (
        _edit(MANIFEST, _resealed(_text("files", "name", b"attempt-golden-single/", b"../tempt-golden-single/"))), errors.FormatError, "file name",
    ),
    "name twice": (
        _edit(MANIFEST, _resealed(_text("tensors", "name", b"model.down.weight", b"model.down.bias"))), errors.FormatError, "names",
    ),
    "box outside": (_edit(MANIFEST, _resealed(_number("shards", "offsets", 1, 1))), errors.FormatError, ""),
    "shape changed": (_edit(MANIFEST, _resealed(_number("tensors", "shape", 0, 2))), errors.FormatError, ""),
    "file of another section": (_edit(MANIFEST, _resealed(_number("shards", "file", 0, 2))), errors.FormatError, ""),
    "offset moved": (_edit(MANIFEST, _resealed(_number("shards", "offset", 0, 1 << 40))), errors.FormatError, ""),
    "rank beyond the world": (_edit(MANIFEST, _resealed(_number("files", "rank", 0, 7))), errors.FormatError, "rank"),
    "tie to nothing": (_edit(MANIFEST, _resealed(_text("aliases", "target", b"model.up", b"model.uq"))), errors.FormatError, "alias"),
}  # fmt: skip

MODEL, OPTIMIZER = "model-00000.safetensors", "optimizer-00000.safetensors"
VALUES = "optimizer-00000.msgpack"
SWAPPED = "this is not the file that was saved (changed, or swapped with another)"

LOAD: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "file missing": (_delete(MODEL), MODEL, "file is missing"),
    "values missing": (_delete(VALUES), VALUES, "file is missing"),
    "file empty": (_edit(MODEL, lambda data: b""), MODEL, "cannot read its first"),
    "file cut in its header": (_edit(MODEL, lambda data: data[:100]), MODEL, "cannot read its first"),
    "file cut in its data": (_edit(MODEL, lambda data: data[:-1]), MODEL, "cannot read bytes"),
    "values cut": (_edit(VALUES, lambda data: data[:-1]), VALUES, "file has"),
    "values longer": (_edit(VALUES, lambda data: data + b"\0"), VALUES, "file has"),
    "flipped header length": (_edit(MODEL, _flip(2)), MODEL, SWAPPED),
    "flipped header": (_edit(MODEL, _flip(60)), MODEL, SWAPPED),
    "flipped padding": (_edit(MODEL, _flip(4095)), MODEL, SWAPPED),
    "flipped first byte": (_edit(MODEL, _flip(4096)), MODEL, "checksum mismatch in tensor model."),
    "flipped last byte": (_edit(MODEL, _flip(-1)), MODEL, "checksum mismatch in tensor model."),
    "flipped optimizer byte": (_edit(OPTIMIZER, _flip(-1)), OPTIMIZER, "checksum mismatch in tensor optimizer.state."),
    "flipped value": (_edit(VALUES, _flip(-3)), VALUES, "checksum mismatch in the values of section optimizer"),
    "swapped": (_swap(MODEL, OPTIMIZER), MODEL, SWAPPED),
}  # fmt: skip


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ROOT / "single", tmp_path / "single"))


@pytest.mark.parametrize("kind", OPEN)
def test_a_mutilated_manifest_is_refused(kind: str, copy: Path) -> None:
    mutilate, error, part = OPEN[kind]
    mutilate(copy)
    state = dict(zip(("model", "optimizer"), golden.plain_target("single")))
    before = describe(state["model"].state_dict())
    for read in (lambda: bcp.open(copy), lambda: bcp.load(copy, state)):
        with pytest.raises(error) as caught:
            read()
        assert type(caught.value) is error
        assert str(copy) in str(caught.value)
        assert part in str(caught.value)
    assert describe(state["model"].state_dict()) == before


@pytest.mark.parametrize("kind", LOAD)
def test_a_mutilated_file_is_found(kind: str, copy: Path) -> None:
    mutilate, file, part = LOAD[kind]
    mutilate(copy)
    checkpoint = bcp.open(copy)
    report = checkpoint.verify()
    assert not report.ok
    assert any(file in problem for problem in report.problems)
    model, optimizer = golden.plain_target("single")
    with pytest.raises(errors.CorruptionError) as caught:
        bcp.load(copy, {"model": model, "optimizer": optimizer})
    assert type(caught.value) is errors.CorruptionError
    assert file in str(caught.value)
    assert part in str(caught.value)


@pytest.mark.parametrize("name", ["fsdp2-4", "fsdp1-flat-3", "tp-2"])
def test_one_rank_s_file_for_another_s_is_found(name: str, tmp_path: Path) -> None:
    root = Path(shutil.copytree(ROOT / name, tmp_path / name))
    _swap("model-00000.safetensors", "model-00001.safetensors")(root)
    model, _ = golden.plain_target(name)
    with pytest.raises(errors.CorruptionError, match="swapped with another"):
        bcp.load(root, {"model": model})
    assert not bcp.open(root).verify().ok
