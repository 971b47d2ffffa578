"""``bcp show``: the statistics of a tensor, and plain values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import bytecheckpoint as bcp

_LEAST, _MOST = -(2**63), 2**63 - 1


def test_figures_and_histogram_of_many_elements(tmp_path: Path, bcp_command) -> None:
    values = torch.randn(3, 200_000, generator=torch.Generator().manual_seed(0))
    values[1, 5], values[2, 7:9] = float("nan"), float("inf")
    bcp.save(tmp_path, {"model": {"w": values}})
    found = bcp_command("show", tmp_path, "model.w", "--json").json
    assert (found["dtype"], found["shape"], found["nan"], found["infinite"]) == ("float32", [3, 200_000], 1, 2)
    finite = values[values.isfinite()].double().numpy()
    assert (found["min"], found["max"]) == (finite.min(), finite.max())
    assert found["mean"] == pytest.approx(finite.mean())
    counts, edges = np.histogram(finite, bins=10)
    assert np.abs([one["count"] for one in found["histogram"]] - counts).max() <= 2  # rounding at the edges
    assert [one["from"] for one in found["histogram"]] == pytest.approx(edges[:-1])
    lines = bcp_command("show", tmp_path, "model.w").stdout.splitlines()
    assert lines[:3] == ["model.w", "  float32[3, 200000], 600.0 K elements, 2.3 MiB", "  1 NaN, 2 infinite"]
    assert sum(line.endswith("#") for line in lines) == 10


@pytest.mark.parametrize(
    ("tensor", "figures", "histogram"),
    [
        (torch.tensor([True, False, True]), (0, 1, 2 / 3), [(0, 1), (1, 2)]),
        (torch.tensor([-1, 3, 3], dtype=torch.int8), (-1, 3, 5 / 3), [(-1, 1), (0, 0), (1, 0), (2, 0), (3, 2)]),
        (torch.tensor([_MOST, _MOST - 2]), (_MOST - 2, _MOST, 2.0**63), [(_MOST - 2, 1), (_MOST - 1, 0), (_MOST, 1)]),
        (torch.tensor([7], dtype=torch.uint32), (7, 7, 7), [(7, 1)]),
        (torch.tensor([1.5, 1.5]).bfloat16(), (1.5, 1.5, 1.5), [(1.5, 2)]),
        (torch.tensor([3 + 4j]), (5, 5, 5), [(5, 1)]),
        (torch.tensor([float("nan")]), (None, None, None), []),
        (torch.zeros(0, 3), (None, None, None), []),
    ],
    ids=lambda value: str(value.dtype) if isinstance(value, torch.Tensor) else "",
)
def test_each_kind_of_dtype(tensor, figures, histogram, tmp_path: Path, bcp_command) -> None:
    bcp.save(tmp_path, {"model": {"w": tensor}})
    ran = bcp_command("show", tmp_path, "model.w", "--json")
    assert (ran.json["min"], ran.json["max"], ran.json["mean"]) == pytest.approx(figures)
    assert [(one["from"], one["count"]) for one in ran.json["histogram"]] == histogram
    assert bcp_command("show", tmp_path, "model.w").code == 0


@pytest.mark.parametrize(
    "tensor", [torch.tensor([_LEAST, 0, _MOST]), torch.tensor([-1.7e308, 0, 1.7e308], dtype=torch.float64)]
)
def test_the_widest_ranges(tensor: torch.Tensor, tmp_path: Path, bcp_command) -> None:
    bcp.save(tmp_path, {"model": {"w": tensor}})
    found = bcp_command("show", tmp_path, "model.w", "--json").json
    assert (found["min"], found["max"]) == (tensor[0].item(), tensor[2].item())
    assert [one["count"] for one in found["histogram"]] == [1, 0, 0, 0, 0, 1, 0, 0, 0, 1]


def test_a_tensor_of_several_ranks_and_a_tied_one(one: Path, four: Path, bcp_command) -> None:
    stored = bcp.open(four)["model.emb.weight"].load()
    found = bcp_command("show", four, "model.emb.weight", "--json").json
    assert (found["min"], found["max"]) == (stored.min().item(), stored.max().item())
    assert bcp_command("show", one, "model.head.weight").code == 0


def test_plain_values_in_full(four: Path, tmp_path: Path, bcp_command) -> None:
    bcp.save(tmp_path, {"extra": {"text": "a b " * 100, "step": 5}})
    assert bcp_command("show", tmp_path, "extra.text").stdout == f"extra.text = {'a b ' * 100}\n"
    assert bcp_command("show", tmp_path, "extra.step", "--json").json["values"][0]["value"] == 5
    assert bcp_command("show", four, "own.half").stdout.splitlines() == ["own.half@0-1 = 0", "own.half@2-3 = 1"]
    assert bcp_command("show", four, "own.half@3").stdout == "own.half@3 = 1\n"


def test_an_unknown_name(one: Path, bcp_command) -> None:
    ran = bcp_command("show", one, "model.iner.weight")
    assert (ran.code, ran.stdout) == (2, "")
    assert "'model.inner.weight'" in ran.stderr
