"""Find, open and read committed checkpoints."""

from __future__ import annotations
