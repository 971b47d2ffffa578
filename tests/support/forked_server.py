"""Run a server in a process that is forked from one that has imported torch, as ranks are."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

_Serve = Callable[..., None]

_PR_SET_PDEATHSIG = 1


@contextmanager
def forked_server(serve: _Serve, *arguments: Any) -> Iterator[Any]:
    """Call ``serve(announce, *arguments)`` in a process with its own session, and yield what it announces.

    Afterwards the process and its children are killed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bytecheckpoint.testing._preload"])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(theirs, dict(os.environ), serve, arguments))
    process.start()
    theirs.close()
    try:
        yield ours.recv()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
        process.kill()
        process.join()
        process.close()
        ours.close()


def _run(pipe: Connection, environment: dict[str, str], serve: _Serve, arguments: tuple[Any, ...]) -> None:
    os.setsid()
    # The fork server ends when the test process does, even if that is killed.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.clear()
    os.environ.update(environment)
    serve(pipe.send, *arguments)
