"""Addresses of engines: plain data that a sender passes to a worker, so that the worker can reach its own engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base import Engine
from .targets import TargetEngine
from .vllm import HttpEngine, NativeEngine

__all__ = ["engine_at"]


def engine_at(address: Mapping[str, Any]) -> Engine:
    """Return the engine with this address, see ``Engine.address``."""
    engine: Engine = HttpEngine(address["url"], pause=address["pause"], headers=address["headers"])
    if address.get("native"):
        assert isinstance(engine, HttpEngine)
        engine = NativeEngine(engine)
    target = address.get("target")
    return engine if target is None else TargetEngine(engine, *target)
