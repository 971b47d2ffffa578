"""``Session``: what saves and loads of one process share, with its own I/O engine, plans and ranks."""

from __future__ import annotations

import atexit
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from .checkpoint.checkpoint import Checkpoint
from .checkpoint.discovery import CompleteCheckpoint, find_newest
from .checkpoint.index import Index
from .checkpoint.location import Location
from .checkpoint.nearest import open_nearest
from .checkpoint.sweep import FilesGoneError
from .control import current_communicator
from .control.base import Communicator, Operation
from .errors import BytecheckpointError, RankFailedError, UsageError
from .foreign.opening import CheckpointSource
from .load.options import LoadRequest
from .load.protocol import load
from .load.report import LoadReport
from .rules import Rules
from .runtime import DEFAULT_DEADLINE_S
from .runtime.arguments import ARGUMENTS
from .save.engine import DEFAULT_MERGE_MEMORY_BYTES, SaveEngine
from .save.failures import FailedSaves
from .save.gating import pass_gates
from .save.handle import SaveHandle
from .save.options import SaveRequest
from .save.protocol import save
from .save.warmup import warm_up
from .telemetry.trace_files import TraceFiles

_log = logging.getLogger(__name__)
_Request = TypeVar("_Request")

TRACE_VARIABLE = "BYTECHECKPOINT_TRACE"
"""Environment variable that names the directory into which every rank writes a trace of its saves and loads."""


