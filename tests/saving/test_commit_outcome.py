"""What the ranks say of a save when one of them is lost or late around the commit: never the opposite of the truth."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
import torch
import torch.distributed as dist
from damage import keys_of

import bytecheckpoint as bcp
from bytecheckpoint import telemetry
from bytecheckpoint.checkpoint import location, manifest_file
from bytecheckpoint.control import operation
from bytecheckpoint.control.communicator import current_communicator
from bytecheckpoint.engine.writing import WrittenFile
from bytecheckpoint.errors import BytecheckpointError, CommitUnknownError, StorageError, UnansweredError, UsageError
from bytecheckpoint.saving import commit
from bytecheckpoint.saving.record import pack_written
from bytecheckpoint.storage_backends import ObjectWriter
from bytecheckpoint.storage_backends.local.backend import LocalBackend
from bytecheckpoint.storage_backends.writers import BufferedWriter
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.faults import Call, FaultRule, FaultyBackend
from bytecheckpoint.testing.ranks import RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(3) as ranks:
        yield ranks


def _state(rank: int, value: float) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {f"w{rank}": torch.full((10,), value)}}


def _die_after_confirm(rank: int, world_size: int, path: str) -> tuple[str, set[str]]:
    """Rank 2 dies when it has confirmed; rank 0 commits when it is gone."""
    bcp.save(path, _state(rank, 1.0), options=bcp.SaveOptions(deadline_s=time_limit(30)))
    old = set(os.listdir(path)) - {"manifest.msgpack"}
    dist.barrier()
    pids = [None] * world_size
    dist.all_gather_object(pids, os.getpid())

    def observer(name: str, event: str) -> None:
        if rank == 2 and (name, event) == ("save.confirm", "exit"):
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0 and (name, event) == ("save.commit.before", "point"):
            while _runs(pids[2]):
                os.sched_yield()

    telemetry.observe(observer)
    try:
        bcp.save(path, _state(rank, 2.0), step=2, options=bcp.SaveOptions(deadline_s=time_limit(30)))
    except BytecheckpointError as error:
        return f"{type(error).__name__}: {error}", set()
    return "saved", old & set(os.listdir(path)) if rank == 0 else set()


def _runs(pid: object) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it may go while it is read
        return False
    return state.rpartition(")")[2].split()[0] != "Z"


def test_a_rank_that_dies_after_confirming_cannot_undo_the_save(pool: RankPool, tmp_path: Path) -> None:
    results = pool.run(_die_after_confirm, str(tmp_path), expect_death={2: signal.SIGKILL})
    assert results[:2] == [("saved", set())] * 2
    checkpoint = bcp.open(tmp_path)
    assert checkpoint.step == 2
    assert checkpoint.verify().ok


def _commit_late(rank: int, world_size: int, root: str, has_manager: bool) -> str:
    """Rank 0's store takes the manifest only when rank 1 has given up, which has no patience from then on."""

    def hold(call: Call) -> None:
        dist.barrier()
        dist.barrier()  # rank 1 has given up

    def lose_patience(name: str, event: str) -> None:
        if rank == 1 and (name, event) == ("save.confirm", "exit"):
            dist.barrier()  # rank 0 is in the put
            operation.ParentTimeLimit.seconds = lambda limit, waited_s: 0.0

    rule = FaultRule("put", "manifest.msgpack", hook=hold)
    real, patience = location.open_backend, operation.ParentTimeLimit.seconds

    if rank == 0:
        location.open_backend = lambda url, **options: FaultyBackend(real(url, **options), [rule])
    stop = telemetry.observe(lose_patience)
    deadline_s = time_limit(30)
    try:
        if has_manager:
            with bcp.CheckpointManager(root, job={"deadline_s": deadline_s}) as manager:
                manager.save(1, _state(rank, 1.0), force=True)
        else:
            bcp.save(f"{root}/step-1", _state(rank, 1.0), step=1, options={"deadline_s": deadline_s})
        return "saved"
    except BytecheckpointError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        stop()
        location.open_backend, operation.ParentTimeLimit.seconds = real, patience
        if rank:
            dist.barrier()


