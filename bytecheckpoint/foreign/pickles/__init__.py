"""Read pickles without running them."""

from __future__ import annotations

from .classes import explain, storage_dtype
from .interpreter import interpret, interpret_prefix
from .records import Global, Instance, Storage, TensorRef

__all__ = [
    "Global",
    "Instance",
    "Storage",
    "TensorRef",
    "explain",
    "interpret",
    "interpret_prefix",
    "storage_dtype",
]
