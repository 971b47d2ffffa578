"""One save or load, measured: what the training loop waits for, when it is durable, processor, memory, bytes read.

Linux only. Everything is of this process and the processes it started.
"""

from __future__ import annotations

import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.page_cache import sync_tree
from benchmarks.peers.base import Contestant, Pending

__all__ = ["Meter", "Sample", "TrainingStep", "wire_bytes"]

Sample = dict[str, Any]
"""Figures by name; times in seconds, everything else in bytes or shares."""

_BASELINE_S = 0.3  # long enough for a mean that other tenants of the machine do not make
_GATED_STEP_S = 1.0  # of a training step whose optimizer waits for the copy: longer than the copy of any workload
_TICK = os.sysconf("SC_CLK_TCK")


class TrainingStep:
    """A few milliseconds of matrix products on one thread: what a save must not slow down.

    Between the products it is Python, as training is, so that a save that holds the interpreter lock shows.
    """

    def __init__(self) -> None:
        self._a, self._b = torch.rand(256, 256), torch.rand(256, 256)
        self._out = torch.empty(256, 256)

    def __call__(self) -> float:
        """Run one step; the seconds it took."""
        begin = time.perf_counter()
        for _ in range(10):
            torch.mm(self._a, self._b, out=self._out)
        return time.perf_counter() - begin


@dataclass(frozen=True)
class _Durable:
    """When the bytes were durable on the clock of ``time.perf_counter``."""

    at: float


class Meter:
    """Measures the saves and loads of one contestant in this process.

    Make it when the state is in memory and before the contestant did anything: a save's peak memory is growth since
    then, a load's is growth since its first load began.
    """

    def __init__(self, contestant: Contestant) -> None:
        self._contestant = contestant
        self._step = TrainingStep()
        self._syncer = ThreadPoolExecutor(1)
        self._before_saves = _status("VmRSS")
        self._before_loads: int | None = None

    def save(self, path: str, state: Any) -> Sample:
        """Save, with a training loop that goes on until the bytes are durable.

        ``return_s`` is the call; ``excess_s`` what later steps took longer than before, gates included; ``stall_s``
        both; ``durable_s`` from the call until everything is synced: where the contestant does not sync, it is done
        here and counted.
        """
        ordinary = statistics.mean(self._steps_for(_BASELINE_S))
        _reset_peak()
        cpu, begin = _cpu_seconds(), time.perf_counter()
        pending = self._contestant.save(path, state)
        returned = time.perf_counter()
        own_cpu, steps = 0.0, []
        if pending is None:
            durable = self._make_durable(path, None)
        else:
            future = self._syncer.submit(self._make_durable, path, pending)
            own_begin = time.thread_time()
            steps = list(self._steps_until(future, pending.gate))
            own_cpu = time.thread_time() - own_begin
            durable = future.result()
        excess = max(0.0, sum(steps) - len(steps) * ordinary)
        return {
            "return_s": returned - begin,
            "excess_s": excess,
            "stall_s": returned - begin + excess,
            "durable_s": durable.at - begin,
            "cpu_s": _cpu_seconds() - cpu - own_cpu,
            "peak_bytes": _peak_growth(self._before_saves),
            "stages": self._contestant.stages(),
        }

    def load(self, path: str, state: Any) -> Sample:
        """Load into ``state``. ``read_bytes`` is what came from the disk, not from the page cache."""
        if self._before_loads is None:
            self._before_loads = _status("VmRSS")
        _reset_peak()
        cpu, read, begin = _cpu_seconds(), _disk_bytes(), time.perf_counter()
        self._contestant.load(path, state)
        seconds = time.perf_counter() - begin
        return {
            "seconds": seconds,
            "cpu_s": _cpu_seconds() - cpu,
            "read_bytes": _disk_bytes() - read,
            "peak_bytes": _peak_growth(self._before_loads),
            "stages": self._contestant.stages(),
        }

    def close(self) -> None:
        """End the thread."""
        self._syncer.shutdown()

    def _make_durable(self, path: str, pending: Pending | None) -> _Durable:
        if pending is not None:
            pending.wait()
        if not self._contestant.durable:
            sync_tree(path)
        return _Durable(time.perf_counter())

    def _steps_for(self, seconds: float) -> Iterator[float]:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            yield self._step()

    def _steps_until(self, future: Future[_Durable], gate: Callable[[], object] | None) -> Iterator[float]:
        """Steps until the save is durable. With a gate, they are parts of steps of ``_GATED_STEP_S``, at whose ends the
        optimizer must wait for what is not copied yet."""
        optimizer_at = time.perf_counter() + _GATED_STEP_S
        while True:
            seconds = self._step()
            begin = time.perf_counter()
            if gate is not None and begin >= optimizer_at:
                gate()
                optimizer_at = begin + _GATED_STEP_S
                seconds += time.perf_counter() - begin
            yield seconds
            if future.done():
                return


def wire_bytes() -> int:
    """Bytes that all processes of the machine have sent over the loopback interface."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[8])
    return 0


def _cpu_seconds() -> float:
    """Of all threads, of ended children, and of descendants that still run (these in hundredths)."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime + sum(_ticks(pid) for pid in _descendants()) / _TICK


def _ticks(pid: int) -> int:
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(int(fields[at]) for at in (11, 12, 13, 14))
    return 0


def _descendants(pid: int | str = "self") -> Iterator[int]:
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield int(child)
                yield from _descendants(int(child))


def _status(key: str, pid: int | str = "self") -> int:
    """Bytes of one line of a process's status; 0 where the process is gone."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == key:
                return int(value.split()[0]) * 1024
    return 0


def _peak_growth(before: int) -> int:
    return max(0, _status("VmHWM") - before) + sum(max(0, _own_peak(pid)) for pid in _descendants())


def _own_peak(pid: int) -> int:
    """About what a child had at most for itself: memory shared with others is counted where it was made."""
    return _status("VmHWM", pid) - _status("RssFile", pid) - _status("RssShmem", pid)


def _reset_peak() -> None:
    for pid in ("self", *_descendants()):
        with suppress(OSError):
            Path(f"/proc/{pid}/clear_refs").write_text("5")


def _disk_bytes() -> int:
    with suppress(OSError):
        for line in Path("/proc/self/io").read_text().splitlines():
            if line.startswith("read_bytes:"):
                return int(line.split()[1])
    return 0
