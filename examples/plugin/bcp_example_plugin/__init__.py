"""An example plug-in for bytecheckpoint: a storage backend and a framework adapter."""

from __future__ import annotations

from .adapter import WeightAverage, WeightAverageAdapter
from .storage import SQLiteBackend

__all__ = ["SQLiteBackend", "WeightAverage", "WeightAverageAdapter"]
