"""``BcpTransport``: a killed replica group of torchft is replaced, and heals from another one."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import TestCase

import pytest
import torch
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from bytecheckpoint.errors import (
    ControlError,
    CorruptionError,
    DeadlineError,
    MismatchError,
    UnserializableError,
    UsageError,
)
from bytecheckpoint.storage_backends.memory import MemoryBackend
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool

pytest.importorskip("torchft")

from torchft import Manager, Optimizer, ProcessGroupGloo
from torchft.checkpointing.transport_test import make_state_dict, run_multi_recovery_test
from torchft.coordination import LighthouseServer

from bytecheckpoint.integrations.torchft import BcpTransport

pytestmark = [pytest.mark.huggingface, pytest.mark.filterwarnings("ignore")]

_STEPS, _KILLED_AT = 6, 3
_STATE: dict[str, Any] = {
    "user": {"weight": torch.arange(6.0).view(2, 3), "betas": (0.9, 0.95), 0: [1, None]},
    "torchft": {"step": 4},
}


def _limit() -> timedelta:
    return timedelta(seconds=time_limit(60))


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(3) as ranks:
        yield ranks


@pytest.fixture
def transports() -> Iterator[tuple[BcpTransport, BcpTransport]]:
    pair = BcpTransport(_limit()), BcpTransport(_limit())
    yield pair
    for one in pair:
        one.shutdown()


def _receive(sender: BcpTransport, receiver: BcpTransport, step: int, limit: timedelta | None = None) -> Any:
    return receiver.recv_checkpoint(0, sender.metadata(), step, limit or _limit())


def test_the_test_of_torchft() -> None:
    run_multi_recovery_test(
        TestCase(),
        lambda rank, world_size: BcpTransport(_limit(), like=make_state_dict(torch.device("cpu"))),
        torch.device("cpu"),
    )


def test_a_state_arrives_as_it_was(transports: tuple[BcpTransport, BcpTransport]) -> None:
    sender, receiver = transports
    weight = _STATE["user"]["weight"].clone()
    sender.send_checkpoint([1], 4, {**_STATE, "user": {**_STATE["user"], "weight": weight}}, _limit())
    weight.zero_()  # the sender has a copy
    found = _receive(sender, receiver, 4)
    assert torch.equal(found["user"].pop("weight"), _STATE["user"]["weight"])
    assert found == {"user": {"betas": (0.9, 0.95), 0: [1, None]}, "torchft": {"step": 4}}


def test_only_the_step_that_is_sent(transports: tuple[BcpTransport, BcpTransport]) -> None:
    sender, receiver = transports
    sender.send_checkpoint([1], 4, _STATE, _limit())
    with pytest.raises(ControlError, match=r"step 3 from rank 0.*it serves step 4"):
        _receive(sender, receiver, 3)
    sender.disallow_checkpoint()
    with pytest.raises(DeadlineError, match=r"timed out after 0\.1 s: step 4"):
        _receive(sender, receiver, 4, timedelta(seconds=0.1))
    address = sender.metadata()
    sender.shutdown()
    with pytest.raises(ControlError, match="step 4 from rank 0"):
        receiver.recv_checkpoint(0, address, 4, _limit())


def test_no_value_is_pickled(transports: tuple[BcpTransport, BcpTransport]) -> None:
    with pytest.raises(UnserializableError, match=r"state\.policy"):
        transports[0].send_checkpoint([1], 4, {"policy": object()}, _limit())


def test_changed_bytes_are_noticed(
    transports: tuple[BcpTransport, BcpTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    def flip(self: MemoryBackend, key: str, offset: int, buffer: Any) -> None:
        read_into(self, key, offset, buffer)
        if key.endswith(".safetensors"):
            buffer[-1] ^= 1

    sender, receiver = transports
    sender.send_checkpoint([1], 4, _STATE, _limit())
    read_into = MemoryBackend.read_into
    with monkeypatch.context() as patch:
        patch.setattr(MemoryBackend, "read_into", flip)
        with pytest.raises(CorruptionError, match="state"):
            _receive(sender, receiver, 4)
    assert _receive(sender, receiver, 4)["torchft"] == {"step": 4}


def _exchange_shards(rank: int, world_size: int) -> str:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",))
    table = torch.arange(15.0).view(5, 3)
    state = {"weight": distribute_tensor(table, mesh, [Shard(0)]), "moment": distribute_tensor(table, mesh, [Shard(0)])}
    sender, receiver = BcpTransport(_limit()), BcpTransport(_limit(), like={"weight": state["weight"]})
    other = BcpTransport(_limit(), like={"weight": distribute_tensor(table, mesh, [Replicate()])})
    try:
        sender.send_checkpoint([1], 4, state, _limit())
        found = _receive(sender, receiver, 4)
        for name, one in found.items():
            assert isinstance(one, DTensor)
            assert one._spec == state[name]._spec
            assert torch.equal(one.full_tensor(), table)
        with pytest.raises(MismatchError, match=r"weight.*Shard"):
            _receive(sender, other, 4)
        equal = [distribute_tensor(table, DeviceMesh("cpu", ranks), [Replicate()]) for ranks in ([0, 1], [1, 0])]
        with pytest.raises(UsageError, match="two meshes"):
            BcpTransport(_limit(), like=equal)
        return "done"
    finally:
        for one in (sender, receiver, other):
            one.shutdown()


def test_shards_get_the_mesh_of_the_receiver(pool: RankPool) -> None:
    assert pool.run(_exchange_shards, world_size=2) == ["done"] * 2


def _train(replica: str, lighthouse: str, killed_at: int | None = None) -> dict[str, Any]:
    """Train a replica group of one rank."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    torch.manual_seed(ord(replica) if killed_at is None else 0)  # a replacement begins with other parameters
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    transport = BcpTransport(_limit())
    manager = Manager(
        pg=ProcessGroupGloo(_limit()),
        min_replica_size=2,
        use_async_quorum=False,  # so that a group that heals takes part in the same step
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        load_state_dict=lambda state: (
            model.load_state_dict(state["model"]),
            optimizer.load_state_dict(state["optimizer"]),
        ),
        replica_id=replica,
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        hostname="localhost",
        timeout=_limit(),
        quorum_timeout=_limit(),
        checkpoint_transport=transport,
    )
    steps = Optimizer(manager, optimizer)
    received: list[int] = []
    receive = transport.recv_checkpoint
    transport.recv_checkpoint = lambda **given: received.append(given["step"]) or receive(**given)  # type: ignore
    try:
        while manager.current_step() < _STEPS:
            if manager.current_step() == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)
            steps.zero_grad()
            step = manager.current_step()  # of this group, also if it was just healed
            data = torch.Generator().manual_seed(2 * step + ord(replica))
            model(torch.randn(4, 3, generator=data)).square().sum().backward()
            for parameter in model.parameters():
                manager.allreduce(parameter.grad).wait()
            steps.step()
        held = {**model.state_dict(), **optimizer.state_dict()["state"][0]}
        return {"received": received, "sums": {name: one.double().sum().item() for name, one in held.items()}}
    finally:
        manager.shutdown(wait=False)


