"""The kit for tests of this library and of plug-ins for it."""

from __future__ import annotations

from .ranks import RankPool, RanksFailed, run_ranks

__all__ = ["RankPool", "RanksFailed", "run_ranks"]
