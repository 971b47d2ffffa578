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

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

from ..control.base import Operation
from ..engine.resources import IOEngine
from ..runtime.gc_pause import paused
from ..storage_backends.base import StorageBackend
from .agreement import SaveShare, SkipSave, agree
from .companions import StoredModel, find_models
from .gating import pass_gates
from .handle import SaveHandle
from .local_state import describe_state
from .options import SaveOptions
from .planning import plan_save
from .run import SaveRun
from .staging import CopyMode, StateCopy, would_wait
from .writing import merge_tensors, write_files

__all__ = ["save"]

_log = logging.getLogger(__name__)


def save(
    engine: IOEngine,
    backend: StorageBackend,
    op: Operation,
    state: Mapping[str, Any],
    options: SaveOptions,
    *,
    is_async: bool,
) -> SaveHandle:
    """Save ``state`` and return the handle; a synchronous save has ended then.

    ``op`` is the operation in which all ranks make this save. It is closed when the save ends, successfully or not. A
    failure of any rank is raised here, or by the handle if the caller does not wait.
    """
    run = SaveRun(engine, backend, op, options, is_async=is_async)
    with run.failing_on_caller():
        with run.step("check"):
            run.check(state)
        with paused():
            with run.step("describe"):
                local = describe_state(op, state, options, seed=run.handle.url)
            with run.step("agree"):
                arguments = options.shared_arguments(run.handle.url, local.section_names)
                is_busy = is_async and options.when_busy == "skip" and would_wait(engine, engine.plans, local)
                agreement = agree(op, engine.plans, local, arguments, is_busy=is_busy, job=options.job)
                if isinstance(agreement, SaveShare):
                    run.begin_attempt(agreement)  # other ranks continue, even if this one fails before its next step
            if isinstance(agreement, SkipSave):
                return run.skip()
            with run.step("plan"):
                if isinstance(agreement, SaveShare):
                    share = agreement
                else:
                    share = plan_save(op, engine.plans, local, agreement, job=options.job)
                    run.begin_attempt(share)
                if options.base is not None:
                    run.find_base(share)
                run.check_space(share)
        if not engine.is_background_thread:
            pass_gates(engine)
        with run.step("stage"):
            copy = run.prepare_copy(local, share)
            models = find_models(state) if op.rank == 0 and options.layout == "whole" else []
            models = [model for model in models if options.stores_all_of(model.section)]
            complete = partial(_complete, run, share, copy, models)
            with copy.reserved():
                if copy.mode is CopyMode.PIPELINED:
                    run.queue(complete)  # writing begins before the copy ends, and releases memory for the rest
                    if copy.waits_for_merge:
                        run.lifecycle.wait_merged()
                copy.copy(state)
        if copy.mode is not CopyMode.PIPELINED:
            run.queue(complete)
        if not is_async:
            run.handle.result()
    return run.handle


def _complete(run: SaveRun, share: SaveShare, copy: StateCopy, models: list[StoredModel]) -> None:
    """From staged bytes to a committed checkpoint, on the background thread. Raises nothing: the handle reports."""
    if not run.lifecycle.start():
        return
    commit = run.commit
    try:
        with run.op.phase("stage"):
            copy.wait_copied()
        merged = []
        if (work := share.planned.merge) is not None:
            with run.step("merge"):
                merged = merge_tensors(run, share, copy, work)
        run.lifecycle.finish_merge()
        with run.step("write"):
            written = write_files(run, share, copy, merged, models)
        with run.step("confirm"):
            confirmed = commit.confirm(written)
        with run.step("commit"):
            commit.commit(confirmed)
    except BaseException as error:  # noqa: BLE001 - the handle raises it
        if not commit.exists_despite(error):
            run.fail(error)
            return
        _log.warning("%s is committed, although this rank met an error: %s", run.backend.display_url, error)
    commit.clean()
    run.succeed(written)
