"""What must happen before the interpreter goes, and before executors take no more work."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable

__all__ = ["before_exit"]

# Executors take no more work once the interpreter begins to shut down, and are joined then, which is before atexit
# functions run. Python's own executors register here too, and the last registered runs first.
_register: Callable[..., object] = getattr(threading, "_register_atexit", atexit.register)


def before_exit(function: Callable[[], None]) -> None:
    """Call ``function`` once the main thread has ended, while executors still work; the last registered goes first.

    Raises ``RuntimeError`` where the interpreter is shutting down already.
    """
    _register(function)
