"""From stored bytes to tensors: ranged, checked, and passed on among ranks that want the same."""

from __future__ import annotations

__all__: list[str] = []
