"""``Checkpointer``: the object behind the public functions, with its own I/O engine, plans and ranks."""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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

    ``bytecheckpoint.save`` and the other module-level functions share one instance. Create another instance to set a
    memory budget or to use other ranks. Saves of one instance are committed in the order of their calls. Use an
    instance from one thread at a time, and close it (or use it as a context manager) to release threads and memory.

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
            slots: Number of asynchronous saves for which staging memory is allocated if there is no budget.
            merge_memory: Limit of the additional memory of the merge stage (``layout`` of ``save``), in bytes; at least
                32 MiB.
            communicator: The ranks that save and load together. None uses those of the default process group, or a
                single process if there is none.

        Raises:
            UsageError: A limit is too small.
        """
        if directory := os.environ.get(TRACE_VARIABLE):
            _trace_into(directory)
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
        """Save ``state`` as one checkpoint at ``path``. Call it on every rank with the same arguments.

        The checkpoint appears atomically once all data is durable. Until then, and after a failure, whatever was at
        ``path`` before is still there.

        The state at the moment of the call is stored. A synchronous save returns when the checkpoint is committed. An
        asynchronous save returns as soon as the state is copied to host memory, and a background thread writes and
        commits it. CUDA tensors are copied on internal streams, and the caller's current streams wait for these copies:
        kernels launched after the call may change the tensors, and the host thread does not block.

        A value that several ranks hold is written once. For parameters and optimizer state, the layout states which
        ranks hold the same values, and any one of them writes. Module buffers may have diverged between ranks, so those
        of the lowest rank are stored. Tensors and values in trees are compared; if they differ, the value of each rank
        is stored.

        Args:
            path: Local path, or URL of any fsspec filesystem.
            state: Maps section names to modules, optimizers, objects with ``state_dict`` and ``load_state_dict``, or
                trees of tensors and plain values. A list of modules or optimizers stands for pipeline stages.
            framework: Name of the adapter to use for all sections; by default it is inferred from each object.
            async_save: Return before the checkpoint is written.
            step: Training step to store with the checkpoint.
            metadata: Plain values to store with the checkpoint.
            allow_pickle: Store values that are not plain as pickles. ``load`` refuses them unless it is called with
                ``allow_pickle=True``.
            deadline_s: Seconds that each single wait may take: for another rank, for staging memory, or for storage.
            chunk_size: Bytes under one checksum. By default 256 KiB, and more if the checkpoint exceeds 1 TiB.
            when_busy: What an asynchronous save does if earlier ones still occupy the staging memory. "wait" waits
                until they have written enough. "skip" skips the save on all ranks if any of them would have to wait;
                ``SaveHandle.skipped`` is then True.
            layout: How to store tensors that are sharded across ranks. "shards" stores each shard as it is. "merged"
                merges irregular shards (flat parameters of FSDP-1 and ZeRO) into whole tensors. "whole" merges all
                shards, and also writes the index and configuration with which Hugging Face libraries and vLLM load the
                model from ``Checkpoint.model_directory``. Merging runs in the background and does not delay the call.
            gate: With ``async_save``, return before parameters and optimizer state are copied. The copy overlaps with
                the next forward and backward pass; ``torch.optim.Optimizer.step`` of the optimizers in ``state``,
                ``load_state_dict`` of its optimizers and modules, and ``load`` wait until it is done. Call it from the
                training thread. Everything else, such as buffers and parameters that none of these optimizers updates,
                is copied before the call returns. If other code changes one of the tensors in place before
                ``SaveHandle.staged()``, the save fails; changes through ``tensor.data`` and by replayed CUDA graphs are
                not detected. If the state does not fit into the staging memory, the call copies it as it does without a
                gate.
            storage_options: Options for the storage backend, such as credentials or ``endpoint_url``.

        Returns:
            A handle, already done if ``async_save`` is False.

        Raises:
            UsageError: An argument is invalid.
            StateError: The state cannot be saved. Subclasses: ``UnknownObjectError``, ``UnserializableError``,
                ``NameCollisionError``, ``UnsupportedTensorError``.
            DisagreementError: The ranks passed different arguments.
            StorageError: A storage operation failed, for example because the disk is full.
            RankFailedError: One rank failed; all ranks raise the same cause.
            DeadlineError: A wait exceeded ``deadline_s``.
            CommitUnknownError: The checkpoint may or may not exist. After any other error it does not; see
                ``BytecheckpointError.may_have_committed``.

            An asynchronous save raises failures after the copy from ``SaveHandle.result``.

        Example:
            >>> state = {"model": model, "optimizer": optimizer, "extra_state": {"step": step}}
            >>> handle = bcp.save(f"runs/7b/step-{step}", state, step=step, async_save=True)
            >>> train_step()
            >>> handle.result()
        """
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
            backend, op, state = self._begin("save", path, storage_options, options.deadline_s, make_state)
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
        """Prepare for saves of ``state``, so that the first save is as fast as the second.

        Call it once on every rank before training begins. It plans the save and caches the plan, allocates the staging
        memory of ``slots`` asynchronous saves and faults it in, pins it if tensors are on a CUDA device, and starts the
        threads. Nothing is copied or written.

        The cached plan applies to states with the same structure. If an optimizer has no state yet, its part is
        planned, and the memory for it allocated, in the first save.

        Args:
            state: As in ``save``.
            slots: Number of asynchronous saves to allocate staging memory for, limited by the memory budget of the
                ``Checkpointer``. Use 0 if you only save synchronously.
            framework: As in the saves to come.
            allow_pickle: As in the saves to come.
            layout: As in the saves to come.
            deadline_s: Seconds that each single wait may take.

        Raises:
            UsageError: An argument is invalid.
            StateError: The state cannot be saved.
            ControlError: The ranks passed different arguments, one of them failed, or a wait exceeded ``deadline_s``.

        Example:
            >>> bcp.warmup({"model": model, "optimizer": optimizer})
        """
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
        """Fill ``state`` in place from the checkpoint at ``path``, whatever layout and world size saved it.

        Call it on every rank. Tensors keep their identity and are overwritten; plain values are replaced inside the
        given trees. Sections that are stored but not in ``state`` are not read. All missing, unexpected and mismatched
        names of all ranks are found before any tensor changes, and are raised as one ``MismatchError``.

        If reading fails on any rank after that, tensors may already hold loaded values, while plain values and newly
        created optimizer state are unchanged. Load again, or initialize the state, before you continue.

        Args:
            path: Local path, or URL of any fsspec filesystem.
            state: As in ``save``. Tensors on the meta device get memory.
            framework: Name of the adapter to use for all sections; by default it is inferred from each object.
            strict: One rule, or a rule for each section name. True (the same as "strict") tolerates only differences
                that the section's adapter declares harmless, such as optimizer state that was never created. "exact"
                tolerates none. False (the same as "lenient") tolerates missing and unexpected names and reports them;
                shapes and dtypes must still match.
            include: Shell patterns of full names to load (``"optimizer.*"``).
            exclude: Shell patterns of full names not to load; applied after ``include``.
            rename: Mapping from stored full names to those of ``state``, or a function that maps one to the other.
            cast: Which dtype conversions are allowed. "exact": none. "widen": those that keep every value. "any": also
                those that round.
            per_rank: What to do with values that were stored for each rank if the world size has changed. "error"
                raises. "lowest" gives rank 0's value to every rank. "modulo" gives rank ``r`` the value of saved rank
                ``r % saved_world_size``. "skip" leaves the present value.
            allow_pickle: Load values that are stored as pickles. Unpickling can run arbitrary code: use it only if you
                trust the author of the checkpoint.
            verify: Check all bytes that are read against their checksums.
            device: Where meta tensors get memory.
            share_reads: Whether one rank reads bytes that several ranks need and forwards them to the others. "auto"
                does so where it is likely to be faster: always among ranks on several hosts; on a single host only if
                the files are not in its page cache, and for files on its own disk only among four or more ranks. Ranks
                that need different columns of the same matrices each read some of the rows and exchange their parts.
                "always" and "never" override this.
            deadline_s: Seconds that each single wait may take: for another rank or for storage.
            storage_options: Options for the storage backend.

        Returns:
            What was loaded, missing, unexpected and cast, and how many bytes this rank read.

        Raises:
            UsageError: An argument is invalid.
            StateError: An object in ``state`` cannot be filled.
            MismatchError: The state and the checkpoint do not fit together; lists every name of every rank.
            CheckpointNotFoundError: Nothing is stored at ``path``. Also a ``FileNotFoundError``.
            NotACheckpointError: Something is stored at ``path``, but no committed checkpoint.
            UnsupportedVersionError: A newer library saved the checkpoint.
            FormatError: A file violates the format.
            CorruptionError: Stored bytes are damaged; states file, tensor and range.
            StorageError: A storage operation failed.
            ControlError: The ranks could not work together: ``RankFailedError``, ``DeadlineError``,
                ``DisagreementError``.

        Example:
            >>> extra = {"step": 0}
            >>> report = bcp.load("runs/7b/step-1000", {"model": model, "optimizer": optimizer, "extra_state": extra})
            >>> extra["step"]
            1000
        """
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
            backend, op, _ = self._begin("load", path, storage_options, deadline_s, lambda: state)
            return run_load(self._engine, backend, op, state, options)

    def open(self, path: URL, *, verify: bool = True, storage_options: Mapping[str, Any] | None = None) -> Checkpoint:
        """Open the checkpoint at ``path`` for reading. Needs no process group and no model.

        Also opens safetensors files that other libraries wrote: one file, or a folder with ``model.safetensors`` or an
        index. Their tensors form the section ``model``. They have no checksums and are not verified.

        Args:
            path: Local path, or URL of any fsspec filesystem.
            verify: Check all bytes that are read against their checksums.
            storage_options: Options for the storage backend.

        Returns:
            A mapping from full tensor names to tensors, which are read when they are indexed or loaded.

        Raises:
            CheckpointNotFoundError: Nothing is stored at ``path``. Also a ``FileNotFoundError``.
            NotACheckpointError: Something is stored at ``path``, but no committed checkpoint.
            UnsupportedVersionError: A newer library saved the checkpoint.
            FormatError: A file violates the format.
            CorruptionError: The manifest is damaged.
            StorageError: A storage operation failed.

        Example:
            >>> checkpoint = bcp.open("s3://runs/7b/step-1000")
            >>> checkpoint["model.wte.weight"][0:128]     # reads only these rows
        """
        self._engine.check_usable()
        url, options = os.fspath(path), dict(storage_options or {})
        if url.endswith(".safetensors"):
            file = open_safetensors(url, self._engine, storage_options=options)
            if file is not None:
                return file
        try:
            return Checkpoint.open(open_backend(url, **options), self._engine, verify=verify)
        except (CheckpointNotFoundError, NotACheckpointError):
            foreign = open_safetensors(url, self._engine, storage_options=options)
            if foreign is None:
                raise
            return foreign

    def latest(
        self, root: URL, *, allow_fresh: bool = False, storage_options: Mapping[str, Any] | None = None
    ) -> Checkpoint | None:
        """Open the newest valid checkpoint among the direct children of ``root``.

        A checkpoint is valid if its manifest can be decoded and every file exists with its full length; use
        ``Checkpoint.verify`` to check the bytes too. The newest one has the highest step: the step stored in it, or the
        number at the end of its name if none is stored. Children whose names end in a number are tried from the highest
        number down. Invalid checkpoints are skipped with a warning.

        Args:
            root: Local path or URL whose children are checkpoints.
            allow_fresh: Return None if saves were made below ``root`` but none of them is valid.
            storage_options: Options for the storage backend.

        Returns:
            The checkpoint, or None if nothing was ever saved below ``root``.

        Raises:
            NoValidCheckpointError: Saves were made below ``root``, but none of them is valid.
            UnsupportedVersionError: A newer library saved the newest checkpoint.
            StorageError: A storage operation failed.

        Example:
            >>> newest = bcp.latest("runs/7b")
            >>> if newest is not None:
            ...     bcp.load(newest.url, state)
        """
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

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _begin(
        self,
        kind: str,
        path: URL,
        storage_options: Mapping[str, Any] | None,
        deadline_s: float,
        make_state: Callable[[], Mapping[str, Any]],
    ) -> tuple[StorageBackend, Operation, Mapping[str, Any]]:
        """Begin the operation before anything that may fail on a single rank: ranks match operations by counting."""
        op = self.operation(kind, deadline_s)
        try:
            with op.phase("check"):
                backend = open_backend(path, **dict(storage_options or {}))
                op.set_description(f"{kind} of {backend.url}")
            with op.phase("state"):
                return backend, op, make_state()
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


@functools.cache
def _checkpointer_of(pid: int) -> Checkpointer:
    # By process, because threads do not survive a fork: a forked child gets a new one.
    return Checkpointer()


@functools.cache
def _trace_into(directory: str) -> None:
    atexit.register(TraceFiles(directory).close)


def default_checkpointer() -> Checkpointer:
    """Return the ``Checkpointer`` that the module-level functions share."""
    return _checkpointer_of(os.getpid())
