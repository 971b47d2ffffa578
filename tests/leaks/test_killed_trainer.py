"""A job that is killed, all ranks at once, in the middle of an asynchronous save: no process and no shared memory is
left of it, and the next job on this host has the root at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from leak_watch import shared_memory_names

import bytecheckpoint as bcp

GONE_S = 5.0
START_S = 120.0

_TRAINER = """
import os, sys, threading
import torch
import torch.distributed as dist
import bytecheckpoint as bcp
from bytecheckpoint import trace

root, rank, world_size, layout = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
if world_size > 1:
    dist.init_process_group("gloo", init_method=f"file://{root}.store", rank=rank, world_size=world_size)

def hold(name, event):
    if name == "save.write.complete":
        print("writing", flush=True)
        threading.Event().wait()

def state(value):
    return {"extra_state": {"weight": torch.full((1 << 20,), float(value)), "value": value}}

manager = bcp.CheckpointManager(root, every_steps=1, layout=layout, keep_last=2)
for step in range(1, 4):
    manager.save(step, state(step))
manager.wait()
trace.observe(hold)
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
def test_a_killed_job_leaves_nothing(tmp_path: Path, world_size: int, layout: str) -> None:
    root = tmp_path / "root"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _TRAINER, str(root), str(rank), str(world_size), layout],
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        assert ranks[0].stdout is not None
        assert ranks[0].stdout.readline() == "writing\n"
        for process in ranks:
            # Alone, not its group: what else it may have started has to notice by itself.
            os.kill(process.pid, signal.SIGKILL)
        for process in ranks:
            assert process.wait(GONE_S) == -signal.SIGKILL
        give_up = time.monotonic() + GONE_S
        while left := [process for rank in ranks for process in _of_session(rank.pid)]:
            assert time.monotonic() < give_up, f"left behind: {left}"
            time.sleep(0.05)
        assert not [name for name in shared_memory_names() if any(str(rank.pid) in name for rank in ranks)]
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    found = bcp.latest(root)
    assert found is not None
    assert found.step == 3
    assert found.verify().ok
    assert not (root / "step-4" / "manifest.msgpack").exists()
    assert [path for path in (root / "step-4").rglob("*") if path.is_file()], "it was killed before it wrote"
    # A lease of a holder that may live is watched for 15 s; that this one has ended is seen.
    begin = time.monotonic()
    manager = bcp.CheckpointManager(root, keep_last=2)
    assert time.monotonic() - begin < GONE_S
    with manager:
        state = {"extra_state": {"weight": torch.zeros(1 << 20), "value": 0}}
        assert manager.resume(state) is not None
        assert state["extra_state"]["value"] == 3
        manager.save(5, state, force=True)
    # Files: the kill may have come between the removal of the last one in a folder and that of the folder.
    files = [path.relative_to(root) for path in root.rglob("*") if path.is_file()]
    assert {path.parts[0] for path in files} == {"step-3", "step-5"}, files
