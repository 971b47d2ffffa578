"""``bcp.watch``: evaluators see each new checkpoint once, in the order of the steps."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint.errors import UsageError

STATE: dict[str, Any] = {"x": {"a": torch.ones(2)}}


def _save(root: Path, *steps: int) -> None:
    for step in steps:
        bcp.save(root / f"step-{step}", STATE, step=step)


def _steps(root: Path, **options: Any) -> list[int | None]:
    return [one.step for one in bcp.watch(root, poll_s=0.01, timeout_s=0.01, **options)]


def test_each_new_checkpoint_is_returned_once_in_order(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    seen: list[int | None] = []
    polls = iter([(), (3, 2), (), (10,), ()])

    def stop() -> bool:
        """Called before every look at the root."""
        _save(tmp_path, *next(polls, ()))
        return len(seen) >= 3

    for checkpoint in bcp.watch(tmp_path, poll_s=0.001, stop=stop):
        seen.append(checkpoint.step)
        assert checkpoint["x.a"].load().tolist() == [1, 1]
    assert seen == [2, 3, 10]


def test_it_ends_after_the_time_limit(tmp_path: Path) -> None:
    assert _steps(tmp_path / "nothing yet") == []
    _save(tmp_path, 2, 1)
    assert _steps(tmp_path) == []
    assert _steps(tmp_path, include_existing=True) == [1, 2]


def test_damaged_and_uncommitted_checkpoints_are_tried_again(tmp_path: Path) -> None:
    _save(tmp_path, 1, 2)
    manifest = tmp_path / "step-1" / "manifest.msgpack"
    content = manifest.read_bytes()
    (tmp_path / "step-2" / "manifest.msgpack").unlink()
    manifest.write_bytes(b"damaged")
    seen: list[int | None] = []
    actions = iter([lambda: None, lambda: None, lambda: manifest.write_bytes(content)])

    def stop() -> bool:
        next(actions, lambda: None)()
        return len(seen) >= 1

    for checkpoint in bcp.watch(tmp_path, poll_s=0.001, include_existing=True, stop=stop):
        seen.append(checkpoint.step)
    assert seen == [1]


def test_a_checkpoint_that_was_removed_and_saved_again_is_new(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    seen: list[int | None] = []
    actions = iter([lambda: None, lambda: shutil.rmtree(tmp_path / "step-1"), lambda: None, lambda: _save(tmp_path, 1)])

    def stop() -> bool:
        next(actions, lambda: None)()
        return len(seen) >= 2

    for checkpoint in bcp.watch(tmp_path, poll_s=0.001, include_existing=True, stop=stop):
        seen.append(checkpoint.step)
    assert seen == [1, 1]


@pytest.mark.parametrize(
    "arguments", [{"poll_s": 0}, {"poll_s": "1"}, {"timeout_s": -1}, {"storage_options": 1}], ids=str
)
def test_arguments_are_checked_at_the_call(tmp_path: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        bcp.watch(tmp_path, **arguments)


def test_a_checkpoint_is_not_a_root(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    with pytest.raises(UsageError, match="is a checkpoint"):
        bcp.watch(tmp_path / "step-1")
