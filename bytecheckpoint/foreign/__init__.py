"""Open safetensors files that other libraries wrote as if they were checkpoints."""

from __future__ import annotations
