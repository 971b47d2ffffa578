"""Incremental saves of real ranks: each rank refers to what the base has of its files, and any layout loads it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from sorted_arguments import loading, saving
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import bytecheckpoint as bcp
from bytecheckpoint import telemetry
from bytecheckpoint.errors import BytecheckpointError, DisagreementError
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool

WAIT = {"deadline_s": time_limit(60)}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as ranks:
        yield ranks


def _trained(seed: int) -> dict[str, Any]:
    """Return a sharded model of which only one layer is trained, and its optimizer after two steps."""
    torch.manual_seed(seed)
    layers = [nn.Linear(64, 96), nn.Linear(96, 33, bias=False), nn.Linear(33, 64)]
    model = nn.Sequential(*layers)
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    _train(model, optimizer)
    _train(model, optimizer)
    return {"model": model, "optimizer": optimizer}


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 64)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _save_trained(rank: int, world_size: int, root: str, options: dict[str, Any]) -> list[int]:
    state = _trained(1)
    sizes = []
    for step in (1, 2, 3):
        handle = bcp.save(
            f"{root}/step-{step}", state, step=step, **saving(base="auto", chunk_size=512, **options, **WAIT)
        )
        if step == 2:
            _train(**state)
        sizes.append(handle.result(time_limit(60)).bytes_written)
    return sizes


def _leaves(state: dict[str, Any]) -> dict[str, bytes]:
    """Return the bits of all whole tensors of the model and of the optimizer's state."""
    leaves = {f"model.{name}": tensor for name, tensor in state["model"].state_dict().items()}
    for row, entries in enumerate(state["optimizer"].state.values()):
        leaves |= {f"{row}.{key}": tensor for key, tensor in entries.items()}
    return {name: _whole(tensor).numpy().tobytes() for name, tensor in leaves.items()}


def _load_trained(rank: int, world_size: int, root: str) -> list[dict[str, bytes]]:
    """Return what each of the three checkpoints contains."""
    found = []
    for step in (1, 2, 3):
        loaded = _trained(2)
        bcp.load(f"{root}/step-{step}", loaded, **loading(**WAIT))
        found.append(_leaves(loaded))
    return found


def _expected(rank: int, world_size: int) -> list[dict[str, bytes]]:
    state = _trained(1)
    first = _leaves(state)
    _train(**state)
    return [first, first, _leaves(state)]


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize(
    "options",
    [{}, {"async_save": True}, {"async_save": True, "gate": True}, {"codec": "zstd-planes"}],
    ids=["sync", "async", "gate", "codec"],
)
@pytest.mark.sampled(2)
def test_an_incremental_checkpoint_loads_into_any_world_size(
    pool: RankPool, tmp_path: Path, options: dict[str, Any]
) -> None:
    saved = pool.run(_save_trained, str(tmp_path), options, world_size=3)
    for step in (2, 3):
        manifest = bcp.open(tmp_path / f"step-{step}").manifest
        assert bcp.open(tmp_path / f"step-{step}").verify().ok
        for row, reference in enumerate(manifest.references.name):
            assert manifest.references.size[row] == os.path.getsize(tmp_path / "objects" / reference)
        assert {Path(name).name[:5] for name in manifest.references.name} >= {"model"}
        ranks = {Path(name).name.partition("-")[2][:5] for name in manifest.references.name}
        assert ranks == {"00000", "00001", "00002"}, "each rank refers to its own files"
    assert all(second < first / 1.5 and third > second for first, second, third in saved)
    expected = pool.run(_expected, world_size=3)[0]
    assert expected[1] != expected[2]
    for world_size in (3, 2, 1):
        assert pool.run(_load_trained, str(tmp_path), world_size=world_size) == [expected] * world_size


