"""Engines that are set up for checkpoint-engine and run without bytecheckpoint."""

from __future__ import annotations

__all__: list[str] = []
