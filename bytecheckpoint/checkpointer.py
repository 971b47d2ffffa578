"""``Checkpointer``: the object behind the public functions, with its own I/O engine, plans and ranks."""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

import torch

from .checkpoint.checkpoint import Checkpoint
from .checkpoint.discovery import CompleteCheckpoint, find_newest
from .checkpoint.index import Index
from .checkpoint.nearest import open_nearest, with_staging
from .checkpoint.selection import Selection
from .checkpoint.watch import watch
from .control import current_communicator
from .control.base import Communicator, Operation
from .errors import UsageError
from .foreign.given_rules import GivenRules, rules_argument
from .foreign.opening import Location
from .frameworks.per_rank import OnResize
from .load.options import Cast, LoadOptions, Strictness
from .load.protocol import load as run_load
from .load.report import LoadReport
from .load.shared_reads.negotiation import ShareReads
from .planners import Layout
from .rules import Rules
from .runtime.arguments import ARGUMENTS, check_arguments
from .runtime.limits import DEFAULT_DEADLINE_S
from .save.engine import DEFAULT_MERGE_MEMORY_BYTES, SaveEngine
from .save.gating import pass_gates
from .save.handle import SaveHandle
from .save.options import SaveOptions, WaitFor, WhenBusy
from .save.protocol import save as run_save
from .save.replicas import Replicas
from .save.warmup import warm_up
from .storage_backends import StorageBackend, url_text
from .telemetry.trace_files import TraceFiles

__all__ = ["TRACE_VARIABLE", "URL", "Checkpointer", "default_checkpointer"]

