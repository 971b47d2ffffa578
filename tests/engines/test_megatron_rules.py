"""The rules for ranks of Megatron-core put the parameters of real models together.

The expected tensors are assembled from the attributes that Megatron sets on its parameters (``mcore_training``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from bytecheckpoint.rules import Rules, Source
from bytecheckpoint.tensors.dtypes import DTYPES
from bytecheckpoint.testing.ranks import RankPool

pytest.importorskip("megatron.core", reason="make test-megatron installs Megatron-core")

from mcore_training import VOCABULARY, Layout, Recipe, training

pytestmark = pytest.mark.megatron


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


def _parameters(
    rank: int, world_size: int, layout: Layout, recipe: Recipe
) -> tuple[dict[str, int], dict[str, Any], Any]:
    """The place of this rank, its parameters under the names of its own model, and the global ones."""
    with training(layout, recipe, seed=1) as job:
        from megatron.core import parallel_state

        place = {
            "tp": parallel_state.get_tensor_model_parallel_rank(),
            "pp": parallel_state.get_pipeline_model_parallel_rank(),
            "ep": parallel_state.get_expert_model_parallel_rank(),
            "dp": parallel_state.get_expert_data_parallel_rank(),
        }
        (chunk,) = job.chunks
        module = chunk.module.module
        local = {name: param.detach().float().numpy() for name, param in module.named_parameters()}
        whole = job.full_state()  # on all ranks, because it communicates
        return place, local, whole if rank == 0 else None


@pytest.mark.parametrize(
    ("layout", "recipe"),
    [
        pytest.param(Layout(tp=2, pp=2), Recipe(), id="tp2 pp2"),
        pytest.param(Layout(tp=2, world=4), Recipe(tied=False), id="tp2 dp2 untied"),
        pytest.param(Layout(pp=2, ep=2), Recipe(experts=4), id="pp2 ep2"),
        pytest.param(Layout(tp=2, etp=2), Recipe(experts=4), id="tp2 etp2"),
    ],
)
@pytest.mark.sampled(1)
def test_ranks_of_megatron_are_put_together(pool: RankPool, layout: Layout, recipe: Recipe) -> None:
    results = pool.run(_parameters, layout, recipe, world_size=layout.world)
    stored = [(name, place, array) for place, local, _ in results for name, array in local.items()]
    mesh = {axis: 1 + max(place[axis] for _, place, _ in stored) for axis in ("tp", "pp", "ep", "dp")}
    rules = Rules.shipped("megatron", "megatron-swiglu")
    sources = [Source(name, array.shape, DTYPES["float32"], place) for name, place, array in stored]
    found = {}
    for name, tensor in rules.resolve(sources, mesh).tensors.items():
        found[name] = np.full(tensor.meta.shape, np.nan, np.float32)
        for region in tensor.regions:
            found[name][region.box.slices()] = stored[region.source][2][region.within.slices()]
    expected = {
        name.removesuffix("/model").replace(".local_experts.", ".experts."): tensor.numpy()
        for name, tensor in results[0][2].items()
        if name.endswith("/model")
    }
    if recipe.tied and layout.pp > 1:  # the last stage has a copy
        expected["output_layer.weight"] = expected["embedding.word_embeddings.weight"]
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        padded = "word_embeddings" in name or "output_layer" in name
        assert np.array_equal(found[name][:VOCABULARY] if padded else found[name], array), name
