"""The ranks of the planning benchmark hold what ranks of the real Megatron-core hold, in a form of the same size."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks.scale_megatron import MegatronCoreWorld
from benchmarks.scale_world import Param
from bytecheckpoint.format.values.files import decode_path
from bytecheckpoint.frameworks.sections import resolve_sections
from bytecheckpoint.planners.local_plan import OWN_BOXES, WHOLE, LocalPlan
from bytecheckpoint.saving.local_state import LocalState
from bytecheckpoint.saving.options import SaveRequest
from bytecheckpoint.testing.ranks import RankPool

pytest.importorskip("megatron.core", reason="make test-megatron installs Megatron-core")

from mcore_training import Layout, Recipe, Training, training
from sampling import sample

pytestmark = pytest.mark.megatron

BUCKET = 3000
NAMES = {
    ".local_experts.": ".experts.",
    ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
    ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
}
"""Names of modules and Megatron's keys for them, which are those of Transformer Engine's fused layers."""


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


def _params(job: Training) -> list[Param]:
    """The parameters of this rank with their global shapes, from attributes that Megatron sets."""
    found = []
    module = job.chunks[0].module.module
    for name, param in module.named_parameters():
        full = job._global_name(module, name)
        for ours, keys in NAMES.items():
            full = full.replace(ours, keys)
        is_cut = job.layout.tp > 1 and getattr(param, "tensor_model_parallel", False)
        cut = param.partition_dim if is_cut else None
        shape = tuple(n * job.layout.tp if d == cut else n for d, n in enumerate(param.shape))
        expert = re.search(r"\.experts\.experts\.(\d+)\.", full) if job.layout.ep > 1 else None
        found.append(Param(full, shape, cut, int(expert[1]) if expert else None, halves="linear_fc1" in full))
    return found


def _held(plan: LocalPlan) -> dict[str, Any]:
    """By name of a tensor: its type, whether its contents are compared, how it is held, and its boxes in order."""
    table = plan.table
    found: dict[str, Any] = {}
    for row, name in enumerate(table.tensors.names):
        if name.startswith(("model.", "optimizer.")):
            number = int(table.held[row])
            how: Any = number if number in (OWN_BOXES, WHOLE) else table.layouts[number - 1]
            place = plan.coordinates[number - 1] if number > WHOLE else None
            found[name] = (table.tensors.meta_of(row), bool(table.compared[row]), how, place, [])
    for row, box in zip(plan.shards.tensor.tolist(), plan.shards):
        name = table.tensors.names[row]
        if name in found:
            found[name][-1].append(box)
    values = zip(table.values.sections, table.values.paths, strict=True)
    paths = [decode_path(path) for section, path in values if section == "optimizer"]
    return {**found, "values": sorted(path for path in paths if path[0] != "empty_groups")}


def _real(rank: int, world_size: int, layout: Layout, recipe: Recipe) -> tuple[list[Param], dict[str, Any]]:
    with training(layout, recipe, seed=1) as job:
        for part in job.optimizer.chained_optimizers:
            inner = part.optimizer
            for group in inner.param_groups:
                group["step"] = 1
                for param in group["params"]:
                    inner.state[param] = {key: torch.zeros_like(param) for key in ("exp_avg", "exp_avg_sq")}
        sections = resolve_sections(
            job.state, framework=None, rank=rank, world_size=world_size, allow_pickle=False, trainable_only=False
        )
        sources = {section.name: section.capture() for section in sections}
        local = LocalState(sections, sources, rank=rank, world_size=world_size, options=SaveRequest())
        return _params(job), _held(local.build_plan())


@pytest.mark.parametrize(
    ("layout", "experts"),
    sample([(Layout(tp=2, pp=2), 0), (Layout(tp=2), 0), (Layout(ep=2), 4), (Layout(tp=2, ep=2, etp=2), 4)], 1),
    ids=str,
)
def test_simulated_ranks_hold_what_real_ranks_hold(pool: RankPool, layout: Layout, experts: int) -> None:
    recipe = Recipe(experts=experts, tied=False, bucket=BUCKET)
    results = pool.run(_real, layout, recipe, world_size=layout.world)
    per_stage = layout.world // layout.pp
    stages = [
        list(dict.fromkeys(param for params, _ in results[first : first + per_stage] for param in params))
        for first in range(0, layout.world, per_stage)
    ]
    world = MegatronCoreWorld(stages, layout.world, tensor_parallel=layout.tp, expert_parallel=layout.ep, bucket=BUCKET)
    for rank, (_, held) in enumerate(results):
        found = _held(world.plan(rank))
        assert found.keys() == held.keys()
        assert [key for key in found if found[key] != held[key]] == []
