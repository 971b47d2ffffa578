"""Parts of ``benchmarks.gpu`` that go wrong, each in its process: the arguments are those of ``serve``."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["crash", "hang", "leave_processes"]


def crash(pipe: Connection, *_: Any) -> None:
    pipe.recv()
    os.kill(os.getpid(), signal.SIGSEGV)


def hang(pipe: Connection, name: str, settings: Any, log: str) -> None:
    with open(log, "w") as opened:
        faulthandler.enable(opened)
        pipe.recv()
        pipe.recv()  # nothing comes


def leave_processes(pipe: Connection, *_: Any) -> None:
    os.setsid()
    pipe.recv()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    pipe.send(("done", child.pid))
    pipe.recv()
