"""Signals are recorded, and handlers restored."""

from __future__ import annotations

import os
import signal
import time

import pytest

from bytecheckpoint.errors import UsageError
from bytecheckpoint.manager.signals import SignalWatch

NUMBER = signal.SIGUSR2


@pytest.fixture(autouse=True)
def _as_before() -> object:
    before = signal.getsignal(NUMBER)
    yield
    assert signal.getsignal(NUMBER) == before


def test_a_signal_is_recorded_once_with_its_time() -> None:
    watch = SignalWatch([NUMBER, NUMBER])
    assert watch.received == {}
    os.kill(os.getpid(), NUMBER)
    first = watch.received[NUMBER]
    os.kill(os.getpid(), NUMBER)
    assert watch.received == {NUMBER: first}
    watch.close()
    watch.close()


def test_after_its_grace_period_a_signal_has_its_earlier_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Monotonic time passes only when the test says so."""
    now = [100.0]
    monkeypatch.setattr("bytecheckpoint.manager.signals.time.monotonic", lambda: now[0])
    reached: list[int] = []
    before = signal.signal(NUMBER, lambda number, frame: reached.append(number))
    watch = SignalWatch([NUMBER], grace_s={NUMBER: 30.0})
    for now[0], expected in ((100.0, []), (130.0, []), (130.1, [NUMBER])):
        os.kill(os.getpid(), NUMBER)
        assert reached == expected
    watch.close()
    signal.signal(NUMBER, before)


@pytest.mark.parametrize("is_abandoned", [False, True])
def test_an_abandoned_watch_lets_signals_through(*, is_abandoned: bool) -> None:
    reached: list[int] = []
    before = signal.signal(NUMBER, lambda number, frame: reached.append(number))
    watch = SignalWatch([NUMBER], is_abandoned=lambda: is_abandoned)
    os.kill(os.getpid(), NUMBER)
    assert reached == ([NUMBER] if is_abandoned else [])
    watch.close()
    signal.signal(NUMBER, before)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_watches_may_be_closed_in_any_order(order: tuple[int, int]) -> None:
    watches = [SignalWatch([NUMBER]), SignalWatch([NUMBER])]
    for index in order:
        watches[index].close()


def test_a_forked_child_ends_as_it_would_without_a_watch() -> None:
    watch = SignalWatch([signal.SIGTERM])
    ready, child_ready = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(child_ready, b"x")
        while True:  # not in signal.pause(): a signal that arrives right before it would not end it
            time.sleep(0.05)
    os.read(ready, 1)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    watch.close()
    os.close(ready)
    os.close(child_ready)
    assert os.WTERMSIG(status) == signal.SIGTERM
    assert watch.received == {}


def test_a_handler_installed_in_between_stays() -> None:
    before = signal.getsignal(NUMBER)
    watch = SignalWatch([NUMBER])

    def own(number: int, frame: object) -> None: ...

    signal.signal(NUMBER, own)
    watch.close()
    assert signal.getsignal(NUMBER) is own
    signal.signal(NUMBER, before)


def test_a_signal_that_cannot_be_handled_changes_nothing() -> None:
    with pytest.raises(UsageError, match="SIGKILL"):
        SignalWatch([NUMBER, signal.SIGKILL])
