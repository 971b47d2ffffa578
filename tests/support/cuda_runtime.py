"""A stand-in for the functions of the CUDA runtime that register host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from bytecheckpoint.engine import blocks

__all__ = ["Runtime", "stand_in_runtime"]

_ALREADY_REGISTERED, _NOT_REGISTERED = 712, 713


class Runtime:
    """Records each call with the device that is current. ``last_error`` is what torch's next call would raise.

    ``registered`` has the size of each registered range, by its address. ``code`` is the error of registering.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.current = self.code = self.last_error = 0
        self.registered: dict[int, int] = {}
        self.on_register: Callable[[], object] = lambda: None

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append(("register", self.current))
        self.on_register()
        self.last_error = _ALREADY_REGISTERED if address in self.registered else self.code
        if not self.last_error:
            self.registered[address] = nbytes
        return self.last_error

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", self.current))
        return 0 if self.registered.pop(address, None) else _NOT_REGISTERED

    def cudaGetLastError(self) -> int:
        self.calls.append(("clear", self.current))
        self.last_error = 0
        return self.code

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether the memory of a tensor is registered."""
        begin = tensor.data_ptr()
        return any(at <= begin and begin + tensor.nbytes <= at + size for at, size in self.registered.items())


def stand_in_runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """Replace the CUDA runtime of this process."""
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
    monkeypatch.setattr(blocks, "ctypes", type("Ctypes", (), {"CDLL": staticmethod(library)}))
    return made
