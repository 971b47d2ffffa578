"""One adapter a framework: what shards does an object hold, in global boxes; where do loaded boxes go."""

from __future__ import annotations

__all__: list[str] = []
