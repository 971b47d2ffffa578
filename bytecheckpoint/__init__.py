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
from .api import latest, load, save, warmup, watch
from .api import open as open
from .checkpoint.checkpoint import Checkpoint
from .checkpoint.location import Location, Tier
from .checkpointer import Checkpointer
from .frameworks.data_loader import DataLoaderState
from .frameworks.per_rank import PerRank
from .frameworks.registry import register_adapter
from .frameworks.rng import RNGState
from .loading.options import LoadOptions
from .loading.report import LoadReport
from .manager import Cadence, Callbacks, CheckpointManager, ExceptionSave, JobOptions, Preemption, Retention
from .saving.handle import SaveHandle
from .saving.options import SaveOptions

if TYPE_CHECKING:
    from . import dcp

__all__ = [
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


if not TYPE_CHECKING:  # for a type checker, the module would have every name

    def __getattr__(name: str) -> Any:
        """Import ``dcp`` on first use: it imports ``torch.distributed.checkpoint``, which takes a second."""
        if name == "dcp":
            return importlib.import_module(".dcp", __name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "open"]
