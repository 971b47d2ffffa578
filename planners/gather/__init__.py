"""Plan which tensors are stored whole, and which rank writes each."""

from __future__ import annotations

__all__: list[str] = []
