"""Arguments and names that cannot be stored are refused in the first steps, before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sorted_arguments import loading, saving

import bytecheckpoint as bcp
from bytecheckpoint.errors import NameCollisionError, StateError, StorageError, UnsupportedURLError, UsageError

STATE: dict[str, Any] = {"x": {"a": torch.ones(2)}}
BAD_IN_BOTH: list[dict[str, Any]] = [
    {"deadline_s": value} for value in (0, -1, float("nan"), float("inf"), "a", True)
] + [
    {"allow_pickle": 1}, {"framework": 5}, {"storage_options": 5}, {"include": 5}, {"include": "a"}, {"exclude": [1]},
]  # fmt: skip
BAD_FOR_SAVES: list[dict[str, Any]] = [
    {"chunk_size": 0}, {"chunk_size": -4}, {"chunk_size": 2.5}, {"chunk_size": 1}, {"chunk_size": 1 << 31},
    {"step": -1}, {"step": 2**63}, {"step": True}, {"step": "1"}, {"step": np.bool_(1)}, {"step": np.float64(1)},
    {"metadata": [1]}, {"metadata": 5}, {"async_save": "yes"}, {"gate": 1}, {"layout": 1}, {"layout": ["shards"]},
    {"trainable_only": 2}, {"options": 5}, {"options": {"codecs": "zstd"}},
]  # fmt: skip
BAD_FOR_LOADS: list[dict[str, Any]] = [
    {"rename": "abc"}, {"rename": {1: "a"}}, {"rename": {"a": 1}}, {"device": "nothing"}, {"device": 5.5},
    {"device": "meta"}, {"verify": "no"}, {"cast": 1}, {"strict": 5}, {"strict": {"x": []}}, {"share_reads": None},
    {"per_rank": []}, {"options": [1]}, {"options": {"verfy": True}},
]  # fmt: skip
PATHS: list[Any] = ["", "a\0b", 5, None, b"bytes", "file://host/x"]


@pytest.mark.parametrize("arguments", [*BAD_IN_BOTH, *BAD_FOR_SAVES], ids=str)
def test_arguments_of_save(tmp_path: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(arguments))):
        bcp.save(tmp_path / "c", STATE, **saving(**arguments))
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("arguments", [*BAD_IN_BOTH, *BAD_FOR_LOADS], ids=str)
def test_arguments_of_load(tmp_path: Path, arguments: dict[str, Any]) -> None:
    bcp.save(tmp_path / "c", STATE)
    tensor = torch.zeros(2)
    with pytest.raises(UsageError, match=next(iter(arguments))):
        bcp.load(tmp_path / "c", {"x": {"a": tensor}}, **loading(**arguments))
    assert tensor.tolist() == [0, 0]


@pytest.mark.parametrize("path", PATHS, ids=repr)
def test_paths(path: Any) -> None:
    for call in (
        lambda: bcp.save(path, STATE),
        lambda: bcp.load(path, STATE),
        lambda: bcp.open(path),
        lambda: bcp.latest(path),
        lambda: bcp.CheckpointManager(path).latest(),
    ):
        with pytest.raises(UnsupportedURLError):
            call()


def test_arguments_of_open_and_latest(tmp_path: Path) -> None:
    bcp.save(tmp_path / "c", STATE)
    for call in (
        lambda: bcp.open(tmp_path / "c", options=bcp.LoadOptions(verify="no")),  # type: ignore[arg-type]
        lambda: bcp.open(tmp_path / "c", storage_options=[1]),  # type: ignore[arg-type]
        lambda: bcp.latest(tmp_path, allow_fresh=5),  # type: ignore[arg-type]
        lambda: bcp.open(tmp_path / "c")["x.a"].load("nothing"),
        lambda: bcp.warmup(STATE, slots=-1),
        lambda: bcp.warmup(STATE, options={"gat": True}),
        lambda: bcp.open(tmp_path / "c", options={"layout": "whole"}),
    ):
        with pytest.raises(UsageError):
            call()


def test_numpy_numbers_and_upper_case_schemes(tmp_path: Path) -> None:
    path = tmp_path / "c"
    result = bcp.save(
        f"FILE://{path}", STATE, step=np.int64(7), options=bcp.SaveOptions(deadline_s=np.float32(60))
    ).result()  # type: ignore[arg-type]
    assert type(result.step) is int
    assert bcp.open(path).step == 7
    assert type(bcp.open(path).step) is int


def test_a_removed_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(StorageError, match="the working directory was removed"):
        bcp.save("c", STATE)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("content", "is_refused"),
    [(b"other", True), (b"{}", True), (b"", False), (bytes(100), False), (b"\x96\xaebytecheckpoint\x01", False)],
)
def test_a_foreign_manifest_is_not_overwritten(tmp_path: Path, content: bytes, *, is_refused: bool) -> None:
    manifest = tmp_path / "manifest.msgpack"
    manifest.write_bytes(content)
    if is_refused:
        with pytest.raises(UsageError, match="was not written by this library"):
            bcp.save(tmp_path, STATE)
        assert manifest.read_bytes() == content
        assert list(tmp_path.iterdir()) == [manifest]
    else:
        bcp.save(tmp_path, STATE)
        assert "x.a" in bcp.open(tmp_path)


class _Failing:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def state_dict(self) -> dict[str, Any]:
        raise self.error

    def load_state_dict(self, state: Any) -> None:
        raise self.error


def test_an_error_in_the_users_code_names_its_section(tmp_path: Path) -> None:
    cause = ZeroDivisionError("no batches")
    with pytest.raises(
        StateError, match=r"section loader: .*_Failing.* raised ZeroDivisionError: no batches"
    ) as raised:
        bcp.save(tmp_path / "c", {"loader": _Failing(cause)})
    assert raised.value.__cause__ is cause


@pytest.mark.parametrize(
    ("name", "error", "part"),
    [
        ("w@3", NameCollisionError, "reserved"),
        ("w[0:2]", NameCollisionError, "parts of tensors"),
        ("w[]", NameCollisionError, "parts of tensors"),
        ("__metadata__", NameCollisionError, "safetensors"),
        ("w\0", StateError, "Unicode text"),
        ("w\ud800", StateError, "Unicode text"),
        ("w" * 5000, StateError, "4096"),
    ],
)
def test_tensor_names(tmp_path: Path, name: str, error: type[Exception], part: str) -> None:
    with pytest.raises(error, match=part):
        bcp.save(tmp_path / "c", {"x": {name: torch.ones(2)}})
    assert not (tmp_path / "c").exists()
