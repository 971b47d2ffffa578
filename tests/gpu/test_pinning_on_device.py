"""Pinned staging memory: on which GPUs it makes contexts, and what a failure leaves behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bytecheckpoint.engine.blocks import Block
from bytecheckpoint.errors import StateError
from bytecheckpoint.inference.push.checkpoint_engine import Buckets
from bytecheckpoint.inference.push.transports.shared_memory import SharedArena
from bytecheckpoint.testing import time_limit

pytestmark = pytest.mark.gpu

_RANK = """
import subprocess, sys
import torch
import bytecheckpoint as bcp

torch.cuda.set_device(1)
state = {"model": {f"w{i}": torch.full((1 << 20,), float(i), device="cuda:1") for i in range(40)}}
for turn in range(2):
    bcp.save(sys.argv[1], state, async_save=True).result()
    bcp.load(sys.argv[1], state)
query = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"]
print(subprocess.run(query, capture_output=True, text=True, check=True).stdout)
print([str(torch.cuda.get_device_properties(gpu).uuid) for gpu in range(2)])
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 devices")
@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs nvidia-smi")
def test_a_rank_on_another_device_has_no_context_on_device_0(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _RANK, str(tmp_path / "step")], stdout=subprocess.PIPE, text=True
    ) as rank:
        output, _ = rank.communicate(timeout=time_limit(120))
    assert rank.returncode == 0
    *apps, names = output.strip().splitlines()
    own = [line for line in apps if line.startswith(f"{rank.pid},")]
    if not own:
        pytest.skip("nvidia-smi does not show the processes of this container")
    first = names.split("'")[1]
    assert not any(first in line for line in own)


def test_an_error_of_pinning_does_not_remain() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.zeros(1, device=device)
    block = Block(1 << 20)
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    block.fault_in(block.nbytes)
    assert int(runtime.cudaHostRegister(block.address, block.nbytes, 1)) == 0
    try:
        assert block.pin(device) != 0  # it is registered already
        assert torch.arange(10, device=device).sum().item() == 45
        torch.cuda.synchronize()
    finally:
        runtime.cudaHostUnregister(block.address)
    assert block.pin(device) == 0
    block.unpin()


def test_an_arena_is_pinned() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    arena = SharedArena(100_000, device)
    memory, target = arena.memory, torch.zeros(100_000, dtype=torch.uint8, device=device)
    assert memory.is_pinned()
    memory.fill_(3)
    assert target.copy_(memory).eq(3).all()
    arena.close()
    assert not memory.is_pinned()


def test_expandable_segments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(StateError, match="PYTORCH_CUDA_ALLOC_CONF"):
        Buckets(["GPU-0"], 1 << 20)
