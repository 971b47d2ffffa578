"""Train on two ranks and save with the ByteCheckpoint package: ``bytecheckpoint_job.py KIND FOLDER``.

Rank 0 also writes ``expected.pt`` into the folder, with the full state dicts of the model and the optimizer. The script
runs outside the repository, where ``bytecheckpoint`` is that package.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 13), nn.Linear(13, 5, bias=False), nn.LayerNorm(5))


def _wrapped(kind: str, model: nn.Module) -> nn.Module:
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        return fully_shard(model)
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, use_orig_params=kind == "fsdp-orig", device_id=torch.device("cpu"))


def main(kind: str, folder: str) -> None:
    dist.init_process_group("gloo")
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    import bytecheckpoint

    assert Path(bytecheckpoint.__file__).with_name("checkpointer").is_dir(), "this is another package of the name"
    rank = dist.get_rank()
    model = _wrapped(kind, make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03, weight_decay=0.2)
    torch.manual_seed(1 + rank)
    for _ in range(3):
        model(torch.randn(4, 20)).sin().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    extra: dict[str, Any] = {"step": 3, "data": {"epoch": 1, "rank": rank}, "seen": torch.arange(7)}
    state = {"model": model, "optimizer": optimizer, "extra_state": {**extra, "rng": torch.get_rng_state()}}
    full = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    framework = "fsdp" if kind.startswith("fsdp-") else kind
    bytecheckpoint.save(folder, state, framework=framework)  # type: ignore[call-arg]
    if rank == 0:
        torch.save(full, f"{folder}/expected.pt")
    dist.barrier()
    for server in multiprocessing.active_children():  # which the package leaves running
        server.kill()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
