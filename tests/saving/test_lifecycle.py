"""The states of a save: which transitions exist, which thread owns the save, and what waiters see."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint.saving.commit import SaveCommit
from bytecheckpoint.saving.lifecycle import InvalidTransition, SaveLifecycle, SaveState
from bytecheckpoint.telemetry import observe
from bytecheckpoint.testing import time_limit

ERROR = OSError("the disk is gone")
Lifecycle = SaveLifecycle[str]

# How to reach each state, and which states follow it.
ROUTES: dict[SaveState, list[Callable[[Lifecycle], object]]] = {
    SaveState.PREPARING: [],
    SaveState.QUEUED: [Lifecycle.queue],
    SaveState.MERGING: [Lifecycle.queue, Lifecycle.start],
    SaveState.WRITING: [Lifecycle.queue, Lifecycle.start, Lifecycle.finish_merge],
    SaveState.FAILING: [lambda save: save.fail(ERROR)],
    SaveState.COMMITTED: [Lifecycle.queue, Lifecycle.start, Lifecycle.finish_merge, lambda save: save.commit("done")],
    SaveState.FAILED: [lambda save: save.fail(ERROR), Lifecycle.end_failed],
}
MOVES: dict[SaveState, Callable[[Lifecycle], object]] = {
    SaveState.QUEUED: Lifecycle.queue,
    SaveState.MERGING: Lifecycle.start,
    SaveState.WRITING: Lifecycle.finish_merge,
    SaveState.FAILING: lambda save: save.fail(ERROR),
    SaveState.COMMITTED: lambda save: save.commit("done"),
    SaveState.FAILED: Lifecycle.end_failed,
}
EDGES = {
    (SaveState.PREPARING, SaveState.QUEUED),
    (SaveState.PREPARING, SaveState.FAILING),
    (SaveState.QUEUED, SaveState.MERGING),
    (SaveState.QUEUED, SaveState.FAILING),
    (SaveState.MERGING, SaveState.WRITING),
    (SaveState.MERGING, SaveState.FAILING),
    (SaveState.WRITING, SaveState.COMMITTED),
    (SaveState.WRITING, SaveState.FAILING),
    (SaveState.FAILING, SaveState.FAILED),
}
FINAL = {SaveState.COMMITTED, SaveState.FAILED}


def in_state(state: SaveState) -> Lifecycle:
    save: Lifecycle = SaveLifecycle()
    for move in ROUTES[state]:
        move(save)
    assert save.state is state
    return save


@pytest.mark.parametrize("start", SaveState)
@pytest.mark.parametrize("to", MOVES)
def test_transitions(start: SaveState, to: SaveState) -> None:
    save = in_state(start)
    if (start, to) in EDGES:
        MOVES[to](save)
        assert save.state is to
    elif to is SaveState.MERGING and start in (SaveState.FAILING, SaveState.FAILED):
        assert not save.start(), "the caller has withdrawn the save"
        assert save.state is start
    else:
        with pytest.raises(InvalidTransition, match=f"{start.name} to {to.name}"):
            MOVES[to](save)
        assert save.state is start
    assert start.is_final == (start in FINAL)


@pytest.mark.parametrize("state", SaveState)
def test_the_caller_withdraws_only_what_it_owns(state: SaveState) -> None:
    save = in_state(state)
    owned = state in (SaveState.PREPARING, SaveState.QUEUED)
    assert save.withdraw(ERROR) == owned
    assert save.state is (SaveState.FAILING if owned else state)


def test_one_thread_owns_a_queued_save() -> None:
    """The background thread starts a save at the moment in which the caller withdraws it: exactly one succeeds."""
    for _ in range(200):
        save = in_state(SaveState.QUEUED)
        together = threading.Barrier(2)
        started: list[bool] = []

        def background(save: Lifecycle = save, together: threading.Barrier = together) -> None:
            together.wait(time_limit(60))
            started.append(save.start())  # noqa: B023 - the thread ends within the iteration

        thread = threading.Thread(target=background)
        thread.start()
        together.wait(time_limit(60))
        withdrawn = save.withdraw(ERROR)
        thread.join(time_limit(60))
        assert [withdrawn] != started


def test_result_raises_the_error() -> None:
    save = in_state(SaveState.FAILED)
    with pytest.raises(OSError, match="disk is gone") as raised:
        save.result()
    assert raised.value is ERROR
    assert save.exception() is ERROR


def test_result_of_a_committed_save() -> None:
    save = in_state(SaveState.COMMITTED)
    assert save.result(0) == "done"
    assert save.exception(0) is None


@pytest.mark.parametrize("state", [state for state in SaveState if not state.is_final])
def test_waits_have_a_timeout(state: SaveState) -> None:
    save = in_state(state)
    assert not save.wait_final(0.01)
    with pytest.raises(TimeoutError, match="in the background"):
        save.result(0.01)
    with pytest.raises(TimeoutError, match="in the background"):
        save.exception(0)
    assert not save._waiters._queues, "a wait that timed out leaves nothing behind"


def test_waiters_wake_when_their_state_is_reached() -> None:
    save = in_state(SaveState.QUEUED)
    merged, ended = threading.Event(), threading.Event()
    threads = [
        threading.Thread(target=lambda: (save.wait_merged(), merged.set())),
        threading.Thread(target=lambda: (save.wait_final(), ended.set())),
    ]
    for thread in threads:
        thread.start()
    save.start()
    assert not merged.wait(0.05)
    save.finish_merge()
    assert merged.wait(time_limit(60))
    assert not ended.is_set()
    save.commit("done")
    assert ended.wait(time_limit(60))
    for thread in threads:
        thread.join(time_limit(60))


def test_wait_merged_raises_what_the_merge_failed_with() -> None:
    save = in_state(SaveState.MERGING)
    save.fail(ERROR)
    with pytest.raises(OSError, match="disk is gone"):
        save.wait_merged()


def test_callbacks_run_once_when_the_save_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    save = in_state(SaveState.WRITING)
    states: list[SaveState] = []

    def broken() -> None:
        raise ValueError("a callback of the user")

    save.add_done_callback(broken)
    save.add_done_callback(lambda: states.append(save.state))
    save.fail(ERROR)
    assert states == []
    save.end_failed()
    assert states == [SaveState.FAILED]
    save.add_done_callback(lambda: states.append(save.state))
    assert states == [SaveState.FAILED] * 2
    assert "done callback" in caplog.text


@pytest.mark.parametrize("is_async", [False, True], ids=["synchronous", "asynchronous"])
def test_a_clean_up_that_raises_still_ends_the_save(
    tmp_path: Path, is_async: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A storage plug-in may raise anything; a handle that never ended would block its waiters for ever."""

    def broken(*arguments: object) -> None:
        raise RuntimeError("the plug-in cannot delete")

    def fail(name: str, event: str) -> None:
        if name == "save.write.file":
            raise ERROR

    state = {"extra_state": {"weight": torch.ones(1000)}}
    monkeypatch.setattr(SaveCommit, "remove_files", broken)
    with bcp.Checkpointer() as saver:
        stop = observe(fail)
        try:
            with pytest.raises(OSError, match="disk is gone"):
                saver.save(tmp_path / "0", state, async_save=is_async).result(time_limit(60))
        finally:
            stop()
        assert "cannot delete" in caplog.text
        monkeypatch.undo()
        saver.save(tmp_path / "1", state)
    assert bcp.open(tmp_path / "1").verify().ok
