"""The merge stage: fragments of tensors travel to one owner, which writes them whole."""

from __future__ import annotations

__all__: list[str] = []
