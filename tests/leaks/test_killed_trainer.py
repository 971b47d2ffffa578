"""Kill all ranks of a job during an asynchronous save.

No process and no shared memory remain, and the next job on this host can use the root immediately.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import torch
from leak_watch import shared_memory_of
from warm_python import warm_python

import bytecheckpoint as bcp
from bytecheckpoint.testing import time_limit

GONE_S = time_limit(5)
START_S = time_limit(120)

_TRAINER = """
import os, sys, threading
import torch
import torch.distributed as dist
import bytecheckpoint as bcp
from bytecheckpoint import telemetry

root, rank, world_size, layout = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
if world_size > 1:
    dist.init_process_group("gloo", init_method=f"file://{root}.store", rank=rank, world_size=world_size)

def hold(name, event):
    if name == "save.write.complete":
        print("writing", flush=True)
        threading.Event().wait()

def state(value):
    return {"extra_state": {"weight": torch.full((1 << 20,), float(value)), "value": value}}

manager = bcp.CheckpointManager(root, cadence=1, keep=2, save=bcp.SaveOptions(layout=layout))
for step in range(1, 4):
    manager.save(step, state(step))
manager.wait()
telemetry.observe(hold)
manager.save(4, state(4))
while True:
    threading.Event().wait(1)
"""


def _of_session(session: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


@pytest.mark.parametrize(("world_size", "layout"), [(1, "shards"), (2, "shards"), (2, "whole")])
@pytest.mark.sampled(2)
def test_a_killed_job_leaves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, world_size: int, layout: str
) -> None:
    root = tmp_path / "root"
    reader, writer = os.pipe()
    ranks = [
        warm_python().start(
            ["-W", "ignore", "-c", _TRAINER, str(root), str(rank), str(world_size), layout],
            stdout=writer if rank == 0 else subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for rank in range(world_size)
    ]
    os.close(writer)
    try:
        with open(reader) as output:
            assert output.readline() == "writing\n"
        for process in ranks:
            # Only the process, not its group: its children must detect the death themselves.
            os.kill(process.pid, signal.SIGKILL)
        for process in ranks:
            assert process.wait(GONE_S) == -signal.SIGKILL
        give_up = time.monotonic() + GONE_S
        while left := [process for rank in ranks for process in _of_session(rank.pid)]:
            assert time.monotonic() < give_up, f"left behind: {left}"
            time.sleep(0.05)
        assert not shared_memory_of({rank.pid for rank in ranks})
    finally:
        for process in ranks:
            process.kill()
    found = bcp.latest(root)
    assert found is not None
    assert found.step == 3
    assert found.verify().ok
    assert not (root / "step-4" / "manifest.msgpack").exists()
    assert [path for path in (root / "step-4").rglob("*") if path.is_file()], "it was killed before it wrote"
    # The manager watches the lease of a possibly living holder for 15 s, but detects that this one has ended.
    caplog.set_level(logging.INFO, "bytecheckpoint.checkpoint.lease")
    with bcp.CheckpointManager(root, keep=2) as manager:
        assert "has ended; its lease is taken over" in caplog.text
        assert "waiting for a heartbeat" not in caplog.text
        state = {"extra_state": {"weight": torch.zeros(1 << 20), "value": 0}}
        assert manager.resume(state) is not None
        assert state["extra_state"]["value"] == 3
        manager.save(5, state, force=True)
    # Only files: the kill may fall between the removal of a folder's last file and that of the folder.
    files = [path.relative_to(root) for path in root.rglob("*") if path.is_file()]
    assert {path.parts[0] for path in files} == {"step-3", "step-5"}, files
