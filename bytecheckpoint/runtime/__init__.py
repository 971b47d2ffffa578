"""Threads and exit hooks, garbage collector pauses, checks of arguments, messages, and limits that all layers share."""

from __future__ import annotations

__all__ = ["DEFAULT_DEADLINE_S"]

DEFAULT_DEADLINE_S = 600.0
"""Seconds that a rank waits for another rank, for staging memory or for storage before it raises ``DeadlineError``.

Ten minutes outlast the slowest healthy step that we know of (an object store that throttles a large save) and still
end a job well before most cluster schedulers do.
"""
