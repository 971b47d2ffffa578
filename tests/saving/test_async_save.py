"""Asynchronous saves: the state at the call, order, failures, the handle, and that nothing piles up."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from leak_watch import held_now, left_since
from small_training import differing, memory, training
from warm_python import warm_python

import bytecheckpoint as bcp
from bytecheckpoint import telemetry
from bytecheckpoint.engine.staging.staging import Staging
from bytecheckpoint.errors import DeadlineError, StateError, UsageError
from bytecheckpoint.runtime.waiting import Waiters
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool

pytestmark = pytest.mark.sampled(15, of=__name__)

WAIT_S = time_limit(60)
_LOST_SIGNAL_S = time_limit(5)


@contextmanager
def _held_at(point: str) -> Iterator[threading.Event]:
    """Saves of this process stop at ``point`` until the event is set (at the latest when the block ends)."""
    go_on = threading.Event()

    def hold(name: str, event: str) -> None:
        if name == point and event in ("enter", "point"):
            go_on.wait(WAIT_S)

    stop = telemetry.observe(hold)
    try:
        yield go_on
    finally:
        go_on.set()
        stop()


@contextmanager
def _failing_at(point: str, times: int = 1) -> Iterator[None]:
    left = [times]

    def fail(name: str, event: str) -> None:
        if name == point and event in ("enter", "point") and left[0]:
            left[0] -= 1
            raise OSError(f"injected at {name}")

    stop = telemetry.observe(fail)
    try:
        yield
    finally:
        stop()


def _spoil(state: dict[str, Any]) -> None:
    """Change everything in a state that can be changed in place."""
    with torch.no_grad():
        for tensor in [*state["model"].parameters(), *state["model"].buffers()]:
            tensor.add_(1000)
    for entries in state["optimizer"].state.values():
        for value in entries.values():
            value.add_(1000)
    state["optimizer"].param_groups[0]["lr"] = 1000.0
    extra = state["extra_state"]
    extra["table"].zero_()
    extra["array"][:] = -1
    extra["nested"]["list"].append("late")
    extra["nested"]["list"][0]["inner"] = "late"
    extra["step"] = -1
    extra["new"] = "late"
    extra["bytes"][0] = 0


def _full_state(value: float) -> dict[str, Any]:
    state = training(value)
    state["extra_state"] |= {
        "array": np.arange(5) + value,
        "nested": {"list": [{"inner": "early"}, 2]},
        "bytes": bytearray(b"early"),
    }
    return state


def _plain(held: dict[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in held.items()}


# -- the state at the call ---------------------------------------------------------------------------------------


def test_what_is_stored_is_the_state_at_the_call(tmp_path: Path) -> None:
    state = _full_state(1.0)
    at_the_call = _plain(memory(state))
    with _held_at("save.write"):
        handle = bcp.save(tmp_path, state, async_save=True)
        assert handle.staged()
        assert not handle.done()
        _spoil(state)
    handle.result(WAIT_S)
    loaded = _full_state(9.0)
    bcp.load(tmp_path, loaded)
    assert not differing(_plain(memory(loaded)), at_the_call)


def test_the_arguments_are_those_of_the_call(tmp_path: Path) -> None:
    run: dict[str, Any] = {"seen": {"tokens": [1, {"of": 2}]}, "mark": bytearray(b"early")}
    include, options = ["extra_state.table"], {"chunk_size": 128}
    with _held_at("save.write"):
        handle = bcp.save(
            tmp_path, training(1.0), async_save=True, metadata={"run": run}, include=include, options=options
        )
        run["seen"]["tokens"][1]["of"] = run["seen"]["late"] = "late"
        run["mark"][:] = b"late!"
        include[0], options["chunk_size"] = "model", 256
    handle.result(WAIT_S)
    stored = bcp.open(tmp_path)
    assert stored.metadata == {"run": {"seen": {"tokens": [1, {"of": 2}]}, "mark": b"early"}}
    assert list(stored) == ["extra_state.table"]


def test_the_arguments_of_a_manager_are_those_at_its_start(tmp_path: Path) -> None:
    metadata, include = {"run": {"tokens": [1]}}, ["extra_state"]
    job = bcp.JobOptions(metadata=metadata, include=include)
    with bcp.CheckpointManager(tmp_path, cadence=1, job=job) as manager:
        metadata["run"]["tokens"].append(2)
        include[0] = "optimizer"
        manager.save(1, {"extra_state": {"step": 1}})
    assert bcp.open(tmp_path / "step-1").metadata["run"] == {"tokens": [1]}


def test_the_state_may_go_away(tmp_path: Path) -> None:
    with _held_at("save.write"):
        handle = bcp.save(tmp_path, {"extra_state": {"weight": torch.full((1000,), 3.0)}}, async_save=True)
        # Memory of the same size, which would get the freed tensor's place.
        others = [torch.full((1000,), -1.0) for _ in range(20)]
    handle.result(WAIT_S)
    assert bcp.open(tmp_path)["extra_state.weight"].load().eq(3).all()
    assert len(others) == 20


def test_steps_taken_during_a_save_do_not_show(tmp_path: Path) -> None:
    state = training(1.0)
    at_the_call = memory(state)
    with _held_at("save.commit"):
        handle = bcp.save(tmp_path, state, async_save=True)
        for _ in range(3):
            for parameter in state["model"].parameters():
                parameter.grad = torch.ones_like(parameter)
            state["optimizer"].step()
    handle.result(WAIT_S)
    loaded = training(9.0)
    bcp.load(tmp_path, loaded)
    assert not differing(memory(loaded), at_the_call)


# -- the handle --------------------------------------------------------------------------------------------------


def test_the_handle_of_a_save_on_its_way(tmp_path: Path) -> None:
    called: list[tuple[bool, bool]] = []
    with _held_at("save.commit.before") as go_on:
        handle = bcp.save(tmp_path, training(1.0), step=4, async_save=True)
        handle.add_done_callback(lambda h: called.append((h is handle, (tmp_path / "manifest.msgpack").exists())))
        assert handle.wait_staged(0)
        assert (handle.done(), called) == (False, [])
        assert "pending" in repr(handle)
        with pytest.raises(TimeoutError):
            handle.result(0.01)
        with pytest.raises(TimeoutError):
            handle.exception(0.01)
        assert not (tmp_path / "manifest.msgpack").exists()
        go_on.set()
        result = handle.result(WAIT_S)
    assert handle.done()
    assert handle.exception() is None
    assert "committed" in repr(handle)
    assert handle.url == result.url == str(tmp_path)
    assert result.step == 4
    assert (tmp_path / result.attempt).is_dir()
    files = list((tmp_path / result.attempt).iterdir())
    assert result.files_written == len(files)
    assert result.bytes_written == sum(path.stat().st_size for path in files)
    # Callbacks run after the commit, in the saving thread; later ones at once.
    handle.add_done_callback(lambda h: called.append((h.done(), True)))
    assert called[-1] == (True, True)
    assert all(call == (True, True) for call in called)


def test_timings_of_every_step(tmp_path: Path) -> None:
    handle = bcp.save(tmp_path, training(1.0), async_save=True)
    handle.result(WAIT_S)
    steps = [name for name in telemetry.SAVE_STEPS if name != "merge"]  # none here
    assert [name for name in telemetry.SAVE_STEPS if name in handle.timings.seconds] == steps
    assert handle.timings.nbytes["write"] == handle.timings.nbytes["stage"] == handle.result().bytes_written


def test_a_synchronous_save_returns_a_finished_handle(tmp_path: Path) -> None:
    handle = bcp.save(tmp_path, training(1.0))
    assert handle.done()
    assert handle.staged()
    called: list[bool] = []
    handle.add_done_callback(lambda h: called.append(h.done()))
    assert called == [True]
    assert handle.result(0).url == str(tmp_path)


def test_a_callback_that_raises_does_no_harm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def bad(handle: bcp.SaveHandle) -> None:
        raise RuntimeError("from the callback")

    called: list[int] = []
    with _held_at("save.commit.before"):
        handle = bcp.save(tmp_path, training(1.0), async_save=True)
        handle.add_done_callback(bad)
        handle.add_done_callback(lambda h: called.append(1))
    handle.result(WAIT_S)
    bcp.save(tmp_path, training(2.0), async_save=True).result(WAIT_S)
    assert called == [1]
    assert "from the callback" in caplog.text


# -- order -------------------------------------------------------------------------------------------------------


def test_two_saves_in_a_row_are_committed_in_order(tmp_path: Path) -> None:
    order: list[str] = []
    with _held_at("save.write"):
        first = bcp.save(tmp_path / "one", training(1.0), async_save=True)
        second = bcp.save(tmp_path / "two", training(2.0), async_save=True)
        for name, handle in (("one", first), ("two", second)):
            handle.add_done_callback(lambda h, name=name: order.append(name))
        assert not first.done()
        assert not second.done()
    second.result(WAIT_S)
    assert first.done(), "the second save was committed before the first"
    assert order[:1] == ["one"]
    for name, value in (("one", 1.0), ("two", 2.0)):
        loaded = training(9.0)
        bcp.load(tmp_path / name, loaded)
        assert not differing(memory(loaded), memory(training(value)))


def test_the_later_of_two_saves_to_one_path_wins(tmp_path: Path) -> None:
    with bcp.Checkpointer(slots=3) as saver:
        with _held_at("save.write"):
            handles = [saver.save(tmp_path, training(float(i)), step=i, async_save=True) for i in (1, 2, 3)]
        for handle in handles:
            handle.result(WAIT_S)
    assert bcp.open(tmp_path).step == 3
    assert bcp.open(tmp_path).verify().ok
    loaded = training(9.0)
    bcp.load(tmp_path, loaded)
    assert not differing(memory(loaded), memory(training(3.0)))
    attempts = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert [path.name for path in attempts] == [bcp.open(tmp_path).manifest.attempt], "files of old saves stay behind"


def test_a_synchronous_save_after_an_asynchronous_one(tmp_path: Path) -> None:
    """It is committed after the one that was begun before it, however long that takes."""
    overtaken = threading.Event()

    def hold_the_first(name: str, event: str) -> None:
        in_main = threading.current_thread() is threading.main_thread()
        if name == "save.commit" and event == "enter" and not in_main:
            overtaken.wait(0.5)  # gives a save that does not wait its turn the time to overtake
        if name == "save.commit" and event == "exit" and in_main:
            overtaken.set()

    stop = telemetry.observe(hold_the_first)
    try:
        handle = bcp.save(tmp_path, training(1.0), step=1, async_save=True)
        bcp.save(tmp_path, training(2.0), step=2)
        handle.result(WAIT_S)
    finally:
        stop()
    assert bcp.open(tmp_path).step == 2, "the save that was begun first was committed last"
    assert bcp.open(tmp_path).verify().ok


def test_save_then_load_at_once(tmp_path: Path) -> None:
    """A load waits for nothing: it finds what is committed at that moment, whole."""
    bcp.save(tmp_path, training(1.0), step=1)
    loaded = training(9.0)
    with _held_at("save.commit.before"):
        handle = bcp.save(tmp_path, training(2.0), step=2, async_save=True)
        assert bcp.load(tmp_path, loaded).step == 1
        assert not differing(memory(loaded), memory(training(1.0)))
    handle.result(WAIT_S)
    assert bcp.load(tmp_path, loaded).step == 2
    assert not differing(memory(loaded), memory(training(2.0)))


# -- failures ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["save.write.file", "save.write.complete", "save.confirm", "save.commit.before"])
def test_a_failure_in_the_background(tmp_path: Path, caplog: pytest.LogCaptureFixture, point: str) -> None:
    bcp.save(tmp_path, training(1.0), step=1)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    called: list[BaseException | None] = []
    with _failing_at(point), caplog.at_level(logging.ERROR):
        handle = bcp.save(tmp_path, training(2.0), step=2, async_save=True)
        handle.add_done_callback(lambda h: called.append(h.exception()))
        error = handle.exception(WAIT_S)
        following = bcp.save(tmp_path / "next", training(3.0), async_save=True)
        following.result(WAIT_S)
    assert isinstance(error, OSError)
    assert called == [error]
    with pytest.raises(OSError, match=f"injected at {point}"):
        handle.result()
    assert "failed" in repr(handle)
    assert f"save to {tmp_path} failed: OSError: injected at {point}" in caplog.text
    found = sorted(path.name for path in tmp_path.rglob("*") if "next" not in path.parts)
    assert found == before
    assert bcp.open(tmp_path).step == 1


def test_what_is_wrong_with_the_state_is_raised_at_the_call(tmp_path: Path) -> None:
    with pytest.raises(StateError):
        bcp.save(tmp_path, {"extra_state": {"f": print}}, async_save=True)
    assert list(tmp_path.iterdir()) == []


# -- budget ------------------------------------------------------------------------------------------------------


def test_a_memory_budget_makes_saves_wait_for_each_other(tmp_path: Path) -> None:
    """Two states do not fit, so the second save is staged as the first is written."""
    state = {"extra_state": {"weight": torch.ones(3 << 18)}}  # 3 MiB
    with bcp.Checkpointer(memory_budget=8 << 20) as saver:
        saver._session.engine.arena.block_size = 1 << 20
        saver._session.engine.arena._capacity = 5
        with _held_at("save.write") as go_on, ThreadPoolExecutor(1) as pool:
            first = saver.save(tmp_path / "0", state, async_save=True)
            second = pool.submit(saver.save, tmp_path / "1", state, async_save=True, options={"deadline_s": WAIT_S})
            with pytest.raises(TimeoutError):
                second.result(0.1)
            go_on.set()
            second.result(WAIT_S).result(WAIT_S)
        assert first.done()
        assert not first.timings.pipelined
        assert saver._session.engine.arena.nbytes <= 5 << 20
        assert bcp.open(tmp_path / "1").verify().ok


def test_a_wait_for_memory_ends(tmp_path: Path) -> None:
    """There is room for two saves; where the third finds none in time, it fails and the others do not."""
    state = {"extra_state": {"weight": torch.ones(3 << 18)}}
    with bcp.Checkpointer() as saver:
        with _held_at("save.write"):
            handles = [saver.save(tmp_path / str(i), state, async_save=True) for i in range(2)]
            with pytest.raises(DeadlineError, match="earlier saves are still being written"):
                saver.save(tmp_path / "2", state, async_save=True, options=bcp.SaveOptions(deadline_s=0.01))
        for handle in handles:
            handle.result(WAIT_S)
        saver.save(tmp_path / "3", state, async_save=True).result(WAIT_S)
    assert not (tmp_path / "2").exists()


@pytest.mark.parametrize("budget", [64 << 10, 300 << 10, 2 << 20])
def test_a_state_that_is_larger_than_the_budget(tmp_path: Path, budget: int) -> None:
    """Staging goes on as fast as writing gives memory back, and the timings say so."""
    state = _full_state(1.0)
    state["extra_state"]["large"] = torch.arange(1 << 18).view(512, 512).t()  # 2 MiB
    at_the_call = _plain(memory(state))
    with bcp.Checkpointer(memory_budget=budget) as saver:
        handle = saver.save(tmp_path, state, async_save=True)
        assert handle.staged()
        _spoil(state)
        state["extra_state"]["large"].zero_()
        handle.result(WAIT_S)
        assert handle.timings.pipelined
        assert "less staging memory than state" in str(handle.timings)
        assert saver._session.engine.arena.nbytes <= budget
    loaded = _full_state(9.0)
    loaded["extra_state"]["large"] = torch.zeros(512, 512, dtype=torch.int64)
    bcp.load(tmp_path, loaded)
    assert not differing(_plain(memory(loaded)), at_the_call)


@pytest.mark.parametrize("point", ["save.write", "save.write.file", "save.write.complete"])
def test_a_failure_while_staging_waits_for_writing(tmp_path: Path, point: str) -> None:
    state = {"extra_state": {"weight": torch.ones(3 << 18)}}
    with bcp.Checkpointer(memory_budget=1 << 20) as saver:
        with _failing_at(point):
            # What fails after the last piece was staged is on the handle alone.
            with suppress(OSError):
                saver.save(tmp_path / "0", state, async_save=True).result(WAIT_S)
        assert not list(tmp_path.rglob("*.*"))
        saver.save(tmp_path / "1", state, async_save=True).result(WAIT_S)
        assert bcp.open(tmp_path / "1").verify().ok


def test_a_synchronous_save_needs_a_few_blocks(tmp_path: Path) -> None:
    state = {"extra_state": {"weight": torch.ones(40 << 20, dtype=torch.uint8)}}
    with bcp.Checkpointer() as saver:
        saver._session.engine.arena.block_size = 1 << 20
        handle = saver.save(tmp_path, state)
        assert saver._session.engine.arena.nbytes <= (saver._session.engine.io_threads + 2) << 20
        assert not handle.timings.pipelined
        assert bcp.open(tmp_path).verify().ok


@pytest.mark.parametrize("point", ["save.write", "save.write.file"])
def test_an_interrupted_synchronous_save_reads_the_state_no_more(tmp_path: Path, point: str) -> None:
    """After ctrl-C the caller may change the state; what was not copied is not saved at all."""
    interrupted = threading.Event()

    def interrupt(name: str, event: str) -> None:
        if name == point and event in ("enter", "point") and not interrupted.is_set():
            main = threading.main_thread().ident or 0
            # In the middle of handing the save over, an interrupt can leave a lock of Python's own executor held.
            while sys._current_frames()[main].f_code is not Waiters.wait_until.__code__:
                interrupted.wait(0.001)
            signal.pthread_kill(main, signal.SIGINT)
            # A signal that comes just before a thread begins to wait for a lock does not end that wait.
            while not interrupted.wait(_LOST_SIGNAL_S):
                signal.pthread_kill(main, signal.SIGINT)

    # It is ignored where tests run in the background.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    stop = telemetry.observe(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            bcp.save(tmp_path, training(1.0))
    finally:
        interrupted.set()
        stop()
        signal.signal(signal.SIGINT, handler)
    bcp.save(tmp_path, training(2.0), step=2)
    assert bcp.open(tmp_path).step == 2
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1


@pytest.mark.parametrize("budget", [None, 24 << 20], ids=["all at once", "as writing releases memory"])
def test_tensors_that_change_after_an_interrupt_while_staging_are_never_stored(
    tmp_path: Path, budget: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C arrives when some pieces are copied. What is committed at the path is the state at a call, or nothing."""
    weight = torch.ones(16 << 20)  # 64 MiB: eight pieces
    copied = threading.Event()

    def interrupt(staging: Staging, *arguments: Any, **options: Any) -> Any:
        result = copy_piece(staging, *arguments, **options)
        if threading.current_thread() is threading.main_thread() and not copied.is_set():
            copied.set()
            raise KeyboardInterrupt
        return result

    copy_piece = Staging._copy_into
    with bcp.Checkpointer(memory_budget=budget) as saver:
        monkeypatch.setattr(Staging, "_copy_into", interrupt)
        with pytest.raises(KeyboardInterrupt):
            saver.save(tmp_path / "0", {"x": {"weight": weight}}, async_save=True)
        weight.fill_(2.0)
        monkeypatch.undo()
        saver.save(tmp_path / "1", {"x": {"weight": weight}}, async_save=True).result(WAIT_S)
    assert copied.is_set()
    assert bcp.open(tmp_path / "1")["x.weight"].load().unique().tolist() == [2.0]
    if (tmp_path / "0" / "manifest.msgpack").exists():
        assert bcp.open(tmp_path / "0")["x.weight"].load().unique().tolist() == [1.0]
    else:
        left = [str(path) for path in (tmp_path / "0").rglob("*")]
        assert not left, left


