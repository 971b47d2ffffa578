"""End an interpreter during a save: the save is finished, or its loss is reported.

The exit never hangs, the exit code is the script's, and every committed checkpoint is complete. The tests run real
interpreters, which block their save until the main thread has ended. ``saving/test_async_save.py`` covers the simple
cases without a manager.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from warm_python import warm_python

import bytecheckpoint as bcp
from bytecheckpoint.testing import time_limit

pytestmark = [pytest.mark.slow, pytest.mark.sampled(4, of=__name__)]

TIMEOUT_S = time_limit(100)  # the guarantee under test: no exit takes longer

_BEGIN = """
import os, sys, threading, time
import torch
import torch.distributed as dist
import bytecheckpoint as bcp
from bytecheckpoint import telemetry
from bytecheckpoint.runtime.threads import before_exit
from bytecheckpoint.testing import time_limit

root, how, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
go, closed = threading.Event(), threading.Event()
before_exit(closed.set)  # registered first, called last

def state(value):
    return {"extra_state": {"weight": torch.full((1000,), float(value)), "value": value}}

def until(condition):
    deadline = time.monotonic() + time_limit(30)
    while not condition():
        if time.monotonic() > deadline:
            os._exit(77)
        time.sleep(0.005)

def arm(observer):
    # The exit of the main thread sets ``go`` before it waits for a save.
    telemetry.observe(observer)
    before_exit(go.set)

def hold(name, event):
    if name == "save.write.file" and not go.is_set():
        until(go.is_set)

class Slow:
    # Its destruction takes long, so that other threads run while the interpreter exits.
    def __del__(self):
        for _ in range(10_000_000):
            pass

LIMIT = bcp.SaveOptions(deadline_s=time_limit(60))

def save(value, **options):
    return bcp.save(f"{root}/step-{value}", state(value), step=value, options=LIMIT, **options)
"""

_ALONE = (
    _BEGIN
    + """
if how.startswith("manager"):
    manager = bcp.CheckpointManager(root, cadence=1, keep=1)
    manager.save(1, state(1))
    manager.wait()
    arm(hold)
    if how == "manager-raises":
        with manager:
            manager.save(2, state(2))
            go.set()
            raise RuntimeError("the script fails")
    manager.save(2, state(2))
    if how == "manager-exit":
        sys.exit(5)
    if how == "manager-os-exit":
        os._exit(6)
else:
    if how != "first-thread":
        save(1)
    if how == "fails":
        def fail(name, event):
            if name == "save.write.file":
                until(go.is_set)
                raise OSError("injected")
        arm(fail)
        save(2, async_save=True)
    elif how == "queue":
        arm(hold)
        for value in range(2, 4):  # staging memory has room for two
            save(value, async_save=True)
    elif how == "os-exit":
        arm(hold)
        save(2, async_save=True)
        os._exit(6)
    elif how == "daemon":
        slow = Slow()
        begun = threading.Event()
        telemetry.observe(lambda name, event: begun.set() if name == "save.write" else None)
        arm(hold)
        threading.Thread(target=save, args=(2,), daemon=True).start()
        begun.wait(time_limit(60))
    elif how == "daemon-loop":
        begun = threading.Event()
        def train():
            # Allocated once: the script itself must not have a daemon thread inside torch when it exits.
            same = state(2)
            for value in range(2, 10_000):
                path = f"{root}/step-{value}"
                same["extra_state"]["value"] = value
                same["extra_state"]["weight"].numpy().fill(value)
                bcp.save(path, same, step=value, async_save=value % 2 == 0, options=LIMIT)
                begun.set()
        threading.Thread(target=train, daemon=True).start()
        begun.wait(time_limit(60))
    elif how == "daemon-in-torch":
        slow = Slow()
        begun = threading.Event()
        def compute(name, event):
            if name == "save.plan" and not begun.is_set():
                begun.set()
                end = time.monotonic() + 2
                while time.monotonic() < end:
                    torch.ones(1_000_000).sum()
        arm(compute)
        threading.Thread(target=save, args=(2,), daemon=True).start()
        begun.wait(time_limit(60))
    elif how.endswith("thread"):
        def late():
            closed.wait(time_limit(60))
            try:
                save(2)
            except bcp.errors.UsageError as error:
                print("refused:", error, flush=True)
        threading.Thread(target=late).start()
