"""Making one rank fail at one point, and telling when it did."""

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

from bytecheckpoint import trace

MESSAGE = "this was injected"
_DEAD_S = 60.0
_TOO_LATE_S = 6.0
_STOPPED_S = 10.0


class Unspeakable(Exception):
    """Cannot be pickled, and says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Fault:
    """The fault of ``cell``, which strikes this process once, between ``install`` and ``remove``.

    The time is written to ``file`` a moment before: a process that is killed cannot tell any more.
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
        self._remove.append(trace.observe(self._see))
        if self._disk is not None:
            self._remove.append(self._disk.remove)
            self._disk.install()

    def remove(self) -> None:
        while self._remove:
            self._remove.pop()()

    def struck(self) -> None:
        """Now, on the clock that all processes of a machine share."""
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
            raise Unspeakable
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        # To this thread: while another one of the process takes the signal, this one would go on for a moment.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def time_of(file: Path) -> float | None:
    """When the fault struck; None if it has not."""
    return float(file.read_text()) if file.exists() else None


class Watch:
    """When a process ended, as its kernel sees it: all of its threads, after what they did in the kernel (an ``fsync``
    may take seconds on a busy disk, and nobody can know of the death before)."""

    def __init__(self, pid: int) -> None:
        self._descriptor = os.pidfd_open(pid)
        self._ended: float | None = None
        self._thread = threading.Thread(target=self._wait)
        self._thread.start()

    def _wait(self) -> None:
        if select.select([self._descriptor], [], [], _DEAD_S)[0]:
            self._ended = time.monotonic()

    def ended(self) -> float:
        """Waits for it, not for ever. On the clock that all processes of a machine share."""
        self._thread.join()
        os.close(self._descriptor)
        assert self._ended is not None, "the process that was killed has not ended"
        return self._ended


@contextmanager
def continued(pid: int, file: Path, deadline_s: float) -> Iterator[None]:
    """Let a stopped process go on after the block, but not before it was stopped for ``deadline_s``. Should the block
    wait for it for much longer, it goes on then, so that the test ends."""
    went_on = threading.Event()

    def go_on() -> None:
        went_on.set()
        os.kill(pid, signal.SIGCONT)

    too_late = threading.Timer(deadline_s + _TOO_LATE_S, go_on)
    too_late.start()
    try:
        yield
    finally:
        too_late.cancel()
        too_late.join()
    if went_on.is_set():
        return
    give_up = time.monotonic() + _STOPPED_S
    while (struck := time_of(file)) is None or time.monotonic() < struck + deadline_s or state_of(pid) != "T":
        assert time.monotonic() < give_up, f"process {pid} was not stopped: it is {state_of(pid)!r}"
        time.sleep(0.01)
    go_on()
