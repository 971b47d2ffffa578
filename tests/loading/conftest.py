from __future__ import annotations

from pathlib import Path

import pytest
from small_training import training

import bytecheckpoint as bcp


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of ``training(1.0)`` that no test changes."""
    path = tmp_path_factory.mktemp("rules") / "checkpoint"
    bcp.save(path, training(1.0), step=7, metadata={"by": "test"}, options=bcp.SaveOptions(chunk_size=64))
    return path
