"""Pinned blocks, with a stand-in for the CUDA runtime: which device it is called on, and what remains of an error."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cuda_runtime import Runtime, stand_in_runtime

from bytecheckpoint.engine.blocks import PAGE, Block
from bytecheckpoint.engine.staging.device_copy_out import pin
from bytecheckpoint.errors import StateError
from bytecheckpoint.testing import time_limit

DEVICE = torch.device("cuda", 3)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    return stand_in_runtime(monkeypatch)


def test_a_thread_pins_on_the_device_of_the_tensors(runtime: Runtime) -> None:
    """A new thread's current device is 0, where the process may have no context."""
    block = Block(4 * PAGE)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(pin, block, DEVICE).result()
    pin(block, DEVICE)
    assert runtime.calls == [("register", 3)]
    assert runtime.current == 0
    block.unpin()
    block.unpin()
    assert runtime.calls == [("register", 3), ("unregister", 3)]


def test_a_pinned_block_that_is_dropped(runtime: Runtime) -> None:
    block = Block(4 * PAGE)
    assert block.pin(DEVICE) == 0
    del block
    gc.collect()
    assert runtime.calls == [("register", 3), ("unregister", 3)]


class _WatchedLock:
    """Sets ``contended`` when a thread must wait for it."""

    def __init__(self, contended: threading.Event) -> None:
        self._lock, self._contended = threading.Lock(), contended

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._contended.set()
            self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


def test_two_threads_pin_one_block(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """The I/O threads of a synchronous save share a block; CUDA refuses to register it twice."""
    block, has_second_come = Block(4 * PAGE), threading.Event()
    monkeypatch.setattr(block.pinning, "_lock", _WatchedLock(has_second_come))
    with ThreadPoolExecutor(2) as pool:
        others = []

        def on_register() -> None:
            if len(runtime.calls) > 1:
                has_second_come.set()  # it did not wait for the first one
            else:
                others.append(pool.submit(pin, block, DEVICE))
                assert has_second_come.wait(time_limit(60))

        runtime.on_register = on_register
        pool.submit(pin, block, DEVICE).result()
        others[0].result()
    assert runtime.calls == [("register", 3)]
    block.unpin()


def test_an_error_does_not_remain(runtime: Runtime) -> None:
    runtime.code = 2
    block = Block(4 * PAGE)
    with pytest.raises(StateError, match=r"CUDA cannot pin 16384 bytes of staging memory \(error 2\)"):
        pin(block, DEVICE)
    assert runtime.calls == [("register", 3), ("clear", 3)]
    assert runtime.last_error == 0
    block.unpin()  # it is not pinned
    runtime.code = 0
    assert block.pin(DEVICE) == 0
    block.unpin()
