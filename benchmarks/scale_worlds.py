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
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import groupby, product
from math import prod
from typing import Any

import numpy as np

from bytecheckpoint.format.values import encode_path, encode_value, value_digest
from bytecheckpoint.planners import OWN_BOXES, WHOLE, ContentDigests, LocalPlan, ValueEntry, stack_digests
from bytecheckpoint.tensors.dtypes import DTYPES
from bytecheckpoint.tensors.geometry import Box, decompose
from bytecheckpoint.tensors.mesh_layout import MeshLayout
from bytecheckpoint.tensors.metadata import BasicMeta
from bytecheckpoint.tensors.tables import BoxTable, TensorTable

__all__ = ["GROUP", "STEP", "WORLDS", "World", "make_world", "parameters"]

TENSOR_PARALLEL, STAGES, HSDP, EXPERT_PARALLEL = 8, 16, 512, 8
_BUCKET = 40_000_000  # elements; Megatron-core's default
_WIDTH, _INNER, _EXPERTS = 7_168, 2_048, 352  # of the model with experts
_STATES = ("master", "exp_avg", "exp_avg_sq")
_RNG = BasicMeta(DTYPES["uint8"], (5056,))
GROUP = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
"""The values of each parameter's group."""

STEP = np.float32(12_000).tobytes()
"""The content of every step counter."""


@dataclass(frozen=True)
class Param:
    """``cut`` is the axis that tensor parallelism splits, or None for a replica; ``expert`` is the expert's number."""

    name: str
    shape: tuple[int, ...]
    cut: int | None
    expert: int | None = None


def _attention(prefix: str, width: int) -> Iterator[Param]:
    yield Param(f"{prefix}.input_layernorm.weight", (width,), None)
    yield Param(f"{prefix}.self_attention.linear_qkv.weight", (3 * width, width), 0)
    yield Param(f"{prefix}.self_attention.linear_proj.weight", (width, width), 1)
    yield Param(f"{prefix}.pre_mlp_layernorm.weight", (width,), None)


def _dense_layer(prefix: str) -> Iterator[Param]:
    width = 25_600
    yield from _attention(prefix, width)
    yield Param(f"{prefix}.self_attention.linear_qkv.bias", (3 * width,), 0)
    yield Param(f"{prefix}.self_attention.linear_proj.bias", (width,), None)
    yield Param(f"{prefix}.mlp.linear_fc1.weight", (4 * width, width), 0)
    yield Param(f"{prefix}.mlp.linear_fc1.bias", (4 * width,), 0)
    yield Param(f"{prefix}.mlp.linear_fc2.weight", (width, 4 * width), 1)
    yield Param(f"{prefix}.mlp.linear_fc2.bias", (width,), None)


def _moe_layer(prefix: str) -> Iterator[Param]:
    width, inner, experts = _WIDTH, _INNER, _EXPERTS
    yield from _attention(prefix, width)
    yield Param(f"{prefix}.mlp.router.weight", (experts, width), None)
    for expert in range(experts):
        name = f"{prefix}.mlp.experts.{expert}"
        yield Param(f"{name}.gate_proj.weight", (inner, width), 0, expert)
        yield Param(f"{name}.up_proj.weight", (inner, width), 0, expert)
        yield Param(f"{name}.down_proj.weight", (width, inner), 1, expert)


@cache
def _stage_params(kind: str, stage: int) -> list[Param]:
    layers, width, layer = (128, 25_600, _dense_layer) if kind == "dense" else (64, 7_168, _moe_layer)
    each = layers // STAGES
    params = [p for number in range(stage * each, (stage + 1) * each) for p in layer(f"decoder.layers.{number}")]
    if stage == 0:
        params.insert(0, Param("embedding.word_embeddings.weight", (131_072, width), 0))
    if stage == STAGES - 1:
        params += [
            Param("decoder.final_layernorm.weight", (width,), None),
            Param("output_layer.weight", (131_072, width), 0),
        ]
    return params


