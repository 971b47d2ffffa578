"""The public surface: ``save``, ``load``, ``open``, ``latest`` and ``warmup``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .checkpoint import Checkpoint
from .checkpointer import DEADLINE_S, URL, default_checkpointer
from .handle import SaveHandle
from .loading import LoadReport
from .matching import Cast, Strictness
from .planners import Layout
from .save_options import WhenBusy

__all__ = ["latest", "load", "open", "save", "warmup"]


def save(
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
    deadline_s: float = DEADLINE_S,
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
    deadline_s: float = DEADLINE_S,
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

    A folder of safetensors files that others wrote (a ``model.safetensors``, an index, or one file), or one such file,
    is opened too: its tensors are the section ``model``, and are not checked. Raises a ``CheckpointError`` that tells
    nothing there, something else there, and something broken apart.
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
