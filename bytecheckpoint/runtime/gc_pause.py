"""Python's garbage collector, paused while a state is described.

Describing makes some objects for each tensor and keeps them, none in a cycle. The collector wakes up after so many new
objects and looks through all that the process has: with 20,000 tensors that was half the time of a save.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["paused"]

_lock = threading.Lock()
_pauses = 0
_was_enabled = False


@contextmanager
def paused() -> Iterator[None]:
    """No collection runs in this process inside the block. For any thread, nested and at once: the last to leave
    restores what the first found, unless somebody has switched the collector on meanwhile."""
    global _pauses, _was_enabled
    with _lock:
        if _pauses == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses = max(0, _pauses - 1)  # 0 already where the block was left by a fork
            if _pauses == 0 and _was_enabled:
                gc.enable()


def _in_child() -> None:
    """A forked child has none of the threads that would restore it, and maybe one's lock."""
    global _lock, _pauses
    _lock = threading.Lock()
    if _pauses and _was_enabled:
        gc.enable()
    _pauses = 0


os.register_at_fork(after_in_child=_in_child)