@pytest.mark.parametrize("begun", [True, False], ids=["begun", "still queued"])
def test_an_interrupt_while_a_save_is_handed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bool) -> None:
    """The background thread ends the save if it has started it, otherwise the caller does."""
    with bcp.Checkpointer() as saver:
        real = saver._session.engine.submit

        def submit(task: Callable[[], None]) -> None:
            queued = real(task)
            if begun:
                queued.result(WAIT_S)
            raise KeyboardInterrupt

        with _held_at("save.commit") if not begun else nullcontext():
            earlier = saver.save(tmp_path / "0", training(1.0), async_save=True)
            monkeypatch.setattr(saver._session.engine, "submit", submit)
            with pytest.raises(KeyboardInterrupt):
                saver.save(tmp_path / "1", training(2.0))
            monkeypatch.undo()
        earlier.result(WAIT_S)
        saver.save(tmp_path / "2", training(3.0))
    assert bcp.open(tmp_path / "2").verify().ok
    if begun:
        assert bcp.open(tmp_path / "1").verify().ok
    else:
        assert not (tmp_path / "1").exists()


def test_durations(tmp_path: Path) -> None:
    result = bcp.save(tmp_path, training(1.0), async_save=True).result(WAIT_S)
    assert list(result.seconds)[:5] == ["check", "describe", "agree", "plan", "stage"]
    assert {"write", "confirm", "commit"} <= set(result.seconds)
    assert all(seconds >= 0 for seconds in result.seconds.values())


