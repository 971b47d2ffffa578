"""What the simulated training jobs of ``scale_worlds`` have in common: parameters, tables, and ranks of one kind.

A ``World`` creates the ``LocalPlan`` of any of its ranks, without tensors.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from bytecheckpoint.format.values.encoding import encode_value
from bytecheckpoint.format.values.files import decode_path, encode_path, value_digest
from bytecheckpoint.planners.contents import ContentDigests, stack_digests
from bytecheckpoint.planners.local_plan import WHOLE, LocalPlan, PlanTable, ValueKey, ValueNames
from bytecheckpoint.tensors.dtypes import DTYPES
from bytecheckpoint.tensors.geometry import Box
from bytecheckpoint.tensors.mesh_layout import MeshLayout
from bytecheckpoint.tensors.metadata import BasicMeta
from bytecheckpoint.tensors.tables import BoxTable, TensorTable

__all__ = [
    "EXPERTS",
    "INNER",
    "MOE_LAYERS",
    "PLAIN",
    "STAGES",
    "STATES",
    "STEP",
    "TENSOR_PARALLEL",
    "WIDTH",
    "Param",
    "Table",
    "World",
    "attention",
    "plain_value",
    "rows_of",
    "stage_params",
    "values_of",
]

TENSOR_PARALLEL, STAGES = 8, 16
MOE_LAYERS, WIDTH, INNER, EXPERTS = 64, 7_168, 2_048, 352
"""The model with experts."""

STATES = ("master", "exp_avg", "exp_avg_sq")
RNG = BasicMeta(DTYPES["uint8"], (5056,))
PLAIN = {
    "param_groups": {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
    "class": ["apex.optimizers.fused_adam.FusedAdam"],
    "masters_of": "model",
    "job": 7,
}
"""Plain values of an optimizer by the first part of their path. Each parameter has the first two."""

STEP = np.float32(12_000).tobytes()
"""The content of every step counter."""


@dataclass(frozen=True)
class Param:
    """``cut`` is the axis that tensor parallelism splits (``halves``: each half separately), or None for a replica."""

    name: str
    shape: tuple[int, ...]
    cut: int | None
    expert: int | None = None
    halves: bool = False


def attention(prefix: str, width: int) -> Iterator[Param]:
    yield Param(f"{prefix}.input_layernorm.weight", (width,), None)
    yield Param(f"{prefix}.self_attention.linear_qkv.weight", (3 * width, width), 0)
    yield Param(f"{prefix}.self_attention.linear_proj.weight", (width, width), 1)
    yield Param(f"{prefix}.pre_mlp_layernorm.weight", (width,), None)


def _dense_layer(prefix: str) -> Iterator[Param]:
    width = 25_600
    yield from attention(prefix, width)
    yield Param(f"{prefix}.self_attention.linear_qkv.bias", (3 * width,), 0)
    yield Param(f"{prefix}.self_attention.linear_proj.bias", (width,), None)
    yield Param(f"{prefix}.mlp.linear_fc1.weight", (4 * width, width), 0)
    yield Param(f"{prefix}.mlp.linear_fc1.bias", (4 * width,), 0)
    yield Param(f"{prefix}.mlp.linear_fc2.weight", (width, 4 * width), 1)
    yield Param(f"{prefix}.mlp.linear_fc2.bias", (width,), None)


def _moe_layer(prefix: str) -> Iterator[Param]:
    width, inner, experts = WIDTH, INNER, EXPERTS
    yield from attention(prefix, width)
    yield Param(f"{prefix}.mlp.router.weight", (experts, width), None)
    for expert in range(experts):
        name = f"{prefix}.mlp.experts.{expert}"
        yield Param(f"{name}.gate_proj.weight", (inner, width), 0, expert)
        yield Param(f"{name}.up_proj.weight", (inner, width), 0, expert)
        yield Param(f"{name}.down_proj.weight", (width, inner), 1, expert)


@cache
def stage_params(kind: str, stage: int) -> list[Param]:
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
        items = self.plan(rank).table.compared_items()
        return stack_digests(
            [STEP if isinstance(item, str) else _plain_digest(str(decode_path(item[1])[0])) for item in items]
        )

    def _assemble(
        self,
        table: Table,
        shards: BoxTable,
        coordinates: list[tuple[int, ...]],
    ) -> LocalPlan:
        """Build a rank's plan: its table, with its random number state as the last tensor."""
        names = [*table.tensors.names, "rng.cpu"]
        old = table.tensors
        tensors = TensorTable(
            names,
            [*old.sections, "rng"],
            np.append(old.section, len(old.sections)),
            np.append(old.dtype, RNG.dtype.code),
            np.append(old.ndim, 1),
            np.append(old.shape, RNG.shape[0]),
        )
        none = np.zeros(len(names), np.bool_)
        values = [*table.values, ("rng", encode_path(("python",)))]
        return LocalPlan(
            PlanTable(
                tensors,
                np.append(none[1:], True),
                none,
                np.append(table.compared, False),
                none,
                np.append(table.held, WHOLE),
                table.layouts,
                ValueNames(
                    [section for section, _ in values],
                    [path for _, path in values],
                    np.append(np.zeros(len(table.values), np.bool_), True),
                ),
                [],
                [("model", "module"), ("optimizer", "optimizer"), ("rng", "stateful")],
            ),
            shards,
            coordinates,
        )


@dataclass(frozen=True, eq=False)
class Table:
    """What ranks of the same kind share."""

    tensors: TensorTable
    held: np.ndarray
    layouts: list[MeshLayout]
    values: list[ValueKey]
    compared: np.ndarray

    @cached_property
    def metas(self) -> list[BasicMeta]:
        return [self.tensors.meta_of(row) for row in range(len(self.tensors))]


def plain_value(*path: str | int) -> ValueKey:
    """Return the key of the optimizer's value at a path."""
    return "optimizer", encode_path(path)


@cache
def _plain_digest(name: str) -> bytes:
    return value_digest(encode_value(PLAIN[name], name))


def values_of(params: list[Param]) -> list[ValueKey]:
    """Return the keys of hyper-parameters of every parameter, and of some numbers of the whole job."""
    return [plain_value("param_groups", p.name) for p in params] + [plain_value("job", n) for n in range(16)]


def rows_of(common: list[tuple[int, Box]], own: list[tuple[int, Box]], rng_row: int) -> BoxTable:
    whole = Box.whole(RNG.shape)
    return BoxTable.build([*common, (rng_row, whole), *own])
