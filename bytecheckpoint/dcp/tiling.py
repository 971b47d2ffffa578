"""Check, before anything is written, that the plans of all ranks make whole tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch.distributed.checkpoint.planner import SavePlan

from ..errors import PlanError
from ..planners import plan_columns
from ..tensors.geometry import Box
from ..tensors.metadata import BasicMeta
from ..tensors.shards import basic_meta
from ..tensors.tables import BoxTable, TensorTable

__all__ = ["check_tiling"]


def check_tiling(plans: Sequence[SavePlan]) -> int:
    """Check that the boxes of all ranks tile their tensors; return the bytes of all boxes.

    Raises:
        PlanError: Boxes overlap, leave a hole or exceed their tensor, or ranks describe a tensor differently.
        UnsupportedTensorError: A tensor has a dtype that cannot be stored.
    """
    metas: dict[str, BasicMeta] = {}
    boxes: list[tuple[str, Box, int]] = []
    for rank, plan in enumerate(plans):
        for item in plan.items:
            if item.tensor_data is None:
                continue
            fqn, data = item.index.fqn, item.tensor_data
            meta = basic_meta(data.properties.dtype, data.size)
            if metas.setdefault(fqn, meta) != meta:
                raise PlanError(f"{fqn}: rank {rank} has parts of {meta}, another rank parts of {metas[fqn]}")
            boxes.append((fqn, Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes)), rank))
    names = sorted(metas)
    rows = {name: row for row, name in enumerate(names)}
    tensors = TensorTable.build([("", name, metas[name]) for name in names])
    tensors.names = names
    table = BoxTable.build([(rows[fqn], box) for fqn, box, _ in boxes])
    rank_of = np.array([rank for *_, rank in boxes], np.int64)
    planned = plan_columns(tensors, table, rank_of, np.arange(len(boxes)), world_size=len(plans))
    if int((planned.shards.numel() > 0).sum()) != int((table.numel() > 0).sum()):
        raise PlanError(
            "several ranks would write the same part of a tensor, because the planner has not removed replicas; let "
            "create_global_plan do so, as DefaultSavePlanner does"
        )
    return int(table.nbytes(tensors).sum())
