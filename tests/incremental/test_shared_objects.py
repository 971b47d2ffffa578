"""What happens to the objects of a root: other programs remove, move and damage them, stores fail, and space is short.

``checkpoint.sweep`` states why no committed checkpoint lacks a file.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
import threading
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_mounts import tiny_disk
from sorted_arguments import saving
from warm_python import warm_python

import bytecheckpoint as bcp
from bytecheckpoint import telemetry
from bytecheckpoint.checkpoint import manifest_file, sweep
from bytecheckpoint.checkpoint.attempts import attempt_name, new_attempt
from bytecheckpoint.checkpoint.lease import LEASE_KEY, hold_root
from bytecheckpoint.checkpointer import session_of
from bytecheckpoint.control.base import Operation, SingleOperation
from bytecheckpoint.convert.copy import copy, remove
from bytecheckpoint.engine.objects import OBJECTS
from bytecheckpoint.errors import CorruptionError, RootInUseError, StorageError, StorageFullError, UsageError
from bytecheckpoint.format.manifest.envelope import MANIFEST_KEY
from bytecheckpoint.saving.commit import SaveCommit
from bytecheckpoint.saving.engine import SharedSaves
from bytecheckpoint.storage_backends import open_backend, registry
from bytecheckpoint.storage_backends.base import StorageBackend
from bytecheckpoint.testing import FaultRule, FaultyBackend, time_limit
from bytecheckpoint.testing.faults import Call

WAIT_S = time_limit(60)
CHUNK = 1024
FULL = 64 * CHUNK


@pytest.fixture(autouse=True)
def _no_memory_of_other_tests() -> None:
    session_of().engine.shared.last_commit = None


def tensor() -> torch.Tensor:
    return torch.arange(FULL // 8)


def save(path: Path | str, value: torch.Tensor, **options: Any) -> bcp.SaveResult:
    return bcp.save(path, {"tree": {"t": value}}, **saving(**{"base": "auto", "chunk_size": CHUNK, **options})).result()


def check(path: Path | str, value: torch.Tensor) -> None:
    assert bcp.open(path).verify().problems == ()
    assert torch.equal(bcp.open(path)["tree.t"].load(), value)


def references(path: Path | str) -> list[str]:
    return bcp.open(path).manifest.references.name


def objects(root: Path) -> set[str]:
    return {path.parent.name for path in (root / OBJECTS).glob("*/*")}


@contextmanager
def during(event: str, action: Callable[[], object]) -> Iterator[None]:
    """Run ``action`` once, when a save enters this step."""
    pending = [action]

    def observe(name: str, what: str) -> None:
        if name == event and what == "enter" and pending:
            pending.pop()()

    stop = telemetry.observe(observe)
    try:
        yield
        assert not pending
    finally:
        stop()


# -- what other programs remove ------------------------------------------------------------------------------------


def test_the_first_save_of_a_root_says_that_it_writes_everything(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "bytecheckpoint.saving"):
        first = save(tmp_path / "step-1", tensor())
        assert "this incremental save writes everything: there is no earlier incremental checkpoint" in caplog.text
        caplog.clear()
        second = save(tmp_path / "step-2", tensor())
    assert "no earlier incremental checkpoint" in first.remark
    assert second.remark == ""
    assert "writes everything" not in caplog.text


@pytest.mark.parametrize("what", ["folder", "objects", "a file", "a part of a file"])
@pytest.mark.parametrize("is_new_process", [False, True])
def test_a_base_that_was_removed_by_hand(tmp_path: Path, what: str, is_new_process: bool) -> None:
    save(tmp_path / "step-1", tensor())
    (file,) = (tmp_path / OBJECTS).rglob("*.safetensors")
    if what == "folder":
        shutil.rmtree(tmp_path / "step-1")
    elif what == "objects":
        shutil.rmtree(tmp_path / OBJECTS)
    elif what == "a file":
        file.unlink()
    else:
        os.truncate(file, 5000)
    if is_new_process:
        session_of().engine.shared.last_commit = None
    done = save(tmp_path / "step-2", tensor(), async_save=True)
    assert done.bytes_written > FULL
    assert done.remark
    assert references(tmp_path / "step-2") == []
    check(tmp_path / "step-2", tensor())
    assert save(tmp_path / "step-3", tensor()).bytes_written < FULL


@pytest.mark.parametrize("how", ["by hand", "by bcp rm"])
def test_a_base_that_is_removed_during_the_save(tmp_path: Path, how: str) -> None:
    """A synchronous save begins again. The state of an asynchronous one may be gone: it commits nothing."""

    def act() -> None:
        if how == "by hand":
            shutil.rmtree(tmp_path / OBJECTS / bcp.open(tmp_path / "step-1").manifest.attempt)
        else:
            remove(str(tmp_path / "step-1"))

    save(tmp_path / "step-1", tensor())
    with during("save.confirm", act):
        assert save(tmp_path / "step-2", tensor()).bytes_written > FULL
    check(tmp_path / "step-2", tensor())
    shutil.rmtree(tmp_path)
    save(tmp_path / "step-1", tensor())
    with during("save.confirm", act), pytest.raises(StorageError, match="another program removed them"):
        save(tmp_path / "step-2", tensor(), async_save=True)
    assert not (tmp_path / "step-2").exists()
    assert save(tmp_path / "step-2", tensor(), async_save=True).bytes_written > FULL
    check(tmp_path / "step-2", tensor())


def test_removing_a_checkpoint_by_any_hand_takes_nothing_from_others(tmp_path: Path) -> None:
    values = [tensor()]
    for step in range(4):
        save(tmp_path / f"step-{step}", values[-1])
        values.append(values[-1].clone())
        values[-1][step] = -1
    shutil.rmtree(tmp_path / "step-0")
    remove(str(tmp_path / "step-1"))
    (tmp_path / "step-2").rename(tmp_path / "best")
    shutil.copytree(tmp_path / "step-3", tmp_path / "copy")
    remove(str(tmp_path / "step-3"))
    check(tmp_path / "best", values[2])
    check(tmp_path / "copy", values[3])
    remove(str(tmp_path / "best"))
    remove(str(tmp_path / "copy"))
    assert not [*tmp_path.iterdir()]


def test_a_folder_was_moved_away_and_a_link_left_behind(tmp_path: Path) -> None:
    root, other = tmp_path / "root", tmp_path / "other"
    save(root / "step-1", tensor())
    save(root / "step-2", tensor())
    other.mkdir()
    shutil.move(root / "step-2", other / "step-2")
    (root / "step-2").symlink_to(other / "step-2")
    remove(str(root / "step-1"))
    check(root / "step-2", tensor())
    assert (other / "step-2" / MANIFEST_KEY).exists()


def test_objects_behind_a_link_are_used_and_never_removed(tmp_path: Path) -> None:
    root, other = tmp_path / "root", tmp_path / "other"
    save(root / "step-1", tensor())
    shutil.move(root / OBJECTS, other)
    (root / OBJECTS).symlink_to(other)
    assert save(root / "step-2", tensor()).bytes_written < FULL
    before = set(other.rglob("*"))
    assert "leads out of the root" in remove(str(root / "step-2")).problem
    assert set(other.rglob("*")) == before
    check(root / "step-1", tensor())


@pytest.mark.parametrize("damage", ["cut", "of another program", "unreadable"])
def test_a_sweep_that_cannot_read_a_manifest_removes_nothing_and_says_so(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path / "step-1", tensor())
    save(tmp_path / "step-2", tensor())
    manifest = tmp_path / "step-2" / MANIFEST_KEY
    intact, before = manifest.read_bytes(), objects(tmp_path)
    manifest.write_bytes({"cut": intact[:-1], "of another program": b"{}", "unreadable": b""}[damage])
    assert str(manifest) in remove(str(tmp_path / "step-1")).problem
    assert "nothing is removed, because it is unknown what is needed" in caplog.text
    assert objects(tmp_path) == before
    manifest.write_bytes(intact)
    check(tmp_path / "step-2", tensor())


def test_a_root_that_cannot_be_listed_is_not_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    save(tmp_path / "step-1", tensor())
    monkeypatch.setattr(sweep, "os", SimpleNamespace(path=os.path, scandir=refuse))
    assert "Permission denied" in remove(str(tmp_path / "step-1")).problem
    assert objects(tmp_path)


def test_a_save_of_unknown_outcome_counts_as_running_for_a_day() -> None:
    def begun_yesterday(number: int) -> str:
        return attempt_name(bytes(1) + int(time.time() - 25 * 3600).to_bytes(7, "big") + bytes([number]) * 8)

    saves, now, before, still_running = SharedSaves(), new_attempt(), begun_yesterday(1), begun_yesterday(2)
    for attempt in (before, still_running, now):
        saves.begin(attempt)
    for attempt in (before, now):
        saves.end(attempt, is_unknown=True)
    assert [*saves.running()] == [still_running, now]


def test_a_save_that_is_interrupted_while_it_cleans_up_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def refuse() -> None:
        raise StorageFullError("the disk is full")

    closed: list[Operation] = []
    monkeypatch.setattr(SingleOperation, "close", lambda op: closed.append(op))
    monkeypatch.setattr(SaveCommit, "remove_files", interrupt)
    with during("save.stage", refuse), pytest.raises(KeyboardInterrupt):
        save(tmp_path / "step-1", tensor())
    assert len(closed) == 1
    assert session_of().engine.shared.running() == {}


def test_no_checkpoint_is_made_among_the_objects(tmp_path: Path) -> None:
    """No search would find it, and a sweep of a later day would remove its files."""
    save(tmp_path / "step-1", tensor())
    before = objects(tmp_path)
    for call in (
        lambda: save(tmp_path / OBJECTS, tensor()),
        lambda: save(tmp_path / OBJECTS, tensor(), base=None),
        lambda: copy(bcp.open(tmp_path / "step-1"), tmp_path / OBJECTS),
    ):
        with pytest.raises(UsageError, match="use another name"):
            call()
    assert objects(tmp_path) == before


# -- the lease -----------------------------------------------------------------------------------------------------


def test_a_removal_leaves_the_objects_to_the_job_that_holds_the_root(tmp_path: Path) -> None:
    with bcp.CheckpointManager(tmp_path, save={"base": "auto"}, keep=2, preemption=None) as manager:
        for step in (1, 2):
            manager.save(step, {"tree": {"t": tensor() + step}}, force=True)
            manager.wait()
        _wait_for_housekeeping(manager)
        report = remove(str(tmp_path / "step-1"))
        assert "in use by" in report.problem or "already has a CheckpointManager" in report.problem
        assert len(objects(tmp_path)) == 2
        for step in (3, 4):
            manager.save(step, {"tree": {"t": tensor() + step}}, force=True)
            manager.wait()
    assert len(objects(tmp_path)) == 2
    assert bcp.open(tmp_path / "step-4").verify().ok


def test_a_save_next_to_a_job_shares_nothing(tmp_path: Path) -> None:
    with bcp.CheckpointManager(tmp_path, save={"base": "auto"}, preemption=None) as manager:
        manager.save(1, {"tree": {"t": tensor()}}, force=True)
        manager.wait()
        with bcp.Checkpointer() as other:
            done = other.save(tmp_path / "other", {"tree": {"t": tensor()}}, **saving(base="auto")).result()
    assert "holds the lease" in done.remark
    assert not bcp.open(tmp_path / "other").manifest.is_shared
    check(tmp_path / "other", tensor())


def test_a_save_that_begins_while_another_one_commits_refers_to_its_base(tmp_path: Path) -> None:
    save(tmp_path / "step-1", tensor())
    root = open_backend(tmp_path)
    with ExitStack() as commit:
        commit.enter_context(hold_root(root, patience_s=0))
        with during("save.stage", commit.close):
            assert save(tmp_path / "step-2", tensor()).remark == ""
    assert references(tmp_path / "step-2")


def test_two_removals_wait_for_each_other(tmp_path: Path) -> None:
    save(tmp_path / "step-1", tensor())
    root, held = open_backend(tmp_path), threading.Event()
    done: list[Any] = []
    with hold_root(root, patience_s=0):
        thread = threading.Thread(target=lambda: (held.wait(WAIT_S), done.append(remove(str(tmp_path / "step-1")))))
        thread.start()
        held.set()
        while (tmp_path / "step-1").exists():
            pass
        with pytest.raises(RootInUseError), hold_root(root, patience_s=0):
            pass
    thread.join(WAIT_S)
    assert [one.problem for one in done] == [""]
    assert not [*tmp_path.iterdir()]


def test_a_lease_that_could_not_be_released_blocks_no_save(tmp_path: Path) -> None:
    save(tmp_path / "step-1", tensor())
    backend = FaultyBackend(open_backend(tmp_path), [FaultRule("delete", LEASE_KEY, error=StorageError("broken"))])
    with hold_root(backend, patience_s=0):
        pass
    assert (tmp_path / LEASE_KEY).exists()
    assert save(tmp_path / "step-2", tensor()).bytes_written < FULL
    assert not (tmp_path / LEASE_KEY).exists()


# -- damage ----------------------------------------------------------------------------------------------------------


def _read(path: Path, how: str) -> None:
    if how == "load":
        bcp.load(path, {"tree": {"t": torch.zeros_like(tensor())}})
    else:
        bcp.open(path)["tree.t"][-20:]


@pytest.mark.parametrize("how", ["load", "verify", "slice", "resume"])
def test_bytes_that_were_found_damaged_are_never_referred_to_again(tmp_path: Path, how: str) -> None:
    save(tmp_path / "step-1", tensor())
    save(tmp_path / "step-2", tensor())
    (file,) = (tmp_path / OBJECTS).rglob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    if how == "verify":
        assert not bcp.open(tmp_path / "step-2").verify().ok
    elif how == "resume":
        with (
            bcp.CheckpointManager(tmp_path, preemption=None) as manager,
            pytest.raises(bcp.errors.CheckpointError),
        ):
            manager.resume({"tree": {"t": torch.zeros_like(tensor())}})
    else:
        with pytest.raises(CorruptionError):
            _read(tmp_path / "step-2", how)
    for _ in range(2):  # the same step again
        save(tmp_path / "step-2", tensor())
        check(tmp_path / "step-2", tensor())
    save(tmp_path / "step-3", tensor())
    check(tmp_path / "step-3", tensor())


def _wait_for_housekeeping(manager: bcp.CheckpointManager) -> None:
    """Wait for the removals that follow the saves so far, which ``wait`` leaves to the background."""
    manager._resources.housekeeping._thread.submit(int).result()  # type: ignore[union-attr]


# -- stores ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """The calls of all backends of a store in memory, whose objects ``refused`` names may be refused."""
    found: list[Call] = []
    real = registry._open

    def wrapped(text: str, options: dict[str, Any]) -> StorageBackend:
        backend = real(text, options)
        rule = FaultRule(times=None, hook=found.append)
        return FaultyBackend(backend, [rule]) if text.startswith("memory:") else backend

    monkeypatch.setattr(registry, "_open", wrapped)
    return found


def test_removal_is_linear(calls: list[Call]) -> None:
    """One removal lists the objects once, and reads each manifest once. Retention does so once for all of them."""
    requests = []
    for count in (10, 40):
        root = f"memory://{uuid.uuid4().hex}/root"
        for step in range(count):
            save(f"{root}/step-{step}", tensor())
        calls.clear()
        remove(f"{root}/step-0")
        requests.append(len(calls))
        assert requests[-1] < 2 * count + 30, Counter(call.operation for call in calls)
        calls.clear()
        with bcp.CheckpointManager(root, save={"base": "auto"}, keep=1, preemption=None) as manager:
            manager.save(1000, {"tree": {"t": tensor()}}, force=True)
        assert len(calls) < 12 * count + 60, Counter(call.operation for call in calls)
    assert requests[1] - requests[0] <= 2 * 30


@pytest.mark.parametrize("what", ["sweep", "best", "milestone"])
def test_the_manifests_of_a_root_need_not_fit_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    read: list[weakref.ref[Any]] = []
    most = 0

    def noting(decode: Callable[..., Any]) -> Callable[..., Any]:
        def decode_and_note(*arguments: Any) -> Any:
            nonlocal most
            manifest = decode(*arguments)
            read.append(weakref.ref(manifest))
            most = max(most, sum(one() is not None for one in read))
            return manifest

        return decode_and_note

    with bcp.CheckpointManager(tmp_path, save={"base": "auto"}, preemption=None) as manager:
        for step in range(30):
            manager.save(step, {"tree": {"t": tensor()}}, metrics={"loss": 1.0 + step}, milestone="same")
        manager.wait()
        for module, name in ((sweep, "decode_manifest"), (manifest_file, "decode_summary")):
            monkeypatch.setattr(module, name, noting(getattr(module, name)))
        if what == "best":
            assert manager.best("loss", "min").step == 0  # type: ignore[union-attr]
        elif what == "milestone":
            assert manager.milestone("same").step == 29  # type: ignore[union-attr]
    if what == "sweep":
        remove(str(tmp_path / "step-0"))
    assert len(read) >= 29
    assert most <= 2 * sweep._READERS


def test_a_save_puts_nothing_into_the_store_but_its_files_and_its_manifest(calls: list[Call]) -> None:
    root = f"memory://{uuid.uuid4().hex}/root"
    value = tensor()
    with bcp.CheckpointManager(root, save={"base": "auto"}, preemption=None) as manager:
        for step in (1, 2, 3):
            value[step] = -1
            calls.clear()
            manager.save(step, {"tree": {"t": value}}, force=True)
            manager.wait()
            written = [call for call in calls if call.operation in ("put", "create") and LEASE_KEY not in call.key]
            assert len(written) == 2, "one file and the manifest"
    assert len(calls) < 25


@pytest.mark.parametrize("base", ["auto", None])
def test_a_store_that_is_down_takes_no_part_in_a_commit_in_the_tier(
    tmp_path: Path, calls: list[Call], monkeypatch: pytest.MonkeyPatch, base: str | None
) -> None:
    root = f"memory://{uuid.uuid4().hex}/root"
    value = tensor()
    location = bcp.Location(root, tier=bcp.Tier(tmp_path))
    with bcp.CheckpointManager(location, save={"base": base}, preemption=None) as manager:
        manager.save(1, {"tree": {"t": value}}, force=True)
        manager.wait()
        _wait_for_housekeeping(manager)
        value[3] = -1
        uploads = manager._session.engine.uploads
        blocked = threading.Event()
        uploads.submit(blocked.wait, WAIT_S)  # what asks the store is the upload, which begins later
        calls.clear()
        handle = manager.save(2, {"tree": {"t": value}}, force=True)
        assert handle is not None
        handle.result()
        assert [call for call in calls if LEASE_KEY not in call.key] == []
        blocked.set()
        manager.wait()
    check(f"{root}/step-2", value)


def test_a_save_that_failed_in_the_tier_does_not_make_the_next_one_ask_the_store(
    tmp_path: Path, calls: list[Call]
) -> None:
    """The disk of the tier is full, because the store is down: no save waits for the store in addition."""

    def refuse() -> None:
        raise StorageFullError("the disk is full")

    root = f"memory://{uuid.uuid4().hex}/root"
    with bcp.CheckpointManager(bcp.Location(root, tier=bcp.Tier(tmp_path)), preemption=None) as manager:
        blocked = threading.Event()
        manager._begin()
        manager._session.engine.uploads.submit(blocked.wait, WAIT_S)
        with during("save.write", refuse):
            handle = manager.save(1, {"tree": {"t": tensor()}}, force=True)
            assert handle is not None
            assert isinstance(handle.exception(), StorageFullError)
        calls.clear()
        handle = manager.save(2, {"tree": {"t": tensor()}}, force=True)
        assert handle is not None
        handle.result()
        assert [call for call in calls if call.operation == "get"] == []
        blocked.set()
    check(f"{root}/step-2", tensor())


def test_a_signal_to_leave_while_the_store_is_silent_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last save is committed in the tier, from where the next job resumes and uploads it."""
    answers, committed = threading.Event(), list[bool]()
    answers.set()
    rule = FaultRule(times=None, wait=answers, wait_limit=WAIT_S)
    real = registry._open

    def opened(text: str, options: dict[str, Any]) -> StorageBackend:
        backend = real(text, options)
        return FaultyBackend(backend, [rule]) if text.startswith("memory:") else backend

    def answer_once_it_is_committed() -> None:
        end = time.monotonic() + WAIT_S / 2
        while not (found := [*tmp_path.rglob(f"step-2/{MANIFEST_KEY}")]) and time.monotonic() < end:
            time.sleep(0)
        committed.append(bool(found))
        answers.set()

    def train() -> None:
        with bcp.CheckpointManager(location, save={"base": "auto"}) as manager:
            manager.save(1, {"tree": {"t": value}}, force=True)
            manager.wait()
            answers.clear()
            value[3] = -1
            thread.start()
            os.kill(os.getpid(), signal.SIGTERM)
            manager.save(2, {"tree": {"t": value}})

    monkeypatch.setattr(registry, "_open", opened)
    location, value = bcp.Location(f"memory://{uuid.uuid4().hex}/root", tier=bcp.Tier(tmp_path)), tensor()
    thread = threading.Thread(target=answer_once_it_is_committed)
    with pytest.raises(SystemExit):
        train()
    thread.join(WAIT_S)
    assert committed == [True]
    with bcp.CheckpointManager(location, preemption=None) as manager:
        manager.resume({"tree": {"t": (resumed := torch.zeros_like(value))}})
    assert torch.equal(resumed, value)
    check(location.url + "/step-2", value)


