"""Run a function on N ranks of a real process group.

Ranks are forked from a server process that has imported torch and the library, so a rank starts in a fraction of a
second. Any failure raises one ``RanksFailed`` with every rank's traceback, the stacks of ranks that hang, and the
output of all ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import linecache
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection as connections
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ..errors import UsageError
from .rank_process import FunctionReference, RankCall, load_function, serve
from .time_limits import time_limit

_AFTER_FAILURE_S = 5.0
_OUTPUT_TAIL = 4000


class RanksFailed(Exception):
    """A rank raised, died or did not finish.

    Attributes:
        tracebacks: The traceback of each rank that raised, by rank.
        stacks: The stacks of all threads of each rank that crashed or had to be killed, by rank.
        deaths: How each rank ended that was not expected to end, by rank.
        outputs: The standard output and error of every rank, by rank.
    """

    def __init__(
        self,
        message: str,
        tracebacks: Mapping[int, str] | None = None,
        stacks: Mapping[int, str] | None = None,
        deaths: Mapping[int, str] | None = None,
        outputs: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.tracebacks = dict(tracebacks or {})
        self.stacks = dict(stacks or {})
        self.deaths = dict(deaths or {})
        self.outputs = dict(outputs or {})


@dataclass
class _Rank:
    """One child process, the parent's end of its pipe, and its files."""

    process: Any
    connection: Connection
    output_file: Path
    stack_file: Path


class RankPool:
    """Rank processes that are reused from call to call.

    The pool starts processes when a call first needs them, and replaces all of them after a failure or an expected
    death. Every call gets a new process group. Environment, working directory, warning filters, default dtype and
    random seeds are reset before each call; other global state of a rank is not.

    Use the pool as a context manager, or call ``close``. It is not thread-safe.

    Example:
        A rank finds the function by its name, so the function must be at the top level of a module or test file::

            def share(rank, world_size, total):
                return total // world_size

            with RankPool(4) as pool:
                assert pool.run(share, 100) == [25] * 4
                assert pool.run(share, 100, world_size=2) == [50] * 2

    Args:
        world_size: The largest number of ranks that a call can use.

    Raises:
        UsageError: ``world_size`` is less than 1.
    """

    def __init__(self, world_size: int) -> None:
        if world_size < 1:
            raise UsageError(f"a pool needs at least one rank, but world_size is {world_size}")
        self.world_size = world_size
        self._ranks: list[_Rank] = []
        self._folder: Path | None = None
        self._counter = itertools.count()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """The process ids of the ranks that are running now, by rank."""
        return [rank.process.pid for rank in self._ranks]

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        world_size: int | None = None,
        timeout_s: float = 120.0,
        env: Mapping[str, str] | None = None,
        backend: str | None = "gloo",
        expect_death: Mapping[int, int] | None = None,
    ) -> list[Any]:
        """Call ``fn(rank, world_size, *args)`` on every rank.

        Args:
            fn: A function at the top level of a module or test file.
            *args: Further arguments; they must be picklable.
            world_size: Number of ranks, the first ones of the pool; all ranks by default.
            timeout_s: Seconds until ranks that still run are killed, multiplied by ``BCP_TEST_TIME_FACTOR``.
            env: Environment variables to set during this call.
            backend: Backend of the process group, or None for no process group.
            expect_death: Signal number by rank, for each rank that a signal must kill during the call.

        Returns:
            The results by rank, None for a rank whose death was expected. Results must be picklable.

        Raises:
            RanksFailed: A rank raised, died or did not finish in time, or survived although its death was expected.
                Nothing of the call runs any more.
            TypeError: Ranks cannot find ``fn`` by its name.
            UsageError: ``world_size`` is larger than the pool.
        """
        size = self.world_size if world_size is None else world_size
        if not 1 <= size <= self.world_size:
            raise UsageError(f"world_size must be between 1 and {self.world_size}, the size of the pool, not {size}")
        function, arguments, timeout_s = _reference(fn), pickle.dumps(args), time_limit(timeout_s)
        try:
            store = self._start(size) / f"store-{next(self._counter)}"
            calls = [
                RankCall(function, arguments, rank, size, backend, str(store), timeout_s, dict(env or {}))
                for rank in range(size)
            ]
            results = self._run(calls, dict(expect_death or {}))
            store.unlink(missing_ok=True)
            return results
        except BaseException:
            self._kill()
            raise

    def close(self) -> None:
        """Kill all ranks, and wait until they have ended."""
        if "coverage" in sys.modules:
            self._end()
        self._kill()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _start(self, size: int) -> Path:
        """Start the ranks that are missing, and return the pool's folder."""
        # An idle rank sends nothing, so a readable pipe means that the rank has ended.
        if any(rank.connection.poll() for rank in self._ranks):
            self._kill()
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="bytecheckpoint-ranks-"))
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["bytecheckpoint.testing._preload"])
        while len(self._ranks) < size:
            number = next(self._counter)
            output, stack = self._folder / f"output-{number}", self._folder / f"stack-{number}"
            output.touch()
            stack.touch()
            own_end, child_end = context.Pipe()
            process = context.Process(
                target=serve,
                args=(child_end, str(output), str(stack), list(sys.path)),
                name=f"rank-{len(self._ranks)}",
                daemon=True,
            )
            process.start()
            # The child holds the only copy now, so the pipe ends when the child does.
            child_end.close()
            self._ranks.append(_Rank(process, own_end, output, stack))

        return self._folder

    def _run(self, calls: Sequence[RankCall], expect_death: dict[int, int]) -> list[Any]:
        function, timeout_s = calls[0].function, calls[0].timeout_s
        call = _OneCall(self._ranks[: len(calls)], expect_death, time.monotonic() + timeout_s, timeout_s)
        for rank, message in zip(call.ranks, calls, strict=True):
            os.truncate(rank.stack_file, 0)
            # collect() finds a rank that dies now.
            with contextlib.suppress(BrokenPipeError):
                rank.connection.send(message)
        call.collect({"returned", "raised"})
        if not call.failed:
            call.release()
            call.collect({"idle"})
        if call.failed:
            raise call.failure(f"{function.module}.{function.qualname} on {len(calls)} ranks")
        if call.dead:
            self._kill()
        # The bytes come from this process's own children.
        return [pickle.loads(call.results[n]) if n in call.results else None for n in range(len(calls))]  # noqa: S301

    def _end(self) -> None:
        """Let the ranks write down what they have measured: killed, they would lose it."""
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.connection.send(None)
        for rank in self._ranks:
            rank.process.join(time_limit(_AFTER_FAILURE_S))

    def _kill(self) -> None:
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            if rank.process.exitcode is None:
                # Each rank has created a process group, which contains its children too.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(rank.process.pid, signal.SIGKILL)
                rank.process.kill()
        for rank in ranks:
            rank.process.join()
            rank.process.close()
            rank.connection.close()
            rank.output_file.unlink(missing_ok=True)
            rank.stack_file.unlink(missing_ok=True)