def test_an_asynchronous_save_in_a_done_callback(tmp_path: Path) -> None:
    handles: list[bcp.SaveHandle] = []
    done = threading.Event()

    def save_again(handle: bcp.SaveHandle) -> None:
        handles.append(bcp.save(tmp_path / "1", training(2.0), async_save=True))
        done.set()

    with _held_at("save.commit"):
        bcp.save(tmp_path / "0", training(1.0), async_save=True).add_done_callback(save_again)
    assert done.wait(WAIT_S)
    handles[0].result(WAIT_S)
    assert bcp.open(tmp_path / "1").verify().ok


def test_a_save_in_a_done_callback_that_would_wait_for_itself(tmp_path: Path) -> None:
    errors: list[BaseException] = []
    with bcp.Checkpointer(slots=1) as saver:

        def save_again(handle: bcp.SaveHandle) -> None:
            try:
                saver.save(tmp_path / "2", training(2.0), async_save=True)
            except BaseException as error:
                errors.append(error)

        with _held_at("save.commit"):
            first = saver.save(tmp_path / "0", training(1.0), async_save=True)
            first.add_done_callback(save_again)
            second = saver.save(tmp_path / "1", training(1.0), async_save=True)
        first.result(WAIT_S)
        second.result(WAIT_S)
    assert [type(error) for error in errors] in ([], [UsageError])
    assert all("done callback" in str(error) for error in errors)


