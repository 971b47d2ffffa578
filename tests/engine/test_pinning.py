"""Pinned blocks, with a stand-in for the CUDA runtime: which device it is called on, and what remains of an error."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from bytecheckpoint.engine import blocks
from bytecheckpoint.engine.blocks import PAGE, Block
from bytecheckpoint.engine.staging.device_copy_out import pin
from bytecheckpoint.errors import StateError

DEVICE = torch.device("cuda", 3)


class Runtime:
    """Records each call with the device that is current. ``last_error`` is what torch's next call would raise."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.current = self.code = self.last_error = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append(("register", self.current))
        self.last_error = self.code
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", self.current))
        return 0

    def cudaGetLastError(self) -> int:
        self.calls.append(("clear", self.current))
        self.last_error = 0
        return self.code


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()

    @contextmanager
    def use(device: torch.device) -> Iterator[None]:
        before, made.current = made.current, device.index
        try:
            yield
        finally:
            made.current = before

    monkeypatch.setattr(torch.cuda, "device", use)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    library: Any = lambda name: made  # noqa: E731
    monkeypatch.setattr(
        blocks, "ctypes", type("Ctypes", (), {"CDLL": staticmethod(library), "c_size_t": ctypes.c_size_t})
    )
    return made


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
