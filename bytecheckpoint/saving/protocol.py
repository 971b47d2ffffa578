"""The save protocol, from top to bottom.

    check      validate the arguments; rank 0 checks that the path can hold a checkpoint
    describe   adapters list the state's shards and plain values; no tensor is copied
    agree      all ranks compare path, step and sections, and find out whether an earlier plan is still valid
    plan       otherwise rank 0 deduplicates replicas, balances bytes and lays out files
    stage      copy this rank's share into the arena; after it the caller may change every tensor
    merge      (if ``layout`` requests whole tensors) fragments travel to one owner per tensor, which writes it
    write      write data files, hashed and durable; release the memory of each piece as soon as it is written
    confirm    rank 0 receives the checksums of every file
    commit     rank 0 writes the manifest with one atomic put: from here on the checkpoint exists
    clean      remove the files that only the overwritten manifest referred to

The first five steps run on the caller's thread, the others on the background thread. An asynchronous save returns after
``stage``; a synchronous save waits for the end and copies each piece just before it is written. A failure before
``commit`` leaves what was stored before, and every rank raises the same cause.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ..control.base import Operation
from ..runtime.gc_pause import paused
from ..storage_backends.base import StorageBackend
from .agreement import SaveShare
from .engine import SaveEngine
from .gating import pass_gates
from .handle import SaveHandle
from .options import SaveRequest
from .run import SaveRun
from .staging import CopyMode, StateCopy


def save(
    engine: SaveEngine,
    backend: StorageBackend,
    op: Operation,
    state: Mapping[str, Any],
    options: SaveRequest,
    *,
    is_async: bool,
) -> SaveHandle:
    """Save ``state`` and return the handle; a synchronous save has ended then.

    ``op`` is the operation in which all ranks make this save. It is closed when the save ends, successfully or not. A
    failure of any rank is raised here, or by the handle if the caller does not wait.
    """
    run = SaveRun(engine, backend, op, options, is_async=is_async)
    with run.failing_on_caller():
        run.step(run.check, state)
        with paused():
            local = run.step(run.describe, state)
            agreement = run.step(run.agree, local)
            share = run.step(run.plan, local, agreement)
        if not engine.is_background_thread:
            pass_gates(engine)
        copy = run.step(run.stage, state, local, share, partial(_complete, run, share))
        if copy.mode is not CopyMode.PIPELINED:
            run.queue(partial(_complete, run, share, copy))
        if not is_async:
            run.handle.result()
    return run.handle


def _complete(run: SaveRun, share: SaveShare, copy: StateCopy) -> None:
    """From staged bytes to a committed checkpoint, on the background thread. Raises nothing: the handle reports."""
    if not run.lifecycle.start():
        return
    try:
        run.wait_copied(copy)
        merged = [] if share.planned.merge is None else run.step(run.merge, share, copy, share.planned.merge)
        run.lifecycle.finish_merge()
        written = run.step(run.write, share, copy, merged)
        confirmed = run.step(run.commit.confirm, written)
        run.step(run.commit.commit, confirmed)
    except BaseException as error:  # noqa: BLE001 - the handle raises it
        if not run.is_committed_despite(error):
            run.fail(error)
            return
    run.commit.clean()
    run.succeed(written)