# -- nothing piles up --------------------------------------------------------------------------------------------


def test_thirty_saves_leave_what_two_left(tmp_path: Path) -> None:
    state = training(1.0)
    with bcp.Checkpointer() as saver:

        def save(times: int) -> None:
            for step in range(times):
                saver.save(tmp_path, state, step=step, async_save=True).result(WAIT_S)

        saver.warmup(state)  # threads are started as they are needed
        save(4)
        before, staged = held_now(), saver._session.engine.arena.nbytes
        save(30)
        assert left_since(before, turns=30) == []
        assert saver._session.engine.arena.nbytes == staged
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("bcp") and _of(saver, thread)]
    assert saver._session.engine.arena.nbytes == 0


def _of(saver: bcp.Checkpointer, thread: threading.Thread) -> bool:
    pools = (saver._session.engine.io, saver._session.engine.background)
    return any(thread in pool._threads for pool in pools)


_EXIT_WITH_SAVE = """
import sys, time
import torch
import bytecheckpoint as bcp
from bytecheckpoint import telemetry
telemetry.observe(lambda name, event: time.sleep(0.5) if name == "save.write.file" else None)
handle = bcp.save(sys.argv[1], {"extra_state": {"weight": torch.ones(1000), "value": 3}}, async_save=True)
print("done" if handle.done() else "in flight")
if sys.argv[2] == "raise":
    raise SystemExit(3)
if sys.argv[2] == "error":
    raise RuntimeError("the script fails")
"""


