"""How ranks meet: with a key that never enters the store, and with one cause for all when one of them cannot connect.

Six ranks in groups: 0 leads 1, 2 leads 3, 4 leads 5.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from bytecheckpoint.control import rendezvous
from bytecheckpoint.control.communicator import SocketCommunicator
from bytecheckpoint.control.network import Network
from bytecheckpoint.errors import BytecheckpointError, UsageError
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool

WORLD = 6
SECRET = "a secret of the job, of many characters"


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(WORLD) as made:
        yield made


def _connect(rank: int, environment: dict[str, str], deadline_s: float) -> SocketCommunicator:
    store = dist.distributed_c10d._get_default_store()
    with mock.patch.dict(os.environ, environment):
        return SocketCommunicator.connect(store, rank, WORLD, group_size=2, deadline_s=deadline_s)


def _exchange(communicator: SocketCommunicator) -> list[bytes] | None:
    with communicator.operation("save", deadline_s=time_limit(30)) as operation:
        return operation.gather("ranks", b"%d" % communicator.rank)


def _meet_with_a_key(rank: int, world_size: int) -> tuple[list[bytes] | None, int]:
    """Return what rank 0 gathers, and how many values this rank has stored."""
    stored: list[bytes] = []

    class Recording(rendezvous.PrefixStore):  # type: ignore[name-defined, misc]
        def set(self, key: str, value: Any) -> None:
            stored.append(value if isinstance(value, bytes) else value.encode())
            super().set(key, value)

    with mock.patch.object(rendezvous, "PrefixStore", Recording):
        communicator = _connect(rank, {rendezvous.KEY_VARIABLE: SECRET}, time_limit(30))
    with mock.patch.dict(os.environ, {rendezvous.KEY_VARIABLE: SECRET}):
        key = rendezvous._configured_key()
    assert not any(key in value or SECRET.encode() in value for value in stored)
    gathered = _exchange(communicator)
    communicator.close()
    return gathered, len(stored)


def test_a_key_of_the_environment_never_enters_the_store(pool: RankPool) -> None:
    found = pool.run(_meet_with_a_key)
    assert found[0][0] == [b"%d" % rank for rank in range(WORLD)]
    assert all(count for _, count in found)


def _fail_to_meet(rank: int, world_size: int, environments: dict[int, dict[str, str]]) -> tuple[str, str, float]:
    begun = time.monotonic()
    try:
        _connect(rank, environments.get(rank, {}), time_limit(60)).close()
    except BytecheckpointError as error:
        return type(error).__name__, str(error), time.monotonic() - begun
    raise AssertionError("connected")


@pytest.mark.parametrize("rank", [3, 2, 0])
def test_a_rank_without_the_key(pool: RankPool, rank: int) -> None:
    """A member, a leader or rank 0 lacks it, and all ranks say so at once."""
    environments = {other: {rendezvous.KEY_VARIABLE: SECRET} for other in range(WORLD) if other != rank}
    found = pool.run(_fail_to_meet, environments)
    assert {name for name, _, _ in found} == {"ControlError"}
    if rank:  # whose children, several of rank 0, notice it
        assert len({text for _, text, _ in found}) == 1
    assert all(f"not on rank {rank}; set it to the same value on every rank" in text for _, text, _ in found)
    assert max(seconds for _, _, seconds in found) < time_limit(30)


def test_a_rank_with_another_key(pool: RankPool) -> None:
    environments = {other: {rendezvous.KEY_VARIABLE: SECRET + ("x" if other == 5 else "")} for other in range(WORLD)}
    found = pool.run(_fail_to_meet, environments)
    assert len({text for _, text, _ in found}) == 1
    assert "rank 5 on " in found[0][1]
    assert "cannot connect to rank 4" in found[0][1]
    assert "BYTECHECKPOINT_KEY must be the same on all ranks" in found[0][1]


def _fail_with_another_version(rank: int, world_size: int, other: int) -> tuple[str, str, float]:
    with mock.patch.object(rendezvous, "VERSION", "9.9" if rank == other else rendezvous.VERSION):
        return _fail_to_meet(rank, world_size, {})


@pytest.mark.parametrize("rank", [5, 4])
def test_a_rank_with_another_version(pool: RankPool, rank: int) -> None:
    found = pool.run(_fail_with_another_version, rank)
    assert {name for name, _, _ in found} == {"ControlError"}
    assert all("install one version for all ranks" in text and "9.9" in text for _, text, _ in found)
    assert max(seconds for _, _, seconds in found) < time_limit(30)


def _fail_to_listen(rank: int, world_size: int, failing: int) -> tuple[str, str, float]:
    failure = mock.patch.object(Network, "listen", side_effect=UsageError("BYTECHECKPOINT_PORTS=x is no range"))
    with failure if rank == failing else contextlib.nullcontext():
        return _fail_to_meet(rank, world_size, {})


@pytest.mark.parametrize("rank", [5, 4, 0])
def test_a_rank_that_cannot_listen(pool: RankPool, rank: int) -> None:
    """It raises its error at once. The others do not wait until the deadline, and raise its cause."""
    found = pool.run(_fail_to_listen, rank)
    assert [name for name, _, _ in found] == ["UsageError" if one == rank else "ControlError" for one in range(WORLD)]
    others = {text for one, (_, text, _) in enumerate(found) if one != rank}
    assert len(others) == 1
    assert re.match(rf"rank {rank} on .*: BYTECHECKPOINT_PORTS=x is no range", others.pop())
    assert max(seconds for _, _, seconds in found) < time_limit(30)
