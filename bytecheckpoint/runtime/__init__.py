"""Exit hooks, garbage collector pauses, shared limits, and checks of arguments."""

from __future__ import annotations

__all__: list[str] = []
