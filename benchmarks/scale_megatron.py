"""Simulated ranks of Megatron-core with a distributed optimizer: what ``frameworks/megatron`` finds on each.

Tensor parallel ranks are neighbours, then data parallel ones, then pipeline stages. Expert parallelism is a part of the
data parallelism. A gradient buffer has the parameters of a rank in reverse order, at multiples of 64 elements; another
one has those of its experts. Every bucket of a buffer is divided into equal ranges over the data parallel ranks (for
experts: those with the same experts), and a rank steps only the parameters in its ranges.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from math import lcm

import numpy as np

from benchmarks.scale_world import (
    EXPERTS,
    INNER,
    MOE_LAYERS,
    STAGES,
    STATES,
    TENSOR_PARALLEL,
    WIDTH,
    Param,
    Table,
    World,
    attention,
    plain_value,
    rows_of,
    stage_params,
)
from bytecheckpoint.planners.local_plan import OWN_BOXES, WHOLE, LocalPlan
from bytecheckpoint.tensors.dtypes import DTYPES
from bytecheckpoint.tensors.geometry import Box, decompose
from bytecheckpoint.tensors.mesh_layout import MeshLayout
from bytecheckpoint.tensors.metadata import BasicMeta
from bytecheckpoint.tensors.tables import TensorTable

__all__ = ["MegatronCoreWorld", "megatron_stages"]

_BUCKET = 40_000_000  # elements; the default, on the first pipeline stage only
_ALIGNED = 64

Ranges = list[tuple[int, int, int]]
"""Number of a parameter, and the elements of its local memory that a rank steps, as start and stop."""


def megatron_stages() -> list[list[Param]]:
    """Return the parameters of each stage of ``moe``, as Megatron-core has them, in the order of its modules."""
    each = MOE_LAYERS // STAGES
    stages = []
    for stage in range(STAGES):
        params = []
        for number in range(stage * each, (stage + 1) * each):
            prefix = f"decoder.layers.{number}"
            params += [*attention(prefix, WIDTH), Param(f"{prefix}.mlp.router.weight", (EXPERTS, WIDTH), None)]
            for expert in range(EXPERTS):
                name = f"{prefix}.mlp.experts.experts.{expert}"
                params.append(Param(f"{name}.linear_fc1.weight", (2 * INNER, WIDTH), 0, expert, halves=True))
                params.append(Param(f"{name}.linear_fc2.weight", (WIDTH, INNER), 1, expert))
        rest = [p for p in stage_params("moe", stage) if not p.name.startswith("decoder.layers.")]
        first = [p for p in rest if p.name.startswith("embedding")]
        stages.append(first + params + [p for p in rest if p not in first])
    return stages


@dataclass(frozen=True)
class _Local:
    """The boxes that a rank holds of a parameter, in the order of its memory."""

    row: int
    boxes: tuple[Box, ...]

    @property
    def numel(self) -> int:
        return sum(box.numel for box in self.boxes)

    def part(self, start: int, stop: int) -> Iterator[Box]:
        """What is in ``[start, stop)`` of the memory."""
        for box in self.boxes:
            low, high = max(start, 0), min(stop, box.numel)
            if low < high:
                for piece in decompose(low, high - low, box.lengths):
                    yield piece.shift(box.offsets)
            start, stop = start - box.numel, stop - box.numel


class MegatronCoreWorld(World):
    """Tensor, pipeline and expert parallel, SwiGLU, and the distributed optimizer over the data parallel ranks."""

    def __init__(
        self,
        stages: Sequence[Sequence[Param]],
        ranks: int,
        *,
        tensor_parallel: int = TENSOR_PARALLEL,
        expert_parallel: int = 8,
        bucket: int | None = _BUCKET,
    ) -> None:
        super().__init__(ranks)
        self._stages, self._tensor_parallel, self._expert_parallel = stages, tensor_parallel, expert_parallel
        self._bucket = bucket
        self._data_parallel, rest = divmod(ranks, tensor_parallel * len(stages))
        if rest or self._data_parallel % expert_parallel:
            raise ValueError(
                f"needs a multiple of {tensor_parallel * len(stages) * expert_parallel} ranks, not {ranks}"
            )
        self._tables: dict[tuple[int, int], tuple[Table, Ranges]] = {}
        self._ranges: dict[tuple[int, int], list[Ranges]] = {}
        self._plans: dict[int, LocalPlan] = {}

    def _place(self, rank: int) -> tuple[int, int, int]:
        """Return stage, data parallel rank and tensor parallel rank."""
        rest, tensor_rank = divmod(rank, self._tensor_parallel)
        return (*divmod(rest, self._data_parallel), tensor_rank)

    def kind(self, rank: int) -> Hashable:
        return self._place(rank)[:2]

    def plan(self, rank: int) -> LocalPlan:
        if rank not in self._plans:
            self._plans[rank] = self._plan(rank)
        return self._plans[rank]

    def _plan(self, rank: int) -> LocalPlan:
        stage, data_rank, tensor_rank = self._place(rank)
        if (stage, data_rank) not in self._tables:
            self._tables[stage, data_rank] = self._table(stage, data_rank)
        table, ranges = self._tables[stage, data_rank]
        params = self._params(stage, data_rank)
        local = [self._local(row, param, tensor_rank) for row, param in enumerate(params)]
        common: list[tuple[int, Box]] = []
        own: list[tuple[int, Box]] = []
        for one in local:
            (own if table.held[one.row] == OWN_BOXES else common).extend((one.row, box) for box in one.boxes)
        row = len(params)
        for number, start, stop in ranges:
            boxes = list(local[number].part(start, stop))
            own += [(row + state, box) for state in range(len(STATES)) for box in boxes]
            common.append((row + len(STATES), Box((), ())))
            row += len(STATES) + 1
        shards = rows_of(common, own, len(table.tensors))
        return self._assemble(table, shards, [(tensor_rank,)] * len(table.layouts))

    def _params(self, stage: int, data_rank: int) -> list[Param]:
        """The parameters of which the rank holds something."""
        expert_rank, each = data_rank % self._expert_parallel, self._expert_parallel
        experts = 1 + max((p.expert for p in self._stages[stage] if p.expert is not None), default=0)
        share = experts // each
        low, high = expert_rank * share, (expert_rank + 1) * share
        return [p for p in self._stages[stage] if p.expert is None or low <= p.expert < high]

    def _local(self, row: int, param: Param, tensor_rank: int) -> _Local:
        if param.cut is None:
            return _Local(row, (Box.whole(param.shape),))
        blocks, axis = 1 + param.halves, param.cut
        size = param.shape[axis] // blocks // self._tensor_parallel
        boxes = []
        for block in range(blocks):
            offset = block * (param.shape[axis] // blocks) + tensor_rank * size
            offsets = tuple(offset if d == axis else 0 for d in range(len(param.shape)))
            boxes.append(Box(offsets, tuple(size if d == axis else n for d, n in enumerate(param.shape))))
        return _Local(row, tuple(boxes))

    # ------------------------------------------------------------------------------------------------- the optimizer

    def _table(self, stage: int, data_rank: int) -> tuple[Table, Ranges]:
        params = self._params(stage, data_rank)
        layouts: dict[MeshLayout, int] = {}
        held = [self._held(param, layouts) for param in params]
        key = stage, data_rank % self._expert_parallel
        if key not in self._ranges:
            self._ranges[key] = self._divided(stage, params)
        every = self._data_parallel // self._expert_parallel
        dense = [one for one in self._ranges[key][data_rank] if params[one[0]].expert is None]
        experts = self._ranges[key][self._data_parallel + data_rank // self._expert_parallel % every]
        ranges = sorted(dense + experts)
        bf16, fp32 = DTYPES["bfloat16"], DTYPES["float32"]
        rows = [("model", p.name, BasicMeta(bf16, p.shape)) for p in params]
        for number, _, _ in ranges:
            param = params[number]
            rows += [("optimizer", f"state.{param.name}.{s}", BasicMeta(fp32, param.shape)) for s in STATES]
            rows.append(("optimizer", f"state.{param.name}.step", BasicMeta(fp32, ())))
            held += [OWN_BOXES] * len(STATES) + [WHOLE]
        compared = np.zeros(len(rows), np.bool_)
        compared[len(params) + len(STATES) :: len(STATES) + 1] = True
        names = [params[number].name for number, _, _ in ranges]
        values = [plain_value(kind, name) for name in names for kind in ("param_groups", "class")]
        values.append(plain_value("masters_of"))
        return Table(TensorTable.build(rows), np.array(held, np.int64), list(layouts), values, compared), ranges

    def _held(self, param: Param, layouts: dict[MeshLayout, int]) -> int:
        if param.cut is None:
            return WHOLE
        cuts = tuple((0,) if axis == param.cut else () for axis in range(len(param.shape)))
        blocks = tuple(2 if cut else 1 for cut in cuts) if param.halves else ()
        return layouts.setdefault(MeshLayout((self._tensor_parallel,), cuts, blocks), len(layouts) + 1)

    def _divided(self, stage: int, params: Sequence[Param]) -> list[Ranges]:
        """Return the ranges of each data parallel rank, then those of each rank of the experts' data parallelism."""
        found: list[Ranges] = []
        for is_expert, pieces in ((False, self._data_parallel), (True, self._data_parallel // self._expert_parallel)):
            local = [
                (number, self._local(number, param, 0).numel)
                for number, param in enumerate(params)
                if (param.expert is not None) == is_expert
            ]
            shares: list[Ranges] = [[] for _ in range(pieces)]
            for bucket, size in _buckets(local, pieces, self._bucket if stage == 0 else None):
                for share in range(pieces):
                    low, high = size * share // pieces, size * (share + 1) // pieces
                    for number, begin, end in bucket:
                        if begin < high and end > low:
                            shares[share].append((number, max(low - begin, 0), min(high, end) - begin))
            found += shares
        return found


def _buckets(
    local: Sequence[tuple[int, int]], pieces: int, limit: int | None
) -> Iterator[tuple[list[tuple[int, int, int]], int]]:
    """Yield parameters with their elements in a bucket, and the padded size of the bucket."""
    unit = lcm(pieces, 128)
    bucket: list[tuple[int, int, int]] = []
    at = 0
    for number, numel in reversed(local):
        begin = -(-at // _ALIGNED) * _ALIGNED
        at = begin + numel
        bucket.append((number, begin, at))
        if limit is not None and at >= limit:
            yield bucket, -(-at // unit) * unit
            bucket, at = [], 0
    if bucket:
        yield bucket, -(-at // unit) * unit
