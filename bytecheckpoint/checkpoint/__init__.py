"""From staging memory to durable files, and to the commit of a checkpoint."""

from __future__ import annotations

__all__: list[str] = []
