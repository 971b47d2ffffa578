"""Into an inference engine: which part of which stored tensor each of its ranks wants, and how it gets there."""

from __future__ import annotations

from .delivery import Delivered, StoredWeights

__all__ = ["Delivered", "StoredWeights"]
