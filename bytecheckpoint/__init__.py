"""Unified checkpointing for PyTorch: any layout to any layout, asynchronous, checked, with nothing to convert.

import bytecheckpoint as bcp

handle = bcp.save("runs/7b/step-1000", {"model": model, "optimizer": optimizer, "extra_state": {"step": 1000}})
bcp.load("runs/7b/step-1000", {"model": model, "optimizer": optimizer, "extra_state": extra})
"""

from __future__ import annotations

from . import errors
from .api import latest, load, open, save, warmup
from .checkpoint import Checkpoint, StoredTensor, VerifyReport
from .checkpointer import Checkpointer
from .chrome_trace import TraceFiles
from .frameworks.per_rank import PerRank
from .frameworks.registry import register_adapter
from .frameworks.rng import RNGState
from .handle import SaveHandle, SaveResult
from .loading import LoadReport
from .manager import CheckpointManager
from .trace import Timings
from .version import VERSION as __version__

__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "Checkpointer",
    "LoadReport",
    "PerRank",
    "RNGState",
    "SaveHandle",
    "SaveResult",
    "StoredTensor",
    "Timings",
    "TraceFiles",
    "VerifyReport",
    "__version__",
    "errors",
    "latest",
    "load",
    "open",
    "register_adapter",
    "save",
    "warmup",
]
