"""``optimizer.pt`` of a real 8-bit optimizer, whose ``state_dict()`` nests its entries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bytecheckpoint as bcp

bitsandbytes = pytest.importorskip("bitsandbytes", reason="make test-deepspeed runs this with bitsandbytes")

pytestmark = [pytest.mark.deepspeed, pytest.mark.filterwarnings("ignore")]


def _job(seed: int, steps: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(64, 128), nn.Linear(128, 128))
    optimizer = bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-3, min_8bit_size=1024)  # the bias has 32 bits
    _train(model, optimizer, steps)
    return model, optimizer


def _train(model: nn.Module, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        model(torch.randint(0, 64, (4, 3))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("steps", [0, 3])
def test_a_run_continues_from_its_state_dict(tmp_path: Path, steps: int) -> None:
    saved, optimizer = _job(0, 2)
    torch.save({"model": saved.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    loaded, other = _job(1, steps)
    bcp.load(tmp_path / "a.pt", {"model": loaded, "optimizer": other})
    for model, stepped in ((saved, optimizer), (loaded, other)):
        torch.manual_seed(9)
        _train(model, stepped, 2)
    assert all(torch.equal(*pair) for pair in zip(saved.parameters(), loaded.parameters(), strict=True))
    for one, two in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert one.keys() == two.keys()
        assert all(torch.equal(torch.as_tensor(value), torch.as_tensor(two[key])) for key, value in one.items())
