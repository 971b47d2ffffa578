"""The test kit for this library and for plug-ins.

- Conformance suites: ``StorageConformance`` and ``AdapterConformance``. Subclass one in a test module and define its
  fixture. The suites need pytest, and ``StorageConformance`` also needs hypothesis.
- Fault injection: ``FaultyBackend`` with ``FaultRule``.
- Ranks: ``RankPool`` runs functions in several processes that form a process group.
- ``time_limit`` scales time limits for slow machines.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .faults import OPERATIONS, Call, FaultRule, FaultyBackend
from .ranks import RankPool, RanksFailed
from .time_limits import time_limit

if TYPE_CHECKING:
    from .adapters import AdapterCase, AdapterConformance
    from .storage import StorageConformance

__all__ = [
    "OPERATIONS",
    "AdapterCase",
    "AdapterConformance",
    "Call",
    "FaultRule",
    "FaultyBackend",
    "RankPool",
    "RanksFailed",
    "StorageConformance",
    "time_limit",
]

# These modules import pytest, which ranks and benchmarks do not need.
_SUITES = {
    "AdapterCase": "adapters",
    "AdapterConformance": "adapters",
    "StorageConformance": "storage",
}


def __getattr__(name: str) -> Any:
    if name not in _SUITES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_SUITES[name]}", __name__), name)
