"""All that a save does once and not again: done before the first one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .control.base import Operation
from .describing import describe_state
from .engine.resources import Engine
from .engine.staging.device_copy_out import cuda_devices, pin
from .engine.staging.pieces import cut
from .errors import StateError
from .save_options import SaveOptions
from .save_planning import agree, settle
from .sections import check_state

__all__ = ["warm_up"]


def warm_up(engine: Engine, op: Operation, state: Mapping[str, Any], options: SaveOptions, slots: int) -> None:
    """Plan a save of ``state`` and keep the plan, fault in the staging memory of ``slots`` asynchronous saves of it (as
    far as the budget goes), and start the threads. ``op`` is closed when this returns or raises."""
    try:
        with op.phase("check"):
            engine.check_usable()
            check_state(state)
            options.check()
            if type(slots) is not int or slots < 0:
                raise StateError(f"slots must be a number of saves, not {slots!r}")
        with op.phase("describe"):
            local = describe_state(op, state, options)
        with op.phase("agree"):
            agreed = agree(op, engine.plans, local, options.facts("", local.section_names))
        with op.phase("plan"):
            settled = settle(op, engine.plans, local, agreed)
        with op.phase("stage"):
            images = local.images(settled.files, settled.assignment, settled.attempt)
            pieces = cut(images, engine.arena.block_size)
            nbytes = 0 if settled.merge is None else settled.merge.staged_nbytes
            blocks = engine.arena.blocks_for(nbytes) + (pieces[-1].block + 1 if pieces else 0)
            engine.start_threads()
            engine.arena.make_room(blocks)
            engine.arena.prefault(slots * blocks, engine.io, pin if cuda_devices(images) else None)
    finally:
        op.close()
