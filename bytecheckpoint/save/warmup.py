"""Warm-up: do before training what the first save would otherwise do and later saves would not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..control.base import Operation
from ..engine.resources import IOEngine
from ..engine.staging.device_copy_out import cuda_devices, pin
from ..engine.staging.pieces import split_images
from ..errors import UsageError
from ..frameworks.sections import check_state
from .agreement import NewPlan, SaveShare, agree
from .local_state import describe_state
from .options import SaveOptions
from .planning import plan_save

__all__ = ["warm_up"]


def warm_up(engine: IOEngine, op: Operation, state: Mapping[str, Any], options: SaveOptions, slots: int) -> None:
    """Plan a save of ``state``, cache the plan, fault in the staging memory of ``slots`` asynchronous saves within the
    memory budget, and start the threads. Closes ``op``."""
    try:
        with op.phase("check"):
            engine.check_usable()
            check_state(state)
            options.check()
            if type(slots) is not int or slots < 0:
                raise UsageError(f"slots must be a number of saves, not {slots!r}")
        with op.phase("describe"):
            local = describe_state(op, state, options)
        with op.phase("agree"):
            agreement = agree(op, engine.plans, local, options.shared_arguments("", local.section_names))
        with op.phase("plan"):
            share = agreement
            if isinstance(agreement, NewPlan):
                share = plan_save(op, engine.plans, local, agreement)
            assert isinstance(share, SaveShare)  # no rank asks to skip a warm-up
        with op.phase("stage"):
            planned = share.planned
            shards = local.shards(planned.order)
            images = local.images(planned.files, planned.assignment, shards, share.attempt)
            pieces = split_images(images, engine.arena.block_size)
            nbytes = 0 if planned.merge is None else planned.merge.staged_nbytes
            blocks = engine.arena.blocks_for(nbytes) + (pieces[-1].block + 1 if pieces else 0)
            engine.start_threads()
            engine.arena.make_room(blocks)
            engine.arena.prefault(slots * blocks, engine.io, pin if cuda_devices(images) else None)
    finally:
        op.close()