def _rows(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    return {"rows": distribute_tensor(torch.randn(4096, 16, generator=generator), mesh, [Shard(0)])}


def _save_rows(rank: int, world_size: int, path: str, changed: int) -> int:
    state = _rows(0)
    local = state["rows"]
    assert isinstance(local, DTensor)
    if rank == changed:
        local._local_tensor[0] += 1
    return bcp.save(path, {"model": state}, **saving(base="auto", **WAIT)).result().bytes_written


def test_only_the_rank_with_changes_writes_and_other_world_sizes_write_everything(
    pool: RankPool, tmp_path: Path
) -> None:
    full = pool.run(_save_rows, str(tmp_path / "step-1"), -1)
    second = pool.run(_save_rows, str(tmp_path / "step-2"), 2)
    assert all(nbytes > 1 << 16 for nbytes in full)
    assert [nbytes > 1 << 16 for nbytes in second] == [False, False, True, False]
    third = pool.run(_save_rows, str(tmp_path / "step-3"), 0, world_size=2)
    assert all(nbytes > 1 << 17 for nbytes in third)
    assert bcp.open(tmp_path / "step-3").manifest.references.name == []
    before, after = (bcp.open(tmp_path / f"step-{step}")["model.rows"].load() for step in (1, 2))
    assert (before != after).any(dim=1).nonzero().tolist() == [[2048]]


def _fail_while_writing(rank: int, world_size: int, path: str) -> str:
    def fail(name: str, event: str) -> None:
        if rank == 1 and name == "save.write" and event == "enter":
            raise OSError("injected")

    stop = telemetry.observe(fail)
    try:
        bcp.save(path, {"model": _rows(0)}, **saving(base="auto", **WAIT))
    except BytecheckpointError as error:
        return type(error).__name__
    finally:
        stop()
    return "saved"


def test_a_failed_save_leaves_nothing(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_save_rows, str(tmp_path / "step-1"), -1)
    assert pool.run(_fail_while_writing, str(tmp_path / "step-2")) == ["RankFailedError"] * 4
    (attempt,) = (tmp_path / "objects").iterdir()
    assert attempt.name == bcp.open(tmp_path / "step-1").manifest.attempt
    assert not (tmp_path / "step-2").exists()


def _disagree(rank: int, world_size: int, path: str) -> str:
    try:
        bcp.save(path, {"model": _rows(0)}, **saving(base=None if rank else "auto", **WAIT))
    except DisagreementError as error:
        return str(error)
    return "saved"


def test_all_ranks_must_pass_the_same_base(pool: RankPool, tmp_path: Path) -> None:
    for message in pool.run(_disagree, str(tmp_path / "step-1")):
        assert "base" in message


def _train_and_die(rank: int, world_size: int, root: str) -> None:
    def kill(name: str, event: str) -> None:
        if (
            rank == 0
            and name == "save.commit"
            and event == "enter"
            and os.path.exists(f"{root}/step-2/manifest.msgpack")
        ):
            os.kill(os.getpid(), signal.SIGKILL)

    telemetry.observe(kill)
    with (
        suppress(BytecheckpointError),
        bcp.CheckpointManager(root, preemption=None, save=bcp.SaveOptions(base="auto")) as manager,
    ):
        for step in (1, 2, 3):
            manager.save(step, {"model": _rows(0)}, force=True)
            manager.wait()


def _go_on(rank: int, world_size: int, root: str) -> None:
    with bcp.CheckpointManager(root, keep=1, preemption=None, save=bcp.SaveOptions(base="auto")) as manager:
        manager.resume({"model": _rows(1)})
        for step in (4, 5):
            manager.save(step, {"model": _rows(0)}, force=True)


def test_the_next_job_removes_what_a_killed_one_has_left(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_train_and_die, str(tmp_path), expect_death={0: signal.SIGKILL})
    assert len([*(tmp_path / "objects").iterdir()]) == 3, "that of the third save, too, which was killed"
    first = bcp.open(tmp_path / "step-1").manifest.attempt
    pool.run(_go_on, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["objects", "step-5"]
    manifest = bcp.open(tmp_path / "step-5").manifest
    assert {path.name for path in (tmp_path / "objects").iterdir()} == {first, manifest.attempt}
    assert bcp.open(tmp_path / "step-5").verify().ok
