"""Run the benchmark of codecs, and check its ratios."""

from __future__ import annotations

import pytest

from benchmarks import codecs


@pytest.mark.full
def test_ratios_are_those_of_gaussian_weights() -> None:
    found = codecs.measure(1, 1)
    ratios = {(one["kind"], one["codec"]): one["ratio"] for one in found}
    assert ratios["weights, bf16", "zstd-planes"] == pytest.approx(0.692, abs=0.01)
    assert ratios["weights, fp32", "zstd-planes"] == pytest.approx(0.845, abs=0.01)
    assert all(min(one["encode"] + one["decode"]) > 0 for one in found)
    assert [row[:2] for row in codecs.table(found).rows] == list(ratios)
