"""Modes of torch that a caller may have set, as context managers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["MODES"]


class _RefusesFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called in the caller's mode")


class _RefusesOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called in the caller's mode")


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": nullcontext,
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    # What is allocated without a device has no memory there, like on a device other than the intended one.
    "default device": lambda: _default_device("meta"),
    "device context": lambda: torch.device("meta"),
    "float64": lambda: _default_dtype(torch.float64),
    "float16": lambda: _default_dtype(torch.float16),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "function mode": _RefusesFunctions,
    "dispatch mode": _RefusesOperations,
    "deterministic": _deterministic,
}