# -- other users, and full disks -------------------------------------------------------------------------------------


def test_a_base_of_another_user() -> None:
    """Its files can be referred to. If the user may add nothing to the objects, the save is like any other."""
    script = f"""
import os, sys
import torch
import bytecheckpoint as bcp
[getattr(bcp, name) for name in dir(bcp)]  # imported now: the other user may not read the interpreter's files
os.setgid(65534)
os.setuid(65534)
options = {{"base": "auto", "chunk_size": {CHUNK}}}
for root in sys.argv[1:]:
    done = bcp.save(root + "/step-2", {{"tree": {{"t": torch.arange({FULL // 8})}}}}, options=options).result()
    print(done.bytes_written < {FULL}, bcp.open(done.url).verify().ok, done.remark)
"""
    if os.getuid() != 0:
        pytest.skip("needs the right to become another user")
    with tempfile.TemporaryDirectory() as folder:  # other runs of pytest close the folder above tmp_path
        roots = [Path(folder, "shared"), Path(folder, "own")]
        for root in roots:
            save(root / "step-1", tensor())
            root.chmod(0o777)
        (roots[0] / OBJECTS).chmod(0o777)
        os.chmod(folder, 0o755)
        done = warm_python().run(["-c", script, *map(str, roots)], timeout=time_limit(120))
    assert done.returncode == 0, done.stderr
    expected = ["True True ", "False True the root, or its folder of objects, belongs to somebody else"]
    assert done.stdout.splitlines() == expected


