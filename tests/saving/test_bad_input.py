"""What cannot be saved or loaded: its own error, which says what, where and what to do; nothing is lost by it."""

from __future__ import annotations

import enum
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
import xxhash
from damage import MANIFEST, keys_of
from small_mounts import read_only, tiny_disk
from torch import nn

import bytecheckpoint as bcp
from bytecheckpoint.errors import (
    AccessDeniedError,
    CheckpointError,
    CheckpointNotFoundError,
    MismatchError,
    NameCollisionError,
    NotACheckpointError,
    StateError,
    StorageError,
    StorageFullError,
    UnknownObjectError,
    UnserializableError,
    UnsupportedTensorError,
    UnsupportedURLError,
    UnsupportedVersionError,
)
from bytecheckpoint.testing.ranks import RankPool


def _tree(**entries: Any) -> dict[str, Any]:
    return {"extra_state": entries}


def _value(path: Path) -> int:
    """What is committed at ``path``."""
    return int(bcp.open(path).values("extra_state")[("value",)])


# -- storage -----------------------------------------------------------------------------------------------------


def test_a_path_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("something")
    with pytest.raises(StorageError, match=r"file") as caught:
        bcp.save(tmp_path / "file" / "checkpoint", _tree(value=1))
    assert str(tmp_path / "file" / "checkpoint") in str(caught.value)
    assert (tmp_path / "file").read_text() == "something"
    with pytest.raises((CheckpointNotFoundError, StorageError), match=re.escape(str(tmp_path / "file"))):
        bcp.load(tmp_path / "file" / "checkpoint", _tree(value=1))


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("something")
    for act in (bcp.save, bcp.load):
        with pytest.raises(StorageError, match="is a file, not a directory; give another path"):
            act(tmp_path / "file", _tree(value=1))
    with pytest.raises(StorageError, match="is a file, not a directory"):
        bcp.open(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "something"


def test_a_url_that_nobody_serves() -> None:
    with pytest.raises(UnsupportedURLError, match=r"no storage backend serves nowhere://.*Known schemes: .*file"):
        bcp.save("nowhere://bucket/key", _tree(value=1))


def test_a_system_directory_that_takes_no_files() -> None:
    """Not even root makes files there."""
    with pytest.raises(StorageError, match=r"/proc/bytecheckpoint"):
        bcp.save("/proc/bytecheckpoint", _tree(value=1))


def test_a_directory_of_somebody_else(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(0o500)
    with pytest.raises(AccessDeniedError, match=r"check the owner, the mode"):
        bcp.save(tmp_path / "checkpoint", _tree(value=1))
    tmp_path.chmod(0o700)


def test_a_read_only_file_system(tmp_path: Path) -> None:
    with tiny_disk(tmp_path / "disk", 1 << 20) as disk:
        path = disk / "checkpoint"
        bcp.save(path, _tree(value=1))
        before = keys_of(path)
        with read_only(disk):
            for target in (path, disk / "another"):
                with pytest.raises(AccessDeniedError, match=r"read-only") as caught:
                    bcp.save(target, _tree(value=2))
                assert str(target) in str(caught.value)
                handle = bcp.save(target, _tree(value=2), async_save=True)
                assert isinstance(handle.exception(), AccessDeniedError)
            assert _value(path) == 1
            assert bcp.load(path, _tree(value=0)).loaded == ["extra_state.value"]
        assert keys_of(path) == before
        assert not (disk / "another").exists()


def test_a_full_disk(tmp_path: Path) -> None:
    """Found before or in the middle of the data: the old checkpoint stays, and the disk is not left fuller."""
    with tiny_disk(tmp_path / "disk", 1 << 20) as disk:
        path = disk / "checkpoint"
        bcp.save(path, _tree(value=1, weight=torch.ones(1000)))
        before = keys_of(path)
        for shape in ((1 << 18,), (1 << 22,)):
            with pytest.raises(StorageFullError, match=r"free space or quota") as caught:
                bcp.save(path, _tree(value=2, weight=torch.zeros(shape)))
            assert re.search(r"writing 'attempt-\S+/extra_state-00000.safetensors'", str(caught.value))
            assert re.search(r"needed: \d+ bytes, free on this file system: \d+ bytes", str(caught.value))
            assert keys_of(path) == before
            assert _value(path) == 1
            assert bcp.open(path)["extra_state.weight"].load().sum() == 1000
        bcp.save(path, _tree(value=3))
        assert _value(path) == 3


_LIMITED = """
import resource, signal, sys
import torch
import bytecheckpoint as bcp
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path = sys.argv[1]
bcp.save(path, {"extra_state": {"value": 1}})
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    bcp.save(path, {"extra_state": {"value": 2, "weight": torch.zeros(100_000)}})
except bcp.errors.StorageFullError as error:
    print("full:", error)
print("value:", bcp.open(path).values("extra_state")[("value",)])
"""


def test_a_file_size_limit(tmp_path: Path) -> None:
    """What quotas look like where no file system can be mounted."""
    assert resource.RLIMIT_FSIZE is not None
    path = tmp_path / "checkpoint"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _LIMITED, str(path)], capture_output=True, text=True, check=True
    )
    assert "full: writing 'attempt-" in done.stdout
    assert "ulimit -f" in done.stdout
    assert done.stdout.endswith("value: 1\n")
    assert len([key for key in keys_of(path) if key != MANIFEST]) == 1


