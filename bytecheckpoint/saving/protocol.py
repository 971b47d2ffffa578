"""The save protocol, from top to bottom.

    check      validate the arguments; rank 0 checks that the path can hold a checkpoint
    describe   adapters list the state's shards and plain values; no tensor is copied
    agree      all ranks compare path, step and sections, and find out whether an earlier plan is still valid
    plan       otherwise rank 0 deduplicates replicas and balances bytes; each rank lays out its files
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

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..control.base import Operation
from ..engine.staging.device_copy_out import block_preparation
from ..engine.staging.pieces import split_images
from ..frameworks.sections import check_state
from ..runtime.arguments import check_arguments
from ..runtime.gc_pause import paused
from ..storage_backends.base import StorageBackend
from .agreement import NewPlan, SaveShare, agree
from .engine import SaveEngine
from .gating import pass_gates
from .handle import SaveHandle
from .local_state import describe_state
from .options import SaveRequest
from .planning import plan_save
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
            share, copy = run.step(run.plan, local, run.step(run.agree, local))
            del local  # the collector would visit each of its objects at once
        if not engine.is_background_thread:
            pass_gates(engine)
        complete = partial(_complete, run, share, copy)
        run.step(run.stage, state, copy, complete)
        if copy.mode is not CopyMode.PIPELINED:
            run.queue(complete)
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


def warm_up(
    engine: SaveEngine,
    op: Operation,
    state: Mapping[str, Any],
    make_request: Callable[[], SaveRequest],
    slots: int,
    *,
    wait: bool,
) -> None:
    """Do before training what the first save would otherwise do, and later saves would not.

    Plan a save of ``state``, cache the plan, fault in the staging memory of ``slots`` asynchronous saves within the
    memory budget (in the background if not ``wait``), and start the threads. Closes ``op``.
    """
    try:
        with op.phase("check"):
            engine.check_usable()
            check_state(state)
            options = make_request()
            slots = check_arguments({"slots": slots})["slots"]
        with op.phase("describe"):
            local = describe_state(op, state, options, seed="")
        with op.phase("agree"):
            agreement = agree(op, engine.plans, local, options.shared_arguments("", local.section_names))
        with op.phase("plan"):
            if isinstance(agreement, NewPlan):
                agreement = plan_save(op, engine.plans, local, agreement)
        with op.phase("stage"):
            planned = agreement.planned
            shards = local.shards(planned.order)
            images = local.images(planned.files, planned.assignment, shards, agreement.attempt)
            pieces = split_images(images, engine.arena.block_size)
            nbytes = 0 if planned.merge is None else planned.merge.staged_nbytes
            blocks = -(-nbytes // engine.arena.block_size) + (pieces[-1].block + 1 if pieces else 0)
            engine.start_threads()
            engine.arena.make_room(blocks)
            threads = engine.io_threads if wait else 0
            tasks = engine.grow_arena(slots * blocks, block_preparation(images), threads=threads)
            for task in tasks if wait else ():
                task.result()
    finally:
        op.close()