URL: TypeAlias = str | os.PathLike[str]
_Options = TypeVar("_Options", SaveOptions, LoadOptions)

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
        self._engine = SaveEngine(memory_budget=memory_budget, slots=slots, merge_memory=merge_memory)
        self._communicator = communicator
        self._following: Operation | None = None

    @property
    def engine(self) -> SaveEngine:
        """Threads and memory, for parts of this library that write or read without a save or load of all ranks."""
        return self._engine

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
        include: Sequence[str] = ("*",),
        exclude: Sequence[str] = (),
        trainable_only: bool = False,
        replicas: Replicas = "auto",
        codec: str | None = None,
        base: URL | None = None,
        gate: bool = False,
        staging: URL | None = None,
        wait_for: WaitFor = "staging",
        upload_rate: float | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> SaveHandle:
        """Save ``state`` as one checkpoint at ``path``. Call it on every rank with the same arguments.

        The checkpoint appears atomically once all data is durable. Until then, and after a failure, whatever was at
        ``path`` before is still there.

        The state at the moment of the call is stored. A synchronous save returns when the checkpoint is committed. An
        asynchronous save returns as soon as the state is copied to host memory, and a background thread writes and
        commits it. CUDA tensors are copied on internal streams, and the caller's current streams wait for these copies:
        kernels launched after the call may change the tensors, and the host thread does not block.

        A value that several ranks hold is written once. ``replicas`` states how parameters and optimizer state are
        compared before that. Module buffers may have diverged between ranks, so those of the lowest rank are stored.
        Tensors and values in trees are compared; if they differ, the value of each rank is stored.

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
                ``SaveHandle.skipped`` is then True. Memory that is still being faulted in, in the first saves of a
                process, skips none: such a save stalls about as long as a synchronous one.
            layout: How to store tensors that are sharded across ranks. "shards" stores each shard as it is. "merged"
                merges irregular shards (flat parameters of FSDP-1 and ZeRO) into whole tensors. "whole" merges all
                shards, and also writes the index and configuration with which Hugging Face libraries and vLLM load the
                model from ``Checkpoint.model_directory``. Merging runs in the background and does not delay the call.
            include: Shell patterns of what to store: full names (``"model.lora_*"``) or sections (``"model"``). All
                ranks pass the same patterns; one that matches nothing on any rank is an error. A tied tensor is stored
                under those of its names that are selected. The checkpoint lists what was left out, and a load reports
                it in ``LoadReport.left_out`` instead of as missing, unless it is called with ``strict="exact"``.
            exclude: Shell patterns of what not to store; applied after ``include``, with the same rules.
            trainable_only: Leave out the parameters of modules that do not require a gradient, and their optimizer
                state and hyper-parameters, as for a LoRA run. A tied parameter is stored if any of its names requires
                one. Buffers and extra state are stored, because a forward pass may change them; ``exclude`` leaves
                them out too. Other sections are not affected. Combines with ``include`` and ``exclude``.
            replicas: How parameters and optimizer state that several ranks hold are compared. "auto" compares
                completely what nothing declares to be replicas (plain modules without ``DistributedDataParallel``), and
                a sample, which changes with ``path``, of what the state declares (``DistributedDataParallel``,
                ``Replicate()``, HSDP; with ``gate``, only in host memory). The save fails if copies of the former
                differ, and logs a warning if copies of the latter do. "check" compares all of them and fails in both
                cases, "trust" compares none. "own" is like "auto", but stores the copy of each rank where
                undeclared replicas differ.
            codec: How to encode tensors: None (not at all), "zstd", "zstd-planes" (which separates the bytes of
                floating-point numbers by significance first: bf16 weights shrink to 0.69, fp32 ones to 0.85), or a
                codec of another package. Chunks are encoded one by one, so a part of a tensor can still be read. The
                files are no safetensors files then. "auto" encodes with "zstd-planes" on
                ranks whose earlier saves have shown that the store is slower than the codec, and never on local disks.
                Needs ``layout="shards"``.
            base: Do not write what an older checkpoint has: chunks of tensors that are equal to its chunks at the same
                places. "auto" takes the newest checkpoint in the folder that ``path`` is in, or the one at ``path``; or
                pass the path of a checkpoint in that folder. The new checkpoint refers to the older files by relative
                names, so move or copy the whole folder, or use ``bcp copy``, which makes full copies. Removals by
                ``bcp rm`` and ``CheckpointManager`` keep what is still referred to. A base must have been saved with
                ``base`` too, because only such saves store the checksums to compare; the first one writes everything.
                Needs ``layout="shards"``. With ``staging``, the base must be uploaded.
            gate: With ``async_save``, return before parameters and optimizer state are copied. The copy overlaps with
                the next forward and backward pass; ``torch.optim.Optimizer.step`` of the optimizers in ``state``,
                ``load_state_dict`` of its optimizers and modules, and ``load`` wait until it is done. Call it from the
                training thread. Everything else, such as buffers and parameters that none of these optimizers updates,
                is copied before the call returns. If other code changes one of the tensors in place before
                ``SaveHandle.staged()``, the save fails; changes through ``tensor.data`` and by replayed CUDA graphs are
                not detected. If the state does not fit into the staging memory, the call copies it as it does without a
                gate.
            staging: A folder on a local disk of each machine. The checkpoint is committed there first, and uploaded to
                ``path`` in the background: ``SaveHandle.committed`` waits for the commit in the folder,
                ``SaveHandle.uploaded`` for the one at ``path``. An upload that is interrupted is continued by
                ``bcp upload``, or by the ``CheckpointManager`` of the restarted job. The folder keeps what was uploaded
                to load from; only a ``CheckpointManager`` removes it.
            wait_for: Which of both ``SaveHandle.result``, and a call without ``async_save``, waits for: "staging" or
                "path". If an upload fails, "path" raises its error, and the checkpoint is in the staging folders.
            upload_rate: Bytes per second that this rank uploads at most, on average; None for no limit. With
                ``staging``.
            storage_options: Options for the storage backend, such as credentials or ``endpoint_url``.

        Returns:
            A handle, already done if ``async_save`` is False.

        Raises:
            UsageError: An argument is invalid.
            StateError: The state cannot be saved. Subclasses: ``UnknownObjectError``, ``UnserializableError``,
                ``NameCollisionError``, ``UnsupportedTensorError``, ``ReplicaMismatchError`` (ranks hold different
                copies of what must be one tensor).
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
            metadata={} if metadata is None else metadata,
            allow_pickle=allow_pickle,
            deadline_s=deadline_s,
            chunk_size=chunk_size,
            when_busy=when_busy,
            layout=layout,
            selection=Selection(include, exclude),
            trainable_only=trainable_only,
            replicas=replicas,
            codec=codec,
            base=base,
            gate=gate,
            staging=staging,
            wait_for=wait_for,
            upload_rate=upload_rate,
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
            backend, op, state, options = self._begin(
                "save", path, make_state, options, storage_options=storage_options, async_save=async_save
            )
            return run_save(self._engine, backend, op, state, options, is_async=bool(async_save))

    def warmup(
        self,
        state: Mapping[str, Any],
        *,
        slots: int = 2,
        framework: str | None = None,
        allow_pickle: bool = False,
        layout: Layout = "shards",
        include: Sequence[str] = ("*",),
        exclude: Sequence[str] = (),
        trainable_only: bool = False,
        deadline_s: float = DEFAULT_DEADLINE_S,
        wait: bool = True,
    ) -> None:
        """Prepare for saves of ``state``, so that the first save is as fast as the second.

        Without it, the first asynchronous save stalls training about as long as a synchronous save would. Call it once
        on every rank before training begins. It plans the save and caches the plan, allocates the staging
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
            include: As in the saves to come.
            exclude: As in the saves to come.
            trainable_only: As in the saves to come.
            deadline_s: Seconds that each single wait may take.
            wait: Return when the memory is faulted in. False lets background threads fault it in; a save that begins
                earlier uses what is ready. ``CheckpointManager.resume`` does this for one slot.

        Raises:
            UsageError: An argument is invalid.
            StateError: The state cannot be saved.
            ControlError: The ranks passed different arguments, one of them failed, or a wait exceeded ``deadline_s``.

        Example:
            >>> bcp.warmup({"model": model, "optimizer": optimizer})
        """
        options = SaveOptions(
            framework=framework,
            allow_pickle=allow_pickle,
            layout=layout,
            selection=Selection(include, exclude),
            trainable_only=trainable_only,
            deadline_s=deadline_s,
        )
        self.warm_up_with(state, options, slots=slots, wait=wait)

    def warm_up_with(self, state: Mapping[str, Any], options: SaveOptions, *, slots: int, wait: bool) -> None:
        """Prepare for saves with options that are already validated; the manager uses it.

        Args:
            state: As in ``warmup``.
            options: Those of the saves to come.
            slots: As in ``warmup``.
            wait: As in ``warmup``.
        """
        with self._engine.track_call():
            warm_up(self._engine, self.operation("warmup", options.deadline_s), state, options, slots, wait=wait)

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
        rules: GivenRules | None = None,
        staging: URL | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> LoadReport:
        """Fill ``state`` in place from the checkpoint at ``path``, whatever layout and world size saved it.

        Call it on every rank. Tensors keep their identity and are overwritten; plain values are replaced inside the
        given trees, and an empty dict receives everything that is stored of its section. Sections that are stored but
        not in ``state`` are not read. All missing, unexpected and mismatched
        names of all ranks are found before any tensor changes, and are raised as one ``MismatchError``.

        If reading fails on any rank after that, tensors may already hold loaded values, while plain values and newly
        created optimizer state are unchanged. Load again, or initialize the state, before you continue.

        ``path`` may also be whatever else ``open`` reads: a safetensors file, or a folder in Hugging Face's layout. Its
        tensors are the section ``model`` (``{"model": model}``), and their bytes are not verified. A model's own lists
        (``_keys_to_ignore_on_load_unexpected``, ``_keys_to_ignore_on_load_missing``, ``_tied_weights_keys``) apply.

        Args:
            path: Local path, or URL of any fsspec filesystem.
            state: As in ``save``. Tensors on the meta device get memory.
            framework: Name of the adapter to use for all sections; by default it is inferred from each object.
            strict: One rule, or a rule for each section name. True (the same as "strict") tolerates only differences
                that the section's adapter declares harmless, such as optimizer state that was never created. "exact"
                tolerates none. False (the same as "lenient") tolerates missing and unexpected names and reports them;
                shapes and dtypes must still match. "skip_mismatched" is like "strict", but leaves tensors unchanged
                that are stored with another shape, such as those of a new head, and reports them:
                ``strict={"model": "skip_mismatched"}``.
            include: Shell patterns of what to load: full names (``"optimizer.state.*"``) or sections (``"model"``),
                under the names of ``state``, that is, after ``rename``. A pattern that matches no name, neither of
                ``state`` nor stored in its sections, is an error.
            exclude: Shell patterns of what not to load; applied after ``include``, with the same rules.
            rename: Mapping from stored full names to those of ``state``, or a function that maps one to the other. The
                keys of a mapping are names of the checkpoint; a key that is not stored is an error, unless it belongs
                to a section that is not loaded. Optimizer state follows its parameter and cannot be a key.
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
            rules: As in ``open``. ``rename`` sees the names that the rules make.
            staging: The ``staging`` of the saves. Copies of data files in this folder are read instead of those at
                ``path``, where they are undamaged; what the folder lacks is read there.
            storage_options: Options for the storage backend.

        Returns:
            What was loaded, missing, unexpected and cast, and how many bytes this rank read.

        Raises:
            UsageError: An argument is invalid.
            RuleError: The rules do not explain what is stored; lists everything that is wrong.
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
            selection=Selection(include, exclude),
            rename=rename,
            cast=cast,
            per_rank=per_rank,
            allow_pickle=allow_pickle,
            verify=verify,
            device=device,
            share_reads=share_reads,
            deadline_s=deadline_s,
            rules=rules,
        )
        with self._engine.track_call():
            pass_gates()
            backend, op, _, options = self._begin(
                "load", path, lambda: state, options, storage_options=storage_options, staging=staging
            )
            found = options.rules if isinstance(options.rules, Rules) else None
            location = Location(url_text(path), backend, backend.options, found)
            return run_load(self._engine, location, op, state, options)

    def open(
        self,
        path: URL,
        *,
        verify: bool = True,
        rules: GivenRules | None = None,
        staging: URL | None = None,
        deadline_s: float = DEFAULT_DEADLINE_S,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Checkpoint:
        """Open the checkpoint at ``path`` for reading. Needs no process group and no model.

        Also opens safetensors files that other libraries wrote: one file, or a folder with ``model.safetensors`` or an
        index. Their tensors form the section ``model``. They have no checksums and are not verified.

        Args:
            path: Local path, or URL of any fsspec filesystem.
            verify: Check all bytes that are read against their checksums.
            rules: What the stored tensors are (``docs/rules.md``): ``bytecheckpoint.rules.Rules``, the path of a TOML
                file, or the name of a set of rules of this library. The tensors then have the names and shapes that the
                rules make. Nothing is copied: reads go to the stored bytes.
            staging: The ``staging`` of the saves. Copies of data files in this folder are read instead of those at
                ``path``, where they are undamaged; what the folder lacks is read there.
            deadline_s: Seconds that one request to the store may take.
            storage_options: Options for the storage backend.

        Returns:
            A mapping from full tensor names to tensors, which are read when they are indexed or loaded.

        Raises:
            RuleError: The rules do not explain what is stored; lists everything that is wrong.
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
        given = {
            "verify": verify,
            "rules": rules,
            "staging": staging,
            "deadline_s": deadline_s,
            "storage_options": storage_options,
        }
        arguments = check_arguments(given, rules=rules_argument)
        url, found = url_text(path), arguments["rules"]
        options = with_staging(arguments["storage_options"], arguments["staging"])
        backend = open_nearest(url, options, arguments["deadline_s"])
        return Checkpoint(
            Location(url, backend, backend.options, found).index(),
            self._engine,
            verify=arguments["verify"],
            reopen=functools.partial(_reopen, url, options, verify=arguments["verify"], rules=found),
        )

    def latest(
        self,
        root: URL,
        *,
        allow_fresh: bool = False,
        staging: URL | None = None,
        deadline_s: float = DEFAULT_DEADLINE_S,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Checkpoint | None:
        """Open the newest valid checkpoint among the direct children of ``root``.

        A checkpoint is valid if its manifest can be decoded and every file exists with its full length; use
        ``Checkpoint.verify`` to check the bytes too. The newest one has the highest step: the step stored in it, or the
        number at the end of its name if none is stored. Children whose names end in a number are tried from the highest
        number down. Invalid checkpoints are skipped with a warning.

        Args:
            root: Local path or URL whose children are checkpoints.
            allow_fresh: Return None if saves were made below ``root`` but none of them is valid.
            staging: The ``staging`` of the saves. Copies of data files in this folder are read instead of those at
                ``root``, where they are undamaged; what the folder lacks is read there.
            deadline_s: Seconds that one request to the store may take.
            storage_options: Options for the storage backend.

        Returns:
            The checkpoint, or None if nothing was ever saved below ``root``.

        Raises:
            UsageError: ``root`` is a checkpoint itself, and not the folder above it.
            NoValidCheckpointError: Saves were made below ``root``, but none of them is valid.
            UnsupportedVersionError: A newer library saved the newest checkpoint.
            StorageError: A storage operation failed.

        Example:
            >>> newest = bcp.latest("runs/7b")
            >>> if newest is not None:
            ...     bcp.load(newest.url, state)
        """
        self._engine.check_usable()
        given = {
            "allow_fresh": allow_fresh,
            "staging": staging,
            "deadline_s": deadline_s,
            "storage_options": storage_options,
        }
        arguments = check_arguments(given)
        options = with_staging(arguments["storage_options"], arguments["staging"])
        found = find_newest(root, allow_fresh=allow_fresh, deadline_s=arguments["deadline_s"], storage_options=options)
        return None if found is None else self._opened(found, options)

    def watch(
        self,
        root: URL,
        *,
        poll_s: float = 10.0,
        timeout_s: float | None = None,
        stop: Callable[[], bool] = lambda: False,
        include_existing: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Iterator[Checkpoint]:
        """Iterate over checkpoints as they are committed below ``root``, for example to evaluate them.

        Takes no part in the saves: it needs no process group and no lease. Checkpoints that are found at the same time
        are returned in the order of their steps. One that is removed before it is found is not returned, and one that
        cannot be read is tried again.

        Args:
            root: Local path or URL whose children are checkpoints. It need not exist yet.
            poll_s: Seconds between two looks at ``root``.
            timeout_s: End when this many seconds have passed since the last checkpoint was returned and processed.
                None waits until ``stop`` returns True.
            stop: Called before every wait and after every checkpoint; returns True to end.
            include_existing: Begin with the checkpoints that are there already.
            storage_options: Options for the storage backend.

        Returns:
            An iterator of opened checkpoints.

        Raises:
            UsageError: An argument is invalid, or ``root`` is a checkpoint itself.
            UnsupportedVersionError: A newer library saved a checkpoint; raised by the iterator.
            StorageError: A storage operation failed; also raised by the iterator.

        Example:
            >>> for checkpoint in bcp.watch("runs/7b", timeout_s=3600):
            ...     evaluate(checkpoint)
        """
        self._engine.check_usable()
        return watch(
            url_text(root),
            lambda found: self._opened(found, storage_options),
            poll_s=poll_s,
            timeout_s=timeout_s,
            stop=stop,
            include_existing=include_existing,
            storage_options=storage_options,
        )

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

    def _opened(self, found: CompleteCheckpoint, storage_options: Mapping[str, Any] | None) -> Checkpoint:
        reopen = functools.partial(_reopen, found.backend.url, dict(storage_options or {}))
        return Checkpoint(Index(found.backend, found.manifest), self._engine, reopen=reopen)

    def _begin(
        self,
        kind: str,
        path: URL,
        make_state: Callable[[], Mapping[str, Any]],
        options: _Options,
        **arguments: Any,
    ) -> tuple[StorageBackend, Operation, Mapping[str, Any], _Options]:
        """Begin the operation before anything that may fail on a single rank: ranks match operations by counting."""
        op = self.operation(kind, options.deadline_s)
        try:
            with op.phase("check"):
                checked = options.checked()
                given = check_arguments(arguments)
                storage_options = with_staging(given["storage_options"], given.get("staging"))
                backend = open_nearest(path, storage_options, checked.deadline_s)
                op.set_description(f"{kind} of {backend.url}")
            with op.phase("state"):
                return backend, op, make_state(), checked
        except BaseException:
            op.close()
            raise

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
        try:
            deadline_s = ARGUMENTS["deadline_s"]("deadline_s", deadline_s)
        except UsageError:
            deadline_s = DEFAULT_DEADLINE_S  # the first step of the operation reports it, to all ranks
        ranks = self._communicator if self._communicator is not None else current_communicator(deadline_s=deadline_s)
        return ranks.operation(kind, deadline_s=deadline_s)


@functools.cache
def _checkpointer_of(pid: int) -> Checkpointer:
    # By process, because threads do not survive a fork: a forked child gets a new one.
    return Checkpointer()


def _reopen(
    url: str,
    storage_options: Mapping[str, Any],
    *,
    verify: bool = True,
    rules: Rules | None = None,
) -> Checkpoint:
    """Open a path in the process that unpickles a ``Checkpoint``, or that was forked from the one that opened it."""
    opener = default_checkpointer()
    return opener.open(url, verify=verify, rules=rules, storage_options=storage_options)


@functools.cache
def _trace_into(directory: str) -> None:
    atexit.register(TraceFiles(directory).close)


def default_checkpointer() -> Checkpointer:
    """Return the ``Checkpointer`` that the module-level functions share."""
    return _checkpointer_of(os.getpid())