# -- what is there already ---------------------------------------------------------------------------------------


def test_a_directory_with_other_things(tmp_path: Path) -> None:
    """Not a checkpoint for readers; a save puts one beside what is there."""
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-10").mkdir()
    (tmp_path / "step-10" / "model.bin").write_text("mine too")
    for read in (bcp.open, lambda path: bcp.load(path, _tree(value=1))):
        with pytest.raises(NotACheckpointError, match=r"no manifest.msgpack but holds notes.txt, step-10/") as caught:
            read(tmp_path)
        assert "did you mean one of step-10/ below it?" in str(caught.value)
    bcp.save(tmp_path, _tree(value=1))
    bcp.save(tmp_path, _tree(value=2))
    assert _value(tmp_path) == 2
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "step-10" / "model.bin").read_text() == "mine too"


def test_nothing_there(tmp_path: Path) -> None:
    state = _tree(value=1)
    with pytest.raises(CheckpointNotFoundError, match=r"no checkpoint at .*nowhere: nothing is stored there"):
        bcp.load(tmp_path / "nowhere", state)
    assert state == _tree(value=1)


@pytest.fixture
def committed(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    bcp.save(path, _tree(value=1, weight=torch.ones(3)))
    return path


def test_a_newer_format_version(committed: Path) -> None:
    """The message names both versions; a save replaces it and keeps the files that it could not understand."""
    file = committed / MANIFEST
    raw = file.read_bytes()
    file.write_bytes(_with_version(raw, 2))
    for read in (bcp.open, lambda path: bcp.load(path, _tree(value=1, weight=torch.zeros(3)))):
        with pytest.raises(UnsupportedVersionError, match=r"version 2\b.*\b1\b") as caught:
            read(committed)
        assert str(file) in str(caught.value)
    before = set(keys_of(committed))
    bcp.save(committed, _tree(value=5))
    assert _value(committed) == 5
    assert before <= set(keys_of(committed))


def _with_version(raw: bytes, version: int) -> bytes:
    """The manifest as a later library would begin it: the version is the byte behind the magic string."""
    changed = raw[:16] + bytes([version]) + raw[17:-16]
    return changed + xxhash.xxh3_128_digest(changed)


@pytest.mark.parametrize("keep", [0, 1, 8, 24, 40, -1])
def test_a_manifest_cut_short(committed: Path, keep: int) -> None:
    file = committed / MANIFEST
    raw = file.read_bytes()
    file.write_bytes(raw[:keep])
    with pytest.raises(CheckpointError, match=re.escape(str(file))):
        bcp.open(committed)
    state = _tree(value=7, weight=torch.zeros(3))
    with pytest.raises(CheckpointError, match=re.escape(str(file))):
        bcp.load(committed, state)
    assert state["extra_state"]["value"] == 7
    bcp.save(committed, _tree(value=2))
    assert _value(committed) == 2


def test_a_manifest_that_is_something_else(committed: Path) -> None:
    for content in (b"{}", msgpack.packb({"version": 1}), os.urandom(300)):
        (committed / MANIFEST).write_bytes(content)
        with pytest.raises(CheckpointError, match=re.escape(str(committed / MANIFEST))):
            bcp.open(committed)


# -- states that cannot be saved ---------------------------------------------------------------------------------


class _Colour(enum.Enum):
    RED = 1


class _Opaque:
    pass


@pytest.fixture
def previous(tmp_path: Path) -> Iterator[Path]:
    """A checkpoint that every refused save must leave as it is."""
    path = tmp_path / "checkpoint"
    bcp.save(path, _tree(value=1))
    before = {key: (path / key).read_bytes() for key in keys_of(path)}
    yield path
    assert {key: (path / key).read_bytes() for key in keys_of(path)} == before


def _refused(path: Path, state: Any, error: type[Exception], *said: str, **options: Any) -> None:
    for background in (False, True):
        with pytest.raises(error) as caught:
            bcp.save(path, state, async_save=background, **options)
        for part in said:
            assert re.search(part, str(caught.value)), f"{part!r} is not in: {caught.value}"


@pytest.mark.parametrize(
    ("value", "kind"),
    [(lambda x: x, "function"), (_Opaque(), "_Opaque"), (_Colour.RED, "_Colour"), (object, "type"), (open, "builtin")],
    ids=["lambda", "object", "enum", "class", "builtin"],
)
def test_what_is_no_plain_value(previous: Path, value: Any, kind: str) -> None:
    state = _tree(value=2, deep={"er": [1, (2, value)]})
    _refused(
        previous, state, UnserializableError, r"extra_state\.deep\.er\.1\.1", kind, "allow_pickle=True", "state_dict"
    )


def test_a_lambda_in_an_optimizer_group(previous: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["warm_up"] = lambda step: step
    _refused(
        previous, {"model": model, "optimizer": optimizer}, UnserializableError, r"optimizer\.param_groups", "warm_up"
    )


def test_pickles_only_when_asked_at_both_ends(tmp_path: Path) -> None:
    bcp.save(tmp_path, _tree(value=1, colour=_Colour.RED), allow_pickle=True)
    target = _tree(value=0, colour=None)
    with pytest.raises(StateError, match=r"extra_state\.colour was stored as a pickle.*allow_pickle=True to load"):
        bcp.load(tmp_path, target)
    assert target == _tree(value=0, colour=None)
    bcp.load(tmp_path, target, allow_pickle=True)
    assert target == _tree(value=1, colour=_Colour.RED)


def test_nan_keys(previous: Path) -> None:
    nan = float("nan")
    _refused(previous, _tree(table={nan: 1}), UnserializableError, r"extra_state\.table", "NaN key")
    _refused(previous, _tree(table=[{(1, nan): 1}]), UnserializableError, r"extra_state\.table", "NaN key")
    _refused(
        previous, _tree(table={_Opaque(): 1}), UnserializableError, r"extra_state\.table", "_Opaque", "keys must be"
    )


def test_tensors_whose_names_collide(previous: Path) -> None:
    state = _tree(**{"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}})
    _refused(previous, state, NameCollisionError, r"'a\.b'", "rename")
    state = {"model": {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}}
    _refused(previous, state, NameCollisionError, r"'a\.b'", "rename")


def test_values_with_dots_in_their_keys_do_not_collide(tmp_path: Path) -> None:
    """Values are stored under paths, so that both survive under their own."""
    bcp.save(tmp_path, _tree(**{"a.b": 1, "a": {"b": 2, "1": "text", 1: "number"}}))
    target = _tree(**{"a.b": 0, "a": {"b": 0, "1": "", 1: ""}})
    bcp.load(tmp_path, target)
    assert target == _tree(**{"a.b": 1, "a": {"b": 2, "1": "text", 1: "number"}})


def test_names_kept_for_ranks(previous: Path) -> None:
    _refused(previous, _tree(**{"weight@3": torch.ones(1)}), NameCollisionError, r"weight@3", "rename")
    bcp.save(previous.with_name("fine"), _tree(**{"weight@home": torch.ones(1), "count@3": 1}))


def _nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (lambda: torch.eye(3).to_sparse(), "to_dense"),
        (lambda: torch.eye(3).to_sparse_csr(), "to_dense"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "dequantize"),
        (_nested, "of their own"),
        (lambda: torch.ones(3, device="meta"), "materialise"),
        (lambda: torch.ones(3, dtype=torch.complex64).conj(), "resolve_conj"),
        (lambda: nn.LazyLinear(3).weight, "forward pass"),
    ],
    ids=["coo", "csr", "quantised", "nested", "meta", "conj", "lazy"],
)
def test_tensors_without_dense_bytes(previous: Path, make: Any, advice: str) -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensor = make()
    _refused(previous, _tree(value=2, inner={"odd": tensor}), UnsupportedTensorError, r"inner\.odd", advice)
    _refused(previous, {"model": {"odd": tensor}}, UnsupportedTensorError, "odd", advice)


def test_a_tensor_inside_a_plain_value(previous: Path) -> None:
    _refused(previous, _tree(odd={("a", 1): torch.ones(1)}), UnserializableError, r"extra_state\.odd", "tensor inside")


def test_a_tree_that_contains_itself(previous: Path) -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    _refused(previous, _tree(loop=loop), UnserializableError, r"extra_state\.loop", "contains itself")
    table: dict[str, Any] = {"deep": {}}
    table["deep"]["again"] = table
    _refused(previous, {"extra_state": table}, UnserializableError, "contains itself")


@pytest.mark.parametrize("state", [[1, 2], None, {}, nn.Linear(1, 1), "model"], ids=repr)
def test_a_state_that_is_no_mapping(previous: Path, state: Any) -> None:
    _refused(previous, state, StateError, "non-empty mapping such as", "'model': model")
    with pytest.raises(StateError, match="non-empty mapping such as"):
        bcp.load(previous, state)


@pytest.mark.parametrize("name", ["", "a/b", "..", "a.b", "a b", 3, None, "-x", "ü"])
def test_section_names_that_cannot_be_files(previous: Path, name: Any) -> None:
    _refused(previous, {name: {"value": 1}}, StateError, re.escape(repr(name)), "use letters, digits")


def test_sections_of_unknown_kinds(previous: Path) -> None:
    _refused(previous, {"extra": _Opaque()}, UnknownObjectError, "'extra'", "_Opaque", "register_adapter")
    _refused(previous, {"model": [nn.Linear(1, 1), _Opaque()]}, UnserializableError, r"model\.1", "_Opaque")
    _refused(previous, _tree(value=1), UnknownObjectError, "'nonsense'", "known are", framework="nonsense")


def test_an_optimizer_that_nothing_names(previous: Path) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    _refused(previous, {"optimizer": optimizer}, StateError, "group 0, parameter 0", "Pass the module")
    _refused(previous, _tree(optimizer=optimizer), UnserializableError, r"extra_state\.optimizer", "section of its own")


def test_options_that_mean_nothing(previous: Path) -> None:
    _refused(previous, _tree(value=1), StateError, "step must not be negative: -1", step=-1)
    for metadata in ({"f": _Opaque()}, {3: 1}, {"nan": {float("nan"): 1}}):
        _refused(previous, _tree(value=1), bcp.errors.BytecheckpointError, "metadata", metadata=metadata)


# -- loading into the wrong things -------------------------------------------------------------------------------


def test_loading_into_the_wrong_things(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": nn.Linear(2, 2), "extra_state": {"value": 1, "list": [1, 2]}})
    other = nn.Linear(2, 3)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(MismatchError) as caught:
        bcp.load(tmp_path, {"model": other, "extra_state": {"value": 0, "list": torch.ones(1)}})
    said = str(caught.value)
    for part in (
        r"model\.weight: stored \[2, 2\], wanted \[3, 2\]",
        r"model\.bias: stored \[2\], wanted \[3\]",
        r"extra_state\.list",
        "nothing was changed",
        re.escape(str(tmp_path)),
    ):
        assert re.search(part, said), said
    assert all(torch.equal(before[name], tensor) for name, tensor in other.state_dict().items())


def test_a_section_that_is_not_stored(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": nn.Linear(2, 2)})
    model = nn.Linear(2, 2)
    with pytest.raises(MismatchError, match=r"ema: no such section; the checkpoint has model"):
        bcp.load(tmp_path, {"model": model, "ema": nn.Linear(2, 2)})


# -- ranks that do not agree -------------------------------------------------------------------------------------


def _disagree(rank: int, world_size: int, root: str, what: str) -> tuple[str, str]:
    options: dict[str, Any] = {"step": 1, "deadline_s": 30}
    state: dict[str, Any] = {"extra_state": {"value": rank}}
    path = f"{root}/checkpoint"
    if what == "path" and rank == 1:
        path = f"{root}/elsewhere"
    if what == "step":
        options["step"] = 10 + rank
    if what == "sections" and rank == 1:
        state["more"] = {"value": 1}
    if what == "chunk size":
        options["chunk_size"] = 1024 * (rank + 1)
    try:
        bcp.save(path, state, **options)
    except bcp.errors.BytecheckpointError as error:
        return type(error).__name__, str(error)
    return "saved", ""


def _load_disagreeing(rank: int, world_size: int, root: str) -> tuple[str, str]:
    try:
        bcp.load(f"{root}/checkpoint-{rank}", {"extra_state": {}}, deadline_s=30)
    except bcp.errors.BytecheckpointError as error:
        return type(error).__name__, str(error)
    return "loaded", ""


def _disagree_on_contents(rank: int, world_size: int, root: str) -> tuple[str, str]:
    """One parameter with two shapes."""
    try:
        bcp.save(f"{root}/checkpoint", {"model": nn.Linear(2 + rank, 1)}, deadline_s=30)
    except bcp.errors.BytecheckpointError as error:
        return type(error).__name__, str(error)
    return "saved", ""


def _fail_on_one(rank: int, world_size: int, root: str) -> tuple[str, str, int]:
    try:
        bcp.save(f"{root}/checkpoint", {"extra_state": {"f": print if rank == 1 else 1}}, deadline_s=30)
    except bcp.errors.BytecheckpointError as error:
        said = type(error).__name__, str(error)
    else:
        said = "saved", ""
    bcp.save(f"{root}/next", {"extra_state": {"value": 4}}, deadline_s=30)
    return (*said, _value(Path(root) / "next"))


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


@pytest.mark.parametrize("what", ["path", "step", "sections", "chunk size"])
def test_ranks_that_disagree(pool: RankPool, tmp_path: Path, what: str) -> None:
    said = pool.run(_disagree, str(tmp_path), what)
    assert {kind for kind, _ in said} == {"DisagreementError"}, said
    assert said[0] == said[1]
    message = said[0][1]
    assert what in message
    expected = {
        "path": ["elsewhere", "/checkpoint"],
        "step": ["10", "11"],
        "sections": ["extra_state, more"],
        "chunk size": ["1024", "2048"],
    }[what]
    assert all(part in message for part in expected), message
    assert re.search(r"\brank", message)
    assert keys_of(tmp_path) == [], "something was written"


def test_loads_that_disagree(pool: RankPool, tmp_path: Path) -> None:
    said = pool.run(_load_disagreeing, str(tmp_path))
    assert {kind for kind, _ in said} == {"DisagreementError"}, said


def test_one_name_with_two_shapes(pool: RankPool, tmp_path: Path) -> None:
    said = pool.run(_disagree_on_contents, str(tmp_path))
    assert said[0][0] == said[1][0] == "PlanError", said
    for part in ("model.weight", "[1, 2]", "[1, 3]", "rank 0", "rank 1"):
        assert all(part in message for _, message in said), said
    assert keys_of(tmp_path) == []


def test_a_state_that_one_rank_cannot_store(pool: RankPool, tmp_path: Path) -> None:
    said = pool.run(_fail_on_one, str(tmp_path))
    assert {kind for kind, *_ in said} == {"UnserializableError"}, said
    assert all("extra_state.f" in message for _, message, _ in said)
    assert [value for *_, value in said] == [4, 4]
    assert not (tmp_path / "checkpoint").exists()
