"""The rank harness: run a function on N ranks of a real process group, quickly and without leaving anything behind.

Ranks are forked from a server that has torch loaded, so a rank costs a fraction of a second. Whatever goes wrong, the
caller gets one ``RanksFailed`` with every rank's traceback, the stacks of those that hang, and what they printed.

    def shares(rank, world_size, total):        # a function at the top level of any module or test file
        return total // world_size

    with RankPool(4) as pool:
        assert pool.run(shares, 100) == [25] * 4
        assert pool.run(shares, 100, world_size=2) == [50] * 2

Nothing that a rank leaves in its globals is undone between calls, apart from environment, folder, warning filters,
default dtype and random seeds, which are the same at the start of every call.
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

from .rank_process import Call, FunctionReference, load_function, serve

__all__ = ["RankPool", "RanksFailed", "run_ranks"]

_AFTER_FAILURE_S = 5.0
_OUTPUT_TAIL = 4000


class RanksFailed(Exception):
    """Some rank raised, died or did not finish.

    ``tracebacks`` holds the text of each rank that raised, ``stacks`` those of the ranks that had to be killed or
    that crashed, ``deaths`` how ranks ended that were not expected to; all by rank. ``outputs`` is what each printed.
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
    """One child process and the parent's ends of everything that belongs to it."""

    process: Any
    connection: Connection
    output_file: Path
    stack_file: Path


class RankPool:
    """Rank processes that are reused from call to call; each call gets a process group of its own.

    Processes start when a call first needs them. After any failure, and after an expected death, the next call gets
    new ones. Use as a context manager, or ``close`` it. For one thread at a time.
    """

    def __init__(self, world_size: int) -> None:
        if world_size < 1:
            raise ValueError(f"a pool needs at least one rank, not {world_size}")
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
        """Process ids of the ranks that are up now, by rank."""
        return [rank.process.pid for rank in self._ranks]

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        world_size: int | None = None,
        timeout_s: float = 60.0,
        env: Mapping[str, str] | None = None,
        backend: str | None = "gloo",
        expect_death: Mapping[int, int] | None = None,
    ) -> list[Any]:
        """Call ``fn(rank, world_size, *args)`` on every rank and return the results by rank.

        ``fn`` stands at the top level of a module or test file; arguments and results can be pickled. ``world_size``
        takes only the first ranks of the pool. ``backend=None`` makes no process group. ``env`` is added to the
        environment for this call. A rank that is killed as ``expect_death`` (rank to signal number) says has the
        result None; not dying then is a failure. Raises ``RanksFailed``, at the latest some seconds after
        ``timeout_s``; nothing of the call is running any more then.
        """
        size = self.world_size if world_size is None else world_size
        if not 1 <= size <= self.world_size:
            raise ValueError(f"world_size {size} does not fit a pool of {self.world_size} ranks")
        function = _reference(fn)
        arguments = pickle.dumps(args)
        try:
            self._start(size)
            return self._run(function, arguments, size, timeout_s, dict(env or {}), backend, dict(expect_death or {}))
        except BaseException:
            self._kill()
            raise

    def close(self) -> None:
        """End all ranks, and wait until they are gone."""
        self._kill()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _start(self, size: int) -> None:
        # An idle rank has nothing to say: what can be read is the end of its pipe.
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
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve,
                args=(theirs, str(output), str(stack), list(sys.path)),
                name=f"rank-{len(self._ranks)}",
                daemon=True,
            )
            process.start()
            # With our copy closed, the end of the child is the end of the pipe.
            theirs.close()
            self._ranks.append(_Rank(process, ours, output, stack))

    def _run(
        self,
        function: FunctionReference,
        arguments: bytes,
        size: int,
        timeout_s: float,
        env: dict[str, str],
        backend: str | None,
        expect_death: dict[int, int],
    ) -> list[Any]:
        assert self._folder is not None
        store = self._folder / f"store-{next(self._counter)}"
        call = _OneCall(self._ranks[:size], expect_death, time.monotonic() + timeout_s, timeout_s)
        for number, rank in enumerate(call.ranks):
            os.truncate(rank.stack_file, 0)
            # A rank that dies now is found by collect().
            with contextlib.suppress(BrokenPipeError):
                rank.connection.send(Call(function, arguments, number, size, backend, str(store), timeout_s, env))
        call.collect({"returned", "raised"})
        if not call.failed:
            call.release()
            call.collect({"idle"})
        if call.failed:
            raise call.failure(f"{function.module}.{function.qualname} on {size} ranks")
        store.unlink(missing_ok=True)
        if call.dead:
            self._kill()
        return [pickle.loads(call.results[number]) if number in call.results else None for number in range(size)]  # noqa: S301 - our own children's bytes

    def _kill(self) -> None:
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            if rank.process.exitcode is None:
                _kill_group(rank.process.pid)
                rank.process.kill()
        for rank in ranks:
            rank.process.join()
            rank.process.close()
            rank.connection.close()
            rank.output_file.unlink(missing_ok=True)
            rank.stack_file.unlink(missing_ok=True)


