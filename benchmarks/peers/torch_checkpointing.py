"""Meta's ``torch_checkpointing``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch_checkpointing as tc
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from benchmarks.peers.base import Contestant, Pending, Tensors

__all__ = ["TorchCheckpointing"]


class TorchCheckpointing(Contestant):
    """Uses its manager with the staging options for machines without an accelerator, and buffered writes."""

    def __init__(self, *, background: bool = False) -> None:
        self._background = background
        staging = tc.CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
        saver: Any = tc.SyncCheckpointSaverConfig()
        if background:
            saver = tc.AsyncCheckpointSaverConfig(staging_config=staging)
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        self._manager = tc.CheckpointManager(tc.CheckpointManager.Config(save=saver, storage_config=storage))

    def save(self, path: str, state: Tensors) -> Pending | None:
        future = self._manager.save(path, state.sections)
        return None if future is None else Pending(future.result, partial(_locked, self._manager))

    def load(self, path: str, state: Tensors) -> None:
        self._manager.load(path, into=state.sections)

    def versions(self) -> Mapping[str, str]:
        return {"torch_checkpointing": tc.__version__}

    def close(self) -> None:
        self._manager.close()


def _locked(manager: Any) -> None:
    """Return the lock that an update of the state waits for."""
    with manager.lock():
        return
