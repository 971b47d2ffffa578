"""Checkpointing for PyTorch: save from any parallel layout, load into any other, asynchronously and with checksums.

Example:
    >>> import bytecheckpoint as bcp
    >>> bcp.save("runs/7b/step-1000", {"model": model, "optimizer": optimizer, "extra_state": {"step": 1000}})
    >>> bcp.load("runs/7b/step-1000", {"model": model, "optimizer": optimizer, "extra_state": extra})
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .version import VERSION as __version__

# isort: split
from . import errors

if TYPE_CHECKING:
    from . import dcp
    from .api import latest, load, save, warmup, watch
    from .api import open as open
    from .checkpoint.checkpoint import Checkpoint
    from .checkpoint.location import Location, Tier
    from .checkpointer import Checkpointer
    from .frameworks.data_loader import DataLoaderState
    from .frameworks.per_rank import PerRank
    from .frameworks.registry import register_adapter
    from .frameworks.rng import RNGState
    from .loading.app_state import AppState
    from .loading.options import LoadOptions
    from .loading.report import LoadReport
    from .manager import Cadence, Callbacks, CheckpointManager, ExceptionSave, JobOptions, Preemption, Retention
    from .saving.handle import SaveHandle
    from .saving.options import SaveOptions

__all__ = [
    "AppState",
    "Cadence",
    "Callbacks",
    "Checkpoint",
    "CheckpointManager",
    "Checkpointer",
    "DataLoaderState",
    "ExceptionSave",
    "JobOptions",
    "LoadOptions",
    "LoadReport",
    "Location",
    "PerRank",
    "Preemption",
    "RNGState",
    "Retention",
    "SaveHandle",
    "SaveOptions",
    "Tier",
    "__version__",
    "dcp",
    "errors",
    "latest",
    "load",
    "register_adapter",
    "save",
    "warmup",
    "watch",
]


# The module of each name, imported on first use: a command that only lists files must not wait two seconds for torch.
_MODULES = {
    ".api": ("latest", "load", "open", "save", "warmup", "watch"),
    ".checkpoint.checkpoint": ("Checkpoint",),
    ".checkpoint.location": ("Location", "Tier"),
    ".checkpointer": ("Checkpointer",),
    ".frameworks.data_loader": ("DataLoaderState",),
    ".frameworks.per_rank": ("PerRank",),
    ".frameworks.registry": ("register_adapter",),
    ".frameworks.rng": ("RNGState",),
    ".loading.app_state": ("AppState",),
    ".loading.options": ("LoadOptions",),
    ".loading.report": ("LoadReport",),
    ".manager": ("Cadence", "Callbacks", "CheckpointManager", "ExceptionSave", "JobOptions", "Preemption", "Retention"),
    ".saving.handle": ("SaveHandle",),
    ".saving.options": ("SaveOptions",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

if not TYPE_CHECKING:  # for a type checker, the module would have every name

    def __getattr__(name: str) -> Any:
        if name == "dcp":
            return importlib.import_module(".dcp", __name__)
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_HOMES[name], __name__), name)
        return value


def __dir__() -> list[str]:
    return [*__all__, "open"]
