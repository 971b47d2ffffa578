"""The storage classes of torch and of this library, for tests that run with both."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

import bytecheckpoint as bcp


class Storage(NamedTuple):
    writer: type
    reader: type


STORAGES = {
    "torch": Storage(FileSystemWriter, FileSystemReader),
    "bytecheckpoint": Storage(bcp.dcp.Writer, bcp.dcp.Reader),
}

both = pytest.mark.parametrize(
    "storage", [pytest.param(name, marks=pytest.mark.full if name == "torch" else ()) for name in STORAGES]
)
"""For tests of what both do. What torch itself does depends on its version only, so only the full set tests it."""


def save(storage: str, path: Any, state: dict[str, Any], **options: Any) -> Any:
    """``dcp.save`` without its warnings of a single process and of a checkpoint that it replaces."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled|Detected an existing checkpoint")
        return dcp.save(state, storage_writer=STORAGES[storage].writer(str(path)), **options)  # type: ignore[attr-defined]


def load(storage: str, path: Any, state: dict[str, Any], reader: Any = None, **options: Any) -> None:
    """``dcp.load`` without its warning of a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(state, storage_reader=reader or STORAGES[storage].reader(str(path)), **options)  # type: ignore[attr-defined]


def causes(error: BaseException) -> list[BaseException]:
    """The errors of the ranks that DCP has collected, by rank."""
    assert isinstance(error, CheckpointException)
    return [error.failures[rank][0] for rank in sorted(error.failures)]