def fill(disk: Path) -> None:
    with open(disk / "other", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def test_a_full_disk(tmp_path: Path) -> None:
    """A save leaves what is there, and a removal makes room."""
    with tiny_disk(tmp_path / "disk", 1 << 20) as root:
        save(root / "step-1", tensor() + 1)
        save(root / "step-2", tensor())
        with pytest.raises(OSError, match="No space left"):
            fill(root)
        with pytest.raises(StorageFullError):
            save(root / "step-3", tensor() + 3)
        assert not (root / "step-3").exists()
        check(root / "step-2", tensor())
        assert remove(str(root / "step-1")).problem == ""
        check(root / "step-2", tensor())
        assert len(objects(root)) == 1
        changed = tensor()
        changed[3] = -1
        assert save(root / "step-3", changed).bytes_written < FULL
        check(root / "step-3", changed)


# -- space -----------------------------------------------------------------------------------------------------------


def _stored(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


@pytest.mark.parametrize("changes", ["layers freeze one after another", "random"])
def test_space_is_bounded(tmp_path: Path, changes: str) -> None:
    """The checkpoints that are kept need at most twice the space of complete ones."""
    layers, keep = 10, 3
    generator = torch.Generator().manual_seed(0)
    values = {f"layer{n}": torch.randn(16 * CHUNK, generator=generator) for n in range(layers)}
    full = sum(value.nbytes for value in values.values())
    peak = 0
    with bcp.CheckpointManager(tmp_path, save={"base": "auto"}, keep=keep, preemption=None) as manager:
        for step in range(1, 25):
            for n, value in enumerate(values.values()):
                if changes == "random":
                    value[torch.randint(len(value), (6,), generator=generator)] = float(step)  # of 64 chunks
                elif n >= step:
                    value += 1
            manager.save(step, {"tree": values}, force=True, metrics={})
            manager.wait()
            _wait_for_housekeeping(manager)
            peak = max(peak, _stored(tmp_path))
    assert peak < 2 * keep * full
    for step in (22, 23, 24):
        assert bcp.open(tmp_path / f"step-{step}").verify().ok
