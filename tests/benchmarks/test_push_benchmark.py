"""Run the push benchmark, which checks the weights of its engines."""

from __future__ import annotations

import pytest

from benchmarks.push import COPY, JOIN, NOTHING, STREAM, WAYS, grid, measure, with_table


@pytest.mark.slow
def test_every_way_is_measured() -> None:
    found = measure(4 << 20, 1)
    assert set(found["seconds"]) == {*WAYS, NOTHING, JOIN, COPY, STREAM}
    assert all(len(values) == 1 and values[0] > 0 for values in found["seconds"].values())
    for name, (engines, options) in WAYS.items():
        assert found["left"][name] == found["bytes"] * (1 if "group" in options else engines)
    machine = {"cores": 2, "processor": "some"}
    made = grid({"header": {"settings": {"rounds": 1}, "machine": machine}, **found})
    page = with_table("Before\n<!-- The rest is written by `python -m benchmarks.push --page`. -->\nold", made)
    assert "Before" in page
    assert "old" not in page
    assert page.count("\n| ") == 2 + len(found["seconds"])
