"""``Checkpointer``: the object behind the public functions, with its own I/O engine, plans and ranks."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeAlias

import torch

from .checkpoint.checkpoint import Checkpoint
from .checkpoint.discovery import find_newest
from .control import current_communicator
from .control.base import Communicator, Operation
from .engine.resources import DEFAULT_MERGE_MEMORY_BYTES, IOEngine
from .errors import CheckpointNotFoundError, NotACheckpointError
from .foreign.safetensors import open_safetensors
from .frameworks.per_rank import OnResize
from .load.options import Cast, LoadOptions, Strictness
from .load.protocol import load as run_load
from .load.report import LoadReport
from .load.shared_reads.negotiation import ShareReads
from .planners import Layout
from .runtime.limits import DEFAULT_DEADLINE_S
from .save.gating import pass_gates
from .save.handle import SaveHandle
from .save.options import SaveOptions, WhenBusy
from .save.protocol import save as run_save
from .save.warmup import warm_up
from .storage_backends import StorageBackend, open_backend
from .telemetry.trace_files import TraceFiles

__all__ = ["TRACE_VARIABLE", "URL", "Checkpointer", "default_checkpointer"]

URL: TypeAlias = str | os.PathLike[str]

TRACE_VARIABLE = "BYTECHECKPOINT_TRACE"
"""Environment variable that names the directory into which every rank writes a trace of its saves and loads."""


class Checkpointer:
    """Saves and loads checkpoints with its own staging memory, threads, plan cache and connections to other ranks.

    ``bytecheckpoint.save`` and the other module-level functions share one instance. Create your own to set a memory
    budget or to use other ranks. Saves of one instance are committed in the order of their calls. Use an instance from
    one thread at a time, and close it (or use it as a context manager) to release threads and memory.

    Example:
        >>> with bcp.Checkpointer(memory_budget=8 << 30) as checkpointer:
        ...     handle = checkpointer.save("runs/7b/step-1000", state, async_save=True)
        ...     train()
        ...     handle.result()
    """

    def __init__(
        self,
        *,
        memory_budget: int | None = None,
        slots: int = 2,
        merge_memory: int = DEFAULT_MERGE_MEMORY_BYTES,
        communicator: Communicator | None = None,
    ) -> None:
        """Create a checkpointer. It allocates memory and starts threads when they are first needed.

        Args:
            memory_budget: Limit of this process's staging memory, in bytes. A state that is larger than the budget is
                copied as fast as it is written. None allows ``slots`` asynchronous saves of the largest size so far,
                each the size of this rank's share of the state; synchronous saves need about 80 MB. Staging memory is
                kept until ``close``.
            slots: Number of asynchronous saves that staging memory has room for if there is no budget.
            merge_memory: Limit of the additional memory of the merge stage (``layout`` of ``save``), in bytes; at least
                32 MiB.
            communicator: The ranks that save and load together. None uses those of the default process group, or a
                single process if there is none.

        Raises:
            UsageError: A limit is too small.
        """
        _process.start_tracing()
        self._engine = IOEngine(memory_budget=memory_budget, slots=slots, merge_memory=merge_memory)
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
        deadline_s: float = DEFAULT_DEADLINE_S,
        chunk_size: int | None = None,
        when_busy: WhenBusy = "wait",
        layout: Layout = "shards",
        gate: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> SaveHandle:
        """See ``bytecheckpoint.save``."""
        options = SaveOptions(
            framework=framework,
            step=step,
            metadata=dict(metadata or {}),
            allow_pickle=allow_pickle,
            deadline_s=deadline_s,
            chunk_size=chunk_size,
            when_busy=when_busy,
            layout=layout,
            gate=gate,
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
        """Save with options that are already validated and a state that is built inside the operation.

        The manager uses it: a state that one rank fails to build then fails the save on all ranks.

        Args:
            path: As in ``save``.
            make_state: Builds the state. An error in it is raised by all ranks.
            options: The other arguments of ``save``, and the job's lease.
            async_save: As in ``save``.
            storage_options: As in ``save``.

        Returns:
            A handle, already done if ``async_save`` is False.
        """
        with self._engine.track_call():
            backend, op = self._begin("save", path, storage_options, options.deadline_s)
            state = self._made(op, make_state)
            return run_save(self._engine, backend, op, state, options, is_async=async_save)

    def warmup(
        self,
        state: Mapping[str, Any],
        *,
        slots: int = 2,
        framework: str | None = None,
        allow_pickle: bool = False,
        layout: Layout = "shards",
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> None:
        """See ``bytecheckpoint.warmup``."""
        options = SaveOptions(framework=framework, allow_pickle=allow_pickle, layout=layout, deadline_s=deadline_s)
        with self._engine.track_call():
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
        per_rank: OnResize = "error",
        allow_pickle: bool = False,
        verify: bool = True,
        device: torch.device | str | None = None,
        share_reads: ShareReads = "auto",
        deadline_s: float = DEFAULT_DEADLINE_S,
        storage_options: Mapping[str, Any] | None = None,
    ) -> LoadReport:
        """See ``bytecheckpoint.load``."""
        options = LoadOptions(
            framework=framework,
            strict=strict,
            include=include,
            exclude=exclude,
            rename=rename,
            cast=cast,
            per_rank=per_rank,
            allow_pickle=allow_pickle,
            verify=verify,
            device=None if device is None else torch.device(device),
            share_reads=share_reads,
            deadline_s=deadline_s,
        )
        with self._engine.track_call():
            pass_gates()
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
        """Finish the saves in flight and release threads and memory.

        Does not raise the error of a save that failed; its handle does. The checkpointer cannot be used afterwards.
        """
        pass_gates(self._engine)
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
        """Begin the operation before anything that may fail on a single rank: ranks match operations by counting."""
        op = self.operation(kind, deadline_s)
        try:
            with op.phase("check"):
                backend = open_backend(path, **dict(storage_options or {}))
                op.set_description(f"{kind} of {backend.url}")
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
        """Make the first operation that begins in this block, a save or a load, a successor of ``op``.

        Args:
            op: An operation that all ranks have entered.
            kind: The kind of the successor, ``"save"`` or ``"load"``.
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

    def operation(self, kind: str, deadline_s: float) -> Operation:
        """Begin an operation of all ranks.

        Args:
            kind: What the operation is for, such as ``"save"``; ranks match operations of one kind by counting.
            deadline_s: Limit of each wait in it, in seconds.

        Returns:
            The operation, which the caller closes.
        """
        if self._following is not None:
            following, self._following = self._following, None
            return following
        ranks = self._communicator if self._communicator is not None else current_communicator(deadline_s=deadline_s)
        return ranks.operation(kind, deadline_s=deadline_s)

    @property
    def _pid(self) -> int:
        return self._engine.pid


class _Process:
    """The process-wide objects of the library: the shared ``Checkpointer`` and the trace files. There are no others
    above the control plane, except the list of closed gates in ``save.gating``."""

    def __init__(self) -> None:
        self._shared: Checkpointer | None = None
        self._traced = False

    def shared_checkpointer(self) -> Checkpointer:
        """Return the instance behind the module-level functions. A forked child gets a new one, because threads do not
        survive a fork."""
        if self._shared is None or self._shared._pid != os.getpid():
            self._shared = Checkpointer()
        return self._shared

    def start_tracing(self) -> None:
        """Trace this process from its first ``Checkpointer`` on if the environment names a directory for it."""
        directory = os.environ.get(TRACE_VARIABLE)
        if directory and not self._traced:
            self._traced = True
            atexit.register(TraceFiles(directory).close)


_process = _Process()


def default_checkpointer() -> Checkpointer:
    """Return the ``Checkpointer`` that the module-level functions share."""
    return _process.shared_checkpointer()
