"""Where checkpoints live: one small interface, opened by URL."""

from __future__ import annotations

from .base import ObjectStat, ObjectWriter, StorageBackend
from .keys import check_key
from .registry import join, open_backend

__all__ = ["ObjectStat", "ObjectWriter", "StorageBackend", "check_key", "join", "open_backend"]
