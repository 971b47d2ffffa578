"""Simulated training jobs of 1T parameters: the local plans and the contents of their ranks.

A ``World`` creates the ``LocalPlan`` of any of its ranks, without tensors. Ranks are numbered as Megatron does: tensor
parallel ranks are neighbours, then data parallel ones, then pipeline stages.

* ``dense``: 128 layers of width 25,600; ``moe``: 64 layers of width 7,168 with 352 experts, every expert's three
  matrices being separate tensors. Both have tensor parallelism 8, pipeline parallelism 16, and data parallelism over
  the rest. Parameters are in bfloat16, replicated over the data parallel ranks. Master weights and moments are in
  float32, flattened for each tensor parallel rank of a stage and divided into equal ranges over its data parallel
  ranks, regardless of tensor boundaries (ZeRO-1). ``moe-ep`` has whole experts on 8 ranks instead of parts of all
  experts.
* ``megatron``: the experts as Megatron-core's grouped ones, with the rows of both SwiGLU halves in one matrix, of which
  a rank holds two boxes. Expert parallelism 8 is a part of the data parallelism, and every expert's matrices are split
  by tensor parallelism. The distributed optimizer divides each bucket of gradients over the data parallel ranks of its
  parameters.
* ``fsdp``: the dense model in float32 with moments, every tensor split along its first axis over all ranks; ``hsdp``:
  over 512 ranks, and replicated over the others.

Every rank has its own random number state, and values of its optimizer's groups for each parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from math import prod
from typing import Any

import numpy as np

from benchmarks.scale_megatron import MegatronCoreWorld, megatron_stages
from benchmarks.scale_world import (
    STAGES,
    STATES,
    TENSOR_PARALLEL,
    Param,
    Table,
    World,
    rows_of,
    stage_params,
    values_of,
)
from bytecheckpoint.planners.local_plan import OWN_BOXES, WHOLE, LocalPlan
from bytecheckpoint.tensors.dtypes import DTYPES
from bytecheckpoint.tensors.geometry import Box, decompose
from bytecheckpoint.tensors.mesh_layout import MeshLayout
from bytecheckpoint.tensors.metadata import BasicMeta
from bytecheckpoint.tensors.tables import TensorTable

__all__ = ["WORLDS", "make_world", "parameters"]

_HSDP = 512


Cell = tuple[Table, list[tuple[int, Box]], list[list[tuple[int, Box]]]]


class MegatronWorld(World):
    """Tensor, pipeline and data parallel, with ZeRO-1 over the data parallel ranks."""

    def __init__(self, kind: str, ranks: int) -> None:
        super().__init__(ranks)
        self._kind = kind
        self._data_parallel = ranks // (TENSOR_PARALLEL * STAGES)
        self._made: dict[tuple[int, int], Cell] = {}

    def place(self, rank: int) -> tuple[int, int, int]:
        """Return stage, data parallel rank and tensor parallel rank."""
        rest, tensor_rank = divmod(rank, TENSOR_PARALLEL)
        stage, data_rank = divmod(rest, self._data_parallel)
        return stage, data_rank, tensor_rank

    def plan(self, rank: int) -> LocalPlan:
        stage, data_rank, tensor_rank = self.place(rank)
        if (stage, tensor_rank) not in self._made:
            self._made[stage, tensor_rank] = self._cell(stage, tensor_rank)
        table, common, ranges = self._made[stage, tensor_rank]
        shards = rows_of(common, ranges[data_rank], len(table.tensors))
        return self._assemble(table, shards, [(tensor_rank,)] * len(table.layouts))

    def kind(self, rank: int) -> Hashable:
        stage, _, tensor_rank = self.place(rank)
        return stage, tensor_rank if self._kind == "moe-ep" else 0

    def _params(self, stage: int, tensor_rank: int) -> list[Param]:
        params = stage_params("moe" if self._kind == "moe-ep" else self._kind, stage)
        if self._kind != "moe-ep":
            return params
        own = [p for p in params if p.expert is None or p.expert % TENSOR_PARALLEL == tensor_rank]
        return [p if p.expert is None else Param(p.name, p.shape, None, p.expert) for p in own]

    def _cell(self, stage: int, tensor_rank: int) -> Cell:
        """Return the table, parameters, and data parallel ranges of one tensor parallel rank of a stage."""
        params = self._params(stage, tensor_rank)
        layouts = [MeshLayout((TENSOR_PARALLEL,), cuts) for cuts in (((0,), ()), ((), (0,)), ((0,),))]
        if not any(param.cut == 0 and len(param.shape) == 1 for param in params):
            layouts.pop()
        held, common = [], []
        for row, param in enumerate(params):
            box = tensor_parallel_part(param, tensor_rank)
            common.append((row, box))
            held.append(WHOLE if param.cut is None else 3 if len(param.shape) == 1 else 1 + param.cut)
        bf16, fp32 = DTYPES["bfloat16"], DTYPES["float32"]
        rows = [("model", p.name, BasicMeta(bf16, p.shape)) for p in params]
        rows += [("optimizer", f"state.{p.name}.{s}", BasicMeta(fp32, p.shape)) for p in params for s in STATES]
        held += [OWN_BOXES] * (3 * len(params))
        table = Table(
            TensorTable.build(rows), np.array(held, np.int64), layouts, values_of(params), np.zeros(len(rows), np.bool_)
        )
        return table, common, list(_ranges(common, self._data_parallel, len(params)))


def tensor_parallel_part(param: Param, tensor_rank: int) -> Box:
    whole = Box.whole(param.shape)
    if param.cut is None:
        return whole
    size = param.shape[param.cut] // TENSOR_PARALLEL
    offsets = tuple(tensor_rank * size if d == param.cut else 0 for d in range(whole.ndim))
    return Box(offsets, tuple(size if d == param.cut else n for d, n in enumerate(param.shape)))


def _ranges(local: list[tuple[int, Box]], pieces: int, first_row: int) -> Iterator[list[tuple[int, Box]]]:
    """Divide the concatenated local parts into equal ranges, for three states, and decompose these into boxes."""
    bounds = np.cumsum([0, *(box.numel for _, box in local)]).tolist()
    total, at = bounds[-1], 0
    for piece in range(pieces):
        low, high = total * piece // pieces, total * (piece + 1) // pieces
        held = []
        while at < len(local) and bounds[at] < high:
            start, stop = max(low, bounds[at]), min(high, bounds[at + 1])
            row, part = local[at]
            for box in decompose(start - bounds[at], stop - start, part.lengths):
                there = box.shift(part.offsets)
                held += [(first_row + 3 * row + state, there) for state in range(3)]
            if bounds[at + 1] > high:
                break
            at += 1
        yield sorted(held, key=lambda row: row[0])


class ShardedWorld(World):
    """Every tensor is split along its first axis over ``ways`` ranks, and replicated over the others."""

    def __init__(self, ways: int, ranks: int) -> None:
        super().__init__(ranks)
        self._ways = ways
        self._params = [p for stage in range(STAGES) for p in stage_params("dense", stage)]
        self._made: dict[Hashable, Table] = {}

    def kind(self, rank: int) -> Hashable:
        at = rank % self._ways
        return frozenset(n for n in {p.shape[0] for p in self._params} if at * -(-n // self._ways) >= n)

    def plan(self, rank: int) -> LocalPlan:
        replica, at = divmod(rank, self._ways)
        mesh = (self.ranks // self._ways, self._ways)
        empty = self.kind(rank)
        if empty not in self._made:
            self._made[empty] = self._table(mesh, empty)
        table = self._made[empty]
        common = []
        for row, (held, meta) in enumerate(zip(table.held.tolist(), table.metas)):
            if held == WHOLE:
                common.append((row, Box.whole(meta.shape)))
            elif held > WHOLE:
                size = -(-meta.shape[0] // self._ways)
                low, high = at * size, min(meta.shape[0], (at + 1) * size)
                rest = meta.shape[1:]
                common.append((row, Box((low, *(0 for _ in rest)), (high - low, *rest))))
        return self._assemble(table, rows_of(common, [], len(table.tensors)), [(replica, at)] * len(table.layouts))

    def _table(self, mesh: tuple[int, int], empty: Any) -> Table:
        fp32 = DTYPES["float32"]
        rows, held, compared = [], [], []
        layouts = [MeshLayout(mesh, ((1,), ())), MeshLayout(mesh, ((1,),))]
        for section, states in (("model", ("",)), ("optimizer", (*STATES[1:], "step"))):
            for p in self._params:
                for state in states:
                    name = f"state.{p.name}.{state}" if state else p.name
                    whole = state == "step"
                    rows.append((section, name, BasicMeta(fp32, () if whole else p.shape)))
                    held.append(WHOLE if whole else OWN_BOXES if p.shape[0] in empty else 3 - len(p.shape))
                    compared.append(whole)
        return Table(
            TensorTable.build(rows),
            np.array(held, np.int64),
            layouts,
            values_of(self._params),
            np.array(compared, np.bool_),
        )


WORLDS: dict[str, Callable[[int], World]] = {
    "dense": lambda ranks: MegatronWorld("dense", ranks),
    "moe": lambda ranks: MegatronWorld("moe", ranks),
    "moe-ep": lambda ranks: MegatronWorld("moe-ep", ranks),
    "megatron": lambda ranks: MegatronCoreWorld(megatron_stages(), ranks),
    "fsdp": lambda ranks: ShardedWorld(ranks, ranks),
    "hsdp": lambda ranks: ShardedWorld(min(_HSDP, ranks), ranks),
}


def make_world(name: str, ranks: int) -> World:
    """Create the job of this name on so many ranks."""
    return WORLDS[name](ranks)


def parameters(name: str) -> int:
    """Return the number of parameters of the model."""
    kind = "moe" if name.startswith(("moe", "megatron")) else "dense"
    return sum(prod(p.shape) for stage in range(STAGES) for p in stage_params(kind, stage))
