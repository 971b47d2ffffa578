"""Measure one save or load: stall of the training loop, time until durable, processor time, memory and bytes read.

Linux only. Figures cover this process and its children.
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

_BASELINE_S = 0.3  # long enough that other tenants of the machine do not dominate the mean
_GATED_STEP_S = 1.0  # a training step that is longer than the copy of any workload
_TICK = os.sysconf("SC_CLK_TCK")


class TrainingStep:
    """A few milliseconds of matrix products on one thread, which a save must not slow down.

    Python runs between the products, as in training, so a save that holds the GIL shows.
    """

    def __init__(self) -> None:
        self._a, self._b = torch.rand(256, 256), torch.rand(256, 256)
        self._out = torch.empty(256, 256)

    def __call__(self) -> float:
        """Run one step; return its seconds."""
        begin = time.perf_counter()
        for _ in range(10):
            torch.mm(self._a, self._b, out=self._out)
        return time.perf_counter() - begin


@dataclass(frozen=True)
class _Durable:
    """The ``time.perf_counter`` value at which the bytes were durable."""

    at: float


class Meter:
    """Measures the saves and loads of one contestant in this process.

    Create it when the state is in memory, before the contestant does anything: the peak memory of a save is the growth
    since then, and that of a load is the growth since the first load began.
    """

    def __init__(self, contestant: Contestant) -> None:
        self._contestant = contestant
        self._step = TrainingStep()
        self._syncer = ThreadPoolExecutor(1)
        self._before_saves = _status("VmRSS")
        self._before_loads: int | None = None

    def save(self, path: str, state: Any) -> Sample:
        """Save, while a training loop runs until the bytes are durable.

        ``return_s`` is the time of the call, ``excess_s`` the slowdown of later steps including gates, and ``stall_s``
        the sum of both. ``durable_s`` lasts from the call until everything is synced. If the contestant does not sync,
        this method does, and counts it. For an asynchronous save, it has percentiles of the steps before and during it.
        """
        before = [*self._steps_for(_BASELINE_S)]
        ordinary = statistics.mean(before)
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
            **(_percentiles("before", before) | _percentiles("during", steps) if steps else {}),
        }

    def load(self, path: str, state: Any) -> Sample:
        """Load into ``state``. ``read_bytes`` counts bytes from the disk, not from the page cache."""
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
        """Stop the thread."""
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
        """Run steps until the save is durable.

        With a gate, an optimizer step follows every ``_GATED_STEP_S``, and waits for tensors that are not copied yet.
        """
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
    """Return the bytes that all processes have sent over the loopback interface."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[8])
    return 0


def _percentiles(when: str, seconds: list[float]) -> Sample:
    ordered = sorted(seconds)
    return {f"step_{when}_p{share}_s": ordered[share * (len(ordered) - 1) // 100] for share in (50, 99)}


def _cpu_seconds() -> float:
    """Return the processor time of all threads and descendants; running descendants count in hundredths."""
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
    """Return one line of a process's status in bytes; 0 if the process has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == key:
                return int(value.split()[0]) * 1024
    return 0


def _peak_growth(before: int) -> int:
    return max(0, _status("VmHWM") - before) + sum(max(0, _own_peak(pid)) for pid in _descendants())


def _own_peak(pid: int) -> int:
    """Return the approximate peak of a child's private memory; shared memory counts in its creator."""
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
