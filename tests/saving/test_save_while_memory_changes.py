"""A tensor that gets other memory after it was described, and before it is copied."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint.errors import CheckpointError, StateError


class _Swaps:
    """Its ``state_dict`` changes a tensor of another section, as a wrapper that moves or converts weights may."""

    def __init__(self, change: Callable[[], object]) -> None:
        self.change = change

    def state_dict(self) -> dict[str, Any]:
        self.change()
        return {"step": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("replaced", [torch.zeros(2), torch.zeros(1000, dtype=torch.float64), torch.zeros(2, 1000).t()])
@pytest.mark.parametrize("count", [1, 40])
def test_other_memory_of_another_size_is_refused(
    tmp_path: Path, count: int, replaced: torch.Tensor, is_async: bool
) -> None:
    tensors = {f"w{index}": torch.full((1000,), float(index)) for index in range(count)}

    def change() -> None:
        tensors["w0"].data = replaced

    with pytest.raises(StateError, match=r"^model\.w0 was given other memory"):
        bcp.save(tmp_path / "c", {"model": tensors, "swaps": _Swaps(change)}, async_save=is_async).result()
    with pytest.raises(CheckpointError):
        bcp.open(tmp_path / "c")


def test_other_memory_of_the_same_size_is_saved(tmp_path: Path) -> None:
    tensors = {"w": torch.zeros(1000)}

    def change() -> None:
        tensors["w"].data = torch.ones(1000)

    bcp.save(tmp_path / "c", {"model": tensors, "swaps": _Swaps(change)})
    assert torch.equal(bcp.open(tmp_path / "c")["model.w"].load(), torch.ones(1000))
