"""Listings that lag behind what other hosts write, and what a removal does then. See also ``crash/test_mounts.py``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sorted_arguments import saving

import bytecheckpoint as bcp
from bytecheckpoint.checkpoint import sweep
from bytecheckpoint.checkpoint.attempts import attempt_name, new_attempt_id
from bytecheckpoint.checkpoint.lease import Lease
from bytecheckpoint.checkpoint.rollback import roll_back
from bytecheckpoint.checkpointer import session_of
from bytecheckpoint.convert.copy import remove
from bytecheckpoint.engine.objects import OBJECTS
from bytecheckpoint.format.manifest.envelope import MANIFEST_KEY
from bytecheckpoint.storage_backends.local.backend import LocalBackend
from bytecheckpoint.storage_backends.local.objects import LocalReader

CHUNK = 1024
STALENESS_S = 3600.0


class Listings:
    """Listings of local folders, which lack the ``hidden`` names, and for how long a root's lease ``is_held_long``."""

    hidden: set[str] = set()
    is_held_long = False


@pytest.fixture
def listings(monkeypatch: pytest.MonkeyPatch) -> Listings:
    """Let the local disk pass for a mount with stale listings."""
    state = Listings()
    list_all, folders_of = LocalBackend.list_children, sweep._folders

    def shown(names: Any) -> list[str]:
        return [name for name in names if name.rstrip("/") not in state.hidden]

    monkeypatch.setattr(LocalBackend, "_staleness_s", STALENESS_S)
    monkeypatch.setattr(LocalBackend, "list_children", lambda store, prefix="": shown(list_all(store, prefix)))
    monkeypatch.setattr(sweep, "_folders", lambda root: shown(folders_of(root)))
    monkeypatch.setattr(Lease, "held_s", property(lambda lease: STALENESS_S + 1 if state.is_held_long else 0.0))
    session_of().engine.shared.last_commit = None
    return state


def save(path: Path, value: int, **options: Any) -> None:
    options = {"base": "auto", "chunk_size": CHUNK, **options}
    bcp.save(path, state_of(value), **saving(**options)).result()


def state_of(value: int) -> dict[str, Any]:
    return {"tree": {"t": torch.full((8 * CHUNK,), value), "same": torch.arange(8 * CHUNK)}}


def check(path: Path, value: int) -> None:
    assert bcp.open(path).verify().problems == ()
    assert bcp.open(path)["tree.t"].load().unique().tolist() == [value]


def objects(root: Path) -> set[str]:
    return {path.parent.name for path in (root / OBJECTS).glob("*/*")}


def managed(root: Path, **options: Any) -> bcp.CheckpointManager:
    return bcp.CheckpointManager(
        root, save=bcp.SaveOptions(base="auto", chunk_size=CHUNK), preemption=None, async_save=False, **options
    )


@pytest.mark.parametrize("what", ["removal", "overwrite"])
def test_what_a_fresh_save_of_another_host_refers_to_is_kept(tmp_path: Path, listings: Listings, what: str) -> None:
    save(tmp_path / "step-1", 1)
    save(tmp_path / "step-2", 2)
    listings.hidden = {"step-2"}
    if what == "removal":
        assert "a listing may lack what another host has just saved" in remove(str(tmp_path / "step-1")).problem
    else:
        save(tmp_path / "step-1", 3, base=None)
    check(tmp_path / "step-2", 2)


def test_a_manager_keeps_what_its_own_saves_refer_to(tmp_path: Path, listings: Listings) -> None:
    """Although no listing has them; it removes what it has removed the checkpoint of."""
    listings.is_held_long = True
    with managed(tmp_path, keep=2) as manager:
        for step in range(1, 6):
            listings.hidden = {f"step-{step}"}
            manager.save(step, state_of(step), force=True)
    for step in (4, 5):
        check(tmp_path / f"step-{step}", step)
    needed = {name.split("/")[0] for step in (4, 5) for name in bcp.open(tmp_path / f"step-{step}").manifest.files.name}
    assert objects(tmp_path) <= needed | {
        name.split("/")[0] for step in (4, 5) for name in bcp.open(tmp_path / f"step-{step}").manifest.references.name
    }


