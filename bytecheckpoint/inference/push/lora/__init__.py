"""LoRA adapters that are pushed instead of read from files."""

from __future__ import annotations

__all__: list[str] = []