@pytest.mark.parametrize("has_manager", [False, True], ids=["save", "manager"])
def test_ranks_that_gave_up_on_a_late_commit_do_not_say_that_it_failed(
    pool: RankPool, tmp_path: Path, has_manager: bool
) -> None:
    """A regression: a manager raised that rank 0 did not answer, and not that it may commit."""
    results = pool.run(_commit_late, str(tmp_path), has_manager, world_size=2)
    assert results[0].startswith("CommitUnknownError: " if has_manager else "saved")  # all ranks of a manager raise it
    assert results[1].startswith("CommitUnknownError: ")
    assert re.search(r"waited [0-9.e-]+ s in committed for rank\(s\) 0", results[1])
    assert bcp.open(tmp_path / "step-1").verify().ok


def _lose_rank_0_and_the_store(rank: int, world_size: int, path: str) -> str:
    """Rank 0 dies right after it has written the manifest; then rank 1's store fails too."""
    rule = FaultRule("get", "manifest.msgpack", times=None, error=StorageError("no answer"))
    real = location.open_backend
    if rank == 1:
        location.open_backend = lambda url, **options: FaultyBackend(real(url, **options), [rule])

    def observer(name: str, event: str) -> None:
        if rank == 0 and (name, event) == ("save.commit.after", "point"):
            os.kill(os.getpid(), signal.SIGKILL)

    stop = telemetry.observe(observer)
    try:
        bcp.save(path, _state(rank, 1.0), step=1, options=bcp.SaveOptions(deadline_s=time_limit(30)))
    except BytecheckpointError as error:
        return f"{type(error).__name__}, {error.may_have_committed}: {error}"
    finally:
        stop()
        location.open_backend = real
    return "saved"


def test_the_outcome_is_unknown_if_rank_0_and_the_store_are_lost(pool: RankPool, tmp_path: Path) -> None:
    outcomes = pool.run(_lose_rank_0_and_the_store, str(tmp_path), world_size=2, expect_death={0: signal.SIGKILL})
    assert outcomes[1].startswith("CommitUnknownError, True: ")
    assert bcp.open(tmp_path).verify().ok, "the checkpoint exists, and none of its files was removed"


