"""Run the examples for Megatron-core in ranks that have imported torch, with the environment that torchrun sets."""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import socket
import sys
import warnings
from pathlib import Path
from unittest import mock

from mcore_folders import saves_in_a_pool

from bytecheckpoint.testing import RankPool

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run_script(folder: Path, name: str, processes: int, *arguments: str, dies: bool = False) -> str:
    """Run a script of ``examples/`` in a folder, and return the standard output of rank 0.

    With ``dies``, every rank must be killed by ``SIGKILL``.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    deaths = dict.fromkeys(range(processes), signal.SIGKILL) if dies else None
    with RankPool(processes) as pool:
        pool.run(_main, name, str(folder), arguments, env=rendezvous, backend=None, expect_death=deaths)
    return (folder / "rank-0.out").read_text()


def _main(rank: int, world_size: int, name: str, folder: str, arguments: tuple[str, ...]) -> None:
    os.chdir(folder)
    script = str(EXAMPLES / name)
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(Path(f"rank-{rank}.out").open("w", buffering=1))
        stack.enter_context(contextlib.redirect_stdout(output))
        stack.enter_context(mock.patch.object(sys, "argv", [script, *arguments]))
        stack.enter_context(mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]))
        stack.enter_context(saves_in_a_pool(with_server=rank == 0))
        warnings.simplefilter("default")
        runpy.run_path(script, run_name="__main__")
