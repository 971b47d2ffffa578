"""The adapters for DeepSpeed: engines at ZeRO 0 to 3, and the optimizers inside them.

Neither imports DeepSpeed. Both read the engine's own structures, without collectives.
"""

from __future__ import annotations

from .model import DeepSpeedAdapter
from .optimizer import DeepSpeedOptimizerAdapter

__all__ = ["DeepSpeedAdapter", "DeepSpeedOptimizerAdapter"]
