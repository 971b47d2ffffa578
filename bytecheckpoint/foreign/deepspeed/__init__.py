"""Read checkpoints of DeepSpeed in place: ZeRO 0 to 3, and universal checkpoints."""

from __future__ import annotations

from .reader import read_deepspeed

__all__ = ["read_deepspeed"]
