"""Two faults in which ``torch.distributed.checkpoint`` silently loses training state, and this library does not.

The tests of DCP show that the faults are real. They describe torch 2.13; if a later release handles a fault, its test
fails and can be removed.

*Two steps mixed.* Two ranks overwrite the checkpoint of step 1 with step 2, and one rank is killed just before it
writes. DCP keeps the metadata of step 1 until the end and gives the files of both steps the same names, so a load
succeeds and returns rank 0's rows of step 2 and rank 1's rows of step 1.

*A writer thread that fails.* ``FileSystemWriter(thread_count=2)`` starts plain threads (``_write_data`` in
``filesystem.py``), joins them, and reads their results from a queue. An exception of a thread goes to
``threading.excepthook``, that is, to stderr. ``save`` returns normally, although the tensors of that thread are not
stored. The next load raises a ``KeyError`` that names a ``MetadataIndex``, and the overwritten checkpoint is gone.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fuse_disk import FuseRule, fuse_disk
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import bytecheckpoint as bcp
from bytecheckpoint import telemetry
from bytecheckpoint.errors import StorageError, StorageFullError
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool

WORLD = 2
DEADLINE_S = time_limit(30)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(WORLD) as ranks:
        yield ranks


# -- two steps mixed ---------------------------------------------------------------------------------------------------


def _rows(value: float) -> dict[str, Any]:
    """Two rows on each of two ranks."""
    full = torch.full((4, 3), value)
    return {"weight": distribute_tensor(full, init_device_mesh("cpu", (WORLD,)), [Shard(0)])}


class _DyingWriter(FileSystemWriter):
    def write_data(self, *args: Any, **options: Any) -> Any:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().write_data(*args, **options)


def _dcp_overwrite(rank: int, world_size: int, path: str) -> str:
    warnings.simplefilter("ignore")  # DCP warns that it overwrites
    dcp.save(_rows(1.0), checkpoint_id=path)
    try:
        dcp.save(_rows(2.0), storage_writer=_DyingWriter(path))
    except (RuntimeError, CheckpointException) as error:
        return type(error).__name__
    return "saved"


def _dcp_rows(rank: int, world_size: int, path: str) -> list[float]:
    state = _rows(0.0)
    dcp.load(state, checkpoint_id=path)
    return [float(row) for row in state["weight"].full_tensor()[:, 0]]


@pytest.mark.peers
def test_dcp_mixes_two_steps(pool: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "dcp")
    results = pool.run(_dcp_overwrite, path, expect_death={1: signal.SIGKILL})
    assert results[0] != "saved", "rank 0 detects the failure, but the next job cannot"
    assert pool.run(_dcp_rows, path) == [[2.0, 2.0, 1.0, 1.0]] * WORLD


def _overwrite(rank: int, world_size: int, path: str, point: str) -> str:
    def kill(name: str, event: str) -> None:
        if rank == 1 and name == point and event in ("enter", "point"):
            os.kill(os.getpid(), signal.SIGKILL)

    bcp.save(path, {"model": _rows(1.0)}, step=1, options=bcp.SaveOptions(deadline_s=DEADLINE_S))
    dist.barrier()
    telemetry.observe(kill)
    try:
        bcp.save(path, {"model": _rows(2.0)}, step=2, options=bcp.SaveOptions(deadline_s=DEADLINE_S))
    except bcp.errors.RankFailedError as error:
        return str(error)
    return "saved"


def _loaded_rows(rank: int, world_size: int, path: str) -> list[float]:
    state = _rows(0.0)
    report = bcp.load(path, {"model": state}, options=bcp.LoadOptions(deadline_s=DEADLINE_S))
    return [float(report.step or 0), *(float(row) for row in state["weight"].full_tensor()[:, 0])]


@pytest.mark.parametrize("point", ["save.write", "save.write.file", "save.write.complete", "save.confirm"])
def test_two_steps_are_never_mixed(pool: RankPool, tmp_path: Path, point: str) -> None:
    path = str(tmp_path / "checkpoint")
    results = pool.run(_overwrite, path, point, expect_death={1: signal.SIGKILL})
    assert "rank 1" in results[0]
    assert pool.run(_loaded_rows, path) == [[1.0, 1.0, 1.0, 1.0, 1.0]] * WORLD


# -- a writer thread that fails ----------------------------------------------------------------------------------------


class _HalfFullDisk(FileSystem):
    """Two threads write a file each at the same time; only the main thread's file has space."""

    def __init__(self) -> None:
        super().__init__()
        self._both = threading.Barrier(2)

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        if "__0_" not in str(path):  # the metadata
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        self._both.wait(time_limit(30))
        is_main = threading.current_thread() is threading.main_thread()
        with super().create_stream(path if is_main else Path("/dev/full"), mode) as stream:
            yield stream


def _tensors(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full((1000,), value) for name in ("first", "second")}


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_dcp_saves_with_a_failed_writer_thread_and_reports_success(tmp_path: Path) -> None:
    path = tmp_path / "dcp"
    writer = FileSystemWriter(path, thread_count=2, sync_files=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(_tensors(1.0), storage_writer=FileSystemWriter(path, thread_count=2), no_dist=True)
        writer.fs = _HalfFullDisk()
        failed: list[BaseException] = []
        former, threading.excepthook = threading.excepthook, lambda args: failed.append(args.exc_value)  # type: ignore
        try:
            metadata = dcp.save(_tensors(2.0), storage_writer=writer, no_dist=True)
        finally:
            threading.excepthook = former
        assert [getattr(error, "errno", None) for error in failed] == [errno.ENOSPC]
        assert set(metadata.state_dict_metadata) == {"first", "second"}, "save returned metadata of both tensors"
        assert len(metadata.storage_data) == 1, "but one of them is not stored"
        with pytest.raises((KeyError, CheckpointException)) as caught:
            dcp.load(_tensors(0.0), checkpoint_id=path, no_dist=True)
    text = str(caught.value)
    assert "KeyError: MetadataIndex(fqn=" in text
    assert "No space" not in text


@pytest.mark.parametrize(("code", "kind"), [(errno.ENOSPC, StorageFullError), (errno.EIO, StorageError)])
@pytest.mark.parametrize("use_async", [False, True], ids=["sync", "async"])
def test_a_failed_writer_thread_fails_the_save(tmp_path: Path, use_async: bool, code: int, kind: type) -> None:
    """Several threads write the file, and the write at its end fails."""
    elements = 6 << 20  # 24 MiB, three pieces
    with fuse_disk(tmp_path / "disk") as disk, bcp.Checkpointer() as saver:
        path = f"{disk.path}/checkpoint"
        threads: set[str] = set()
        stop = telemetry.record(
            lambda span: threads.add(span.thread) if span.name == "write" and not span.is_step else None
        )
        saver.save(path, {"extra_state": {"long": torch.full((elements,), 1.0)}}, step=1)
        stop()
        assert threads, "other threads write the pieces"
        assert threading.current_thread().name not in threads
        unsupported = FuseRule("fallocate", errno.EOPNOTSUPP)
        disk.fail(unsupported, FuseRule("write", code, "*/extra_state-*", 20 << 20))
        with pytest.raises(
            kind, match=rf"writing 'attempt-\S+/extra_state-00000.safetensors'.*{errno.errorcode[code]}"
        ):
            saver.save(
                path, {"extra_state": {"long": torch.full((elements,), 2.0)}}, step=2, async_save=use_async
            ).result(time_limit(60))
        disk.mend()
        state = {"extra_state": {"long": torch.zeros(elements)}}
        assert saver.load(path, state).step == 1
        assert state["extra_state"]["long"].eq(1.0).all()
