"""Addresses of engines: plain data that a sender passes to a worker, so that the worker can reach its own engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..guard import tls_context
from .base import Engine
from .targets import TargetEngine
from .vllm import HttpEngine, NativeEngine

__all__ = ["engine_at", "server_at"]


def engine_at(address: Mapping[str, Any]) -> Engine:
    """Return the engine with this address, see ``Engine.address``."""
    server = server_at(address)
    engine: Engine = NativeEngine(server) if address.get("native") else server
    target = address.get("target")
    return engine if target is None else TargetEngine(engine, *target)


def server_at(address: Mapping[str, Any]) -> HttpEngine:
    """Return the server with this address."""
    tls = tls_context(address["tls"])
    return HttpEngine(address["url"], pause=address["pause"], headers=address["headers"], ssl_context=tls)
