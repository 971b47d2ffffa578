"""Plan which ranks read boxes for each other."""

from __future__ import annotations

__all__: list[str] = []