@pytest.mark.parametrize("how", ["end", "raise", "error"])
def test_the_interpreter_finishes_a_save_in_flight(tmp_path: Path, how: str) -> None:
    command = ["-W", "ignore", "-c", _EXIT_WITH_SAVE, str(tmp_path / "checkpoint"), how]
    done = warm_python().run(command, timeout=time_limit(120))
    assert done.stdout == "in flight\n"
    assert done.returncode == {"end": 0, "raise": 3, "error": 1}[how]
    if how != "error":
        assert done.stderr == ""
    checkpoint = bcp.open(tmp_path / "checkpoint")
    assert checkpoint.verify().ok
    assert checkpoint.section_values("extra_state")[("value",)] == 3


# -- during collectives ------------------------------------------------------------------------------------------


def _save_during_collectives(rank: int, world_size: int, path: str, rounds: int) -> list[float]:
    state = training(1.0, shard=True)
    at_the_call = memory(state)
    handles = []
    total = torch.zeros(1)
    for step in range(rounds):
        if step % 50 == 0:
            handles.append(
                bcp.save(path, state, step=step, async_save=True, options=bcp.SaveOptions(deadline_s=time_limit(30)))
            )
        dist.barrier()
        one = torch.ones(1) * rank
        dist.all_reduce(one)
        total += one
    for handle in handles:
        handle.result(time_limit(30))
    loaded = training(9.0, shard=True)
    bcp.load(path, loaded, options=bcp.LoadOptions(deadline_s=time_limit(30)))
    assert not differing(memory(loaded), at_the_call)
    return [total.item(), float(bcp.open(path).step or 0)]


