"""Saves of one path that are committed at the same moment: the last one stays, and no file of another one remains."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import keys_of
from sorted_arguments import save_in_job

import bytecheckpoint as bcp
from bytecheckpoint.checkpoint import location
from bytecheckpoint.checkpoint.manifest_file import commit
from bytecheckpoint.convert.copy import copy
from bytecheckpoint.errors import KeyExistsError, RootInUseError, StorageError
from bytecheckpoint.storage_backends import Conditions, StorageBackend
from bytecheckpoint.storage_backends.local.backend import LocalBackend
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.faults import Call, FaultRule, FaultyBackend


def _state(value: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((10,), value)}}


def _save_elsewhere(path: Path, step: int) -> None:
    """Save as another process would: not on the threads of the save that is in progress."""
    with closing(bcp.Checkpointer()) as other:
        other.save(path, _state(float(step)), step=step)


def _expect(path: Path, step: int) -> None:
    """One checkpoint, and nothing else."""
    checkpoint = bcp.open(path)
    assert checkpoint.step == step
    assert checkpoint.verify().ok
    assert sorted(keys_of(path)) == sorted(["manifest.msgpack", *checkpoint.manifest.files.name])


@pytest.fixture
def at_commit(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object], bool], FaultRule]:
    """Return a function that calls another one right before the first manifest is put."""

    def install(action: Callable[[], object], is_reply_lost: bool) -> FaultRule:
        real = location.open_backend

        def hook(call: Call) -> None:
            monkeypatch.setattr(location, "open_backend", real)
            action()

        error = KeyExistsError("refused the repetition") if is_reply_lost else None
        rule = FaultRule("put", "manifest.msgpack", hook=hook, error=error, after=True)
        monkeypatch.setattr(
            location, "open_backend", lambda url, **options: FaultyBackend(real(url, **options), [rule])
        )
        return rule

    return install


AtCommit = Callable[[Callable[[], object], bool], FaultRule]


@pytest.mark.parametrize("is_new", [False, True], ids=["overwrite", "new"])
def test_another_save_is_committed_in_between(at_commit: AtCommit, tmp_path: Path, is_new: bool) -> None:
    if not is_new:
        bcp.save(tmp_path, _state(1.0), step=1)
    rule = at_commit(lambda: _save_elsewhere(tmp_path, 2), False)
    bcp.save(tmp_path, _state(3.0), step=3)
    assert rule.matched == 2, "the first put was refused"
    _expect(tmp_path, 3)


def test_the_checkpoint_is_removed_in_between(at_commit: AtCommit, tmp_path: Path) -> None:
    bcp.save(tmp_path, _state(1.0), step=1)
    at_commit((tmp_path / "manifest.msgpack").unlink, False)
    bcp.save(tmp_path, _state(2.0), step=2)
    assert bcp.open(tmp_path).step == 2


@pytest.mark.parametrize("is_new", [False, True], ids=["overwrite", "new"])
def test_a_put_whose_reply_was_lost_is_recognized(at_commit: AtCommit, tmp_path: Path, is_new: bool) -> None:
    if not is_new:
        bcp.save(tmp_path, _state(1.0), step=1)
    rule = at_commit(lambda: None, True)
    bcp.save(tmp_path, _state(2.0), step=2)
    assert rule.matched == 1
    _expect(tmp_path, 2)


def test_a_job_that_lost_its_lease_does_not_replace_what_its_successor_saved(
    at_commit: AtCommit, tmp_path: Path
) -> None:
    """It checks its lease again before it replaces what it finds."""
    checks = []

    def guard() -> None:
        checks.append(1)
        if len(checks) == 2:
            raise RootInUseError("taken over")

    at_commit(lambda: _save_elsewhere(tmp_path, 2), False)
    with pytest.raises(RootInUseError):
        save_in_job(tmp_path, _state(3.0), step=3, guard=guard)
    _expect(tmp_path, 2)


def test_queued_saves_of_one_path_replace_each_other(tmp_path: Path) -> None:
    handles = [bcp.save(tmp_path, _state(float(step)), step=step, async_save=True) for step in range(1, 6)]
    for handle in handles:
        handle.result(time_limit(60))
    _expect(tmp_path, 5)


def test_a_copy_keeps_a_checkpoint_that_appears_in_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    bcp.save(source, _state(1.0), step=1)

    def save_in_between(call: object) -> None:
        monkeypatch.undo()
        bcp.save(target, _state(2.0), step=2)

    rule = FaultRule("put", "manifest.msgpack", hook=save_in_between)
    monkeypatch.setattr(
        "bytecheckpoint.checkpoint.location.open_backend",
        lambda url, **options: FaultyBackend(LocalBackend(url), [rule]),
    )
    with pytest.raises(KeyExistsError, match="not changed"):
        copy(bcp.open(source), str(target))
    _expect(target, 2)


class _WithoutConditions(LocalBackend):
    def conditions(self) -> Conditions:
        return Conditions()

    def put(self, key: str, data: Any, *, if_absent: bool = False, if_version: str = "") -> str:
        if if_absent or if_version:
            raise StorageError("a condition that was not offered")
        return super().put(key, data)


@pytest.mark.parametrize("make", [LocalBackend, _WithoutConditions])
def test_a_path_is_replaced_on_every_kind_of_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: type[StorageBackend]
) -> None:
    monkeypatch.setattr(location, "open_backend", lambda url, **options: make(url))  # type: ignore[call-arg]
    for step in (1, 2, 3):
        bcp.save(tmp_path, _state(float(step)), step=step)
        _expect(tmp_path, step)


def test_concurrent_commits_replace_each_other_one_by_one(tmp_path: Path) -> None:
    """Each learns which checkpoint it has replaced: together they name every one except the last."""
    bcp.save(tmp_path, _state(0.0), step=0)
    attempts = []
    for step in range(8):
        bcp.save(tmp_path / "other", _state(float(step)), step=step)
        attempts.append(bcp.open(tmp_path / "other").manifest)
    first = bcp.open(tmp_path).manifest.attempt
    with ThreadPoolExecutor(8) as pool:
        replaced = list(pool.map(lambda manifest: commit(LocalBackend(tmp_path), manifest), attempts))
    names = [one.attempt for one in replaced if one is not None]
    remaining = bcp.open(tmp_path).manifest.attempt
    assert sorted([*names, remaining]) == sorted([first, *(one.attempt for one in attempts)])
