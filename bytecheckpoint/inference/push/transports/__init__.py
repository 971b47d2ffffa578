"""Ways in which chunks reach the memory of workers."""

from __future__ import annotations
