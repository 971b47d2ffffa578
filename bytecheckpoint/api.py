"""The public surface: ``save``, ``load``, ``open``, ``latest``, and the ``Checkpointer`` behind them."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Union

import torch

from .checkpoint import Checkpoint
from .control import current_communicator
from .control.base import Communicator, Operation
from .engine.checksums import CHUNK_SIZE
from .engine.resources import Engine
from .errors import CheckpointError
from .handle import SaveHandle
from .loading import LoadOptions, LoadReport
from .loading import load as run_load
from .matching import Cast, Rules, Strictness
from .saving import SaveOptions
from .saving import save as run_save
from .storage_backends import StorageBackend, join, open_backend

__all__ = ["Checkpointer", "latest", "load", "open", "save"]

URL = Union[str, "os.PathLike[str]"]

_DEADLINE_S = 600.0
_NUMBER_AT_END = re.compile(r"(\d+)$")

_log = logging.getLogger(__name__)


class Checkpointer:
    """Saves and loads with resources of its own: staging memory, threads, and a line to the other ranks.

    The functions of this module share one; make your own to give it a memory budget or ranks of its own. Saves of one
    checkpointer are committed in the order in which they were begun. Use it from one thread at a time.
    """

    def __init__(self, *, memory_budget: int | None = None, communicator: Communicator | None = None) -> None:
        """``memory_budget`` bounds the bytes of staging memory of this process (None: as the states need)."""
        self._engine = Engine(memory_budget=memory_budget)
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
        chunk_size: int = CHUNK_SIZE,
        storage_options: Mapping[str, Any] | None = None,
    ) -> SaveHandle:
        """See ``bytecheckpoint.save``."""
        options = SaveOptions(framework, step, dict(metadata or {}), allow_pickle, deadline_s, chunk_size)
        backend, op = self._begin("save", path, storage_options, deadline_s)
        return run_save(self._engine, backend, op, state, options, background=async_save)

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
        deadline_s: float = _DEADLINE_S,
        storage_options: Mapping[str, Any] | None = None,
    ) -> LoadReport:
        """See ``bytecheckpoint.load``."""
        rules = Rules(include, exclude, rename, strict, cast)
        place = None if device is None else torch.device(device)
        options = LoadOptions(framework, rules, per_rank, allow_pickle, verify, place, deadline_s)
        backend, op = self._begin("load", path, storage_options, deadline_s)
        return run_load(self._engine, backend, op, state, options)

    def open(self, path: URL, *, verify: bool = True, storage_options: Mapping[str, Any] | None = None) -> Checkpoint:
        """See ``bytecheckpoint.open``."""
        self._engine.check_usable()
        return Checkpoint.open(open_backend(path, **dict(storage_options or {})), self._engine, verify=verify)

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
        ranks = self._communicator if self._communicator is not None else current_communicator(deadline_s=deadline_s)
        op = ranks.operation(kind, deadline_s=deadline_s)
        try:
            with op.phase("check"):
                return open_backend(path, **dict(storage_options or {})), op
        except BaseException:
            op.close()
            raise

    @property
    def _pid(self) -> int:
        return self._engine.pid


_shared: Checkpointer | None = None


def _default() -> Checkpointer:
    """The process's own checkpointer. Threads do not survive a fork, so a child gets a new one."""
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
    chunk_size: int = CHUNK_SIZE,
    storage_options: Mapping[str, Any] | None = None,
) -> SaveHandle:
    """Save ``state`` as one checkpoint at ``path``. Call it on every rank with the same arguments.

    ``path`` is a local path or a URL of any fsspec filesystem. ``state`` maps section names to modules, optimizers,
    objects with ``state_dict`` and ``load_state_dict``, or trees of tensors and plain values. The checkpoint appears
    all at once when everything is durable; until then, whatever was at ``path`` stays, and a failure leaves it so.

    A synchronous save returns when the checkpoint is committed, or raises. With ``async_save`` it returns as soon as
    the state is copied, so that training may go on; ``handle.result()`` waits for the commit and raises what went
    wrong. What is stored is the state at the moment of the call.

    What several ranks hold alike is written once. Parameters and optimizer state are taken to be alike where their
    layout says so, and any one rank writes them. Buffers of modules may have drifted apart: all come from the lowest
    rank that has them. Tensors and values of trees are compared; where they differ, each rank's own is stored.

    ``framework`` forces an adapter. ``step`` and ``metadata`` (plain values) are stored for readers.
    ``allow_pickle`` stores values that are not plain as pickles, which ``load`` then refuses unless asked too.
    ``deadline_s`` bounds each single wait for another rank; ``chunk_size`` is the number of bytes under one checksum.

    Raises ``StateError`` for a state that cannot be stored, ``DisagreementError`` where ranks called with different
    arguments, ``StorageError`` for I/O, ``RankFailedError`` with the same cause on every rank where one rank failed.
    """
    return _default().save(
        path,
        state,
        framework=framework,
        async_save=async_save,
        step=step,
        metadata=metadata,
        allow_pickle=allow_pickle,
        deadline_s=deadline_s,
        chunk_size=chunk_size,
        storage_options=storage_options,
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

    Where reading fails half-way, on whichever rank, tensors may hold loaded values already, while plain values and
    newly made optimizer state are as before: load again, or start afresh, before going on.

    Raises ``CheckpointNotFoundError``, ``NotACheckpointError``, ``UnsupportedVersionError``, ``FormatError``,
    ``CorruptionError`` (naming file, tensor and range), ``MismatchError``, ``StorageError``, ``ControlError``.
    """
    return _default().load(
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
        deadline_s=deadline_s,
        storage_options=storage_options,
    )


def open(  # named like the builtin on purpose: bcp.open(path)
    path: URL, *, verify: bool = True, storage_options: Mapping[str, Any] | None = None
) -> Checkpoint:
    """A read-only handle on the checkpoint at ``path``; needs no process group and no model.

    Raises a ``CheckpointError`` that tells nothing there, something else there, and something broken apart.
    """
    return _default().open(path, verify=verify, storage_options=storage_options)


def latest(root: URL, *, storage_options: Mapping[str, Any] | None = None) -> Checkpoint | None:
    """The committed checkpoint of the highest step among the direct children of ``root``; None if there is none.

    Children whose names end in a number are tried from the highest number down, until one opens. A checkpoint's step
    is the one stored with it, else the number in its name. A child whose manifest does not decode is passed over with
    a warning; so is what was never committed.
    """
    backend = open_backend(root, **dict(storage_options or {}))
    children = [name.rstrip("/") for name in backend.list_children("") if name.endswith("/")]
    found: list[tuple[int, str, Checkpoint]] = []
    number_found = False
    for name in sorted(children, key=_number_in, reverse=True):
        number = _number_in(name)
        if number >= 0 and number_found:
            continue
        checkpoint = _opened(backend.url, name, storage_options)
        if checkpoint is not None:
            number_found = True
            found.append((number if checkpoint.step is None else checkpoint.step, name, checkpoint))
    return max(found, key=lambda entry: entry[:2])[2] if found else None


def _opened(root: str, name: str, storage_options: Mapping[str, Any] | None) -> Checkpoint | None:
    try:
        return open(join(root, name), storage_options=storage_options)
    except CheckpointError as error:
        _log.warning("passed over: %s", error)
        return None


def _number_in(name: str) -> int:
    number = _NUMBER_AT_END.search(name)
    return int(number[1]) if number else -1