"""
)

_RANKS = (
    _BEGIN
    + """
dist.init_process_group("gloo", init_method=f"file://{root}/../store", rank=rank, world_size=2)
mark = f"{root}/../rank-{1 - rank}-leaves"
save(1)
dist.barrier()
leaver = {"rank-0-first": 0, "rank-1-first": 1}.get(how)

def hold_for_the_other(name, event):
    if name == "save.write.file":
        until(lambda: os.path.exists(mark))

def leave():
    open(f"{root}/../rank-{rank}-leaves", "w").close()

if leaver is not None and rank != leaver:
    telemetry.observe(hold_for_the_other)
elif how == "dies" and rank == 1:
    # This rank writes no file, and would finish before it dies.
    arm(lambda name, event: until(go.is_set) if name == "save.write" else None)
elif leaver is None:
    arm(hold)
handle = save(2, async_save=True)
if how == "destroyed":
    dist.destroy_process_group()
    go.set()
    handle.result(time_limit(60))
    save(3)
elif how == "destroyed-and-left":
    dist.destroy_process_group()
elif how == "raises" and rank == 1:
    raise RuntimeError("the script fails")
elif how == "dies" and rank == 1:
    os._exit(9)
elif rank == leaver:
    leave()
elif leaver is not None:
    handle.result(time_limit(60))
"""
)


def _run(script: str, root: Path, how: str, ranks: Sequence[int] = (0,)) -> list[subprocess.CompletedProcess[str]]:
    root.mkdir(exist_ok=True)
    run = partial(warm_python().run, timeout=TIMEOUT_S)
    with ThreadPoolExecutor(len(ranks)) as threads:
        ended = [*threads.map(run, [["-W", "ignore", "-c", script, str(root), how, str(rank)] for rank in ranks])]
    assert all(one.returncode not in (77, -signal.SIGKILL) for one in ended), [one.stderr for one in ended]
    return ended


def _newest(root: Path) -> int:
    """Check that the newest checkpoint is complete, and return its step."""
    found = bcp.latest(root)
    assert found is not None
    assert found.verify().ok
    assert found.section_values("extra_state")[("value",)] == found.step
    assert found["extra_state.weight"].load().eq(float(found.step or 0)).all()
    return found.step or 0


@pytest.mark.parametrize(("how", "code"), [("manager-end", 0), ("manager-exit", 5), ("manager-raises", 1)])
@pytest.mark.sampled(1)
def test_a_manager_that_was_not_closed_finishes_its_save(tmp_path: Path, how: str, code: int) -> None:
    """The manager also applies its retention and releases its lease."""
    root = tmp_path / "root"
    (ended,) = _run(_ALONE, root, how)
    assert ended.returncode == code, ended.stderr
    assert ("the script fails" in ended.stderr) == (how == "manager-raises")
    assert ended.stderr.count("Traceback") == (how == "manager-raises"), ended.stderr
    assert _newest(root) == 2
    assert sorted(path.name for path in root.iterdir()) == ["step-2"]


def test_several_saves_in_flight_are_all_finished(tmp_path: Path) -> None:
    (ended,) = _run(_ALONE, tmp_path / "root", "queue")
    assert (ended.returncode, ended.stderr) == (0, "")
    for step in range(1, 4):
        assert bcp.open(tmp_path / "root" / f"step-{step}").verify().ok


def test_a_save_that_fails_during_exit_is_reported(tmp_path: Path) -> None:
    (ended,) = _run(_ALONE, tmp_path / "root", "fails")
    assert ended.returncode == 0
    assert f"save to {tmp_path}/root/step-2 failed" in ended.stderr
    assert "injected" in ended.stderr
    assert _newest(tmp_path / "root") == 1
    assert not (tmp_path / "root" / "step-2").exists()


@pytest.mark.parametrize("how", ["os-exit", "manager-os-exit"])
@pytest.mark.sampled(1)
def test_os_exit_leaves_an_attempt(tmp_path: Path, how: str) -> None:
    """The next job can use the root immediately, and its manager removes the attempt."""
    root = tmp_path / "root"
    (ended,) = _run(_ALONE, root, how)
    assert ended.returncode == 6
    assert _newest(root) == 1
    assert not (root / "step-2" / "manifest.msgpack").exists()
    with bcp.CheckpointManager(root, keep=1) as manager:
        manager.save(3, {"extra_state": {"value": 3, "weight": torch.full((10,), 3.0)}}, force=True)
    assert _newest(root) == 3
    left = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
    if how == "manager-os-exit":
        assert all(name.startswith("step-3/") for name in left), left


def test_a_save_in_a_daemon_thread_is_finished(tmp_path: Path) -> None:
    (ended,) = _run(_ALONE, tmp_path / "root", "daemon")
    assert ended.returncode == 0, ended.stderr
    assert _newest(tmp_path / "root") == 2


def test_a_daemon_thread_that_keeps_saving_does_not_block_the_exit(tmp_path: Path) -> None:
    """Its next save is refused, or the thread stops where it is."""
    (ended,) = _run(_ALONE, tmp_path / "root", "daemon-loop")
    assert ended.returncode == 0, ended.stderr
    assert _newest(tmp_path / "root") >= 2


def test_a_daemon_thread_inside_torch_does_not_abort_the_exit(tmp_path: Path) -> None:
    """Python would unwind the thread's stack through torch, which ends the process by SIGABRT."""
    (ended,) = _run(_ALONE, tmp_path / "root", "daemon-in-torch")
    assert ended.returncode == 0, ended.stderr
    assert _newest(tmp_path / "root") == 1


