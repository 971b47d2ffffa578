"""Run functions before the interpreter shuts down executors."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable

__all__ = ["before_exit"]

# The interpreter joins its executors before it runs atexit functions, and they accept no work from then on. Executors
# register with threading._register_atexit; functions registered there later run earlier.
_register: Callable[..., object] = getattr(threading, "_register_atexit", atexit.register)


def before_exit(function: Callable[[], None]) -> None:
    """Call ``function`` when the main thread has ended and executors still accept work; the last registered runs first.

    Raises ``RuntimeError`` if the interpreter is already shutting down.
    """
    _register(function)
