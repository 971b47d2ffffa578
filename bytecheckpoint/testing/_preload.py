"""Imported once by the fork server, so that every rank forked from it starts with torch already loaded.

Nothing here may start a thread or touch an accelerator: ranks are forked from this process.
"""

from __future__ import annotations

import contextlib
import gc
import os
import warnings

__all__: list[str] = []

# Read by the OpenMP runtime when it is loaded; ranks share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch's stores look up the names of loopback addresses; a name server that drops requests must not cost 5 s each time.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import msgpack  # noqa: F401
    import numpy  # noqa: F401
    import torch
    import torch._dynamo
    import torch.distributed
    import torch.distributed.checkpoint
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.device_mesh
    import torch.distributed.fsdp
    import torch.distributed.tensor
    import torch.distributed.tensor.parallel

    with contextlib.suppress(ImportError):
        import torch.distributed.pipelining
    with contextlib.suppress(ImportError):
        import hypothesis  # noqa: F401
        import pytest  # noqa: F401

torch.set_num_threads(1)

# What is loaded by now stays: collections in the ranks need not visit it (nor copy its pages).
gc.collect()
gc.freeze()