class _OneCall:
    """The parent's view of a call in progress."""

    def __init__(
        self, ranks: Sequence[_Rank], expect_death: Mapping[int, int], deadline: float, timeout_s: float
    ) -> None:
        self.ranks = ranks
        self.results: dict[int, bytes] = {}
        self.dead: set[int] = set()
        self._expect_death = expect_death
        self._deadline = deadline
        self._timeout_s = timeout_s
        self._tracebacks: dict[int, str] = {}
        self._deaths: dict[int, str] = {}
        self._stacks: dict[int, str] = {}
        self._late: list[int] = []
        self._failed_at: dict[int, float] = {}
        self._polled_at = 0.0

    @property
    def failed(self) -> bool:
        return bool(self._tracebacks or self._deaths or self._late)

    def release(self) -> None:
        for number in sorted(self.results):
            with contextlib.suppress(BrokenPipeError):
                self.ranks[number].connection.send("release")

    def collect(self, kinds: set[str]) -> None:
        """Receive one message of these kinds from every living rank, or give up at the deadline."""
        waiting = {
            self.ranks[number].connection: number for number in range(len(self.ranks)) if number not in self.dead
        }
        while waiting:
            self._polled_at = time.monotonic()
            remaining = self._deadline - self._polled_at
            ready = connections.wait(list(waiting), timeout=max(0.0, remaining))
            if not ready and remaining <= 0:
                self._late = sorted(waiting.values())
                self._dump_stacks()
                return
            for pipe in ready:
                number = waiting[pipe]  # type: ignore[index]
                if self._receive(number, kinds):
                    del waiting[pipe]  # type: ignore[arg-type]

    def failure(self, what: str) -> RanksFailed:
        outputs = {number: _tail(rank.output_file) for number, rank in enumerate(self.ranks)}
        lines = [f"{what} failed."]
        # On a busy machine messages arrive together, so the time of arrival does not show which failure came first.
        for number in sorted(self._failed_at, key=self._failed_at.__getitem__):
            if number in self._tracebacks:
                lines.append(f"\n--- rank {number} raised ---\n{self._tracebacks[number].rstrip()}")
            if number in self._deaths:
                lines.append(f"\n--- rank {number} {self._deaths[number]} ---\n{self._stacks.get(number, '').rstrip()}")
        for number in self._late:
            why = "after the others had failed" if self._failed_at else f"after {self._timeout_s:g} s"
            lines.append(f"\n--- rank {number} was still running {why} ---\n{self._stacks[number].rstrip()}")
        lines += [
            f"\n--- output of rank {number} ---\n{text.rstrip()}" for number, text in outputs.items() if text.strip()
        ]
        return RanksFailed("\n".join(lines), self._tracebacks, self._stacks, self._deaths, outputs)

    def _receive(self, number: int, kinds: set[str]) -> bool:
        try:
            kind, payload, text, at = self.ranks[number].connection.recv()
        except (EOFError, OSError):
            self._died(number)
            return True
        if kind == "returned":
            if number in self._expect_death:
                self._deaths[number] = (
                    f"returned, but should have been killed by {_signal_name(self._expect_death[number])}"
                )
                self._record_failure(number, at)
            else:
                self.results[number] = payload
        elif kind == "raised":
            self._tracebacks[number] = text
            self._record_failure(number, at)
        return kind in kinds

    def _died(self, number: int) -> None:
        rank = self.ranks[number]
        rank.process.join()
        self.dead.add(number)
        code = rank.process.exitcode
        if number in self._expect_death and code == -self._expect_death[number]:
            return
        self._deaths[number] = f"was killed by {_signal_name(-code)}" if code < 0 else f"exited with status {code}"
        self._stacks[number] = _with_source(rank.stack_file.read_text(errors="replace"))
        # The time of a death is unknown. The last poll precedes everything that other ranks raised because of it.
        self._record_failure(number, self._polled_at)

    def _record_failure(self, number: int, at: float) -> None:
        self._failed_at.setdefault(number, at)
        self._deadline = min(self._deadline, time.monotonic() + time_limit(_AFTER_FAILURE_S))

    def _dump_stacks(self) -> None:
        for number in self._late:
            os.kill(self.ranks[number].process.pid, signal.SIGUSR1)
        for number in self._late:
            text = _complete_text(self.ranks[number].stack_file)
            self._stacks[number] = _with_source(text) if text else "(no stack: the process does not react to signals)"


