"""The object behind the public functions: saves and loads with engine, plans and ranks of its own."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from types import TracebackType
from typing import Any, TypeAlias
from weakref import WeakSet

import torch

from .checkpoint import Checkpoint
from .chrome_trace import TraceFiles
from .control import current_communicator
from .control.base import Communicator, Operation
from .engine.resources import MERGE_MEMORY, Engine
from .errors import CheckpointNotFoundError, NotACheckpointError
from .finding import find_newest
from .foreign import open_safetensors
from .handle import SaveHandle
from .loading import LoadOptions, LoadReport
from .loading import load as run_load
from .matching import Cast, Rules, Strictness
from .planners import Layout
from .save_options import SaveOptions, WhenBusy
from .saving import save as run_save
from .storage_backends import StorageBackend, open_backend
from .warming import warm_up

__all__ = ["DEADLINE_S", "TRACE_VARIABLE", "URL", "Checkpointer", "default_checkpointer"]

URL: TypeAlias = str | os.PathLike[str]

DEADLINE_S = 600.0

TRACE_VARIABLE = "BYTECHECKPOINT_TRACE"
"""Environment variable: the folder into which every rank writes a trace of its saves and loads."""

_checkpointers: WeakSet[Checkpointer] = WeakSet()  # a load waits for the gated saves of all of them


class Checkpointer:
    """Saves and loads with resources of its own: staging memory, threads, and a line to the other ranks.

    The functions of this module share one; make your own to give it a memory budget or ranks of its own. Saves of one
    checkpointer are committed in the order in which they were begun. Use it from one thread at a time.
    """

    def __init__(
        self,
        *,
        memory_budget: int | None = None,
        slots: int = 2,
        merge_memory: int = MERGE_MEMORY,
        communicator: Communicator | None = None,
    ) -> None:
        """``memory_budget`` bounds the bytes of staging memory of this process. With None there is room for ``slots``
        asynchronous saves of the largest size so far, each the size of this rank's share of the state; synchronous
        saves need some 80 MB. A state that is larger than the budget is staged as fast as it is written. Memory is
        taken as it is needed (see ``warmup``) and kept until ``close``. ``merge_memory`` bounds what the merge stage
        has under way beside it (``layout`` of ``save``), at least 32 MiB.
        """
        _trace_if_asked()
        self._engine = Engine(memory_budget=memory_budget, slots=slots, merge_memory=merge_memory)
        _checkpointers.add(self)
        self._communicator = communicator
        self._following: Operation | None = None

    def save(
        self,
        path: URL,
        state: Mapping[str, Any],
        *,
        framework: str | None = None,
        async_save: bool = False,
        step: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        allow_pickle: bool = False,
        deadline_s: float = DEADLINE_S,
        chunk_size: int | None = None,
        when_busy: WhenBusy = "wait",
        layout: Layout = "shards",
        gate: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> SaveHandle:
        """See ``bytecheckpoint.save``."""
        options = SaveOptions(
            framework, step, dict(metadata or {}), allow_pickle, deadline_s, chunk_size, when_busy, layout, gate
        )
        return self.save_with(path, lambda: state, options, async_save=async_save, storage_options=storage_options)

    def save_with(
        self,
        path: URL,
        make_state: Callable[[], Mapping[str, Any]],
        options: SaveOptions,
        *,
        async_save: bool,
        storage_options: Mapping[str, Any] | None,
    ) -> SaveHandle:
        """As ``save``, for the manager, with a function that makes the state."""
        with self._engine.calling():
            backend, op = self._begin("save", path, storage_options, options.deadline_s)
            state = self._made(op, make_state)
            return run_save(self._engine, backend, op, state, options, background=async_save)

    def warmup(
        self,
        state: Mapping[str, Any],
        *,
        slots: int = 2,
        framework: str | None = None,
        allow_pickle: bool = False,
        layout: Layout = "shards",
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """See ``bytecheckpoint.warmup``."""
        options = SaveOptions(framework, allow_pickle=allow_pickle, layout=layout, deadline_s=deadline_s)
        with self._engine.calling():
            warm_up(self._engine, self.operation("warmup", deadline_s), state, options, slots)

    def load(
        self,
        path: URL,
        state: Mapping[str, Any],
        *,
        framework: str | None = None,
        strict: bool | Strictness | Mapping[str, bool | Strictness] = True,
        include: Sequence[str] = ("*",),
        exclude: Sequence[str] = (),
        rename: Mapping[str, str] | Callable[[str], str] | None = None,
        cast: Cast = "widen",
        per_rank: str = "error",
        allow_pickle: bool = False,
        verify: bool = True,
        device: torch.device | str | None = None,
        share_reads: str = "auto",
        deadline_s: float = DEADLINE_S,
        storage_options: Mapping[str, Any] | None = None,
    ) -> LoadReport:
        """See ``bytecheckpoint.load``."""
        rules = Rules(include, exclude, rename, strict, cast)
        place = None if device is None else torch.device(device)
        options = LoadOptions(framework, rules, per_rank, allow_pickle, verify, place, deadline_s, share_reads)
        with self._engine.calling():
            for checkpointer in tuple(_checkpointers):
                checkpointer._engine.pass_gates()
            backend, op = self._begin("load", path, storage_options, deadline_s)
            return run_load(self._engine, backend, op, state, options)

    def open(self, path: URL, *, verify: bool = True, storage_options: Mapping[str, Any] | None = None) -> Checkpoint:
        """See ``bytecheckpoint.open``."""
        self._engine.check_usable()
        if os.fspath(path).endswith(".safetensors"):
            file = open_safetensors(os.fspath(path), self._engine, storage_options=storage_options)
            if file is not None:
                return file
        try:
            return Checkpoint.open(open_backend(path, **dict(storage_options or {})), self._engine, verify=verify)
        except (CheckpointNotFoundError, NotACheckpointError):
            foreign = open_safetensors(os.fspath(path), self._engine, storage_options=storage_options)
            if foreign is None:
                raise
            return foreign

    def latest(
        self, root: URL, *, allow_fresh: bool = False, storage_options: Mapping[str, Any] | None = None
    ) -> Checkpoint | None:
        """See ``bytecheckpoint.latest``."""
        self._engine.check_usable()
        found = find_newest(root, allow_fresh=allow_fresh, storage_options=storage_options)
        return None if found is None else Checkpoint(found.backend, found.manifest, self._engine)

    def close(self) -> None:
        """Finish saves in flight and give threads and memory back. Does not raise what a save failed with; its handle
        does."""
        self._engine.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(
        self, kind: str, path: URL, storage_options: Mapping[str, Any] | None, deadline_s: float
    ) -> tuple[StorageBackend, Operation]:
        """Enter the operation before anything that may fail on one rank alone: ranks meet by counting operations."""
        op = self.operation(kind, deadline_s)
        try:
            with op.phase("check"):
                backend = open_backend(path, **dict(storage_options or {}))
                op.is_about(f"{kind} of {backend.url}")
                return backend, op
        except BaseException:
            op.close()
            raise

    @staticmethod
    def _made(op: Operation, make: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        try:
            with op.phase("state"):
                return make()
        except BaseException:
            op.close()
            raise

    @contextmanager
    def following(self, op: Operation, kind: str, deadline_s: float) -> Iterator[None]:
        """The first operation that is begun in this block, a save or a load, follows from ``op``."""
        self._following = op.follow(kind, deadline_s=deadline_s)
        try:
            yield
        finally:
            if self._following is not None:
                self._following.close()
                self._following = None

    def operation(self, kind: str, deadline_s: float) -> Operation:
        """Begin an operation of all ranks, for the manager; whoever begins it closes it."""
        if self._following is not None:
            following, self._following = self._following, None
            return following
        ranks = self._communicator if self._communicator is not None else current_communicator(deadline_s=deadline_s)
        return ranks.operation(kind, deadline_s=deadline_s)

    @property
    def _pid(self) -> int:
        return self._engine.pid


@cache
def _trace_if_asked() -> TraceFiles | None:
    """Trace this process from its first ``Checkpointer`` on where the environment names a folder for it."""
    directory = os.environ.get(TRACE_VARIABLE)
    if not directory:
        return None
    files = TraceFiles(directory)
    atexit.register(files.close)
    return files


_shared: Checkpointer | None = None


def default_checkpointer() -> Checkpointer:
    """The one behind the functions of this module. Threads do not survive a fork, so a child gets a new one."""
    global _shared
    if _shared is None or _shared._pid != os.getpid():
        _shared = Checkpointer()
    return _shared