class _OneCall:
    """What the parent knows about a call that is under way."""

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
        self._looked_at = 0.0

    @property
    def failed(self) -> bool:
        return bool(self._tracebacks or self._deaths or self._late)

    def release(self) -> None:
        for number in sorted(self.results):
            with contextlib.suppress(BrokenPipeError):
                self.ranks[number].connection.send("release")

    def collect(self, kinds: set[str]) -> None:
        """Take one answer of these kinds from every living rank; stop early when the rest does not come."""
        waiting = {
            self.ranks[number].connection: number for number in range(len(self.ranks)) if number not in self.dead
        }
        while waiting:
            self._looked_at = time.monotonic()
            remaining = self._deadline - self._looked_at
            ready = connections.wait(list(waiting), timeout=max(0.0, remaining))
            if not ready and remaining <= 0:
                self._late = sorted(waiting.values())
                self._take_stacks()
                return
            for pipe in ready:
                number = waiting[pipe]  # type: ignore[index]
                if self._take(number, kinds):
                    del waiting[pipe]  # type: ignore[arg-type]

    def failure(self, what: str) -> RanksFailed:
        outputs = {number: _tail(rank.output_file) for number, rank in enumerate(self.ranks)}
        lines = [f"{what} failed."]
        # Answers of a busy machine come together, so it is not their coming that tells the cause from what it caused.
        for number in sorted(self._failed_at, key=self._failed_at.__getitem__):
            if number in self._tracebacks:
                lines.append(f"\n--- rank {number} raised ---\n{self._tracebacks[number].rstrip()}")
            if number in self._deaths:
                lines.append(f"\n--- rank {number} {self._deaths[number]} ---\n{self._stacks.get(number, '').rstrip()}")
        for number in self._late:
            why = "when the others had failed" if self._failed_at else f"after {self._timeout_s:g} s"
            lines.append(f"\n--- rank {number} was still running {why} ---\n{self._stacks[number].rstrip()}")
        lines += [
            f"\n--- output of rank {number} ---\n{text.rstrip()}" for number, text in outputs.items() if text.strip()
        ]
        return RanksFailed("\n".join(lines), self._tracebacks, self._stacks, self._deaths, outputs)

    def _take(self, number: int, kinds: set[str]) -> bool:
        try:
            kind, payload, text, at = self.ranks[number].connection.recv()
        except (EOFError, OSError):
            self._died(number)
            return True
        if kind == "returned":
            if number in self._expect_death:
                self._deaths[number] = f"returned, but should have died by {_signal_name(self._expect_death[number])}"
                self._note(number, at)
            else:
                self.results[number] = payload
        elif kind == "raised":
            self._tracebacks[number] = text
            self._note(number, at)
        return kind in kinds

    def _died(self, number: int) -> None:
        rank = self.ranks[number]
        rank.process.join()
        self.dead.add(number)
        code = rank.process.exitcode
        if number in self._expect_death and code == -self._expect_death[number]:
            return
        self._deaths[number] = f"died by {_signal_name(-code)}" if code < 0 else f"exited with status {code}"
        self._stacks[number] = _with_source(rank.stack_file.read_text(errors="replace"))
        # The dead tell no time: some moment since the last look, and so before all that others raised because of it.
        self._note(number, self._looked_at)

    def _note(self, number: int, at: float) -> None:
        self._failed_at.setdefault(number, at)
        self._deadline = min(self._deadline, time.monotonic() + _AFTER_FAILURE_S)

    def _take_stacks(self) -> None:
        for number in self._late:
            os.kill(self.ranks[number].process.pid, signal.SIGUSR1)
        for number in self._late:
            text = _settled_text(self.ranks[number].stack_file)
            self._stacks[number] = _with_source(text) if text else "(no stack: the process does not answer signals)"


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    env: Mapping[str, str] | None = None,
    backend: str | None = "gloo",
    expect_death: Mapping[int, int] | None = None,
) -> list[Any]:
    """``RankPool.run`` on new processes that end with the call."""
    with RankPool(world_size) as pool:
        return pool.run(fn, *args, timeout_s=timeout_s, env=env, backend=backend, expect_death=expect_death)


def _reference(fn: Callable[..., Any]) -> FunctionReference:
    module, qualname = getattr(fn, "__module__", None), getattr(fn, "__qualname__", None)
    if not module or not qualname or "<" in qualname:
        raise TypeError(f"{fn!r} must be a function at the top level of a module, so that a rank can find it by name")
    loaded = sys.modules.get(module)
    file = getattr(loaded, "__file__", None)
    reference = FunctionReference(module, file, qualname)
    if loaded is not None and load_function(reference) is not fn:
        raise TypeError(f"{module}.{qualname} is not {fn!r}: a rank would call something else")
    return reference


def _kill_group(pid: int) -> None:
    # A rank leads a process group of its own; before it has made one there is nothing else to kill.
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _tail(file: Path) -> str:
    text = file.read_text(errors="replace") if file.exists() else ""
    return text if len(text) <= _OUTPUT_TAIL else "[...]\n" + text[-_OUTPUT_TAIL:]


def _settled_text(file: Path) -> str:
    """The dump is written by a signal handler in the other process: read until it has stopped growing."""
    text, give_up = "", time.monotonic() + 3.0
    while time.monotonic() < give_up:
        time.sleep(0.1)
        latest = file.read_text(errors="replace")
        if latest and latest == text:
            break
        text = latest
    return text


def _with_source(stacks: str) -> str:
    """Add the source line under each frame, as a traceback has it."""
    lines = []
    for line in stacks.splitlines():
        lines.append(line)
        frame = re.match(r'\s*File "(.+)", line (\d+) in ', line)
        source = linecache.getline(frame[1], int(frame[2])).strip() if frame else ""
        if source:
            lines.append(f"    {source}")
    return "\n".join(lines)