class Session:
    """Threads, staging memory, plans, and the ranks that save and load together.

    Requests are made inside of an operation of all ranks: a rank whose arguments are invalid fails the others, too.

    Attributes:
        engine: Threads and memory.
        failures: Saves that failed, and whose outcome no one asked for.
    """

    def __init__(
        self,
        *,
        memory_budget: int | None = None,
        slots: int = 2,
        merge_memory: int = DEFAULT_MERGE_MEMORY_BYTES,
        communicator: Communicator | None = None,
    ) -> None:
        if directory := os.environ.get(TRACE_VARIABLE):
            _trace_into(directory)
        self.engine = SaveEngine(memory_budget=memory_budget, slots=slots, merge_memory=merge_memory)
        self.failures = FailedSaves()
        self._communicator = communicator
        self._following: Operation | None = None

    def save(
        self,
        make_request: Callable[[], SaveRequest],
        make_state: Callable[[], Mapping[str, Any]],
        *,
        is_async: bool,
        deadline_s: Any,
    ) -> SaveHandle:
        """Save what ``make_state`` returns. An error in it, or in ``make_request``, is raised by all ranks."""
        with self.engine.track_call():
            try:
                return self._save_once(make_request, make_state, is_async=is_async, deadline_s=deadline_s)
            except BytecheckpointError as error:
                cause = error.error_type if isinstance(error, RankFailedError) else type(error).__name__
                if is_async or cause != FilesGoneError.__name__:
                    raise
                _log.warning("saving again: %s", error)
            return self._save_once(make_request, make_state, is_async=is_async, deadline_s=deadline_s)

    def _save_once(
        self,
        make_request: Callable[[], SaveRequest],
        make_state: Callable[[], Mapping[str, Any]],
        *,
        is_async: bool,
        deadline_s: Any,
    ) -> SaveHandle:
        op = self.operation("save", deadline_s)
        with _closing_on_failure(op):
            with op.phase("check"):
                request = make_request()
                location = request.location
                assert location is not None
                backend = location.open(request.deadline_s)
                self.failures.warn(location)
                op.set_description(f"save of {backend.url}")
            with op.phase("state"):
                state = make_state()
        handle = save(self.engine, backend, op, state, request, is_async=is_async)
        self.failures.follow(location, handle)
        return handle

    def warm_up(
        self,
        make_request: Callable[[], SaveRequest],
        state: Mapping[str, Any],
        *,
        slots: int,
        wait: bool,
        deadline_s: Any,
    ) -> None:
        """Prepare for saves of ``state``."""
        with self.engine.track_call():
            warm_up(self.engine, self.operation("warmup", deadline_s), state, make_request, slots, wait=wait)

    def load(self, make_request: Callable[[], LoadRequest], state: Mapping[str, Any], *, deadline_s: Any) -> LoadReport:
        """Fill ``state``."""
        with self.engine.track_call():
            pass_gates()
            op = self.operation("load", deadline_s)
            with _closing_on_failure(op), op.phase("check"):
                request = make_request()
                source = request.source
                op.set_description(f"load of {source.url}")
                if isinstance(source, Checkpoint):
                    contents: Index | CheckpointSource = source.index
                else:
                    contents = _source(source, request.deadline_s, request.rules)
            return load(self.engine, contents, op, state, request)

    def open(
        self, location: Location, *, verify: bool = True, rules: Rules | None = None, deadline_s: float | None = None
    ) -> Checkpoint:
        """Open a checkpoint for reading."""
        self.engine.check_usable()
        return Checkpoint(
            _source(location, deadline_s or DEFAULT_DEADLINE_S, rules).index(),
            self.engine,
            verify=verify,
            reopen=functools.partial(_reopen, location, verify=verify, rules=rules),
        )

    def latest(self, root: Location, *, allow_fresh: bool, deadline_s: float) -> Checkpoint | None:
        """Open the newest valid checkpoint below ``root``."""
        self.engine.check_usable()
        found = find_newest(root, allow_fresh=allow_fresh, deadline_s=deadline_s)
        return None if found is None else self.opened(found, root)

    def opened(self, found: CompleteCheckpoint, root: Location) -> Checkpoint:
        """Return a handle on a checkpoint that was found below ``root``."""
        reopen = functools.partial(_reopen, root.join(found.name))
        return Checkpoint(Index(found.backend, found.manifest), self.engine, reopen=reopen)

    def close(self) -> None:
        """Finish the saves in flight and release threads and memory. Raises the failure of a save that is missed."""
        pass_gates(self.engine)
        self.engine.close()
        self.failures.raise_for()

    @contextmanager
    def following(self, op: Operation, kind: str, deadline_s: float) -> Iterator[None]:
        """Make the first operation that begins in this block a successor of ``op``.

        Args:
            op: An operation that all ranks have entered.
            kind: The kind of the successor: ``"save"``, ``"load"`` or ``"warmup"``.
            deadline_s: Limit of each wait in the successor, in seconds.

        Yields:
            Nothing.
        """
        self._following = op.follow(kind, deadline_s=deadline_s)
        try:
            yield
        finally:
            if self._following is not None:
                self._following.close()
                self._following = None

    def operation(self, kind: str, deadline_s: Any) -> Operation:
        """Begin an operation of all ranks.

        Args:
            kind: What the operation is for, such as ``"save"``; ranks match operations of one kind by counting.
            deadline_s: Limit of each wait in it, in seconds; None for the default.

        Returns:
            The operation, which the caller closes.
        """
        if self._following is not None:
            following, self._following = self._following, None
            return following
        try:
            deadline_s = ARGUMENTS["deadline_s"]("deadline_s", deadline_s) or DEFAULT_DEADLINE_S
        except UsageError:
            deadline_s = DEFAULT_DEADLINE_S  # the first step of the operation reports it, to all ranks
        ranks = self._communicator if self._communicator is not None else current_communicator(deadline_s=deadline_s)
        return ranks.operation(kind, deadline_s=deadline_s)


@contextmanager
def _closing_on_failure(op: Operation) -> Iterator[None]:
    try:
        yield
    except BaseException:
        op.close()
        raise


def _source(location: Location, deadline_s: float, rules: Rules | None) -> CheckpointSource:
    return CheckpointSource(location, open_nearest(location, deadline_s), rules)


def default_session() -> Session:
    """Return the session that the module-level functions share."""
    return _session_of(os.getpid())


@functools.cache
def _session_of(pid: int) -> Session:
    # By process, because threads do not survive a fork: a forked child gets a new one.
    return Session()


def _reopen(location: Location, *, verify: bool = True, rules: Rules | None = None) -> Checkpoint:
    """Open a path in the process that unpickles a ``Checkpoint``, or that was forked from the one that opened it."""
    return default_session().open(location, verify=verify, rules=rules)


@functools.cache
def _trace_into(directory: str) -> None:
    atexit.register(TraceFiles(directory).close)