class World:
    """The plans of all ranks, which share as much as possible."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def plan(self, rank: int) -> LocalPlan:
        """Return the local plan of ``rank``."""
        raise NotImplementedError

    def kind(self, rank: int) -> Hashable:
        """Return the kind of a rank. Ranks of the same kind have equal tables and contents."""
        raise NotImplementedError

    def contents(self, rank: int) -> ContentDigests:
        """Return the content of ``rank`` that ranks compare."""
        plan = self.plan(rank)
        digests = [value.digest for value in plan.values if not value.per_rank]
        return stack_digests([*digests, *([STEP] * int(plan.table().compared.sum()))])

    def _assemble(
        self,
        rank: int,
        table: _Table,
        shards: BoxTable,
        coordinates: list[tuple[int, ...]],
    ) -> LocalPlan:
        """Build a rank's plan: its table, with its random number state as the last tensor."""
        names = [*table.tensors.names, f"rng.cpu@{rank}"]
        old = table.tensors
        tensors = TensorTable(
            names,
            [*old.sections, "rng"],
            np.append(old.section, len(old.sections)),
            np.append(old.dtype, _RNG.dtype.code),
            np.append(old.ndim, 1),
            np.append(old.shape, _RNG.shape[0]),
        )
        scope = np.full(len(names), -1, np.int64)
        scope[-1] = rank
        values = [*table.values, ValueEntry("rng", encode_path(("python",)), b"", 2500, True)]
        return LocalPlan(
            tensors,
            shards,
            values,
            scope,
            [],
            [("model", "module"), ("optimizer", "optimizer"), ("rng", "stateful")],
            np.zeros(len(names), np.bool_),
            np.append(table.held, WHOLE),
            table.layouts,
            coordinates,
            np.append(table.compared, False),
        )


@dataclass(frozen=True, eq=False)
class _Table:
    """What ranks of the same kind share."""

    tensors: TensorTable
    held: np.ndarray
    layouts: list[MeshLayout]
    values: list[ValueEntry]
    compared: np.ndarray

    @cached_property
    def metas(self) -> list[BasicMeta]:
        return [self.tensors.meta_of(row) for row in range(len(self.tensors))]


def _values(params: list[Param]) -> list[ValueEntry]:
    """Return hyper-parameters of every parameter, and some numbers of the whole job."""
    group, number = encode_value(GROUP, "group"), encode_value(7, "number")
    entries = [
        ValueEntry("optimizer", encode_path(("param_groups", p.name)), value_digest(group), len(group)) for p in params
    ]
    return entries + [
        ValueEntry("optimizer", encode_path(("job", n)), value_digest(number), len(number)) for n in range(16)
    ]


def _rows(common: list[tuple[int, Box]], own: list[tuple[int, Box]], rng_row: int) -> BoxTable:
    whole = Box.whole(_RNG.shape)
    return BoxTable.build([*common, (rng_row, whole), *own])


_Cell = tuple[_Table, list[tuple[int, Box]], list[list[tuple[int, Box]]]]


class MegatronWorld(World):
    """Tensor, pipeline and data parallel, with ZeRO-1 over the data parallel ranks."""

    def __init__(self, kind: str, ranks: int) -> None:
        super().__init__(ranks)
        self._kind = kind
        self._data_parallel = ranks // (TENSOR_PARALLEL * STAGES)
        self._made: dict[tuple[int, int], _Cell] = {}

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
        shards = _rows(common, ranges[data_rank], len(table.tensors))
        return self._assemble(rank, table, shards, [(tensor_rank,)] * len(table.layouts))

    def kind(self, rank: int) -> Hashable:
        stage, _, tensor_rank = self.place(rank)
        return stage, tensor_rank if self._kind == "moe-ep" else 0

    def _params(self, stage: int, tensor_rank: int) -> list[Param]:
        params = _stage_params("moe" if self._kind == "moe-ep" else self._kind, stage)
        if self._kind != "moe-ep":
            return params
        own = [p for p in params if p.expert is None or p.expert % TENSOR_PARALLEL == tensor_rank]
        return [p if p.expert is None else Param(p.name, p.shape, None, p.expert) for p in own]

    def _cell(self, stage: int, tensor_rank: int) -> _Cell:
        """Return the table, parameters, and data parallel ranges of one tensor parallel rank of a stage."""
        params = self._params(stage, tensor_rank)
        layouts = [MeshLayout((TENSOR_PARALLEL,), cuts) for cuts in (((0,), ()), ((), (0,)), ((0,),))]
        if not any(param.cut == 0 and len(param.shape) == 1 for param in params):
            layouts.pop()
        held, common = [], []
        for row, param in enumerate(params):
            box = _tensor_parallel_part(param, tensor_rank)
            common.append((row, box))
            held.append(WHOLE if param.cut is None else 3 if len(param.shape) == 1 else 1 + param.cut)
        bf16, fp32 = DTYPES["bfloat16"], DTYPES["float32"]
        rows = [("model", p.name, BasicMeta(bf16, p.shape)) for p in params]
        rows += [("optimizer", f"state.{p.name}.{s}", BasicMeta(fp32, p.shape)) for p in params for s in _STATES]
        held += [OWN_BOXES] * (3 * len(params))
        table = _Table(
            TensorTable.build(rows), np.array(held, np.int64), layouts, _values(params), np.zeros(len(rows), np.bool_)
        )
        return table, common, list(_ranges(common, self._data_parallel, len(params)))


