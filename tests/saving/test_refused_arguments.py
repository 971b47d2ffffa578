"""Arguments and names that cannot be stored are refused in the first steps, before anything is written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint.errors import NameCollisionError, StateError, UsageError


@pytest.mark.parametrize(
    "arguments",
    [{"chunk_size": 0}, {"chunk_size": -4}, {"chunk_size": 2.5}, {"step": -1}, {"step": 2**63}, {"step": True}],
    ids=str,
)
def test_arguments(tmp_path: Path, arguments: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=next(iter(arguments))):
        bcp.save(tmp_path / "c", {"x": {"a": torch.ones(2)}}, **arguments)
    assert not (tmp_path / "c").exists()


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
