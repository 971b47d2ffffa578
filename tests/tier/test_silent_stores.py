"""A signal while the store is silent: the process ends within its grace period, with a tier after a last save there."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from s3_faults import Exchange, fault_proxy
from warm_python import warm_python

import bytecheckpoint as bcp
from bytecheckpoint.testing import time_limit

pytestmark = pytest.mark.s3

_JOB = """
import json, os, signal, sys
import torch, bytecheckpoint as bcp

url, tier, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
location = bcp.Location(url, tier=bcp.Tier(tier) if tier else None, storage_options=options)
with bcp.CheckpointManager(location, cadence=1, keep=1, preemption=bcp.Preemption(grace_s=4)) as manager:
    manager.save(1, {"model": {"w": torch.ones(1000)}})
    manager.wait()
    print("ready", flush=True)
    input()
    manager.save(2, {"model": {"w": torch.ones(1000)}})
    os.kill(os.getpid(), signal.SIGTERM)
    manager.save(3, {"model": {"w": torch.ones(1000)}})
"""


@pytest.mark.parametrize("has_tier", [True, False])
def test_a_signal_ends_a_job_whose_store_is_silent(
    s3: dict[str, Any], bucket: str, tmp_path: Path, *, has_tier: bool
) -> None:
    """Without the limit, each request would hold the process up for ten minutes, as those of a save in flight."""
    silent = threading.Event()

    def rule(exchange: Exchange) -> str | None:
        if has_tier or (exchange.kind == "put" and "/step-2/" in exchange.path):
            silent.set()
        return "stall" if silent.is_set() else None

    with fault_proxy(s3["endpoint_url"]) as proxy:
        options = json.dumps({**s3, "endpoint_url": proxy.url})
        command = ["-c", _JOB, f"s3://{bucket}/run", str(tmp_path) if has_tier else "", options]
        (reader, its_output), (its_input, writer) = os.pipe(), os.pipe()
        with tempfile.TemporaryFile("w+") as log, open(reader) as output, open(writer, "w") as go_on:
            job = warm_python().start(command, stdin=its_input, stdout=its_output, stderr=log)
            os.close(its_input)
            os.close(its_output)
            try:
                assert output.readline() == "ready\n"
                proxy.rule = rule
                print(file=go_on, flush=True)
                code = job.wait(time_limit(90))
            finally:
                job.kill()
            log.seek(0)
            errors = log.read()
    assert silent.is_set()
    assert code == (128 + signal.SIGTERM if has_tier else 1), errors
    assert bool(list(tmp_path.glob("**/step-3/manifest.msgpack"))) == has_tier
    assert has_tier or "step-2 failed" in errors
    assert bcp.latest(f"s3://{bucket}/run", storage_options=s3).step == 1