def _mutate_after(rank: int, world_size: int, path: str) -> list[str]:
    state = training(1.0, shard=True)
    at_the_call = memory(state)
    handle = bcp.save(path, state, async_save=True, options=bcp.SaveOptions(deadline_s=time_limit(30)))
    with torch.no_grad():
        for parameter in state["model"].parameters():
            parameter.mul_(-1)
    handle.result(time_limit(30))
    loaded = training(9.0, shard=True)
    bcp.load(path, loaded, options=bcp.LoadOptions(deadline_s=time_limit(30)))
    return differing(memory(loaded), at_the_call)


def _fail_in_background(rank: int, world_size: int, path: str) -> tuple[str, str, int]:
    state = training(1.0, shard=True)
    bcp.save(path, state, step=1, options=bcp.SaveOptions(deadline_s=time_limit(30)))
    with _failing_at("save.write.complete") if rank == 1 else _nothing():
        handle = bcp.save(
            path, training(2.0, shard=True), step=2, async_save=True, options=bcp.SaveOptions(deadline_s=time_limit(30))
        )
        error = handle.exception(60)
    step = bcp.open(path).step or 0
    dist.barrier()
    bcp.save(path, state, step=3, async_save=True, options=bcp.SaveOptions(deadline_s=time_limit(30))).result(
        time_limit(60)
    )
    return type(error).__name__, str(error).splitlines()[0], step


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


def test_saves_during_barriers_and_reductions(pool: RankPool, tmp_path: Path) -> None:
    """A save uses connections of its own between the ranks, and never the process group of the main thread."""
    assert pool.run(_save_during_collectives, str(tmp_path), 200) == [[200.0, 150.0]] * 2


def test_ranks_may_go_on_at_once(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(_mutate_after, str(tmp_path)) == [[], []]


def test_a_rank_that_fails_in_the_background_fails_all(pool: RankPool, tmp_path: Path) -> None:
    results = pool.run(_fail_in_background, str(tmp_path))
    assert {kind for kind, _, _ in results} == {"RankFailedError"}
    assert results[0][1] == results[1][1]
    assert "rank 1" in results[0][1]
    assert "injected at save.write.complete" in results[0][1]
    assert [step for *_, step in results] == [1, 1]
    assert bcp.open(tmp_path).step == 3
