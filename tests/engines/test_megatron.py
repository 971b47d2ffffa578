"""Real models and optimizers of Megatron-core, saved in one layout and loaded into another.

Megatron runs on the CPU (``mcore_cpu``), so these tests show what is stored and where it goes, and nothing about CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import bytecheckpoint as bcp
from bytecheckpoint.testing.ranks import RankPool

pytest.importorskip("megatron.core", reason="make test-megatron installs Megatron-core")

from mcore_training import Layout, Recipe, differences, training
from sampling import sample

pytestmark = pytest.mark.megatron

DENSE = [
    Layout(tp=2, pp=2),
    Layout(world=1),
    Layout(tp=2, world=2),
    Layout(pp=2),
    Layout(pp=2, vp=2),
    Layout(tp=4),
    Layout(world=4),
]
EXPERTS = [
    Layout(ep=2, world=2),
    Layout(world=1),
    Layout(ep=2),
    Layout(tp=2, ep=2, etp=1),
    Layout(tp=2, ep=1, etp=2, world=2),
    Layout(pp=2, ep=2),
]
GROUPED, MOE = Recipe(), Recipe(experts=4)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


def _save(rank: int, world_size: int, layout: Layout, recipe: Recipe, path: str) -> tuple[Any, list[float]]:
    with training(layout, recipe, seed=1) as job:
        job.train(2)
        bcp.save(path, job.state, step=job.steps)
        full = job.full_state()
        return full if rank == 0 else None, job.train(3)


def _load(rank: int, world_size: int, layout: Layout, recipe: Recipe, path: str) -> tuple[Any, list[float]]:
    with training(layout, recipe, seed=2) as job:
        bcp.load(path, job.state)
        job.steps = 2
        full = job.full_state()
        return full if rank == 0 else None, job.train(3)


def _require_equal(
    pool: RankPool, folder: Path, source: Layout, target: Layout, recipe: Recipe, other: Recipe | None = None
) -> None:
    saved, losses = pool.run(_save, source, recipe, str(folder), world_size=source.world)[0]
    loaded, resumed = pool.run(_load, target, other or recipe, str(folder), world_size=target.world)[0]
    assert differences(saved, loaded) == []
    if (source, recipe) == (target, other or recipe):
        assert resumed == losses
    assert resumed == pytest.approx(losses, abs=1e-3)


def _ids(pair: Any) -> str:
    return " ".join(map(str, pair))


@pytest.mark.parametrize("pair", sample(list(product(DENSE, DENSE)), 5), ids=_ids)
def test_dense_models_load_in_any_layout(pool: RankPool, tmp_path: Path, pair: tuple[Layout, Layout]) -> None:
    _require_equal(pool, tmp_path / "checkpoint", *pair, GROUPED)


@pytest.mark.parametrize("pair", sample(list(product(EXPERTS, EXPERTS)), 4), ids=_ids)
def test_experts_load_in_any_layout(pool: RankPool, tmp_path: Path, pair: tuple[Layout, Layout]) -> None:
    _require_equal(pool, tmp_path / "checkpoint", *pair, MOE)


@pytest.mark.parametrize(
    ("source", "target", "recipe", "other"),
    [
        pytest.param(Layout(tp=2), Layout(), Recipe(), Recipe(distributed=False), id="distributed to replicated"),
        pytest.param(Layout(), Layout(tp=2, pp=2), Recipe(distributed=False), Recipe(), id="replicated to distributed"),
        pytest.param(Layout(), Layout(tp=2), Recipe(bf16=False), Recipe(bf16=False, distributed=False), id="fp32"),
        pytest.param(
            Layout(), Layout(pp=2), Recipe(distributed=False, layer_wise=True), Recipe(), id="layer-wise to distributed"
        ),
        pytest.param(
            Layout(tp=2), Layout(), Recipe(), Recipe(distributed=False, layer_wise=True), id="distributed to layer-wise"
        ),
        pytest.param(Layout(tp=2), Layout(), Recipe(query_groups=1), None, id="fewer query groups than ranks"),
        pytest.param(Layout(tp=2, pp=2), Layout(), Recipe(tied=False), None, id="untied"),
        pytest.param(Layout(), Layout(tp=2, pp=2), Recipe(mla=True), None, id="multi-latent attention"),
    ],
)
def test_optimizers_and_models_load_each_other(
    pool: RankPool, tmp_path: Path, source: Layout, target: Layout, recipe: Recipe, other: Recipe | None
) -> None:
    _require_equal(pool, tmp_path / "checkpoint", source, target, recipe, other)