def _live(rank: int, world_size: int, lighthouse: str, ends: str, killed_at: int | None) -> Any:
    """Rank 0 trains all the time; rank 1 until it is killed, and then rank 2 in its place."""
    warnings.simplefilter("ignore")  # the pool resets the filters
    if killed_at is None:
        return _train("ab"[rank], lighthouse)
    if rank == 1:
        os.open(ends, os.O_WRONLY)  # its end of the pipe is open while it lives
        return _train("b", lighthouse, killed_at)
    if rank == 2:
        with open(ends, "rb") as pipe:
            pipe.read()
    return _train("ab"[rank > 0], lighthouse)


@pytest.mark.slow
def test_a_killed_group_heals_without_a_restart_of_the_other(pool: RankPool, tmp_path: Path) -> None:
    """Five processes import torchft and connect; alone on the machine it takes about ten seconds."""
    os.mkfifo(tmp_path / "ends")
    server = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=100, heartbeat_timeout_ms=1000)
    try:
        arguments = server.address(), str(tmp_path / "ends")
        whole = pool.run(_live, *arguments, None, world_size=2, backend=None)
        healed = pool.run(_live, *arguments, _KILLED_AT, backend=None, expect_death={1: signal.SIGKILL})
    finally:
        server.shutdown()
    assert healed[2]["received"] == [_KILLED_AT]
    assert [one["sums"] for one in healed if one] == [one["sums"] for one in whole]
