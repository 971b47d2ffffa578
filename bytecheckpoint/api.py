"""The public functions ``save``, ``load``, ``open``, ``latest``, ``watch`` and ``warmup``.

They are the methods of ``Checkpointer`` of these names, called on the instance that all of them share.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from .checkpointer import Checkpointer, default_checkpointer

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def _on_shared_checkpointer(
    method: Callable[Concatenate[Checkpointer, _Arguments], _Result],
) -> Callable[_Arguments, _Result]:
    """Return a function that calls ``method`` on the shared checkpointer, with its docstring and other parameters."""

    @functools.wraps(method)
    def function(*args: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        return method(default_checkpointer(), *args, **options)

    signature = inspect.signature(method)
    function.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore[attr-defined]
    function.__module__, function.__qualname__ = __name__, method.__name__
    return function


save = _on_shared_checkpointer(Checkpointer.save)
load = _on_shared_checkpointer(Checkpointer.load)
open = _on_shared_checkpointer(Checkpointer.open)  # shadows the builtin on purpose: bcp.open(path)
latest = _on_shared_checkpointer(Checkpointer.latest)
warmup = _on_shared_checkpointer(Checkpointer.warmup)
watch = _on_shared_checkpointer(Checkpointer.watch)
