"""Modules that the fork server imports once, so that ranks start with torch and the library loaded.

This module must not start a thread or use an accelerator: ranks are forked from the process that imports it.
"""

# ruff: noqa: F401

from __future__ import annotations

import contextlib
import functools
import gc
import os
import runpy
import warnings

# The OpenMP runtime reads this when it is loaded. Ranks share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch's stores look up the names of loopback addresses; a name server that drops requests would cost 5 s each time.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    import torch._dynamo
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor.parallel

    with contextlib.suppress(ImportError):
        import hypothesis
        import pytest

    # An import of the library takes a rank a fifth of a second, ten times what the rank takes to start.
    import bytecheckpoint.api
    import bytecheckpoint.manager

# Of modules that only some ranks need; files, separated as in PATH.
for _file in filter(None, os.environ.get("BCP_TEST_PRELOAD", "").split(os.pathsep)):
    runpy.run_path(_file)

torch.set_num_threads(1)
# torch replaces its pool in a forked process when it is first asked for it, and two threads that ask at once may find
# none ("Invalid thread pool!", torch 2.13): ask before there are threads.
os.register_at_fork(after_in_child=functools.partial(torch.set_num_threads, 1))

# These objects live forever: the ranks' garbage collector need not visit them, which would copy their pages.
gc.collect()
gc.freeze()