@pytest.mark.parametrize("how", ["thread", "first-thread"])
def test_a_save_after_the_main_thread_has_ended_is_refused(tmp_path: Path, how: str) -> None:
    (ended,) = _run(_ALONE, tmp_path / "root", how)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("refused: the main thread of this process has ended"), ended
    assert (tmp_path / "root" / "step-1").exists() == (how == "thread")
    assert not (tmp_path / "root" / "step-2").exists()


# -- ranks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "codes", "newest"),
    [
        ("end", [0, 0], 2),
        ("destroyed", [0, 0], 3),
        ("destroyed-and-left", [0, 0], 2),
        ("raises", [0, 1], 2),
        ("rank-0-first", [0, 0], 2),
        ("rank-1-first", [0, 0], 2),
    ],
)
@pytest.mark.sampled(1)
def test_ranks_that_exit_finish_their_save(tmp_path: Path, how: str, codes: list[int], newest: int) -> None:
    """The process group is destroyed, the main thread has ended, or the other rank ended long before."""
    ended = _run(_RANKS, tmp_path / "root", how, ranks=(0, 1))
    assert [one.returncode for one in ended] == codes, [one.stderr for one in ended]
    assert _newest(tmp_path / "root") == newest
    assert not any("save to" in one.stderr for one in ended), [one.stderr for one in ended]


def test_a_rank_that_dies_while_the_other_exits_is_reported(tmp_path: Path) -> None:
    ended = _run(_RANKS, tmp_path / "root", "dies", ranks=(0, 1))
    assert [one.returncode for one in ended] == [0, 9], [one.stderr for one in ended]
    assert f"save to {tmp_path}/root/step-2 failed: RankFailedError: rank 1" in ended[0].stderr
    assert _newest(tmp_path / "root") == 1
