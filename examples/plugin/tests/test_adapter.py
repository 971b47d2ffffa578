"""The adapter passes the conformance suite and works in a real save and load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bcp_example_plugin import WeightAverage, WeightAverageAdapter

import bytecheckpoint as bcp
from bytecheckpoint.testing import AdapterCase, AdapterConformance


def _average(seed: int) -> WeightAverage:
    generator = torch.Generator().manual_seed(seed)
    average = WeightAverage({name: torch.randn(4, 3, generator=generator) for name in ("w", "b")}, 0.9 + seed / 100)
    average.update({name: torch.randn(4, 3, generator=generator) for name in ("w", "b")})
    average.updates += seed
    return average


class TestWeightAverageAdapter(AdapterConformance):
    @pytest.fixture
    def case(self) -> AdapterCase:
        return AdapterCase(
            adapter=WeightAverageAdapter(),
            make=_average,
            content=lambda average: {**average.tensors, "decay": average.decay, "updates": average.updates},
        )


def test_save_and_load_with_both_plug_ins(tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path}/checkpoints.db/step-1"
    saved, loaded = _average(1), _average(2)
    bcp.save(url, {"average": saved}).result()
    bcp.load(url, {"average": loaded})
    assert all(torch.equal(saved.tensors[name], tensor) for name, tensor in loaded.tensors.items())
    assert (loaded.decay, loaded.updates) == (saved.decay, saved.updates)