def _reference(fn: Callable[..., Any]) -> FunctionReference:
    module, qualname = getattr(fn, "__module__", None), getattr(fn, "__qualname__", None)
    if not module or not qualname or "<" in qualname:
        raise TypeError(f"{fn!r} must be a function at the top level of a module, so that ranks can find it by name")
    loaded = sys.modules.get(module)
    file = getattr(loaded, "__file__", None)
    reference = FunctionReference(module, file, qualname)
    if loaded is not None and load_function(reference) is not fn:
        raise TypeError(f"{module}.{qualname} is not {fn!r}, so ranks would call another function")
    return reference


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _tail(file: Path) -> str:
    text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    return text if len(text) <= _OUTPUT_TAIL else "[...]\n" + text[-_OUTPUT_TAIL:]


def _complete_text(file: Path) -> str:
    """Return the text once it has stopped growing: a signal handler in the other process writes it."""
    text, deadline = "", time.monotonic() + time_limit(3.0)
    while time.monotonic() < deadline:
        time.sleep(0.1)
        latest = file.read_text(encoding="utf-8", errors="replace")
        if latest and latest == text:
            break
        text = latest
    return text


def _with_source(stacks: str) -> str:
    """Add the source line under each frame, as in a traceback."""
    lines = []
    for line in stacks.splitlines():
        lines.append(line)
        frame = re.match(r'\s*File "(.+)", line (\d+) in ', line)
        source = linecache.getline(frame[1], int(frame[2])).strip() if frame else ""
        if source:
            lines.append(f"    {source}")
    return "\n".join(lines)
