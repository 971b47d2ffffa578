"""Worker processes: forked with torch loaded, or started in a peer's environment."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.environments import Environments, PeerUnavailable
from benchmarks.worker import Job, serve

__all__ = ["Worker"]

_ROOT = Path(__file__).resolve().parent.parent
_PREPARE_S, _TURN_S, _END_S = 180.0, 900.0, 30.0


class Worker:
    """The parent's side of one worker. ``failure`` is empty while the worker takes part, else the reason."""

    def __init__(self, name: str, job: Job, environments: Environments) -> None:
        self.name = name
        self.failure = ""
        self.versions: dict[str, str] = {}
        self._connection: Connection | None = None
        self._kill: Callable[[], None] = lambda: None
        self._join: Callable[[float], None] = lambda timeout_s: None
        log = os.path.join(job.folder, "log.txt")
        try:
            python = environments.python(job.entry.install if job.entry is not None else ())
        except PeerUnavailable as error:
            self.failure = str(error)
            return
        os.makedirs(job.folder, exist_ok=True)
        if job.entry is not None and job.entry.install:
            self._spawn(python, log)
        else:
            self._fork(log)
        self.versions = self._ask(job, _PREPARE_S) or {}

    def turn(self) -> dict[str, Any] | None:
        """Run one turn and return its samples; None after a failure."""
        answer: dict[str, Any] | None = self._ask("turn", _TURN_S)
        return answer

    def close(self) -> None:
        """Stop the process and wait for its end."""
        if self._connection is None:
            return
        try:
            self._connection.send("end")
            self._join(_END_S)
        except OSError:
            pass
        self._kill()
        self._connection.close()
        self._connection = None

    def _ask(self, request: Any, timeout_s: float) -> Any:
        if self.failure or self._connection is None:
            return None
        begin = time.monotonic()
        try:
            self._connection.send(request)
            if not self._connection.poll(timeout_s):
                self.failure = f"did not answer within {timeout_s:.0f} s"
            else:
                good, answer = self._connection.recv()
                if good:
                    return answer
                self.failure = str(answer)
        except (EOFError, OSError):
            self.failure = f"its process died after {time.monotonic() - begin:.0f} s"
        self.close()
        return None

    def _fork(self, log: str) -> None:
        context = multiprocessing.get_context("forkserver")
        # The same modules as in the rank harness, so that both share one fork server.
        context.set_forkserver_preload(["bytecheckpoint.testing._preload"])
        ours, theirs = context.Pipe()
        # Not a daemon: some contestants start processes.
        process = context.Process(target=serve, args=(theirs, log), name=self.name)
        process.start()
        theirs.close()
        self._connection, self._kill, self._join = ours, process.kill, process.join

    def _spawn(self, python: str, log: str) -> None:
        ours, theirs = multiprocessing.Pipe()
        with theirs:
            process = subprocess.Popen(
                [python, "-m", "benchmarks.worker", str(theirs.fileno()), log],
                cwd=_ROOT,
                pass_fds=[theirs.fileno()],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )

        def join(timeout_s: float) -> None:
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                return

        def kill() -> None:
            process.kill()
            process.wait()

        self._connection, self._kill, self._join = ours, kill, join
