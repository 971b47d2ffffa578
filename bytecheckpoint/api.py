"""The public surface: ``save``, ``load``, ``open``, ``latest``, and the ``Checkpointer`` behind them."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import TracebackType
from typing import Any, Union
from weakref import WeakSet

import torch

from .checkpoint import Checkpoint
from .chrome_trace import TraceFiles
from .control import current_communicator
from .control.base import Communicator, Operation
from .engine.resources import MERGE_MEMORY, Engine
from .finding import find_newest
from .handle import SaveHandle
from .loading import LoadOptions, LoadReport
from .loading import load as run_load
from .matching import Cast, Rules, Strictness
from .planners import Layout
from .save_options import SaveOptions, WhenBusy
from .saving import save as run_save
from .storage_backends import StorageBackend, open_backend
from .warming import warm_up

__all__ = ["Checkpointer", "default_checkpointer", "latest", "load", "open", "save", "warmup"]

URL = Union[str, "os.PathLike[str]"]

_DEADLINE_S = 600.0

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
        deadline_s: float = _DEADLINE_S,
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
        return self.save_with(path, state, options, async_save=async_save, storage_options=storage_options)

    def save_with(
        self,
        path: URL,
        state: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
        options: SaveOptions,
        *,
        async_save: bool,
        storage_options: Mapping[str, Any] | None,
    ) -> SaveHandle:
        """As ``save``, for the manager; ``state`` may be a function that makes it."""
        backend, op = self._begin("save", path, storage_options, options.deadline_s)
        if callable(state):
            state = self._made(op, state)
        return run_save(self._engine, backend, op, state, options, background=async_save)

    def warmup(
        self,
        state: Mapping[str, Any],
        *,
        slots: int = 2,
        framework: str | None = None,
        allow_pickle: bool = False,
        layout: Layout = "shards",
        deadline_s: float = _DEADLINE_S,
    ) -> None:
        """See ``bytecheckpoint.warmup``."""
        options = SaveOptions(framework, allow_pickle=allow_pickle, layout=layout, deadline_s=deadline_s)
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
        deadline_s: float = _DEADLINE_S,
        storage_options: Mapping[str, Any] | None = None,
    ) -> LoadReport:
        """See ``bytecheckpoint.load``."""
        rules = Rules(include, exclude, rename, strict, cast)
        place = None if device is None else torch.device(device)
        options = LoadOptions(framework, rules, per_rank, allow_pickle, verify, place, deadline_s, share_reads)
        for checkpointer in tuple(_checkpointers):
            checkpointer._engine.pass_gates()
        backend, op = self._begin("load", path, storage_options, deadline_s)
        return run_load(self._engine, backend, op, state, options)

    def open(self, path: URL, *, verify: bool = True, storage_options: Mapping[str, Any] | None = None) -> Checkpoint:
        """See ``bytecheckpoint.open``."""
        self._engine.check_usable()
        return Checkpoint.open(open_backend(path, **dict(storage_options or {})), self._engine, verify=verify)

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
                return open_backend(path, **dict(storage_options or {})), op
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

    def operation(self, kind: str, deadline_s: float) -> Operation:
        """Begin an operation of all ranks, for the manager; whoever begins it closes it."""
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


def save(
    path: URL,
    state: Mapping[str, Any],
    *,
    framework: str | None = None,
    async_save: bool = False,
    step: int | None = None,
    metadata: Mapping[str, Any] | None = None,
    allow_pickle: bool = False,
    deadline_s: float = _DEADLINE_S,
    chunk_size: int | None = None,
    when_busy: WhenBusy = "wait",
    layout: Layout = "shards",
    gate: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> SaveHandle:
    """Save ``state`` as one checkpoint at ``path``. Call it on every rank with the same arguments.

    ``path`` is a local path or a URL of any fsspec filesystem. ``state`` maps section names to modules, optimizers,
    objects with ``state_dict`` and ``load_state_dict``, or trees of tensors and plain values. The checkpoint appears
    all at once when everything is durable; until then, whatever was at ``path`` stays, and a failure leaves it so.

    A synchronous save returns when the checkpoint is committed, or raises. With ``async_save`` it returns as soon as
    the state is copied, so that training may go on; ``handle.result()`` waits for the commit and raises what went
    wrong. What is stored is the state at the moment of the call. Tensors on a CUDA device are copied by streams of the
    library's own, for which the streams wait that were current in the call: later kernels may change the tensors, and
    the host does not wait for anything.

    With ``gate`` (and ``async_save``) the call returns before parameters and optimizer state are copied: that goes on
    behind the forward and backward pass, while the steps of the state's ``torch.optim.Optimizer``s wait until it is
    done, and so do ``load_state_dict`` of these and of the modules, and ``load``. Everything else, such as buffers and
    parameters that none of these optimizers steps, is copied before the call returns. If one of the tensors that are
    copied late is changed in place by anything else before ``handle.staged()``, the save fails; not seen is only what
    hides from PyTorch: changes through ``tensor.data`` and replayed CUDA graphs. Call it from the thread that trains.
    Where the state does not fit into the staging memory, it is copied before the call returns, as without a gate.

    What several ranks hold alike is written once. Parameters and optimizer state are taken to be alike where their
    layout says so, and any one rank writes them. Buffers of modules may have drifted apart: all come from the lowest
    rank that has them. Tensors and values of trees are compared; where they differ, each rank's own is stored.

    ``layout`` says what is stored of a tensor that ranks hold in parts: "shards", the parts, where they lie; "merged",
    the whole tensor where the parts are no regular grid (flat parameters of FSDP-1, ZeRO); "whole", always the whole
    tensor. Fragments then travel to one rank for each tensor in the background, and the call takes no longer. With
    "whole", Hugging Face's libraries and vLLM load the model as it is, from ``Checkpoint.model_directory``.

    ``framework`` forces an adapter. ``step`` and ``metadata`` (plain values) are stored for readers.
    ``allow_pickle`` stores values that are not plain as pickles, which ``load`` then refuses unless asked too.
    ``deadline_s`` bounds each single wait, for another rank or for staging memory; ``chunk_size`` is the number of
    bytes under one checksum (by default 256 KiB, and more in checkpoints of more than 1 TiB). An asynchronous save
    for which staging memory has no room waits until earlier ones have written enough; with ``when_busy="skip"`` it
    is made on no rank if it would have to wait on any, ``handle.skipped`` says so and ``handle.result()`` raises
    ``SaveSkippedError``.

    Raises ``StateError`` for a state that cannot be stored, ``DisagreementError`` where ranks called with different
    arguments, ``StorageError`` for I/O, ``RankFailedError`` with the same cause on every rank where one rank failed.
    """
    return default_checkpointer().save(
        path,
        state,
        framework=framework,
        async_save=async_save,
        step=step,
        metadata=metadata,
        allow_pickle=allow_pickle,
        deadline_s=deadline_s,
        chunk_size=chunk_size,
        when_busy=when_busy,
        layout=layout,
        gate=gate,
        storage_options=storage_options,
    )


def warmup(
    state: Mapping[str, Any],
    *,
    slots: int = 2,
    framework: str | None = None,
    allow_pickle: bool = False,
    layout: Layout = "shards",
    deadline_s: float = _DEADLINE_S,
) -> None:
    """Make the first save of ``state`` as quick as the second. Call it on every rank, once, before training begins.

    It plans the save and keeps the plan, takes and faults in the staging memory of ``slots`` asynchronous saves (0 for
    who saves synchronously only; no more than the memory budget), pins it where tensors are on a CUDA device, and
    starts the threads. Nothing is copied and nothing is written. The plan is good for states of the same structure:
    where an optimizer has no state yet, that of the first save is made later, and planned then; the memory it needs
    beside is taken then too. ``framework``, ``allow_pickle`` and ``layout`` are those of the saves to come.

    Raises like ``save``, for what can be wrong with a state.
    """
    default_checkpointer().warmup(
        state, slots=slots, framework=framework, allow_pickle=allow_pickle, layout=layout, deadline_s=deadline_s
    )


def load(
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
    deadline_s: float = _DEADLINE_S,
    storage_options: Mapping[str, Any] | None = None,
) -> LoadReport:
    """Fill ``state`` in place from the checkpoint at ``path``, whatever layout and world size saved it.

    Call it on every rank. Sections that are stored but not in ``state`` are left unread. Every missing, unexpected or
    mismatched name of every rank is found before a tensor changes and raised as one ``MismatchError``.

    ``strict`` may be given for each section: True allows only what the section's adapter knows to be harmless (such as
    optimizer state that was never created), "exact" not even that, False allows and reports everything but mismatched
    shapes and dtypes. ``include`` and ``exclude`` are shell patterns on full names (``optimizer.*``); ``rename`` maps
    stored full names to the state's. ``cast``: "exact", "widen" (keeps every value) or "any" (rounds where it must).
    ``per_rank`` is the policy for values that were stored for each rank when the world size changed: "error",
    "lowest", "modulo" or "skip". ``verify=False`` skips checksums. ``device`` is where meta tensors get memory.

    What several ranks want alike is read by one of them and passed on, over connections of the library's own, where
    ``share_reads`` is "always", and where it is "auto" and that is likely to be faster: not where all those ranks are
    on one host that has the files in memory, or are fewer than four on one host with the files on its own disk. Ranks
    that want different columns of the same stored matrices read a share of the rows each, and send each other their
    parts. With "never" each rank reads all that it wants.

    Where reading fails half-way, on whichever rank, tensors may hold loaded values already, while plain values and
    newly made optimizer state are as before: load again, or start afresh, before going on.

    Raises ``CheckpointNotFoundError``, ``NotACheckpointError``, ``UnsupportedVersionError``, ``FormatError``,
    ``CorruptionError`` (naming file, tensor and range), ``MismatchError``, ``StorageError``, ``ControlError``.
    """
    return default_checkpointer().load(
        path,
        state,
        framework=framework,
        strict=strict,
        include=include,
        exclude=exclude,
        rename=rename,
        cast=cast,
        per_rank=per_rank,
        allow_pickle=allow_pickle,
        verify=verify,
        device=device,
        share_reads=share_reads,
        deadline_s=deadline_s,
        storage_options=storage_options,
    )


def open(  # named like the builtin on purpose: bcp.open(path)
    path: URL, *, verify: bool = True, storage_options: Mapping[str, Any] | None = None
) -> Checkpoint:
    """A read-only handle on the checkpoint at ``path``; needs no process group and no model.

    Raises a ``CheckpointError`` that tells nothing there, something else there, and something broken apart.
    """
    return default_checkpointer().open(path, verify=verify, storage_options=storage_options)


def latest(
    root: URL, *, allow_fresh: bool = False, storage_options: Mapping[str, Any] | None = None
) -> Checkpoint | None:
    """The checkpoint of the highest step among the direct children of ``root`` that holds; None where nothing was ever
    saved.

    Children whose names end in a number are tried from the highest number down. One holds if its manifest decodes and
    every file is there in full length (``Checkpoint.verify`` reads the bytes too). A checkpoint's step is the one
    stored with it, else the number in its name. What does not hold, or was never committed, is passed over with a
    warning; where nothing else is there, that is a ``NoValidCheckpointError``, and with ``allow_fresh`` None.
    """
    return default_checkpointer().latest(root, allow_fresh=allow_fresh, storage_options=storage_options)
