"""Warm-up: do before training what the first save would otherwise do and later saves would not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..control.base import Operation
from ..engine.staging.device_copy_out import block_preparation
from ..engine.staging.pieces import split_images
from ..frameworks.sections import check_state
from ..runtime.arguments import check_arguments
from .agreement import NewPlan, agree
from .engine import SaveEngine
from .local_state import describe_state
from .options import SaveRequest
from .planning import plan_save


def warm_up(
    engine: SaveEngine,
    op: Operation,
    state: Mapping[str, Any],
    make_request: Callable[[], SaveRequest],
    slots: int,
    *,
    wait: bool,
) -> None:
    """Plan a save of ``state``, cache the plan, fault in the staging memory of ``slots`` asynchronous saves within the
    memory budget (in the background if not ``wait``), and start the threads. Closes ``op``."""
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
            blocks = engine.arena.blocks_for(nbytes) + (pieces[-1].block + 1 if pieces else 0)
            engine.start_threads()
            engine.arena.make_room(blocks)
            threads = engine.io_threads if wait else 0
            tasks = engine.grow_arena(slots * blocks, block_preparation(images), threads=threads)
            for task in tasks if wait else ():
                task.result()
    finally:
        op.close()
