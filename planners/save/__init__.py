"""Plan which rank writes which boxes to which file."""

from __future__ import annotations

__all__: list[str] = []