def test_a_manifest_that_the_store_refuses_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store answers that the manifest is not there, so the outcome is known and the attempt is removed."""
    bcp.save(tmp_path, _state(0, 1.0), step=1)
    old = keys_of(tmp_path)
    rule = FaultRule("put", "manifest.msgpack", error=StorageError("refused"))
    real = location.open_backend
    monkeypatch.setattr(location, "open_backend", lambda url, **options: FaultyBackend(real(url, **options), [rule]))
    with pytest.raises(StorageError, match="refused") as caught:
        bcp.save(tmp_path, _state(0, 2.0), step=2)
    assert not caught.value.may_have_committed
    assert keys_of(tmp_path) == old
    assert bcp.open(tmp_path).step == 1


@pytest.mark.parametrize("is_stored", [False, True], ids=["lost", "stored"])
@pytest.mark.parametrize("use_async", [False, True], ids=["sync", "async"])
def test_the_outcome_is_unknown_if_the_manifest_can_be_neither_written_nor_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use_async: bool, is_stored: bool
) -> None:
    """The store stops to respond at the commit, perhaps after it has taken the manifest. Every file stays."""
    bcp.save(tmp_path, _state(0, 1.0), step=1)
    old = keys_of(tmp_path)

    def stop_responding(call: Call) -> None:
        rules.append(FaultRule("*", "*", times=None, error=StorageError("no response")))

    rules = [FaultRule("put", "manifest.msgpack", error=StorageError("timed out"), after=is_stored)]
    rules[0].hook = stop_responding
    real, opened = location.open_backend, []

    def open_faulty(url: object, **options: object) -> FaultyBackend:
        opened.append(FaultyBackend(real(url, **options), rules))
        opened[-1].rules = rules
        return opened[-1]

    monkeypatch.setattr(location, "open_backend", open_faulty)
    with pytest.raises(CommitUnknownError, match=r"timed out.*no response.*may or may not be committed") as caught:
        bcp.save(tmp_path, _state(0, 2.0), step=2, async_save=use_async).result(time_limit(60))
    assert caught.value.may_have_committed
    assert rules[0].matched == 1
    monkeypatch.undo()
    assert set(old) < set(keys_of(tmp_path)), "no file of the old or of the new checkpoint is removed"
    checkpoint = bcp.open(tmp_path)
    assert checkpoint.step == (2 if is_stored else 1)
    assert checkpoint.verify().ok
    bcp.save(tmp_path, _state(0, 3.0), step=3)
    assert bcp.open(tmp_path).step == 3


def _fail_between_confirm_and_commit(rank: int, world_size: int, path: str, victim: int) -> str:
    """The victim fails when it has confirmed; rank 0 is about to write the manifest."""
    bcp.save(path, _state(rank, 1.0), step=1, options=bcp.SaveOptions(deadline_s=time_limit(30)))
    dist.barrier()
    router = current_communicator().router

    def observer(name: str, event: str) -> None:
        if rank == victim != 0 and (name, event) == ("save.confirm", "exit"):
            raise OSError("injected after confirm")
        if rank == 0 and (name, event) == ("save.commit.before", "point"):
            if victim == 0:
                raise OSError("injected after confirm")
            has_failed = lambda: any(state.failure for state in router._states.values())  # noqa: E731
            assert router.wait_until(has_failed, time_limit(20))

    stop = telemetry.observe(observer)
    try:
        bcp.save(path, _state(rank, 2.0), step=2, options=bcp.SaveOptions(deadline_s=time_limit(30)))
    except BytecheckpointError as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    finally:
        stop()
    return "saved"


@pytest.mark.parametrize("victim", [0, 2], ids=["first", "last"])
def test_a_failure_between_confirm_and_commit_keeps_the_old_checkpoint(
    pool: RankPool, tmp_path: Path, victim: int
) -> None:
    path = tmp_path / "checkpoint"
    results = pool.run(_fail_between_confirm_and_commit, str(path), victim)
    assert len(set(results)) == 1, results
    phase = "commit" if victim == 0 else "confirm"
    assert results[0].startswith(f"RankFailedError: rank {victim} on ")
    assert results[0].endswith(f"failed in {phase}: OSError: injected after confirm")
    checkpoint = bcp.open(path)
    assert checkpoint.step == 1
    assert checkpoint.verify().ok
    assert len(os.listdir(path)) == 2, "the manifest and the attempt of step 1"


class _ObjectStore(LocalBackend):
    """An object appears when it is complete, as in an object store."""

    def create(self, key: str, size: int, *, at_most: bool = False) -> ObjectWriter:
        return BufferedWriter(f"writing {key!r}", size, lambda data: self.put(key, data))


def _hold_in_write(rank: int, world_size: int, path: str, operation: str, is_object_store: bool) -> str:
    """Rank 0 fails in write and removes the attempt while rank 1 is held in an operation of its store."""
    bcp.save(path, _state(rank, 1.0), step=1, options=bcp.SaveOptions(deadline_s=time_limit(30)))
    dist.barrier()

    def hold(call: Call) -> None:
        dist.barrier()  # rank 0 fails now
        dist.barrier()  # rank 0 has raised

    def fail(name: str, event: str) -> None:
        if rank == 0 and (name, event) == ("save.write", "enter"):
            dist.barrier()
            raise OSError("injected in write")

    rule = FaultRule(operation, "*/model-00001.safetensors", hook=hold)
    real = location.open_backend
    if rank == 1:
        location.open_backend = lambda url, **options: FaultyBackend(
            _ObjectStore(url) if is_object_store else real(url, **options), [rule]
        )
    stop, patience_s = telemetry.observe(fail), commit._SWEEP_AFTER_S
    commit._SWEEP_AFTER_S = 0.5  # how long rank 0 waits for rank 1 before it removes the attempt
    try:
        bcp.save(path, _state(rank, 2.0), step=2, options=bcp.SaveOptions(deadline_s=time_limit(30)))
        return "saved"
    except BytecheckpointError as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    finally:
        stop()
        location.open_backend, commit._SWEEP_AFTER_S = real, patience_s
        if rank == 0:
            dist.barrier()


@pytest.mark.parametrize("is_object_store", [False, True], ids=["file system", "object store"])
@pytest.mark.parametrize("operation", ["create", "write", "complete"])
def test_a_rank_that_still_writes_when_rank_0_removes_the_attempt_leaves_nothing(
    pool: RankPool, tmp_path: Path, operation: str, is_object_store: bool
) -> None:
    results = pool.run(_hold_in_write, str(tmp_path), operation, is_object_store, world_size=2)
    assert len(set(results)) == 1, results
    assert results[0].endswith("failed in write: OSError: injected in write")
    checkpoint = bcp.open(tmp_path)
    assert checkpoint.step == 1
    assert checkpoint.verify().ok
    assert len(os.listdir(tmp_path)) == 2, "the manifest and the attempt of step 1"


def _lose_rank_0_in_the_cleanup(rank: int, world_size: int, path: str) -> str:
    """Rank 2 fails in write; rank 0 dies when it begins to remove the attempt, while rank 1 still writes."""
    bcp.save(path, _state(rank, 1.0), step=1, options=bcp.SaveOptions(deadline_s=time_limit(30)))
    dist.barrier()
    pids = [None] * world_size
    dist.all_gather_object(pids, os.getpid())

    def wait_for_its_death(call: Call) -> None:
        while _runs(pids[0]):
            os.sched_yield()

    def fail(name: str, event: str) -> None:
        if rank == 2 and (name, event) == ("save.write", "exit"):
            raise OSError("injected after write")

    rules = [FaultRule("delete" if rank == 2 else "complete", times=None, hook=wait_for_its_death)]
    if rank == 0:
        rules = [FaultRule("list", "attempt-*", hook=lambda call: os.kill(os.getpid(), signal.SIGKILL))]
    real = location.open_backend
    location.open_backend = lambda url, **options: FaultyBackend(real(url, **options), rules)
    stop, patience_s = telemetry.observe(fail), commit._SWEEP_AFTER_S
    commit._SWEEP_AFTER_S = 0.5  # how long rank 0 waits for rank 1 before it removes the attempt
    try:
        bcp.save(path, _state(rank, 2.0), step=2, options=bcp.SaveOptions(deadline_s=time_limit(30)))
        return "saved"
    except BytecheckpointError as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    finally:
        stop()
        location.open_backend, commit._SWEEP_AFTER_S = real, patience_s


def test_the_others_clean_up_although_rank_0_dies_while_it_does(pool: RankPool, tmp_path: Path) -> None:
    results = pool.run(_lose_rank_0_in_the_cleanup, str(tmp_path), expect_death={0: signal.SIGKILL})
    assert results[1] == results[2]
    assert results[1].startswith("RankFailedError: rank 2 on ")
    assert results[1].endswith("failed in write: OSError: injected after write")
    checkpoint = bcp.open(tmp_path)
    assert checkpoint.step == 1
    assert checkpoint.verify().ok
    names = Counter(Path(key).name for key in keys_of(tmp_path))
    assert names.pop("model-00000.safetensors") <= 2, "only rank 0 may leave a file of its attempt"
    assert names == {"manifest.msgpack": 1, "model-00001.safetensors": 1, "model-00002.safetensors": 1}


def _forge(rank: int, world_size: int, path: str, forgery: str) -> str:
    def forged(files: Sequence[WrittenFile]) -> bytes:
        return FORGERIES[forgery](*msgpack.unpackb(pack_written(files)))

    if rank == 1:
        commit.pack_written = forged
    try:
        bcp.save(path, _state(rank, 1.0), options=bcp.SaveOptions(deadline_s=time_limit(30)))
        return "saved"
    except BytecheckpointError as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    finally:
        commit.pack_written = pack_written


FORGERIES: dict[str, Callable[[list[int], bytes, list[Any]], bytes]] = {
    "another file": lambda lengths, raw, frames: msgpack.packb([[*lengths, 4096], raw + bytes(8), frames]),
    "a file less": lambda lengths, raw, frames: msgpack.packb([[], b"", frames]),
    "another checksum": lambda lengths, raw, frames: msgpack.packb([lengths, raw + bytes(8), frames]),
    "a checksum less": lambda lengths, raw, frames: msgpack.packb([lengths, raw[:-8], frames]),
    "half a checksum": lambda lengths, raw, frames: msgpack.packb([lengths, raw[:-4], frames]),
    "another size": lambda lengths, raw, frames: msgpack.packb([[lengths[0] + 8], raw, frames]),
    "a negative size": lambda lengths, raw, frames: msgpack.packb([[-8], raw, frames]),
    "frames of a raw file": lambda lengths, raw, frames: msgpack.packb(
        [lengths, raw, [["zstd", bytes(8), b"", bytes(8), b""]]]
    ),
}


@pytest.mark.parametrize("forgery", FORGERIES)
@pytest.mark.sampled(4)
def test_rank_0_refuses_a_confirmation_that_does_not_match_the_plan(
    pool: RankPool, tmp_path: Path, forgery: str
) -> None:
    results = pool.run(_forge, str(tmp_path), forgery, world_size=2)
    assert results[0] == results[1]
    assert re.match(r"PlanError: rank 1 (was assigned 1 files with 1 checksums, but )?confirmed ", results[0]), results
    assert keys_of(tmp_path) == []


def _destroy_group_in_flight(rank: int, world_size: int, path: str) -> str:
    """The others ask whether it was committed only when rank 0 has left the group and made another save without it."""
    moved_on = Path(path, "alone-0", "manifest.msgpack")

    def observer(name: str, event: str) -> None:
        while rank and (name, event) == ("save.confirm", "exit") and not moved_on.exists():
            os.sched_yield()

    stop = telemetry.observe(observer)
    handle = bcp.save(
        f"{path}/together", _state(rank, 1.0), async_save=True, options=bcp.SaveOptions(deadline_s=time_limit(30))
    )
    dist.destroy_process_group()
    if rank == 0:
        handle.result(time_limit(30))
    bcp.save(f"{path}/alone-{rank}", _state(rank, 2.0), async_save=True)
    error = handle.exception(30)
    stop()
    return repr(error)


def test_a_group_that_is_destroyed_takes_no_save_with_it(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(_destroy_group_in_flight, str(tmp_path)) == ["None"] * 3
    assert bcp.open(tmp_path / "together").verify().ok


def test_a_synchronous_save_in_a_callback_is_refused(tmp_path: Path) -> None:
    """It would wait for the thread that it runs on, for ever."""
    results: list[str] = []
    ended = threading.Event()

    def again(handle: bcp.SaveHandle) -> None:
        try:
            checkpointer.save(tmp_path / "b", _state(0, 2.0))
        except UsageError as error:
            results.append(str(error))
            checkpointer.save(tmp_path / "c", _state(0, 3.0), async_save=True).add_done_callback(lambda _: ended.set())

    with bcp.Checkpointer() as checkpointer:
        go_on = threading.Event()
        stop = telemetry.observe(
            lambda name, event: go_on.wait(time_limit(10)) and None if name == "save.write" else None
        )
        handle = checkpointer.save(tmp_path / "a", _state(0, 1.0), async_save=True)
        handle.add_done_callback(again)
        go_on.set()
        assert ended.wait(time_limit(30))
        stop()
    assert "async_save=True" in results[0]
    assert bcp.open(tmp_path / "c").verify().ok
    assert not (tmp_path / "b").exists()


def test_a_manifest_without_reply_is_looked_for_in_the_rest_of_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its put has waited for all of it."""
    with bcp.Checkpointer() as checkpointer:
        checkpointer.save(tmp_path, _state(0, 1.0), step=1)
    now, limits = [1000.0], []
    monkeypatch.setattr(manifest_file, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def wait(call: Call) -> None:
        now[0] += 600

    silent = FaultRule("put", "manifest.msgpack", hook=wait, error=UnansweredError("no reply"))
    look = FaultRule("get", times=None, hook=lambda call: limits.append(backend.deadline_s))
    backend = FaultyBackend(LocalBackend(tmp_path), [silent, look])
    backend.deadline_s = 600
    with pytest.raises(CommitUnknownError, match="may still put it there"):
        manifest_file.commit(backend, b"another")
    before, after = limits
    assert before == 600
    assert after < 1
    assert backend.deadline_s == 600
    assert bcp.open(tmp_path).step == 1


def test_a_closed_checkpointer_refuses_everything(tmp_path: Path) -> None:
    checkpointer = bcp.Checkpointer()
    checkpointer.save(tmp_path, _state(0, 1.0), step=1)
    checkpointer.close()
    for use in (
        lambda: checkpointer.save(tmp_path, _state(0, 2.0), step=2),
        lambda: checkpointer.load(tmp_path, _state(0, 0.0)),
        lambda: checkpointer.open(tmp_path),
    ):
        with pytest.raises(UsageError, match="is closed"):
            use()
    assert bcp.open(tmp_path).step == 1