def test_a_new_manager_removes_nothing_that_it_may_not_see_yet(tmp_path: Path, listings: Listings) -> None:
    with managed(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, state_of(step), force=True)
    session_of().engine.shared.last_commit = None
    dead = attempt_name(new_attempt_id(b"dead"))
    LocalBackend(tmp_path).put(f"step-9/{dead}/x", b"")
    LocalBackend(tmp_path).put(f"{OBJECTS}/{dead}/x", b"")
    listings.hidden = {"step-2"}
    with managed(tmp_path, keep=1) as manager:
        manager.save(3, state_of(3), force=True)
        manager.wait()
        manager._resources.housekeeping._thread.submit(int).result()
        assert (tmp_path / "step-9" / dead / "x").exists()
        assert dead in objects(tmp_path)
        check(tmp_path / "step-2", 2)
        listings.hidden, listings.is_held_long = set(), True
        manager.save(4, state_of(4), force=True)
    assert {path.name for path in tmp_path.iterdir()} == {OBJECTS, "step-4"}
    assert dead not in objects(tmp_path)
    check(tmp_path / "step-4", 4)


def test_an_attempt_whose_manifest_is_not_listed_is_committed(tmp_path: Path, listings: Listings) -> None:
    with bcp.CheckpointManager(tmp_path, preemption=None, async_save=False) as manager:
        manager.save(1, state_of(1), force=True)
    listings.hidden, listings.is_held_long = {MANIFEST_KEY}, True
    assert sweep.uncommitted(LocalBackend(tmp_path)) == {}
    with bcp.CheckpointManager(tmp_path, preemption=None, async_save=False) as manager:
        manager.save(2, state_of(2), force=True)
    check(tmp_path / "step-1", 1)


def test_retention_follows_a_rollback_that_is_not_listed(tmp_path: Path, listings: Listings) -> None:
    with bcp.CheckpointManager(tmp_path, preemption=None, async_save=False) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_of(step), force=True)
    roll_back(bcp.Location(tmp_path), 1)
    listings.hidden = {"rollback.msgpack"}
    with bcp.CheckpointManager(tmp_path, preemption=None, async_save=False, keep=2) as manager:
        manager.save(2, state_of(4), force=True)
    check(tmp_path / "step-1", 1)
    check(tmp_path / "step-2", 4)


def test_the_command_that_cleans_up_waits_until_it_sees_everything(
    tmp_path: Path, listings: Listings, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "step-1", 1)
    save(tmp_path / "step-2", 2)
    listings.hidden = {"step-2"}
    remove(str(tmp_path / "step-1"))
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        listings.hidden = set()

    monkeypatch.setattr(sweep, "time", SimpleNamespace(sleep=sleep, time=sweep.time.time))
    removed, swept = sweep.remove_uncommitted(LocalBackend(tmp_path), 0.0)
    assert (waited, removed, swept.problem) == ([STALENESS_S], [], "")
    check(tmp_path / "step-2", 2)
    remove(str(tmp_path / "step-2"))
    assert sweep.remove_uncommitted(LocalBackend(tmp_path), 0.0)[1].files > 0
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("change", [Path.unlink, lambda file: file.write_bytes(b"cut")], ids=["removed", "cut"])
def test_no_save_refers_to_a_file_that_only_a_listing_has(
    tmp_path: Path, listings: Listings, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object]
) -> None:
    save(tmp_path / "step-1", 1)
    listed = {attempt: [*LocalBackend(tmp_path / OBJECTS).list(f"{attempt}/")] for attempt in objects(tmp_path)}
    list_all = LocalBackend.list
    monkeypatch.setattr(
        LocalBackend, "list", lambda store, prefix="": iter(listed.get(prefix[:-1]) or list_all(store, prefix))
    )
    for file in (tmp_path / OBJECTS).rglob("*.safetensors"):
        change(file)
    save(tmp_path / "step-2", 2)
    check(tmp_path / "step-2", 2)


@pytest.mark.parametrize("tier", [None, "tier"])
def test_what_is_read_from_a_mount_is_read_again_before_it_counts_as_damaged(
    tmp_path: Path,
    listings: Listings,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tier: str | None,
) -> None:
    save(tmp_path / "step-1", 1)
    read, stale = LocalReader.read, [True]

    def read_stale(reader: LocalReader, offset: int, buffers: Any) -> None:
        read(reader, offset, buffers)
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        if stale and sum(map(len, views)) > 4096:
            stale.pop()
            for view in views:
                view[:] = bytes(len(view))

    place = bcp.Location(tmp_path / "step-1", tier=None if tier is None else bcp.Tier(tmp_path / tier))
    opened = bcp.open(place)
    monkeypatch.setattr(LocalReader, "read", read_stale)
    assert opened["tree.t"].load().unique().tolist() == [1]
    assert not stale
    assert "reading again" in caplog.text
