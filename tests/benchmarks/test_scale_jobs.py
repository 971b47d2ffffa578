"""The benchmark of planning builds the same messages as the library, and its simulated jobs hold every element once."""

from __future__ import annotations

from collections import Counter
from math import prod

import pytest

from benchmarks.scale_jobs import measure_job
from benchmarks.scale_worlds import make_world
from bytecheckpoint.planners.local_plan import OWN_BOXES


@pytest.mark.full
def test_a_simulated_job_saves_and_loads() -> None:
    found = measure_job("dense", 256)  # compares messages of two ranks with those of the library
    assert found["ranks"] == 256
    assert found["second_save"]["rank_gets"] == 17
    assert found["manifest"]["load_pieces"] > 0


@pytest.mark.full
def test_a_stage_of_megatron_holds_all_elements_of_its_optimizer_once() -> None:
    world = make_world("megatron", 1024)
    ranks = range(64)  # the first pipeline stage
    held: Counter[str] = Counter()
    sizes: dict[str, int] = {}
    for rank in ranks:
        plan = world.plan(rank)
        tensors, held_as = plan.table.tensors, plan.table.held
        names = tensors.names
        for row, box in zip(plan.shards.tensor.tolist(), plan.shards):
            if names[row].startswith("optimizer.") and held_as[row] == OWN_BOXES:
                held[names[row]] += box.numel
                sizes[names[row]] = prod(tensors.meta_of(row).shape)
    replicated = {name for name, size in sizes.items() if held[name] == 8 * size}
    assert all("norm" in name or "router" in name for name in replicated)  # each tensor parallel rank steps a copy
    assert {name: held[name] for name in sizes.keys() - replicated} == {
        name: size for name, size in sizes.items() if name not in replicated
    }
