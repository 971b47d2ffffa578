"""``torch.distributed.checkpoint``: plain tensors in one process, modules and optimizers over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

from benchmarks.peers.base import Contestant, Pending

__all__ = ["Dcp", "DcpAsync"]


class Dcp(Contestant):
    """The synchronous save with ``threads`` writers, and the load. It syncs files but not directories."""

    def __init__(self, *, threads: int = 1) -> None:
        self._threads = threads

    def save(self, path: str, state: Any) -> Pending | None:
        save(_state_dict(state), storage_writer=self._writer(path), no_dist=not dist.is_initialized())
        return None

    def load(self, path: str, state: Any) -> None:
        values = _state_dict(state)
        load(values, checkpoint_id=path, no_dist=not dist.is_initialized())
        if hasattr(state, "model"):
            set_state_dict(
                state.model,
                state.optimizer,
                model_state_dict=values["model"],
                optim_state_dict=values["optimizer"],
            )

    def versions(self) -> Mapping[str, str]:
        return {"torch": torch.__version__}

    def _writer(self, path: str) -> FileSystemWriter:
        return FileSystemWriter(path, thread_count=self._threads)


class DcpAsync(Dcp):
    """The asynchronous save.

    ``keep_stager`` reuses staging buffers, as its tutorial advises for speed. ``process`` writes from shared memory in
    a separate process.
    """

    def __init__(self, *, keep_stager: bool = False, process: bool = False) -> None:
        super().__init__()
        self._kind = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
        self._stager = DefaultStager(_staging(shared=process)) if keep_stager else None
        self._own_group = process and not dist.is_initialized()
        if self._own_group:  # its process needs a group, even with a single rank
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)

    def save(self, path: str, state: Any) -> Pending | None:
        answer: Any = async_save(
            _state_dict(state),
            checkpoint_id=path,
            async_checkpointer_type=self._kind,
            async_stager=self._stager,
            no_dist=not dist.is_initialized(),
        )
        staging = getattr(answer, "staging_completion", None)
        upload = getattr(answer, "upload_completion", answer)
        return Pending(upload.result, staging.result if staging is not None else None)

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()
        if self._own_group:
            dist.destroy_process_group()


def _staging(*, shared: bool) -> StagingOptions:
    return StagingOptions(
        use_pinned_memory=False, use_shared_memory=shared, use_async_staging=shared, use_non_blocking_copy=False
    )


def _state_dict(state: Any) -> dict[str, Any]:
    """Return a flat state dict of plain tensors, or DCP's state dict of a module and its optimizer."""
    if not hasattr(state, "model"):
        return dict(state.flat)
    model, optimizer = get_state_dict(state.model, state.optimizer)
    return {"model": model, "optimizer": optimizer}
