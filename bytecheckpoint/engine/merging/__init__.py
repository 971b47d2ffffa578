"""Merge fragments of tensors from all ranks into whole tensors, each on the rank that owns it."""

from __future__ import annotations
