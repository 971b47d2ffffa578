"""Tiers of several machines, which are a folder for each rank here, and what restarted jobs make of them."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from sorted_arguments import managing
from tier_faults import opens_silent_store
from torch import nn
from torch.distributed.fsdp import fully_shard

import bytecheckpoint as bcp
from bytecheckpoint import telemetry
from bytecheckpoint.checkpoint.attempts import attempt_name, new_attempt_id
from bytecheckpoint.checkpoint.lease import LeaseRecord
from bytecheckpoint.convert.copy import finish_upload, unfinished_uploads
from bytecheckpoint.errors import BytecheckpointError, StorageError
from bytecheckpoint.saving import commit
from bytecheckpoint.storage_backends import StorageBackend
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool
from bytecheckpoint.transfer.journal import Journal, JournalHead, find_journals

pytestmark = pytest.mark.sampled(7, of=__name__)

WORLD = 3
DEADLINE_S = time_limit(20)
WAIT_S = time_limit(60)


@pytest.fixture(scope="module")
def pool():
    with RankPool(WORLD) as ranks:
        yield ranks


def _state(value: float) -> dict[str, Any]:
    model = nn.Linear(50, 70)
    nn.init.constant_(model.weight, value)
    nn.init.constant_(model.bias, value)
    return {"model": fully_shard(model), "frozen": torch.arange(5000), "extra_state": {"value": value}}


def _value(state: dict[str, Any]) -> float:
    values = {*state["model"].weight.to_local().flatten().tolist(), state["extra_state"]["value"]}
    assert len(values) == 1, f"a mixture of {values}"
    return float(values.pop())


def _machine(root: str, rank: int) -> str:
    return os.path.join(root, f"machine-{rank}")


def _store(root: str) -> str:
    return os.path.join(root, "store")


def _folder(root: str, rank: int, name: str) -> Path:
    return Path(f"{_machine(root, rank)}/file{_store(root)}/{name}")


def _manager(root: str, rank: int, staged: int = 1, **options: Any) -> bcp.CheckpointManager:
    options = {"deadline_s": DEADLINE_S, "coordinate_every_s": 0.05, "lease_s": 2.0, "cadence": 1, **options}
    tier = bcp.Tier(_machine(root, rank), keep=staged)
    return bcp.CheckpointManager(bcp.Location(_store(root), tier=tier), **managing(**options))


def _fail_uploads_on(bad: int | None, rank: int, at: str = "transfer") -> Any:
    def observe(name: str, event: str) -> None:
        if rank == bad and (name, event) == (f"upload.{at}", "enter"):
            raise StorageError("the store is broken")

    return telemetry.observe(observe)


def _save(rank: int, world_size: int, root: str, name: str, value: float, bad: int | None) -> str:
    stop = _fail_uploads_on(bad, rank)
    try:
        handle = bcp.save(
            bcp.Location(f"{_store(root)}/{name}", tier=bcp.Tier(_machine(root, rank))),
            _state(value),
            options=bcp.SaveOptions(deadline_s=DEADLINE_S),
        )
        try:
            handle.uploaded(WAIT_S)
        except BytecheckpointError as error:
            return str(error)
        return ""
    finally:
        stop()


def _load(rank: int, world_size: int, root: str, name: str) -> tuple[float, list[str]]:
    state = _state(-1.0)
    report = bcp.load(
        bcp.Location(f"{_store(root)}/{name}", tier=bcp.Tier(_machine(root, rank))),
        state,
        options=bcp.LoadOptions(deadline_s=DEADLINE_S),
    )
    return _value(state), report.notes


def test_each_machine_holds_its_own_files(pool: RankPool, tmp_path: Path) -> None:
    root = str(tmp_path)
    assert pool.run(_save, root, "step-1", 1.0, None) == [""] * WORLD
    for rank in range(WORLD):
        files = {path.name for path in _folder(root, rank, "step-1").rglob("*") if path.is_file()}
        assert {name for name in files if name.startswith("model-")} == {f"model-{rank:05d}.safetensors"}
        assert "manifest.msgpack" in files
    assert bcp.open(f"{_store(root)}/step-1").verify().ok
    assert list(find_journals(root)) == []
    for value, notes in pool.run(_load, root, "step-1"):
        assert value == 1.0
        assert not any("damaged" in note for note in notes)
    # Two ranks need what the third one has saved.
    results = pool.run(_load, root, "step-1", world_size=2)
    assert [value for value, _ in results] == [1.0] * 2
    assert any("were read from the store" in note for _, notes in results for note in notes)


def _load_replicas(rank: int, world_size: int, root: str) -> tuple[bool, list[str]]:
    """Load what every rank needs completely, and which is read once for all."""
    state = {"model": nn.Linear(500, 700)}
    options = {"share_reads": "always", "deadline_s": DEADLINE_S}
    location = bcp.Location(f"{_store(root)}/step-1", tier=bcp.Tier(_machine(root, 0)))
    report = bcp.load(location, state, options=options)
    return bool((state["model"].weight == 3.0).all()) and report.bytes_received > 0, report.notes


def test_damage_where_ranks_share_reads(pool: RankPool, tmp_path: Path) -> None:
    root = str(tmp_path)
    model = nn.Linear(500, 700)
    nn.init.constant_(model.weight, 3.0)
    bcp.save(bcp.Location(f"{_store(root)}/step-1", tier=bcp.Tier(_machine(root, 0))), {"model": model}).uploaded(
        WAIT_S
    )
    [path] = _folder(root, 0, "step-1").rglob("model-*.safetensors")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    results = pool.run(_load_replicas, root)
    assert [is_equal for is_equal, _ in results] == [True] * WORLD
    assert sum("damaged" in note for _, notes in results for note in notes) >= 1


def _save_behind_a_backlog(rank: int, world_size: int, root: str, slow: int) -> bool:
    """One rank begins its upload when twice the deadline has passed on another, which has uploaded its files."""
    deadline_s = time_limit(2)
    store = dist.distributed_c10d._get_default_store()
    timer = threading.Timer(2 * deadline_s, store.set, (f"{root} is late", ""))

    def observe(name: str, event: str) -> None:
        if rank == slow and (name, event) == ("upload.transfer", "enter"):
            store.wait([f"{root} is late"])
        elif rank == (slow + 1) % world_size and (name, event) == ("upload.transfer", "exit"):
            timer.start()

    stop = telemetry.observe(observe)
    try:
        path = f"{_store(root)}/step-1"
        handle = bcp.save(
            bcp.Location(path, tier=bcp.Tier(_machine(root, rank))),
            _state(1.0),
            options=bcp.SaveOptions(deadline_s=deadline_s),
        )
        handle.uploaded(WAIT_S)
        return os.path.exists(f"{path}/manifest.msgpack")
    finally:
        stop()
        timer.cancel()


@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.sampled(1)
def test_ranks_wait_for_the_backlog_of_another_machine(pool: RankPool, tmp_path: Path, slow: int) -> None:
    assert all(pool.run(_save_behind_a_backlog, str(tmp_path), slow))
    assert list(find_journals(str(tmp_path))) == []
    assert bcp.open(f"{_store(str(tmp_path))}/step-1").verify().ok


def _save_often(rank: int, world_size: int, root: str) -> list[int]:
    """Save more often than rank 1 can upload. Returns the steps that were uploaded."""

    def observe(name: str, event: str) -> None:
        if rank == 1 and (name, event) == ("upload.transfer", "enter"):
            time.sleep(0.3)

    uploaded: list[int] = []
    stop = telemetry.observe(observe)
    callbacks = bcp.Callbacks(on_uploaded=lambda result: uploaded.append(result.step or 0))
    try:
        with _manager(root, rank, keep=2, callbacks=callbacks) as manager:
            for step in range(1, 21):
                manager.save(step, _state(1.0))
    finally:
        stop()
    return uploaded


def test_ranks_upload_the_same_newest_checkpoints(pool: RankPool, tmp_path: Path) -> None:
    uploaded, *others = pool.run(_save_often, str(tmp_path))
    assert all(one == uploaded for one in others)
    assert {19, 20} <= {*uploaded}
    assert len(uploaded) < 15
    assert _names(Path(_store(str(tmp_path)))) == {"step-19", "step-20"}
    assert list(find_journals(str(tmp_path))) == []


def _stop_while_another_uploads(rank: int, world_size: int, root: str) -> str:
    """Rank 0 ends its training with an exception, and the upload of rank 1 goes on until it has."""
    store = dist.distributed_c10d._get_default_store()

    def observe(name: str, event: str) -> None:
        if rank == 1 and (name, event) == ("upload.transfer", "enter"):
            store.wait([f"{root} has ended"])
        elif rank == 0 and (name, event) == ("upload.transfer", "exit"):
            store.set(f"{root} is uploaded", "")

    stop = telemetry.observe(observe)
    handles = []
    try:
        with (
            suppress(ZeroDivisionError, BytecheckpointError),
            _manager(root, rank, preemption=bcp.Preemption(grace_s=0.1)) as manager,
        ):
            handles.append(manager.save(1, _state(1.0)))
            if rank == 0:
                store.wait([f"{root} is uploaded"])
                raise ZeroDivisionError
        if rank == 0:
            store.set(f"{root} has ended", "")
        with pytest.raises(BytecheckpointError) as raised:
            handles[0].uploaded(WAIT_S)
        return str(raised.value)
    finally:
        stop()


def test_a_stop_ends_the_wait_for_another_machine(tmp_path: Path) -> None:
    with RankPool(2) as pool:
        for failure in pool.run(_stop_while_another_uploads, str(tmp_path)):
            assert f"the upload to {_store(str(tmp_path))}/step-1 was stopped" in failure
    assert {head.rank for _, head in find_journals(str(tmp_path))} == {0, 1}


@pytest.mark.parametrize("bad", [0, 2])
def test_one_rank_cannot_upload(pool: RankPool, tmp_path: Path, bad: int) -> None:
    """All ranks raise its cause. The upload is completed on each machine alone, in any order."""
    root = str(tmp_path)
    for failure in pool.run(_save, root, "step-1", 1.0, bad):
        assert "the store is broken" in failure
    assert not os.path.exists(f"{_store(root)}/step-1/manifest.msgpack")
    order = [1, 2, 0] if bad == 0 else [2, 0, 1]
    for number, rank in enumerate(order, 1):
        [upload] = unfinished_uploads(_machine(root, rank))
        report = finish_upload(upload)
        assert report.sent == (report.size if rank == bad else 0)
        # The last file is there when the rank that could not upload is done. Until then, loads use the folder.
        is_complete = bad in order[:number]
        assert os.path.exists(f"{_store(root)}/step-1/manifest.msgpack") == is_complete
        assert len(unfinished_uploads(_machine(root, rank))) == (not is_complete)
        if is_complete:
            break
        found = bcp.latest(bcp.Location(_store(root), tier=bcp.Tier(_machine(root, rank))), allow_fresh=True)
        assert found is None  # of the files of several machines, no load finds all
        assert (
            bcp.open(bcp.Location(f"{_store(root)}/step-1", tier=bcp.Tier(_machine(root, rank)))).manifest.world_size
            == WORLD
        )
    assert bcp.open(f"{_store(root)}/step-1").verify().ok
    for rank in range(WORLD):
        for upload in unfinished_uploads(_machine(root, rank)):
            assert finish_upload(upload).sent == 0
    assert list(find_journals(root)) == []
    assert _names(Path(_store(root)) / "step-1") == {
        "manifest.msgpack",
        bcp.open(f"{_store(root)}/step-1").manifest.attempt,
    }


def _find_where_the_store_is_silent(rank: int, world_size: int, root: str, what: str) -> list[float]:
    """Save, let the store not answer any more, and return the deadlines with which this rank then asks it."""
    limits: list[float] = []
    with bcp.CheckpointManager(
        bcp.Location(_store(root), tier=bcp.Tier(os.path.join(root, "shared"))), preemption=None
    ) as manager:
        manager.save(1, {"extra_state": {"value": 1.0}}, force=True, metrics={"loss": 1.0})
        manager.wait()
        if (housekeeping := manager._resources.housekeeping) is not None:
            housekeeping._thread.submit(int).result()  # it opens the store, too
        with mock.patch.object(bcp.checkpoint.location, "open_backend", opens_silent_store(_store(root), limits)):
            found = manager.latest() if what == "latest" else manager.best("loss", "min")
        assert found is not None
        assert found.step == 1
    return limits


@pytest.mark.parametrize("what", ["latest", "best"])
def test_one_rank_waits_for_a_silent_store(pool: RankPool, tmp_path: Path, what: str) -> None:
    (first, *others), *ranks = pool.run(_find_where_the_store_is_silent, str(tmp_path), what)
    assert first > 100
    assert all(ranks)
    assert max(limit for limits in (others, *ranks) for limit in limits) < 1


def _train(
    rank: int,
    world_size: int,
    root: str,
    first: int,
    last: int,
    bad: int | None,
    keep: int | None = None,
    staged: int = 1,
    base: str | None = None,
) -> float:
    """Resume, train some steps, and return the value that the state had after the resume."""
    stop = _fail_uploads_on(bad, rank)
    try:
        with _manager(root, rank, staged, keep=keep, base=base) as manager:
            state = _state(-1.0)
            found = manager.resume(state, allow_fresh=True)
            for step in range(first, last + 1):
                dist.all_reduce(torch.ones(1))
                manager.save(step, lambda step=step: _state(float(step)))
    except StorageError:
        assert bad is not None
    finally:
        stop()
    return _value(state) if found is not None else -1.0


def _staged(root: str, rank: int) -> list[str]:
    return sorted(path.parent.name for path in _folder(root, rank, "").glob("step-*/manifest.msgpack"))


def _names(folder: Path) -> set[str]:
    """The folders that hold files."""
    return {path.relative_to(folder).parts[0] for path in folder.rglob("*") if path.is_file()}


def _stored(root: str) -> list[str]:
    return sorted(path.parent.name for path in Path(_store(root)).glob("step-*/manifest.msgpack"))


def test_retention_in_both_places(pool: RankPool, tmp_path: Path) -> None:
    root = str(tmp_path)
    assert pool.run(_train, root, 1, 5, None, 3, 2) == [-1.0] * WORLD
    assert _stored(root) == ["step-3", "step-4", "step-5"]
    for rank in range(WORLD):
        assert _staged(root, rank) == ["step-4", "step-5"]
        assert _names(_folder(root, rank, "")) == {"step-4", "step-5"}


def test_a_restarted_job_completes_the_uploads(pool: RankPool, tmp_path: Path) -> None:
    """What is not uploaded stays in the folders, whatever the retention; each machine needs its files at the resume."""
    root = str(tmp_path)
    pool.run(_train, root, 1, 2, None)
    pool.run(_train, root, 3, 4, 1)
    assert _stored(root) == ["step-1", "step-2"]
    for rank in range(WORLD):
        assert _staged(root, rank)[-2:] == ["step-3", "step-4"]
    resumed = pool.run(_train, root, 5, 5, None)
    assert len(set(resumed)) == 1
    assert resumed[0] == 4.0
    assert _stored(root) == ["step-1", "step-2", "step-3", "step-4", "step-5"]
    for rank in range(WORLD):
        assert _staged(root, rank) == ["step-5"]
    assert list(find_journals(root)) == []
    for name in _stored(root):
        assert bcp.open(f"{_store(root)}/{name}").verify().ok


def _save_until_killed(
    rank: int, world_size: int, root: str, victim: int, point: str, event: str, base: str | None
) -> None:
    def observe(name: str, what: str) -> None:
        if rank == victim and (name, what) == (point, event):
            os.kill(os.getpid(), signal.SIGKILL)

    if base is not None:
        _train(rank, world_size, root, 0, 0, None, base=base)
    telemetry.observe(observe)
    with _manager(root, rank, base=base) as manager:
        manager.save(1, _state(1.0))
        manager.wait()


KILLS = [
    ("save.confirm", "enter"),
    ("save.commit.after", "point"),
    ("upload.transfer", "enter"),
    ("upload.transfer", "exit"),
    ("upload.commit.before", "point"),
    ("upload.commit", "exit"),
]


@pytest.mark.parametrize(
    ("point", "event", "base"), [(*kill, base) for base in (None, "auto") for kill in KILLS[2 * bool(base) :]]
)
@pytest.mark.sampled(4)
def test_a_killed_job(tmp_path: Path, point: str, event: str, base: str | None) -> None:
    """The restarted job finds the checkpoint where its files are, or none; nothing remains to be uploaded.

    With a base, the killed save is incremental: it refers to files of step 0.
    """
    root = str(tmp_path)
    victim = 0 if "commit" in point else 1
    with RankPool(2) as pool:
        with pytest.raises(Exception, match=r"killed|SIGKILL|died|ended"):
            pool.run(_save_until_killed, root, victim, point, event, base, expect_death={victim: signal.SIGKILL})
    with RankPool(2) as pool:
        values = pool.run(_train, root, 2, 2, None, None, 1, base)
    assert len(set(values)) == 1
    assert values[0] in (1.0, -1.0)
    assert _stored(root)[-1] == "step-2"
    for name in _stored(root):
        assert bcp.open(f"{_store(root)}/{name}").verify().ok
    assert list(find_journals(root)) == []
    if point.startswith("upload"):
        assert _stored(root)[-2:] == ["step-1", "step-2"]
    if base is not None:
        first, second, third = (bcp.open(f"{_store(root)}/step-{step}").manifest for step in (0, 1, 2))
        assert second.references.name
        assert all(name.startswith(first.attempt) for name in second.references.name)
        assert third.references.name == [], "the new job does not know what is in the store before it saves"
    for rank in range(2):
        assert _staged(root, rank) == ["step-2"]
        assert _names(_folder(root, rank, "")) == ({"step-2"} if base is None else {"step-2", "objects"})
        attempts = {path.parent.name for path in _folder(root, rank, "objects").rglob("*") if path.is_file()}
        assert attempts == (set() if base is None else {third.attempt})


def _save_without_adopting(rank: int, world_size: int, root: str, how: str) -> str:
    """Rank 1 is killed, or fails, when rank 0 has committed on its machine, before it has done so on its own."""

    def fail(backend: StorageBackend, manifest: bytes) -> None:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise StorageError("the disk is full")

    with mock.patch.object(commit, "adopt", fail):
        manager = _manager(root, rank)
        try:
            manager.save(1, _state(1.0)).uploaded(WAIT_S)
        except BytecheckpointError as error:
            return f"{type(error).__name__}, {error.may_have_committed}: {error}"
        finally:
            with suppress(BytecheckpointError):
                manager.close()
    return ""


@pytest.mark.parametrize("how", ["kill", "fail"])
def test_a_rank_ends_before_it_has_the_manifest(tmp_path: Path, how: str) -> None:
    """What only rank 0 has committed is complete, and the next job finds it."""
    root = str(tmp_path)
    with RankPool(2) as pool:
        if how == "kill":
            pool.run(_save_without_adopting, root, how, expect_death={1: signal.SIGKILL})
        else:
            outcome = pool.run(_save_without_adopting, root, how)[1]
            assert outcome.startswith("CommitUnknownError, True: ")
            assert "the disk is full" in outcome
    assert (_staged(root, 0), _staged(root, 1)) == (["step-1"], [])
    [upload] = unfinished_uploads(_machine(root, 1))
    assert finish_upload(upload) is None
    with RankPool(2) as pool:
        assert pool.run(_train, root, 2, 2, None) == [1.0] * 2
    assert _stored(root) == ["step-1", "step-2"]
    for name in _stored(root):
        assert bcp.open(f"{_store(root)}/{name}").verify().ok
    assert list(find_journals(root)) == []


def test_what_no_rank_has_committed_is_given_up(pool: RankPool, tmp_path: Path) -> None:
    """A later checkpoint is uploaded: nothing needs the files of a save whose outcome was unknown."""
    root = str(tmp_path)
    pool.run(_train, root, 1, 1, None)
    for rank in range(WORLD):
        folder = _folder(root, rank, "step-5")
        attempt = attempt_name(new_attempt_id(b"gone"))
        (folder / attempt).mkdir(parents=True)
        (folder / attempt / f"model-{rank:05d}.safetensors").write_bytes(b"x")
        Journal(str(folder), JournalHead("to", f"{_store(root)}/step-5", attempt, rank)).close()
    pool.run(_train, root, 2, 2, None)
    assert list(find_journals(root)) == []
    for rank in range(WORLD):
        assert _names(_folder(root, rank, "")) == {"step-2"}


def _continue_without_the_root(rank: int, world_size: int, root: str) -> list[str]:
    """Another job takes the root over before rank 1 continues its upload, which would complete the checkpoint."""
    stop = _fail_uploads_on(1, rank)
    manager = _manager(root, rank, lease_s=600.0)
    try:
        with pytest.raises(StorageError, match="the store is broken"):
            manager.save(1, _state(1.0)).uploaded(WAIT_S)
    finally:
        stop()
    dist.barrier()
    lease = Path(_store(root)) / "lease.msgpack"
    if rank == 0:
        lease.write_bytes(replace(LeaseRecord.unpack(lease.read_bytes()), job=b"next").pack())
    dist.barrier()
    tier_folder = manager._resources.tier_folder
    if rank == 1:
        tier_folder._continue()
    dist.barrier()
    tier_folder._unfinished.clear()
    with suppress(BytecheckpointError):
        manager.close()
    return [path.parent.name for path in Path(_store(root)).glob("*/manifest.msgpack")]


def test_a_job_that_lost_its_root_commits_from_no_rank(tmp_path: Path) -> None:
    with RankPool(2) as pool:
        assert pool.run(_continue_without_the_root, str(tmp_path)) == [[], []]
