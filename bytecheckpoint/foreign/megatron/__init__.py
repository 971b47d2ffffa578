"""Read checkpoints of Megatron-core's ``dist_checkpointing`` (format ``torch_dist``) in place."""

from __future__ import annotations

from .reader import read_megatron

__all__ = ["read_megatron"]
