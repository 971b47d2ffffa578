"""``Checkpointer``: the object behind the public functions, and the ``Session`` that its saves and loads share."""

from __future__ import annotations

import atexit
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

from .checkpoint.checkpoint import Checkpoint
from .checkpoint.discovery import CompleteCheckpoint, find_newest
from .checkpoint.index import Index
from .checkpoint.location import AnyLocation, Location
from .checkpoint.nearest import open_nearest
from .checkpoint.renaming import Rename
from .checkpoint.selection import Selection
from .checkpoint.sweep import FilesGoneError
from .checkpoint.watch import watch
from .control.base import Communicator, Operation
from .control.communicator import current_communicator
from .errors import BytecheckpointError, RankFailedError, UsageError
from .foreign.opening import CheckpointSource
from .loading.app_state import LoadPart, first_part, keep_late_part
from .loading.options import Cast, LoadOptions, LoadRequest, Strictness
from .loading.protocol import load
from .loading.report import LoadReport
from .rules import Rules
from .runtime import DEFAULT_DEADLINE_S
from .runtime.arguments import ARGUMENTS, check_arguments, deadline_of
from .saving.engine import DEFAULT_MERGE_MEMORY_BYTES, SaveEngine
from .saving.gating import pass_gates
from .saving.handle import FailedSaves, SaveHandle
from .saving.options import SaveOptions, SaveRequest
from .saving.protocol import save, warm_up
from .telemetry.trace_files import TraceFiles

_log = logging.getLogger(__name__)
TRACE_VARIABLE = "BYTECHECKPOINT_TRACE"
"""Environment variable that names the directory into which every rank writes a trace of its saves and loads."""


