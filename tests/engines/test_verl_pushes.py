"""``BcpCheckpointEngine``: weights go from two actors to two rollouts, with stand-ins for verl's two classes."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from trainer_stand_ins import CheckpointEngineRegistry, install_verl

from bytecheckpoint.engine.tensor_bytes import as_bytes
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool

_ACTORS, _FIRST_ROLLOUT = 2, 2
_BUCKET_BYTES = 1 << 20
_DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool]


def _weights(step: int) -> dict[str, torch.Tensor]:
    found = {"wide": torch.full((3, 1 << 20), float(step))}  # three pieces, more than a bucket
    found["long"] = torch.full((1 << 18,), step)
    found |= {f"layer.{dtype}": (torch.arange(3000).view(30, 100) % (step + 2)).to(dtype) for dtype in _DTYPES}
    found["scale"] = torch.tensor(0.5 * step)
    found["empty"] = torch.empty(0, 4)
    found["transposed"] = torch.arange(6.0).view(2, 3).t() * step
    return found


def _engine(rank: int, timeout_s: float) -> Any:
    install_verl()
    importlib.import_module("bytecheckpoint.integrations.verl")
    is_master = {"is_master": True} if rank == 0 else {}
    return CheckpointEngineRegistry.new("bcp", bucket_size=_BUCKET_BYTES, timeout_s=timeout_s, **is_master)


def _connect(engine: Any, rank: int, world_size: int) -> None:
    """What verl's manager does before each update."""
    metadata: list[Any] = [None] * world_size
    dist.all_gather_object(metadata, engine.prepare())
    columns = engine.build_topology(_ACTORS, world_size - _ACTORS, metadata)[rank >= _FIRST_ROLLOUT]
    engine.init_process_group(**{key: column[rank % _FIRST_ROLLOUT] for key, column in columns.items()})
    dist.barrier()


