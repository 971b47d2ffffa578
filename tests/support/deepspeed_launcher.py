"""Run a script as ``__main__`` without building DeepSpeed's extension for communication between CPUs.

Without it, the script does the same. A build takes minutes, and one that is killed leaves a lock behind, on which later
runs wait forever.
"""

from __future__ import annotations

import os
import runpy
import sys
from importlib import import_module
from pathlib import Path

import deepspeed

assert deepspeed.__version__
import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
sys.argv = sys.argv[1:]
sys.path[0] = str(Path(sys.argv[0]).parent)
runpy.run_path(sys.argv[0], run_name="__main__")
sys.stdout.flush()
sys.stderr.flush()
# DeepSpeed keeps its process groups alive after they are destroyed. A thread of gloo that releases the tensors of the
# last collective while the interpreter shuts down ends the process with SIGABRT (seen with torch 2.13).
os._exit(0)
