"""Make one rank fail at one point, and record when it did."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from crash_cells import CALL_FAULTS, DISK_FAULTS, Cell
from crash_disk import FailingDisk
from crash_holdings import state_of

from bytecheckpoint import telemetry
from bytecheckpoint.testing import time_limit

MESSAGE = "this was injected"
_DEAD_S = time_limit(60)
_BLOCKED_S = time_limit(6)
_STOPPED_S = time_limit(10)


class UnprintableError(Exception):
    """An error that cannot be pickled and has no text."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Fault:
    """Causes the fault of ``cell`` in this process, once, between ``install`` and ``remove``.

    The time is written to ``file`` just before the fault, because a killed process cannot report it.
    """

    def __init__(self, cell: Cell, folder: str, file: Path) -> None:
        self._cell, self._file = cell, file
        self._step = ""
        self._has_struck = False
        self._remove: list[Callable[[], None]] = []
        self._disk: FailingDisk | None = None
        if cell.fault in DISK_FAULTS:
            self._disk = FailingDisk(folder, cell.call, cell.fault, lambda: self._step == cell.step, self.struck)

    def install(self) -> None:
        if self._cell.fault in CALL_FAULTS:
            self.struck()
            return
        self._remove.append(telemetry.observe(self._see))
        if self._disk is not None:
            self._remove.append(self._disk.remove)
            self._disk.install()

    def remove(self) -> None:
        while self._remove:
            self._remove.pop()()

    def struck(self) -> None:
        """Record the time, on the clock that all processes of a machine share."""
        temporary = self._file.with_suffix(".tmp")
        temporary.write_text(repr(time.monotonic()))
        temporary.rename(self._file)

    def _see(self, name: str, event: str) -> None:
        if self._disk is not None:
            if event != "point":
                self._step = name if event == "enter" else ""
        elif name == self._cell.point and event != "exit" and not self._has_struck:
            self._has_struck = True
            self.struck()
            self._strike()

    def _strike(self) -> None:
        fault = self._cell.fault
        if fault == "raise":
            raise OSError(MESSAGE)
        if fault == "unpicklable":
            raise UnprintableError
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        # Stop this thread: if another thread received the signal, this one would run a little further.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def time_of(file: Path) -> float | None:
    """Return when the fault happened, None if it has not."""
    return float(file.read_text()) if file.exists() else None


class ProcessWatch:
    """Records when all threads of a process have ended.

    A killed process may take seconds to end, for example in ``fsync`` on a busy disk, and peers cannot detect its death
    before that.
    """

    def __init__(self, pid: int) -> None:
        self._descriptor = os.pidfd_open(pid)
        self._ended: float | None = None
        self._thread = threading.Thread(target=self._wait)
        self._thread.start()

    def _wait(self) -> None:
        if select.select([self._descriptor], [], [], _DEAD_S)[0]:
            self._ended = time.monotonic()

    def ended(self) -> float:
        """Wait until the process has ended, and return when, on the clock that all processes of a machine share."""
        self._thread.join()
        os.close(self._descriptor)
        assert self._ended is not None, "the process that was killed has not ended"
        return self._ended


@contextmanager
def continue_afterwards(pid: int, file: Path, deadline_s: float) -> Iterator[None]:
    """Continue a stopped process after the block, once it has been stopped for ``deadline_s``.

    If the block waits much longer for the process, a timer continues it, so that the test ends.
    """
    continued = threading.Event()

    def send_continue() -> None:
        continued.set()
        os.kill(pid, signal.SIGCONT)

    timer = threading.Timer(deadline_s + _BLOCKED_S, send_continue)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
    if continued.is_set():
        return
    give_up_at = time.monotonic() + _STOPPED_S
    while (struck := time_of(file)) is None or time.monotonic() < struck + deadline_s or state_of(pid) != "T":
        assert time.monotonic() < give_up_at, f"process {pid} was not stopped: it is {state_of(pid)!r}"
        time.sleep(0.01)
    send_continue()
