"""Load stored weights into inference engines: target layouts, delivery from a checkpoint, and the weight push."""

from __future__ import annotations

from .delivery import DeliveryReport, StoredWeights

__all__ = ["DeliveryReport", "StoredWeights"]
