"""The text file of metrics for Prometheus's node exporter."""

from __future__ import annotations

import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint import telemetry
from bytecheckpoint.manager import PrometheusFile
from bytecheckpoint.testing import time_limit

# https://prometheus.io/docs/instrumenting/exposition_formats: a metric, its labels, its value
_LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="((?:[^"\\\n]|\\[\\"n])*)"'
_LINE = re.compile(rf"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{{({_LABEL}(?:,{_LABEL})*)\}})? ([-+0-9.e]+)")


def _read(path: Path) -> dict[tuple[str, str], float]:
    """Return the values by metric and labels. Every line must be valid, and follow the type of its metric."""
    found: dict[tuple[str, str], float] = {}
    typed = ""
    text = path.read_text(encoding="utf-8")
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, typed, kind = line.split(" ")
            assert kind == ("counter" if typed.endswith("_total") else "gauge")
        elif not line.startswith("# HELP "):
            match = _LINE.fullmatch(line)
            assert match is not None, line
            assert match[1] == typed
            found[match[1].removeprefix("bytecheckpoint_"), match[2] or ""] = float(match[match.lastindex or 0])
    return found


def _fail(name: str, event: str) -> None:
    if (name, event) == ("save.write", "enter"):
        raise OSError("injected")


def test_the_saves_of_a_manager(tmp_path: Path) -> None:
    metrics = PrometheusFile(tmp_path / "train.prom")
    called = threading.Semaphore(0)  # result() may return before a callback has run
    callbacks = bcp.Callbacks(
        on_committed=lambda result: (metrics.committed(result), called.release()),
        on_failed=lambda handle, error: (metrics.failed(handle, error), called.release()),
    )
    state: dict[str, Any] = {"model": {"w": torch.ones(1000)}}
    before = time.time()
    with bcp.CheckpointManager(tmp_path / "runs", cadence=1, callbacks=callbacks) as manager:
        for step in (1, 2):
            result = manager.save(step, state).result()
        stop = telemetry.observe(_fail)
        try:
            with pytest.raises(OSError, match="injected"):
                manager.save(3, state).result()
        finally:
            stop()
    for _ in range(3):
        assert called.acquire(timeout=time_limit(30))
    found = _read(tmp_path / "train.prom")
    assert found["saves_total", 'outcome="committed"'] == 2
    assert found["saves_total", 'outcome="failed"'] == 1
    assert found["saves_total", 'outcome="uploaded"'] == 0
    assert found["last_save_step", ""] == 2
    assert found["last_save_bytes", ""] == result.bytes_written
    assert before <= found["last_save_timestamp_seconds", ""] <= time.time()
    for step, seconds in result.seconds.items():
        assert found["last_save_seconds", f'step="{step}"'] == seconds
    assert sorted(os.listdir(tmp_path)) == ["runs", "train.prom"]


def test_uploads_and_labels(tmp_path: Path) -> None:
    metrics = PrometheusFile(tmp_path / "train.prom", labels={"run": 'a "b"\\c\nd'})
    tier = bcp.Tier(tmp_path / "tier")
    uploaded = threading.Event()
    callbacks = bcp.Callbacks(
        on_committed=metrics.committed, on_uploaded=lambda result: (metrics.uploaded(result), uploaded.set())
    )
    with bcp.CheckpointManager(bcp.Location(tmp_path / "runs", tier=tier), cadence=1, callbacks=callbacks) as manager:
        manager.save(1, {"model": {"w": torch.ones(3)}})
    assert uploaded.wait(time_limit(30))
    found = _read(tmp_path / "train.prom")
    run = r'run="a \"b\"\\c\nd"'
    assert found["saves_total", f'{run},outcome="uploaded"'] == 1
    assert found["last_save_step", run] == 1