def _tensor_parallel_part(param: Param, tensor_rank: int) -> Box:
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


class GroupedExpertsWorld(World):
    """Megatron-core's experts, SwiGLU and distributed optimizer."""

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self._data_parallel = ranks // (TENSOR_PARALLEL * STAGES)
        if self._data_parallel % EXPERT_PARALLEL:
            raise ValueError(f"needs a multiple of {TENSOR_PARALLEL * STAGES * EXPERT_PARALLEL} ranks, not {ranks}")
        self._made: dict[tuple[int, int, int], _Cell] = {}

    def _place(self, rank: int) -> tuple[int, int, int]:
        """Return stage, data parallel rank and tensor parallel rank."""
        rest, tensor_rank = divmod(rank, TENSOR_PARALLEL)
        return (*divmod(rest, self._data_parallel), tensor_rank)

    def kind(self, rank: int) -> Hashable:
        stage, data_rank, _ = self._place(rank)
        return stage, data_rank % EXPERT_PARALLEL

    def plan(self, rank: int) -> LocalPlan:
        stage, data_rank, tensor_rank = self._place(rank)
        cell = stage, data_rank % EXPERT_PARALLEL, tensor_rank
        if cell not in self._made:
            self._made[cell] = self._cell(*cell)
        table, common, ranges = self._made[cell]
        shards = _rows(common, ranges[data_rank // EXPERT_PARALLEL], len(table.tensors))
        return self._assemble(rank, table, shards, [(tensor_rank,)] * len(table.layouts))

    def _cell(self, stage: int, expert_rank: int, tensor_rank: int) -> _Cell:
        params = [p for p in _stage_params("moe", stage) if p.expert is None]
        names = [p.name.removesuffix(".mlp.router.weight") for p in params if "router" in p.name]
        for name, expert in product(names, range(expert_rank, _EXPERTS, EXPERT_PARALLEL)):
            params.append(Param(f"{name}.mlp.experts.linear_fc1.weight{expert}", (2 * _INNER, _WIDTH), 0, expert))
            params.append(Param(f"{name}.mlp.experts.linear_fc2.weight{expert}", (_WIDTH, _INNER), 1, expert))
        layouts = [MeshLayout((TENSOR_PARALLEL,), ((0,), ())), MeshLayout((TENSOR_PARALLEL,), ((), (0,)))]
        held: list[int] = []
        common: list[tuple[int, Box]] = []
        halves: list[tuple[int, Box]] = []
        dense: list[tuple[int, Box]] = []
        experts: list[tuple[int, Box]] = []
        for row, param in enumerate(params):
            part = _tensor_parallel_part(param, tensor_rank)
            boxes = [part]
            if "linear_fc1" in param.name:
                size = _INNER // TENSOR_PARALLEL
                boxes = [Box((half * _INNER + tensor_rank * size, 0), (size, _WIDTH)) for half in range(2)]
            held.append(OWN_BOXES if len(boxes) > 1 else WHOLE if param.cut is None else 1 + param.cut)
            (common if len(boxes) == 1 else halves).extend((row, box) for box in boxes)
            (dense if param.expert is None else experts).extend((row, box) for box in boxes)
        bf16, fp32 = DTYPES["bfloat16"], DTYPES["float32"]
        rows = [("model", p.name, BasicMeta(bf16, p.shape)) for p in params]
        rows += [("optimizer", f"state.{p.name}.{s}", BasicMeta(fp32, p.shape)) for p in params for s in _STATES]
        held += [OWN_BOXES] * (3 * len(params))
        table = _Table(
            TensorTable.build(rows), np.array(held, np.int64), layouts, _values(params), np.zeros(len(rows), np.bool_)
        )
        return table, common, [halves + share for share in self._shares(dense, experts, expert_rank, len(params))]

    def _shares(
        self, dense: list[tuple[int, Box]], experts: list[tuple[int, Box]], expert_rank: int, first_row: int
    ) -> list[list[tuple[int, Box]]]:
        """Return the optimizer's boxes of each rank of the experts' data parallelism."""
        pieces = self._data_parallel // EXPERT_PARALLEL
        shares: list[list[tuple[int, Box]]] = [[] for _ in range(pieces)]
        for bucket in _buckets(experts):
            for share, held in zip(shares, _ranges(bucket, pieces, first_row)):
                share += held
        for bucket in _buckets(dense):
            for data_rank, held in enumerate(_ranges(bucket, self._data_parallel, first_row)):
                if data_rank % EXPERT_PARALLEL == expert_rank:
                    shares[data_rank // EXPERT_PARALLEL] += held
        return [sorted(share, key=lambda row: row[0]) for share in shares]


def _buckets(local: list[tuple[int, Box]]) -> Iterator[list[tuple[int, Box]]]:
    """Divide parameters into buckets, the last one first, as their gradients become ready."""
    bucket: list[tuple[int, Box]] = []
    size = 0
    for _, boxes in groupby(reversed(local), key=lambda one: one[0]):
        held = list(boxes)[::-1]
        bucket += held
        size += sum(box.numel for _, box in held)
        if size >= _BUCKET:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


class ShardedWorld(World):
    """Every tensor is split along its first axis over ``ways`` ranks, and replicated over the others."""

    def __init__(self, ways: int, ranks: int) -> None:
        super().__init__(ranks)
        self._ways = ways
        self._params = [p for stage in range(STAGES) for p in _stage_params("dense", stage)]
        self._made: dict[Hashable, _Table] = {}

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
        return self._assemble(rank, table, _rows(common, [], len(table.tensors)), [(replica, at)] * len(table.layouts))

    def _table(self, mesh: tuple[int, int], empty: Any) -> _Table:
        fp32 = DTYPES["float32"]
        rows, held, compared = [], [], []
        layouts = [MeshLayout(mesh, ((1,), ())), MeshLayout(mesh, ((1,),))]
        for section, states in (("model", ("",)), ("optimizer", (*_STATES[1:], "step"))):
            for p in self._params:
                for state in states:
                    name = f"state.{p.name}.{state}" if state else p.name
                    whole = state == "step"
                    rows.append((section, name, BasicMeta(fp32, () if whole else p.shape)))
                    held.append(WHOLE if whole else OWN_BOXES if p.shape[0] in empty else 3 - len(p.shape))
                    compared.append(whole)
        return _Table(
            TensorTable.build(rows),
            np.array(held, np.int64),
            layouts,
            _values(self._params),
            np.array(compared, np.bool_),
        )


WORLDS: dict[str, Callable[[int], World]] = {
    "dense": lambda ranks: MegatronWorld("dense", ranks),
    "moe": lambda ranks: MegatronWorld("moe", ranks),
    "moe-ep": lambda ranks: MegatronWorld("moe-ep", ranks),
    "megatron": GroupedExpertsWorld,
    "fsdp": lambda ranks: ShardedWorld(ranks, ranks),
    "hsdp": lambda ranks: ShardedWorld(min(HSDP, ranks), ranks),
}


def make_world(name: str, ranks: int) -> World:
    """Create the job of this name on so many ranks."""
    return WORLDS[name](ranks)


def parameters(name: str) -> int:
    """Return the number of parameters of the model."""
    kind = "moe" if name.startswith(("moe", "megatron")) else "dense"
    return sum(prod(p.shape) for stage in range(STAGES) for p in _stage_params(kind, stage))
