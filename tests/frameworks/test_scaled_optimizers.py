"""Optimizers whose state has a meaning only with scales that are not part of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bytecheckpoint as bcp
from bytecheckpoint.errors import StateError


class _Scaled(torch.optim.AdamW):
    """Has the methods of Transformer Engine's fused Adam."""

    def get_unscaled_state(self, param: torch.Tensor, key: str) -> torch.Tensor:
        return self.state[param][key].float()

    def set_scaled_state(self, param: torch.Tensor, key: str, values: torch.Tensor) -> None:
        self.state[param][key].copy_(values)

    def initialize_state(self, param: torch.Tensor, remainders: Any) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.uint8])
def test_scaled_state_is_refused_outside_megatron(tmp_path: Path, dtype: torch.dtype) -> None:
    model = nn.Linear(3, 2)
    optimizer = _Scaled(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.state[model.weight]["exp_avg"] = optimizer.state[model.weight]["exp_avg"].to(dtype)
    state = {"model": model, "optimizer": optimizer}
    if dtype == torch.float32:
        bcp.save(tmp_path / "c", state)
        return
    with pytest.raises(StateError, match="_Scaled keeps its state scaled"):
        bcp.save(tmp_path / "c", state)
    assert not (tmp_path / "c").exists()