def _made(step: int, walked: list[str], actors: Any = None, dies_at: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in _weights(step).items():
        if name == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if actors is not None:
            dist.all_reduce(torch.ones(1), group=actors)
        walked.append(name)
        yield name, tensor
        tensor.zero_()  # the next tensor may be made in its memory


async def _taken(engine: Any, step: int | None) -> dict[str, torch.Tensor]:
    return {name: tensor async for name, tensor in engine.receive_weights(global_steps=step)}


def _failure(work: Any) -> str:
    try:
        asyncio.run(work)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no failure"


def _update(engine: Any, rank: int, world_size: int, step: int, actors: Any) -> bool:
    _connect(engine, rank, world_size)
    expected = _weights(step)
    if rank < _FIRST_ROLLOUT:
        walked: list[str] = []
        asyncio.run(engine.send_weights(_made(step, walked, actors), global_steps=step))
        is_right = walked == list(expected)
    else:
        found = asyncio.run(_taken(engine, step))
        is_right = list(found) == list(expected) and all(
            (one.dtype, one.shape) == (expected[name].dtype, expected[name].shape)
            and torch.equal(as_bytes(one), as_bytes(expected[name].contiguous()))
            for name, one in found.items()
        )
    engine.finalize()
    return is_right


def _update_twice(rank: int, world_size: int) -> list[bool]:
    engine = _engine(rank, time_limit(60))
    actors = dist.new_group(list(range(_ACTORS)))
    return [_update(engine, rank, world_size, step, actors) for step in (1, 2)]


def test_two_updates(rank_pool: RankPool) -> None:
    assert rank_pool.run(_update_twice, world_size=4) == [[True, True]] * 4


def test_a_rollout_less(rank_pool: RankPool) -> None:
    assert rank_pool.run(_update_twice, world_size=3) == [[True, True]] * 3


def _kill_the_sender(rank: int, world_size: int) -> str:
    engine = _engine(rank, time_limit(60))
    _connect(engine, rank, world_size)
    if rank >= _FIRST_ROLLOUT:
        return _failure(_taken(engine, 1))
    return _failure(engine.send_weights(_made(1, [], dies_at="scale" if rank == 0 else ""), global_steps=1))


def test_a_sender_that_is_killed(rank_pool: RankPool) -> None:
    _, actor, *rollouts = rank_pool.run(_kill_the_sender, world_size=4, expect_death={0: signal.SIGKILL})
    assert actor == "no failure"
    for rank, (source, found) in enumerate(zip(["actor rank 0", "rollout rank 0"], rollouts, strict=True)):
        assert found.startswith(f"ControlError: rollout rank {rank}: receiving "), found
        assert f"from {source} failed" in found


def _damage(rank: int, world_size: int, damaged_by: int) -> tuple[str, int, bool]:
    engine = _engine(rank, time_limit(60))
    module: Any = importlib.import_module("bytecheckpoint.integrations.verl")
    send, walked = module.send, []

    def flip(connection: Any, data: Any, wait: Any) -> None:
        if len(data) == module._PIECE_BYTES:
            data = bytearray(data)
            data[-1] ^= 1
        send(connection, data, wait)

    _connect(engine, rank, world_size)
    if rank == damaged_by:
        module.send = flip
    try:
        if rank >= _FIRST_ROLLOUT:
            found = _failure(_taken(engine, 1))
        else:
            found = _failure(engine.send_weights(_made(1, walked), global_steps=1))
    finally:
        module.send = send
    dist.barrier()
    return found, len(walked), _update(engine, rank, world_size, 2, None)


def test_a_damaged_byte(rank_pool: RankPool) -> None:
    """The next update succeeds, with new connections."""
    found = rank_pool.run(_damage, 0, world_size=4)
    (actor, walked, _), (_, other, _), (first, _, _), (second, _, _) = found
    damage = "rollout rank 0: bytes of wide were changed on the way from actor rank 0"
    assert [actor, first] == [f"ControlError: {damage}", f"CorruptionError: {damage}"]
    assert second.startswith("ControlError: rollout rank 1: receiving wide from rollout rank 0 failed"), second
    assert walked == other == len(_weights(1))
    assert all(is_right for *_, is_right in found)


def test_a_byte_that_a_rollout_damages(rank_pool: RankPool) -> None:
    found = rank_pool.run(_damage, _FIRST_ROLLOUT, world_size=4)
    damage = "rollout rank 1: bytes of wide were changed on the way from rollout rank 0"
    failures = [failure for failure, *_ in found]
    assert failures == [
        f"ControlError: {damage}",
        "no failure",
        f"ControlError: {damage}",
        f"CorruptionError: {damage}",
    ]
    assert all(is_right for *_, is_right in found)


async def _first_of(weights: Any) -> None:
    async with contextlib.aclosing(weights):
        await anext(weights)


def _receive_otherwise(rank: int, world_size: int, how: str) -> str:
    engine = _engine(rank, 1.0 if how == "not at all" else time_limit(60))
    _connect(engine, rank, world_size)
    found = ""
    if rank < _FIRST_ROLLOUT:
        found = _failure(engine.send_weights(_made(1, []), global_steps=1))
    elif rank > _FIRST_ROLLOUT or how == "another step":
        found = _failure(_taken(engine, 3 if how == "another step" else 1))
    elif how == "one tensor":
        found = _failure(_first_of(engine.receive_weights(1)))
    dist.barrier()
    return found


def test_a_rollout_that_does_not_receive(rank_pool: RankPool) -> None:
    actor, _, _, second = rank_pool.run(_receive_otherwise, "not at all", world_size=4)
    assert actor.startswith("DeadlineError: actor rank 0: "), actor
    assert "to rollout rank 0 failed: " in actor
    assert second.startswith("DeadlineError: rollout rank 1: "), second
    assert "rollout rank 0 failed: " in second


def test_a_rollout_that_stops(rank_pool: RankPool) -> None:
    actor, _, first, _ = rank_pool.run(_receive_otherwise, "one tensor", world_size=4)
    assert actor.startswith("ControlError: rollout rank 0: its rollout takes no more tensors"), actor
    assert first == "no failure"


def test_a_rollout_that_expects_another_step(rank_pool: RankPool) -> None:
    actor, _, first, _ = rank_pool.run(_receive_otherwise, "another step", world_size=4)
    expected = "ControlError: rollout rank 0 expects the weights of step 3, but those of 1 arrive"
    assert [actor, first] == [expected] * 2
