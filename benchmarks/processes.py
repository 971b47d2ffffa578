"""Worker processes: forked with torch loaded for what runs in this environment, started afresh in a peer's."""

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
    """The parent's end of one worker. ``failure`` is empty while it takes part, and afterwards says why it does not."""

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
        """One turn's samples; None if it failed, and from then on."""
        answer: dict[str, Any] | None = self._ask("turn", _TURN_S)
        return answer

    def close(self) -> None:
        """End the process, and wait until it is gone."""
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
        # The rank harness asks for the same, so that there is one fork server for both.
        context.set_forkserver_preload(["bytecheckpoint.testing._preload"])
        ours, theirs = context.Pipe()
        # No daemon: some contestants have processes of their own.
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
