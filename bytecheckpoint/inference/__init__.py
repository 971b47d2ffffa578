"""Inference engines: what their loaders copy, delivery from a checkpoint, and the weight push."""

from __future__ import annotations

from .delivery import DeliveryReport, StoredWeights

__all__ = ["DeliveryReport", "StoredWeights"]
