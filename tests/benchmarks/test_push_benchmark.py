"""Run the push benchmark, which checks the weights of its engines."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from benchmarks import push_vllm
from benchmarks.push import COPY, JOIN, NOTHING, STREAM, WAYS, grid, measure
from benchmarks.push_engine import PipeEngine
from bytecheckpoint.errors import DeadlineError


@pytest.mark.full
def test_every_way_is_measured() -> None:
    found = measure(4 << 20, 1)
    assert set(found["seconds"]) == {*WAYS, NOTHING, JOIN, COPY, STREAM}
    assert all(len(values) == 1 and values[0] > 0 for values in found["seconds"].values())
    for name, (engines, options) in WAYS.items():
        assert found["left"][name] == found["bytes"] * (1 if "group" in options else engines)
    machine = {"cores": 2, "processor": "some"}
    made = grid({"header": {"settings": {"rounds": 1}, "machine": machine}, **found})
    assert len(made.rows) == len(found["seconds"])


def test_the_page_has_the_committed_figures_with_vllm() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs/push.md").read_text()
    committed = json.loads((root / "benchmarks/results/push_vllm.json").read_text())
    assert push_vllm.with_table(page, push_vllm.table(committed)) == page


def test_an_engine_that_does_not_answer() -> None:
    before = set(multiprocessing.active_children())
    engine = PipeEngine("the engine", 1, 1)
    (process,) = set(multiprocessing.active_children()) - before
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(DeadlineError, match=r"a process of the engine did not answer within 0\.1 s"):
        engine.call("a request", 0.1)
    process.kill()
    process.join()
    engine.end()
