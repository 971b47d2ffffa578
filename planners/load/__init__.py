"""Plan which stored bytes to read for the requested boxes."""

from __future__ import annotations

__all__: list[str] = []
