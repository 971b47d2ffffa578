"""Open other systems' checkpoints in place."""

from __future__ import annotations

__all__: list[str] = []
