"""The device of these tests: a GPU, or the CPU in a dry run (``BCP_GPU_DRY_RUN=1``, see ``make gpu``).

A dry run finds errors of the tests themselves before a GPU is there. It runs those that use the fixture ``device``;
all others need a GPU.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what cannot run here."""
    if torch.cuda.is_available():
        return
    is_dry = os.environ.get("BCP_GPU_DRY_RUN") == "1"
    for item in items:
        if _HERE in item.path.parents and not (is_dry and "device" in getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The current GPU, or the CPU in a dry run."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
