"""Exit hooks, interruptible waits, and garbage collector pauses."""

from __future__ import annotations

__all__: list[str] = []
