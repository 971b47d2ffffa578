"""The orders of a save's and a removal's steps that matter, one by one (``checkpoint.references`` explains them)."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint import telemetry
from bytecheckpoint.checkpoint import references
from bytecheckpoint.convert.copy import remove
from bytecheckpoint.errors import StorageError
from bytecheckpoint.format.manifest import MANIFEST_KEY
from bytecheckpoint.session import default_session
from bytecheckpoint.storage_backends.local.backend import LocalBackend


@pytest.fixture
def tensor() -> torch.Tensor:
    default_session().engine.last_commit = None
    return torch.arange(4096)


def _save(path: Path, tensor: torch.Tensor, base: Any = "auto") -> None:
    bcp.save(
        path, {"tree": {"t": tensor}, "extra_state": {"n": 1}}, options=bcp.SaveOptions(base=base, chunk_size=1024)
    )


def _check(path: Path, tensor: torch.Tensor) -> None:
    assert bcp.open(path).verify().ok
    assert torch.equal(bcp.open(path)["tree.t"].load(), tensor)


def _once(action: Callable[[], None]) -> Callable[[], None]:
    pending = [action]

    def act() -> None:
        if pending:
            pending.pop()()

    return act


def _files(folder: Path) -> set[str]:
    return {path.name.partition("-attempt")[0] for path in folder.rglob("*") if path.is_file()}


def test_a_base_that_is_removed_before_the_pin_is_not_used(
    tmp_path: Path, tensor: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(tmp_path / "step-1", tensor)
    act, pin = _once(lambda: remove(str(tmp_path / "step-1")) and None), references.pin

    def late_pin(*arguments: Any, **options: Any) -> None:
        act()
        pin(*arguments, **options)

    monkeypatch.setattr(references, "pin", late_pin)
    _save(tmp_path / "step-2", tensor)
    assert bcp.open(tmp_path / "step-2").manifest.references.name == []
    _check(tmp_path / "step-2", tensor)
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


def test_a_save_during_a_removal_does_not_use_what_is_removed(
    tmp_path: Path, tensor: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(tmp_path / "step-1", tensor)
    act, delete = _once(lambda: _save(tmp_path / "step-2", tensor)), references._delete

    def slow_delete(folder: Any, keys: Any) -> None:
        if MANIFEST_KEY not in keys:
            act()
        delete(folder, keys)

    monkeypatch.setattr(references, "_delete", slow_delete)
    remove(str(tmp_path / "step-1"))
    assert bcp.open(tmp_path / "step-2").manifest.references.name == []
    _check(tmp_path / "step-2", tensor)


@pytest.mark.parametrize("fails", [False, True])
def test_what_was_kept_for_a_running_save_only_is_removed_when_it_ends(
    tmp_path: Path, tensor: torch.Tensor, fails: bool
) -> None:
    _save(tmp_path / "step-1", tensor)
    kept: list[set[str]] = []

    def act(name: str, event: str) -> None:
        if name == "save.write" and event == "enter":
            report = remove(str(tmp_path / "step-1"))
            assert len(report.shared) == 2
            kept.append(_files(tmp_path / "step-1"))
            if fails:
                raise OSError("injected")

    stop = telemetry.observe(act)
    try:
        _save(tmp_path / "step-2", tensor)
    except OSError:
        assert fails
    finally:
        stop()
    assert kept == [{"pin", "tree-00000.safetensors", "extra_state-00000.msgpack"}]
    if fails:
        assert not (tmp_path / "step-1").exists()
    else:
        assert _files(tmp_path / "step-1") == {"pin", "tree-00000.safetensors"}
        _check(tmp_path / "step-2", tensor)


def test_a_pin_that_is_put_while_a_removal_reads_the_others_counts(
    tmp_path: Path, tensor: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save finds its base, which refers to the folder, in place; then the base is removed, and then it is read."""
    for step in (1, 2, 3):
        _save(tmp_path / f"step-{step}", tensor)
    remove(str(tmp_path / "step-1"))

    def save_and_remove_its_base() -> None:
        _save(tmp_path / "step-4", tensor, base=tmp_path / "step-2")
        remove(str(tmp_path / "step-2"))

    act, needed_by = _once(save_and_remove_its_base), references._needed_by

    def slow(folder: Any, pin: str) -> set[str] | None:
        act()
        return needed_by(folder, pin)

    monkeypatch.setattr(references, "_needed_by", slow)
    remove(str(tmp_path / "step-3"))
    _check(tmp_path / "step-4", tensor)


