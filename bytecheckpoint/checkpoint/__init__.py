"""Find, open and read committed checkpoints."""

from __future__ import annotations

__all__: list[str] = []
