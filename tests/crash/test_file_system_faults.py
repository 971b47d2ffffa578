"""Make real file systems fail during a save: full, read-only, over quota, a broken device.

Every rank raises the right error, which states the place, the sizes and a remedy. The previous checkpoint is bit-equal.
The leftovers of the failed save are removed if the file system still allows it, and are never taken for a checkpoint.
Once the fault is over, the same processes save again.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fuse_disk import FuseDisk, FuseRule, fuse_disk
from small_mounts import Ext4Disk, ext4_disk
from small_training import differing, memory, stepped
from torch import nn
from torch.distributed.fsdp import fully_shard

import bytecheckpoint as bcp
from bytecheckpoint import telemetry
from bytecheckpoint.errors import BytecheckpointError, StorageError, StorageFullError
from bytecheckpoint.storage_backends import open_backend
from bytecheckpoint.storage_backends.fsspec import backend as fsspec_backend
from bytecheckpoint.storage_backends.fsspec.backend import FsspecBackend
from bytecheckpoint.storage_backends.fsspec.connection import Connection
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool

pytestmark = [pytest.mark.slow, pytest.mark.sampled(10, of=__name__)]

WORLD = 2
DISK = 48 << 20
DEADLINE_S = time_limit(30)
ROWS, COLUMNS = 512, 700  # 1.4 MB, and twice that in the optimizer: several files, large enough for direct I/O


@dataclass(frozen=True)
class Fault:
    """What happens to the disk when rank 0 reaches ``point`` for the ``nth`` time, and the expected error."""

    point: str
    arm: Callable[[Any], None]
    lift: Callable[[Any], None]
    error: str  # pattern of the error's class
    message: str  # pattern of its message
    nth: int = 1
    can_remove: bool = True  # the file system still removes files
    can_read: bool = True  # and still reads them


def _ulimit(size: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))


def _break(disk: Ext4Disk) -> None:
    disk.fail_from(4096)


ATTEMPT = r"'attempt-\S+/(model|optimizer|extra_state)-0000\d\.\w+' in \S+/disk/root/step-2: "
FULL = r"; free space or quota, or raise the file size limit \(ulimit -f\) \(needed: \d+ bytes, free on .*: \d+ bytes\)"
DENIED = r"; check the owner, the mode and whether the mount is read-only"
BROKEN = r"; the device or the mount has failed; check the system's log and use another"
# An ext4 that has failed becomes read-only: an open file gets the first error, a newly opened one the second.
DEVICE_ERRORS = "StorageError|AccessDeniedError"
MANIFEST = r"'manifest.msgpack' in \S+/disk/root/step-2: "

ON_EXT4 = {
    "full": Fault(
        "save.check",
        lambda disk: disk.fill(leave=1 << 20),
        Ext4Disk.free,
        "StorageFullError",
        r"/disk/root/step-2: this checkpoint needs [\d,]+ bytes, but only [\d,]+ are free. Nothing was written; free",
    ),
    "fills-after-the-check": Fault(
        "save.stage",
        lambda disk: disk.fill(leave=512 << 10),
        Ext4Disk.free,
        "StorageFullError",
        f"writing {ATTEMPT}.*ENOSPC.*{FULL}",
    ),
    "fills-between-files": Fault(
        "save.write.file", Ext4Disk.fill, Ext4Disk.free, "StorageFullError", f"{ATTEMPT}.*ENOSPC.*{FULL}", nth=3
    ),
    "full-for-the-manifest": Fault(
        "save.commit.before", Ext4Disk.fill, Ext4Disk.free, "StorageFullError", f"{MANIFEST}.*ENOSPC.*{FULL}"
    ),
    "read-only": Fault(
        "save.stage",
        lambda disk: disk.remount("ro"),
        lambda disk: disk.remount("rw"),
        "AccessDeniedError",
        f"{ATTEMPT}.*EROFS.*{DENIED}",
        can_remove=False,
    ),
    "read-only-for-the-manifest": Fault(
        "save.commit.before",
        lambda disk: disk.remount("ro"),
        lambda disk: disk.remount("rw"),
        "AccessDeniedError",
        f"{MANIFEST}.*EROFS.*{DENIED}",
        can_remove=False,
    ),
    "aborted-by-the-kernel": Fault(
        "save.write.file",
        Ext4Disk.abort,
        Ext4Disk.mend,
        DEVICE_ERRORS,
        f"{ATTEMPT}.*(EIO.*{BROKEN}|EROFS.*{DENIED})",
        nth=2,
        can_remove=False,
    ),
    "device-fails-in-a-write": Fault(
        "save.write.file",
        _break,
        Ext4Disk.mend,
        DEVICE_ERRORS,
        f"{ATTEMPT}.*(EIO.*{BROKEN}|EROFS.*{DENIED})",
        nth=2,
        can_remove=False,
        can_read=False,
    ),
    "device-fails-in-the-sync": Fault(
        "save.write.complete",
        _break,
        Ext4Disk.mend,
        DEVICE_ERRORS,
        f"{ATTEMPT}.*(EIO.*{BROKEN}|EROFS.*{DENIED})",
        can_remove=False,
        can_read=False,
    ),
    "ulimit": Fault(
        "save.write.file",
        lambda disk: _ulimit(100 << 10),
        lambda disk: _ulimit(resource.RLIM_INFINITY),
        "StorageFullError",
        f"{ATTEMPT}.*EFBIG.*{FULL}",
        nth=2,
    ),
}


def _rules(*rules: FuseRule) -> Callable[[FuseDisk], None]:
    return lambda disk: disk.fail(*rules)


NO_PREALLOCATION = FuseRule("fallocate", errno.EOPNOTSUPP)

ON_FUSE = {
    "quota": Fault(
        "save.stage",
        _rules(FuseRule("fallocate", errno.EDQUOT, "*/model-*")),
        FuseDisk.mend,
        "StorageFullError",
        f"{ATTEMPT}.*EDQUOT.*{FULL}",
    ),
    "quota-in-a-write": Fault(
        "save.stage",
        _rules(NO_PREALLOCATION, FuseRule("write", errno.EDQUOT, "*/optimizer-*", 256 << 10)),
        FuseDisk.mend,
        "StorageFullError",
        f"{ATTEMPT}.*EDQUOT.*{FULL}",
    ),
    "write-error": Fault(
        "save.stage",
        _rules(FuseRule("write", errno.EIO, "*/optimizer-00000*", 256 << 10)),
        FuseDisk.mend,
        "StorageError",
        f"{ATTEMPT}.*EIO.*{BROKEN}",
    ),
    "sync-error": Fault(
        "save.stage",
        _rules(FuseRule("fsync", errno.EIO, "*/model-00000*")),
        FuseDisk.mend,
        "StorageError",
        f"{ATTEMPT}.*EIO.*{BROKEN}",
    ),
    "rename-error": Fault(
        "save.stage",
        _rules(*(FuseRule(call, errno.EIO, "*/manifest.msgpack") for call in ("rename", "link"))),
        FuseDisk.mend,
        "StorageError",
        f"{MANIFEST}.*EIO.*{BROKEN}",
    ),
}

FAULTS = {**ON_EXT4, **ON_FUSE}
MODES = ("sync", "async", "manager")


@dataclass
class Observed:
    """What one rank observed."""

    error: str
    message: str
    wrong: list[str]  # names of tensors that a load returned with wrong contents
    left: list[str]  # files in the failed checkpoint's folder during the fault
    latest: int  # the newest step after the fault
    left_at_end: list[str]  # files in that folder after the manager of the next job has saved


class Job:
    """Saves below one root, in one of the modes."""

    def __init__(self, root: str, mode: str) -> None:
        self.root, self._mode = root, mode
        self._manager = None
        if mode == "manager":
            self._manager = bcp.CheckpointManager(
                root, job=bcp.JobOptions(deadline_s=DEADLINE_S, coordinate_every_s=0.05)
            )

    def path(self, step: int) -> str:
        return f"{self.root}/step-{step}"

    def save(self, step: int, state: dict[str, Any]) -> None:
        if self._manager is None:
            handle = bcp.save(
                self.path(step),
                state,
                step=step,
                async_save=self._mode == "async",
                options=bcp.SaveOptions(deadline_s=DEADLINE_S),
            )
            handle.result(DEADLINE_S)
            return
        # save() raises failures before staging, wait() later ones, so every rank makes both calls.
        try:
            assert self._manager.save(step, state, force=True) is not None
        finally:
            self._manager.wait()

    def close(self) -> None:
        if self._manager is not None:
            self._manager.close()


def _state(value: float) -> dict[str, Any]:
    model = nn.Linear(COLUMNS, ROWS)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape) + value)
    if dist.is_initialized():
        fully_shard(model)
    return {"model": model, "optimizer": stepped(model), "extra_state": {"value": value}}


def _synchronize() -> None:
    if dist.is_initialized():
        dist.barrier()


def _wrong(path: str, expected: dict[str, Any]) -> list[str]:
    loaded = _state(-1.0)
    bcp.load(path, loaded, options=bcp.LoadOptions(deadline_s=DEADLINE_S))
    return differing(memory(loaded), expected)


def _files(folder: str) -> list[str]:
    return [str(file) for file in Path(folder).rglob("*")]


def _save_with_fault(rank: int, world_size: int, disk: Any, kind: str, mode: str) -> Observed:
    fault = FAULTS[kind]
    job = Job(f"{disk.path}/root", mode)
    first = _state(1.0)
    job.save(1, first)
    expected = memory(first)
    _synchronize()
    seen = 0

    def strike(name: str, event: str) -> None:
        nonlocal seen
        if name == fault.point and event in ("enter", "point"):
            seen += 1
            if seen == fault.nth:
                fault.arm(disk)

    stop = telemetry.observe(strike) if rank == 0 else lambda: None
    try:
        job.save(2, _state(2.0))
        error, message = "", "nothing was raised"
    except BytecheckpointError as raised:
        error, message = type(raised).__name__, str(raised)
    finally:
        stop()
    _synchronize()
    wrong = _wrong(job.path(1), expected) if fault.can_read else []
    left = _files(job.path(2)) if fault.can_read else []
    _synchronize()
    if rank == 0:
        fault.lift(disk)
    _synchronize()
    wrong += _wrong(job.path(1), expected)
    latest = bcp.latest(job.root)
    assert latest is not None
    with pytest.raises(bcp.errors.CheckpointError):
        bcp.open(job.path(2))
    _synchronize()
    third = _state(3.0)
    job.save(3, third)
    wrong += _wrong(job.path(3), memory(third))
    wrong += _wrong(job.path(1), expected)
    job.close()
    left_at_end = []
    if mode == "manager":
        _synchronize()
        next_job = Job(job.root, mode)
        next_job.save(4, third)
        next_job.close()
        _synchronize()  # rank 0 has removed what was left
        # Only files: the empty directory of an attempt may remain, and readers ignore it.
        left_at_end = [file for file in _files(job.path(2)) if os.path.isfile(file)]
    return Observed(error, message, wrong, left, latest.step or 0, left_at_end)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(WORLD) as ranks:
        yield ranks


def _check(pool: RankPool, disk: Any, kind: str, mode: str, world_size: int) -> None:
    fault = FAULTS[kind]
    observed = pool.run(
        _save_with_fault, disk, kind, mode, world_size=world_size, backend="gloo" if world_size > 1 else None
    )
    for rank, one in enumerate(observed):
        assert re.fullmatch(fault.error, one.error), f"rank {rank}: {one.error}: {one.message}"
        assert re.search(fault.message, one.message), f"rank {rank}: {one.message}"
        assert one.wrong == []
        assert one.latest == 1
        if fault.can_remove:
            assert one.left == []
        if rank == 0:  # the other ranks may look before rank 0 has removed the files
            assert one.left_at_end == []


WORLDS = pytest.mark.parametrize("world_size", [1, WORLD], ids=["alone", "ranks"])


@WORLDS
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ON_EXT4)
@pytest.mark.sampled(12)
def test_saves_survive_faults_of_ext4(pool: RankPool, tmp_path: Path, kind: str, mode: str, world_size: int) -> None:
    with ext4_disk(tmp_path / "disk", DISK) as disk:
        _check(pool, disk, kind, mode, world_size)


@pytest.mark.parametrize(("mode", "world_size"), [("sync", 1), ("async", WORLD), ("manager", WORLD)])
@pytest.mark.parametrize("kind", ON_FUSE)
@pytest.mark.sampled(5)
def test_saves_survive_faults_of_a_fuse_mount(
    pool: RankPool, tmp_path: Path, kind: str, mode: str, world_size: int
) -> None:
    with fuse_disk(tmp_path / "disk") as disk:
        _check(pool, disk, kind, mode, world_size)


@pytest.mark.parametrize("mode", MODES)
def test_a_mount_without_hard_links(tmp_path: Path, mode: str) -> None:
    """Nor with exclusive renames, as many FUSE mounts of object stores. The manifest is renamed into place."""
    with fuse_disk(tmp_path / "disk") as disk:
        disk.fail(FuseRule("link", errno.EPERM))
        assert not open_backend(disk.path).conditions().if_absent
        job = Job(f"{disk.path}/root", mode)
        for step, value in ((1, 1.0), (2, 2.0), (2, 3.0)):
            state = _state(value)
            if mode != "manager" or value < 3:
                job.save(step, state)
        job.close()
        assert _wrong(job.path(1), memory(_state(1.0))) == []
        assert _wrong(job.path(2), memory(_state(2.0 if mode == "manager" else 3.0))) == []
        assert not [file for file in _files(f"{disk.path}") if ".bcp-tmp-" in file]


# -- loading -----------------------------------------------------------------------------------------------------------

LONG = 16 << 20  # elements; 64 MiB, many times the size of one read


def _long_state(value: float) -> dict[str, Any]:
    return {"extra_state": {"long": torch.arange(LONG, dtype=torch.float32) + value}}


def _data_file(path: str) -> str:
    return max((str(file) for file in Path(path).rglob("*.safetensors")), key=os.path.getsize)


def _load_and_fail(
    rank: int, world_size: int, path: str, cause: Callable[[Any], None], argument: Any
) -> tuple[str, str]:
    """Load, while rank 0 causes a fault after the first piece of the file has been read."""
    once = threading.Lock()

    def see(span: telemetry.Span) -> None:
        if span.operation == "load" and span.name == "read" and not span.is_step and once.acquire(blocking=False):
            cause(argument)

    stop = telemetry.record(see) if rank == 0 else lambda: None
    try:
        bcp.load(path, _long_state(0.0), options=bcp.LoadOptions(deadline_s=DEADLINE_S))
    except BytecheckpointError as error:
        return type(error).__name__, str(error)
    finally:
        stop()
    return "", "nothing was raised"


def _load_all(rank: int, world_size: int, path: str) -> bool:
    state = _long_state(0.0)
    bcp.load(path, state, options=bcp.LoadOptions(deadline_s=DEADLINE_S))
    return torch.equal(state["extra_state"]["long"], _long_state(1.0)["extra_state"]["long"])


def _break_from(argument: tuple[Ext4Disk, int]) -> None:
    disk, offset = argument
    disk.fail_from(offset)


@WORLDS
def test_a_device_that_fails_during_a_load(pool: RankPool, tmp_path: Path, world_size: int) -> None:
    with ext4_disk(tmp_path / "disk", 128 << 20) as disk:
        path = f"{disk.path}/checkpoint"
        bcp.save(path, _long_state(1.0))
        begin = disk.first_byte_of(_data_file(path))
        results = pool.run(_load_and_fail, path, _break_from, (disk, begin), world_size=world_size)
        for kind, message in results:
            assert kind == "StorageError", message
            assert re.search(r"extra_state-00000.safetensors: cannot read bytes \[\d+, \d+\) of tensor", message)
            assert re.search(f"EIO.*{BROKEN}", message)
        with pytest.raises(StorageError, match="EIO"):
            bcp.open(path)["extra_state.long"].load()
        disk.mend()
        assert pool.run(_load_all, path, world_size=world_size) == [True] * world_size
        assert bcp.open(path).verify().ok


def _fail_reads(disk: FuseDisk) -> None:
    disk.fail(FuseRule("read", errno.EIO, "*/extra_state-*", LONG))


@WORLDS
def test_a_mount_that_fails_during_a_load(pool: RankPool, tmp_path: Path, world_size: int) -> None:
    with fuse_disk(tmp_path / "disk") as disk:
        path = f"{disk.path}/checkpoint"
        bcp.save(path, _long_state(1.0))
        results = pool.run(_load_and_fail, path, _fail_reads, disk, world_size=world_size)
        for kind, message in results:
            assert kind == "StorageError", message
            assert re.search(f"cannot read bytes .* of tensor extra_state.long .*EIO.*{BROKEN}", message)
        disk.mend()
        assert pool.run(_load_all, path, world_size=world_size) == [True] * world_size


def _truncate(file: str) -> None:
    os.truncate(file, 8192)


@pytest.mark.parametrize("cached", [True, False], ids=["cached", "uncached"])
@WORLDS
def test_a_file_truncated_during_a_load(pool: RankPool, tmp_path: Path, world_size: int, cached: bool) -> None:
    """The load raises an error that names the file; without memory maps there is no SIGBUS."""
    path = str(tmp_path / "checkpoint")
    bcp.save(path, _long_state(1.0))
    file = _data_file(path)
    whole = Path(file).read_bytes()  # reading brings the file into the page cache
    if not cached:
        with open(file, "rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    pids = pool.pids
    results = pool.run(_load_and_fail, path, _truncate, file, world_size=world_size)
    for kind, message in results:
        assert kind in ("CorruptionError", "StorageError"), message
        assert re.search(rf"{re.escape(file)}: .*extra_state.long", message)
        assert re.search(r"8192|cut", message)
    Path(file).write_bytes(whole)
    assert pool.run(_load_all, path, world_size=world_size) == [True] * world_size
    assert pool.pids[:world_size] == pids[:world_size] or not pids


# -- one file, several threads -----------------------------------------------------------------------------------------


def test_every_thread_that_writes_a_file_raises_the_cause(tmp_path: Path) -> None:
    """A regression: the second thread raised only that the writer had failed already."""
    with fuse_disk(tmp_path / "disk") as disk:
        writer = open_backend(f"{disk.path}/checkpoint").create("object", 3 << 20)
        disk.fail(FuseRule("write", errno.EIO))
        for piece in range(3):
            with pytest.raises(StorageError, match=r"writing 'object' in .*EIO"):
                writer.write(piece << 20, bytes(1 << 20))
        writer.abort()


def test_a_stream_to_a_full_disk_raises_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsspec_backend, "temporary_path", lambda path: "/dev/full")
    monkeypatch.setattr(Connection, "remove", lambda connection, path: None)
    writer = FsspecBackend(f"file://{tmp_path}").create("object", 9 << 20)
    with suppress(StorageFullError):  # if the first part has failed before the second one begins
        writer.write(0, bytes(9 << 20))
    for _ in range(2):
        with pytest.raises(StorageFullError, match=r"writing 'object' in .*ENOSPC"):
            writer.complete()
    writer.abort()