class Session:
    """Threads, staging memory, plans, and the ranks that save and load together.

    Requests are made inside of an operation of all ranks: a rank whose arguments are invalid fails the others, too.

    Attributes:
        engine: Threads and memory.
        failures: Saves that failed, and whose outcome no one asked for.
    """

    def __init__(self, engine: SaveEngine, communicator: Communicator | None) -> None:
        if directory := os.environ.get(TRACE_VARIABLE):
            _trace_into(directory)
        self.engine, self.failures = engine, FailedSaves()
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

        def save_once() -> SaveHandle:
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

        with self.engine.track_call():
            try:
                return save_once()
            except BytecheckpointError as error:
                cause = error.error_type if isinstance(error, RankFailedError) else type(error).__name__
                if is_async or cause != FilesGoneError.__name__:
                    raise
                _log.warning("saving again: %s", error)
            return save_once()

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
        """Fill ``state``; of an ``AppState``, the sections that are not late."""
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
                part = first_part(state, request)
            report = load(self.engine, contents, op, part.sections, part.request)
        keep_late_part(state, request, self._load_part)
        return report

    def _load_part(self, part: LoadPart) -> LoadReport:
        return self.load(lambda: part.request, part.sections, deadline_s=part.request.deadline_s)

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

    def opened(self, found: CompleteCheckpoint, root: Location) -> Checkpoint:
        """Return a handle on a checkpoint that was found below ``root``."""
        reopen = functools.partial(_reopen, root.join(found.name))
        return Checkpoint(Index(found.backend, found.manifest), self.engine, reopen=reopen)

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
            merge_memory: Limit of the additional memory of the merge stage (``SaveOptions.layout``), in bytes; at least
                32 MiB.
            communicator: The ranks that save and load together. None uses those of the default process group, or a
                single process if there is none.

        Raises:
            UsageError: A limit is too small.
        """
        engine = SaveEngine(memory_budget=memory_budget, slots=slots, merge_memory=merge_memory)
        self._session = Session(engine, communicator)

    def save(
        self,
        path: AnyLocation,
        state: Mapping[str, Any],
        *,
        step: int | None = None,
        async_save: bool = False,
        metadata: Mapping[str, Any] | None = None,
        include: Sequence[str] = ("*",),
        exclude: Sequence[str] = (),
        options: SaveOptions | Mapping[str, Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> SaveHandle:
        """Save ``state`` as one checkpoint at ``path``. Call it on every rank with the same arguments.

        The checkpoint appears atomically once all data is durable. Until then, and after a failure, whatever was at
        ``path`` before is still there.

        The state at the moment of the call is stored. A synchronous save returns when the checkpoint is committed. An
        asynchronous save returns as soon as the state is copied to host memory, and a background thread writes and
        commits it. CUDA tensors are copied on internal streams, and the caller's current streams wait for these copies:
        kernels launched after the call may change the tensors, and the host thread does not block.

        A value that several ranks hold is written once. ``SaveOptions.replicas`` states how parameters and optimizer
        state are compared before that. Module buffers may have diverged between ranks, so those of the lowest rank are
        stored. Tensors and values in trees are compared; if they differ, the value of each rank is stored.

        Args:
            path: Local path, URL of any fsspec filesystem, or ``Location``.
            state: Maps section names to modules, optimizers, objects with ``state_dict`` and ``load_state_dict``, or
                trees of tensors and plain values. A list of modules or optimizers stands for pipeline stages.
            step: Training step to store with the checkpoint.
            async_save: Return before the checkpoint is written.
            metadata: Plain values to store with the checkpoint.
            include: Shell patterns of what to store: full names (``"model.lora_*"``) or sections (``"model"``). All
                ranks pass the same patterns; one that matches nothing on any rank is an error. A tied tensor is stored
                under those of its names that are selected. The checkpoint lists what was left out, and a load reports
                it in ``LoadReport.left_out`` instead of as missing, unless it is called with ``strict="exact"``.
            exclude: Shell patterns of what not to store; applied after ``include``, with the same rules.
            options: How to save: ``SaveOptions``, or a mapping of its fields.
            storage_options: Options for the storage backend of a path, such as credentials or ``endpoint_url``. A
                ``Location`` has its own.

        Returns:
            A handle, already done if ``async_save`` is False. Its ``result`` raises what fails after the copy.

        Raises:
            UsageError: An argument is invalid.
            StateError: The state cannot be saved. Subclasses: ``UnknownObjectError``, ``UnserializableError``,
                ``NameCollisionError``, ``UnsupportedTensorError``, ``ReplicaMismatchError`` (ranks hold different
                copies of what must be one tensor).
            DisagreementError: The ranks passed different arguments.
            StorageError: A storage operation failed, for example because the disk is full.
            RankFailedError: One rank failed; all ranks raise the same cause.
            DeadlineError: A wait exceeded ``SaveOptions.deadline_s``.
            CommitUnknownError: The checkpoint may or may not exist. After any other error it does not; see
                ``BytecheckpointError.may_have_committed``.

        Example:
            >>> state = {"model": model, "optimizer": optimizer, "extra_state": {"step": step}}
            >>> handle = bcp.save(f"runs/7b/step-{step}", state, step=step, async_save=True)
            >>> train_step()
            >>> handle.result()
        """

        def make_request() -> SaveRequest:
            check_arguments({"async_save": async_save})
            return SaveRequest.of(
                options,
                location=Location.of(path, storage_options),
                step=step,
                metadata=metadata,
                selection=Selection(include, exclude),
            )

        return self._session.save(
            make_request, lambda: state, is_async=bool(async_save), deadline_s=deadline_of(options)
        )

    def warmup(
        self,
        state: Mapping[str, Any],
        *,
        slots: int = 2,
        include: Sequence[str] = ("*",),
        exclude: Sequence[str] = (),
        options: SaveOptions | Mapping[str, Any] | None = None,
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
            state: The state of the saves to come.
            slots: Number of asynchronous saves to allocate staging memory for, limited by the memory budget of the
                ``Checkpointer``. Use 0 if you only save synchronously.
            include: Patterns of the saves to come.
            exclude: Patterns of the saves to come.
            options: The options of the saves to come.
            wait: Return when the memory is faulted in. False lets background threads fault it in; a save that begins
                earlier uses what is ready. ``CheckpointManager.resume`` does this for one slot.

        Raises:
            UsageError: An argument is invalid.
            StateError: The state cannot be saved.
            ControlError: The ranks passed different arguments, one of them failed, or a wait exceeded its deadline.

        Example:
            >>> bcp.warmup({"model": model, "optimizer": optimizer})
        """

        def make_request() -> SaveRequest:
            return SaveRequest.of(options, selection=Selection(include, exclude))

        self._session.warm_up(make_request, state, slots=slots, wait=wait, deadline_s=deadline_of(options))

    def load(
        self,
        path: AnyLocation | Checkpoint,
        state: Mapping[str, Any],
        *,
        strict: bool | Strictness | Mapping[str, bool | Strictness] = True,
        include: Sequence[str] = ("*",),
        exclude: Sequence[str] = (),
        rename: Rename | None = None,
        cast: Cast = "widen",
        options: LoadOptions | Mapping[str, Any] | None = None,
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
            path: Local path, URL of any fsspec filesystem, ``Location``, or a ``Checkpoint`` that every rank has
                opened.
            state: Maps section names to objects, as in ``save``. Tensors on the meta device get memory.
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
            rename: Mapping from stored full names to those of ``state``, or a function that maps one to the other. A
                key that ends in a dot is the beginning of names: ``{"ema.module.": "model."}`` loads averaged weights
                into the model. What comes from another section takes the place of what has the name already. A key or
                a function that matches nothing stored is an error. Optimizer state follows its parameter.
            cast: Which dtype conversions are allowed. "exact": none. "widen": those that keep every value. "any": also
                those that round.
            options: How to read: ``LoadOptions``, or a mapping of its fields.
            storage_options: Options for the storage backend of a path, such as credentials or ``endpoint_url``. A
                ``Location`` has its own.

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

        def make_request() -> LoadRequest:
            if isinstance(path, Checkpoint) and storage_options:
                raise UsageError("storage_options do not apply to an open Checkpoint")
            return LoadRequest.of(
                options,
                source=path if isinstance(path, Checkpoint) else Location.of(path, storage_options),
                strict=strict,
                selection=Selection(include, exclude),
                rename=rename,
                cast=cast,
            )

        return self._session.load(make_request, state, deadline_s=deadline_of(options))

    def open(
        self,
        path: AnyLocation,
        *,
        rename: Rename | None = None,
        options: LoadOptions | Mapping[str, Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Checkpoint:
        """Open the checkpoint at ``path`` for reading. Needs no process group and no model.

        Also opens safetensors files that other libraries wrote: one file, or a folder with ``model.safetensors`` or an
        index. Their tensors form the section ``model``. They have no checksums and are not verified.

        Args:
            path: Local path, URL of any fsspec filesystem, or ``Location``.
            rename: From stored full names to those that the handle has, as in ``load``.
            options: How to read: ``LoadOptions``, or a mapping of its fields.
            storage_options: Options for the storage backend of a path, such as credentials or ``endpoint_url``. A
                ``Location`` has its own.

        Returns:
            A mapping from full tensor names to tensors, which are read when they are indexed or loaded.

        Raises:
            RuleError: The rules do not explain what is stored; lists everything that is wrong.
            MismatchError: ``rename`` matches nothing that is stored.
            NameCollisionError: ``rename`` maps two names to one.
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
        request = LoadRequest.of(options, source=Location.of(path, storage_options), rename=rename)
        found = self._session.open(
            request.location, verify=request.verify, rules=request.rules, deadline_s=request.deadline_s
        )
        return found if rename is None else found.renamed(rename)

    def latest(
        self,
        root: AnyLocation,
        *,
        allow_fresh: bool = False,
        deadline_s: float = DEFAULT_DEADLINE_S,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Checkpoint | None:
        """Open the newest valid checkpoint among the direct children of ``root``.

        A checkpoint is valid if its manifest can be decoded and every file exists with its full length; use
        ``Checkpoint.verify`` to check the bytes too. The newest one has the highest step: the step stored in it, or the
        number at the end of its name if none is stored; those that a rollback has abandoned do not count
        (``docs/newest.md``). Invalid checkpoints are skipped with a warning.

        Args:
            root: Local path, URL or ``Location`` whose children are checkpoints.
            allow_fresh: Return None if saves were made below ``root`` but none of them is valid.
            deadline_s: Seconds that one request to the store may take.
            storage_options: Options for the storage backend of a path, such as credentials or ``endpoint_url``. A
                ``Location`` has its own.

        Returns:
            The checkpoint, or None if nothing was ever saved below ``root``.

        Raises:
            UsageError: ``root`` is a checkpoint itself, and not the folder above it.
            NoValidCheckpointError: Saves were made below ``root``, but none of them is valid; or another system made
                them.
            UnsupportedVersionError: A newer library saved the newest checkpoint.
            StorageError: A storage operation failed.

        Example:
            >>> newest = bcp.latest("runs/7b")
            >>> if newest is not None:
            ...     bcp.load(newest, state)
        """
        checked = check_arguments({"allow_fresh": allow_fresh, "deadline_s": deadline_s})
        session, location = self._session, Location.of(root, storage_options)
        session.engine.check_usable()
        found = find_newest(location, **checked)
        return None if found is None else session.opened(found, location)

    def watch(
        self,
        root: AnyLocation,
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
            root: Local path, URL or ``Location`` whose children are checkpoints. It need not exist yet.
            poll_s: Seconds between two looks at ``root``.
            timeout_s: End when this many seconds have passed since the last checkpoint was returned and processed.
                None waits until ``stop`` returns True.
            stop: Called before every wait and after every checkpoint; returns True to end.
            include_existing: Begin with the checkpoints that are there already.
            storage_options: Options for the storage backend of a path, such as credentials or ``endpoint_url``. A
                ``Location`` has its own.

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
        session, location = self._session, Location.of(root, storage_options)
        session.engine.check_usable()
        return watch(
            location,
            lambda found: session.opened(found, location),
            poll_s=poll_s,
            timeout_s=timeout_s,
            stop=stop,
            include_existing=include_existing,
        )

    def close(self) -> None:
        """Finish the saves in flight and release threads and memory.

        The checkpointer cannot be used afterwards.

        Raises:
            BytecheckpointError: The failure of an asynchronous save, after everything is released: unless its handle
                was asked for the outcome, or a later save to the same folder is committed.
        """
        pass_gates(self._session.engine)
        self._session.engine.close()
        self._session.failures.raise_for()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with suppress(Exception) if error is not None else nullcontext():  # which is the one to raise
            self.close()


def default_checkpointer() -> Checkpointer:
    """Return the ``Checkpointer`` that the module-level functions share."""
    return _checkpointer_of(os.getpid())


@functools.cache
def _checkpointer_of(pid: int) -> Checkpointer:
    # By process, because threads do not survive a fork: a forked child gets a new one.
    return Checkpointer()


def session_of(checkpointer: Checkpointer | None = None) -> Session:
    """Return the session of a checkpointer; without one, that of the module-level functions."""
    return (checkpointer or default_checkpointer())._session


@contextmanager
def _closing_on_failure(op: Operation) -> Iterator[None]:
    try:
        yield
    except BaseException:
        op.close()
        raise


def _source(location: Location, deadline_s: float, rules: Rules | None) -> CheckpointSource:
    return CheckpointSource(location, open_nearest(location, deadline_s), rules)


def _reopen(location: Location, *, verify: bool = True, rules: Rules | None = None) -> Checkpoint:
    """Open a path in the process that unpickles a ``Checkpoint``, or that was forked from the one that opened it."""
    return session_of().open(location, verify=verify, rules=rules)


@functools.cache
def _trace_into(directory: str) -> None:
    atexit.register(TraceFiles(directory).close)