def test_a_pin_that_cannot_be_put_leaves_no_other(
    tmp_path: Path, tensor: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(tmp_path / "step-1", tensor)
    tensor[0] = -1
    _save(tmp_path / "step-2", tensor)
    pins = {path.name for path in tmp_path.rglob("pin-*")}
    put = LocalBackend.put

    def refuse(self: LocalBackend, key: str, data: Any, **conditions: Any) -> str:
        if key.startswith("pin-") and self.url.endswith("step-1"):
            raise StorageError("not today")
        return put(self, key, data, **conditions)

    monkeypatch.setattr(LocalBackend, "put", refuse)
    with pytest.raises(StorageError, match="not today"):
        _save(tmp_path / "step-3", tensor)
    assert {path.name for path in tmp_path.rglob("pin-*")} == pins


@pytest.mark.parametrize("name", ["back\\slash", "line\nfeed"])
def test_a_folder_that_no_reference_can_name_is_saved_completely(
    tmp_path: Path, tensor: torch.Tensor, name: str
) -> None:
    _save(tmp_path / name, tensor)
    _save(tmp_path / name, tensor)
    _check(tmp_path / name, tensor)
    _save(tmp_path / "step-2", tensor)
    assert bcp.open(tmp_path / "step-2").manifest.references.name == []


def test_nothing_is_removed_if_a_referrer_cannot_be_read(tmp_path: Path, tensor: torch.Tensor) -> None:
    _save(tmp_path / "step-1", tensor)
    _save(tmp_path / "step-2", tensor)
    manifest = tmp_path / "step-2" / MANIFEST_KEY
    intact = manifest.read_bytes()
    manifest.write_bytes(intact[:-1])
    remove(str(tmp_path / "step-1"))
    manifest.write_bytes(intact)
    _check(tmp_path / "step-2", tensor)


def test_a_file_that_is_no_pin_of_this_library_keeps_everything(tmp_path: Path, tensor: torch.Tensor) -> None:
    _save(tmp_path / "step-1", tensor)
    (tmp_path / "step-1" / "pin-attempt-1").write_bytes(b"\xff../../../etc")
    remove(str(tmp_path / "step-1"))
    assert _files(tmp_path / "step-1") >= {"tree-00000.safetensors"}


def test_old_pins_of_killed_saves_do_not_count(tmp_path: Path, tensor: torch.Tensor) -> None:
    _save(tmp_path / "step-1", tensor)
    pin = tmp_path / "step-1" / "pin-attempt-20250101T000000Z-0123456789abcdef"
    pin.write_text("../step-2/manifest.msgpack")
    remove(str(tmp_path / "step-1"))
    assert not (tmp_path / "step-1").exists()


def _run_job(root: Path, tensor: torch.Tensor, steps: list[int]) -> None:
    default_session().engine.last_commit = None
    with bcp.CheckpointManager(root, preemption=None, save=bcp.SaveOptions(base="auto")) as manager:
        for step in steps:
            manager.save(step, {"tree": {"t": tensor}}, force=True)
            manager.wait()


@pytest.mark.parametrize("how", ["renamed", "copied"])
def test_a_folder_that_was_renamed_or_copied_keeps_what_it_refers_to(
    tmp_path: Path, tensor: torch.Tensor, how: str
) -> None:
    """Its pin leads nowhere, but a sibling has its attempt. What remains is removed with that one."""
    _run_job(tmp_path, tensor, [1, 2])
    if how == "renamed":
        (tmp_path / "step-2").rename(tmp_path / "best")
    else:
        shutil.copytree(tmp_path / "step-2", tmp_path / "best")
        remove(str(tmp_path / "step-2"))
    remove(str(tmp_path / "step-1"))
    _run_job(tmp_path, -tensor - 1, [3])
    _check(tmp_path / "best", tensor)
    assert (tmp_path / "step-1").exists()
    remove(str(tmp_path / "best"))
    _run_job(tmp_path, tensor, [4])
    assert {path.name for path in tmp_path.iterdir()} == {"step-3", "step-4"}
