"""``Location``: one value for where checkpoints live."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import bytecheckpoint as bcp
from bytecheckpoint.errors import StorageError, UsageError

SECRET = bcp.Location(
    "s3://user:hunter2@bucket/runs",
    tier=bcp.Tier("/nvme", keep=2),
    storage_options={"key": "hunter2", "secret": "hunter2"},
)


def test_it_prints_no_secrets() -> None:
    for text in (str(SECRET), repr(SECRET), f"{SECRET.join('step-1')}", f"{SECRET!r}"):
        assert "hunter2" not in text
        assert "bucket/runs" in text
    assert "Tier" in repr(SECRET)


def test_it_travels() -> None:
    copy = pickle.loads(pickle.dumps(SECRET))
    assert copy == SECRET
    assert hash(copy) == hash(SECRET)
    assert copy.storage_options["secret"] == "hunter2"
    assert copy != bcp.Location(SECRET.url)


def test_what_is_below_it_has_the_same_tier_and_options() -> None:
    below = SECRET.join("step-1", "more")
    assert below.url == "s3://user:hunter2@bucket/runs/step-1/more"
    assert (below.tier, below.storage_options) == (SECRET.tier, SECRET.storage_options)
    with pytest.raises(StorageError):
        SECRET.join("..")


def test_options_belong_to_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="pass storage_options to the Location"):
        bcp.open(bcp.Location(tmp_path), storage_options={"key": "x"})
    with pytest.raises(UsageError, match=r"storage_options must have names as keys, not \[1\]"):
        bcp.open(tmp_path, storage_options={1: "x"})
    session, regions = object(), ["eu"]
    options = {"client_kwargs": {"regions": regions, "session": session}}
    location = bcp.Location("s3://bucket/runs", storage_options=options)
    regions.append("us")
    assert location.storage_options == {"client_kwargs": {"regions": ["eu"], "session": session}}


def test_it_stands_for_a_path_everywhere(tmp_path: Path) -> None:
    root = bcp.Location(tmp_path, tier=bcp.Tier(tmp_path.with_name("tier")))
    state = {"extra_state": {"value": torch.ones(3)}}
    bcp.save(root.join("step-1"), state, step=1).uploaded()
    assert bcp.open(root.join("step-1")).step == 1
    assert bcp.load(root.join("step-1"), state).step == 1
    newest = bcp.latest(root)
    assert newest is not None
    assert pickle.loads(pickle.dumps(newest)).step == 1
    assert [one.step for one in bcp.watch(root, include_existing=True, timeout_s=0.01)] == [1]
    with bcp.CheckpointManager(root, cadence=1) as manager:
        assert manager.resume(state) is not None
    store = bcp.Location(tmp_path)
    dcp.save({"m": {"w": torch.ones(2)}}, storage_writer=bcp.dcp.Writer(store.join("dcp")))
    found = {"m": {"w": torch.zeros(2)}}
    dcp.load(found, storage_reader=bcp.dcp.Reader(store.join("dcp")))
    assert found["m"]["w"].tolist() == [1.0, 1.0]
    with pytest.raises(UsageError, match="without a tier"):
        bcp.dcp.Writer(root)


def test_the_working_directory_counts_only_when_a_path_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hydra changes it as a habit. A manager kept its lease in one folder and its checkpoints in another."""
    state = {"extra_state": {"value": torch.ones(3)}}
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    with bcp.CheckpointManager(bcp.Location("runs", tier=bcp.Tier("nvme")), cadence=1) as manager:
        monkeypatch.chdir(elsewhere)
        manager.save(1, state)
    monkeypatch.chdir(tmp_path)
    relative = bcp.open("runs/step-1")
    opened, handle = pickle.dumps(relative), bcp.save("late", state, async_save=True)
    monkeypatch.chdir(elsewhere)
    handle.result()
    assert pickle.loads(opened).step == 1
    assert relative["extra_state.value"].load().eq(1).all()
    assert bcp.open(tmp_path / "late").verify().ok
    assert list(elsewhere.iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "late", "nvme", "runs"]


def test_a_path_is_absolute_and_other_urls_stay() -> None:
    home = Path("~/runs").expanduser()
    assert bcp.Location("~/runs").url == str(home)
    assert bcp.Location("runs/../a").url == str(Path.cwd() / "a")
    assert bcp.Location("file:///a/./b%20c").url == "/a/b c"
    for url in ("memory://a/b", "zip://x::file://a.zip"):
        assert bcp.Location(url).url == url
