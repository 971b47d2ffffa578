"""Files of other systems whose names and groups are no ones that a program would choose."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import bytecheckpoint as bcp
from bytecheckpoint.errors import BytecheckpointError

DIGITS = "9" * 5000  # more than Python converts
_TENSOR = torch.ones(2)

STATES: dict[str, dict[str, Any]] = {
    "a rank of 5,000 digits": {"model": {f"w@{DIGITS}": _TENSOR}},
    "a number of 5,000 digits": {
        "model": {"w": _TENSOR},
        "optimizer": {"state": {DIGITS: {"exp_avg": _TENSOR}}, "param_groups": [{"params": [0]}]},
    },
    "a group that is a number": {
        "model": {"w": _TENSOR},
        "optimizer": {"state": {"0": {"exp_avg": _TENSOR}}, "param_groups": [7]},
    },
    "parameters that are a number": {
        "model": {"w": _TENSOR},
        "optimizer": {"state": {"0": {"exp_avg": _TENSOR}}, "param_groups": [{"params": 7}]},
    },
}


def _use(path: Path) -> None:
    """Open it, and load what fits or refuse it."""
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint = bcp.open(path)
    for section in checkpoint.sections:
        checkpoint.tree(section)
    with contextlib.suppress(BytecheckpointError):
        bcp.load(checkpoint, {"optimizer": optimizer}, options={"strict": False})


@pytest.mark.parametrize("name", STATES)
def test_a_file_of_torch_save(name: str, tmp_path: Path) -> None:
    torch.save(STATES[name], tmp_path / "state.pt")
    _use(tmp_path / "state.pt")


@pytest.mark.parametrize("name", STATES)
@pytest.mark.filterwarnings("ignore")
def test_a_folder_of_dcp(name: str, tmp_path: Path) -> None:
    dcp.save(STATES[name], checkpoint_id=tmp_path / "dcp", no_dist=True)
    _use(tmp_path / "dcp")
