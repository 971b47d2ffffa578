"""Ranks on three hosts with separate networks, whose links are slow, are cut, and come back.

In a cut network, a save ends with an error on every rank that says which hosts nothing arrives from, and the next save
works once the network does.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from network_hosts import Hosts, enter_host, network_hosts
from torch.distributed import TCPStore

import bytecheckpoint as bcp
from bytecheckpoint.control.communicator import SocketCommunicator
from bytecheckpoint.errors import BytecheckpointError
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.ranks import RankPool

pytestmark = pytest.mark.full

WORLD = 3
DEADLINE_S = time_limit(3)
CONNECT_S = time_limit(20)

_job: list[Any] = []  # what a rank keeps from call to call: its store, its communicator and its checkpointer


@dataclass
class Job:
    """A job of one rank on each host."""

    hosts: Hosts
    pool: RankPool
    folder: Path

    def connect(self, *, address: str = "", at_rank_0: str = "", deadline_s: float = CONNECT_S) -> list[Any]:
        """Connect the ranks; return what each of them has raised, or None."""
        address = address or self.hosts.addresses[0]
        self.port = _free_port()
        arguments = (self.hosts.pids, address, at_rank_0 or address, self.port, deadline_s)
        return self.pool.run(_connect, *arguments, backend=None)

    def save(self, name: str) -> list[Any]:
        """Save on all ranks; return what each of them has raised, or None."""
        return self.pool.run(_save, str(self.folder / name), backend=None)

    def check(self, name: str) -> None:
        """Save, and load that."""
        assert self.save(name) == [None] * WORLD
        assert self.pool.run(_load, str(self.folder / name), backend=None) == [True] * WORLD


def _free_port() -> int:
    """Return a port that is free in the namespaces, which nothing else uses."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def _outcome(call: Any) -> tuple[str, str, float] | None:
    begun = time.monotonic()
    try:
        call()
    except BytecheckpointError as error:
        return type(error).__name__, str(error), time.monotonic() - begun
    return None


def _connect(
    rank: int, world_size: int, pids: list[int], address: str, at_rank_0: str, port: int, deadline_s: float
) -> tuple[str, str, float] | None:
    if os.uname().nodename != f"node{rank}":
        enter_host(pids[rank])
    store = TCPStore(address, port, WORLD, rank == 0, wait_for_workers=True)
    _job[:] = [store]
    os.environ["MASTER_ADDR"] = address if rank else at_rank_0

    def connect() -> None:
        communicator = SocketCommunicator.connect(store, rank, WORLD, deadline_s=deadline_s)
        options = bcp.SaveOptions(deadline_s=DEADLINE_S)
        _job[1:] = [communicator, bcp.Checkpointer(communicator=communicator), options]

    return _outcome(connect)


def _state(rank: int) -> dict[str, Any]:
    return {"model": {"w": torch.arange(1000.0)}, "extra_state": {"step": 5}}


def _save(rank: int, world_size: int, path: str) -> tuple[str, str, float] | None:
    *_, checkpointer, options = _job
    return _outcome(lambda: checkpointer.save(path, _state(rank), step=5, options=options))


def _load(rank: int, world_size: int, path: str) -> bool:
    *_, checkpointer, _options = _job
    state: dict[str, Any] = {"model": {"w": torch.zeros(1000)}, "extra_state": {"step": 0}}
    checkpointer.load(path, state)
    return bool(torch.equal(state["model"]["w"], torch.arange(1000.0))) and state["extra_state"] == {"step": 5}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with network_hosts(WORLD, tmp_path_factory.mktemp("hosts")) as made:
        yield made


@pytest.fixture
def job(hosts: Hosts, tmp_path: Path) -> Iterator[Job]:
    """A job that is not connected yet."""
    hosts.heal()
    with RankPool(WORLD) as pool:
        yield Job(hosts, pool, tmp_path)


@pytest.fixture
def connected(job: Job) -> Job:
    assert job.connect() == [None] * WORLD
    job.check("first")
    return job


@pytest.mark.parametrize("version", [4, 6])
def test_a_slow_network(job: Job, version: int) -> None:
    """Each host also has an interface of an address that all have, as Docker makes it."""
    job.hosts.delay_s = 0.025
    address = job.hosts.addresses[0] if version == 4 else job.hosts.addresses6[0]
    assert job.connect(address=address) == [None] * WORLD
    job.check("slow")


def test_rank_0_whose_host_is_localhost_to_it(job: Job) -> None:
    assert job.connect(at_rank_0="localhost") == [None] * WORLD
    job.check("step")


@pytest.mark.parametrize("host", [0, 2])
def test_a_host_that_is_cut_off(connected: Job, host: int) -> None:
    connected.hosts.isolate(host)
    found = connected.save("cut")
    for rank in range(WORLD):
        _, text, seconds = found[rank]
        assert "ProcessDied" not in text
        assert seconds < DEADLINE_S + time_limit(20)
        beyond = {host} if rank != host else {0, 1, 2} - {host}
        if rank in (0, host) or host == 0:  # the others learn it from rank 0
            assert all(
                f"node{other}" in text.partition("Nothing arrives on")[2] for other in beyond & _parents(rank)
            ), text
    connected.hosts.heal()
    connected.check("healed")
    connected.check("healed later")


def _parents(rank: int) -> set[int]:
    """The hosts that exchange messages with that of a rank."""
    return {0} if rank else {1, 2}


@pytest.mark.parametrize(("source", "target"), [(0, 1), (1, 0)])
def test_a_link_that_fails_in_one_direction(connected: Job, source: int, target: int) -> None:
    connected.hosts.cut(source, target)
    found = connected.save("cut")
    for outcome in found:
        assert "ProcessDied" not in outcome[1], outcome
    text = f"Nothing arrives on node{target} from rank(s) {source} on node{source}"
    assert any(text in outcome[1] for outcome in found), "\n".join(outcome[1] for outcome in found)
    connected.hosts.heal()
    connected.check("healed")


def test_a_link_that_is_not_needed(connected: Job) -> None:
    connected.hosts.cut(1, 2)
    connected.hosts.cut(2, 1)
    connected.check("cut")


def test_connections_that_the_network_has_forgotten(connected: Job) -> None:
    connected.hosts.forget()
    found = connected.save("forgotten")
    assert all("ProcessDied" not in outcome[1] for outcome in found), found
    connected.check("after")
    connected.check("later")


def test_a_host_that_freezes(connected: Job) -> None:
    frozen = connected.pool.pids[2]
    connected.pool.run(_stop_and_continue, str(connected.folder / "frozen"), frozen, backend=None)
    connected.check("after")


def _stop_and_continue(rank: int, world_size: int, path: str, frozen: int) -> None:
    """Rank 2 is stopped until the others have failed."""
    stopped = f"{path}-stopped"
    if rank == 1:
        os.kill(frozen, signal.SIGSTOP)
        Path(stopped).touch()
    while rank == 0 and not Path(stopped).exists():
        time.sleep(0.01)
    if rank != 2:
        outcome = _save(rank, world_size, path)
        assert outcome is not None
        assert "node2" in outcome[1], outcome
    Path(f"{path}-{rank}").touch()
    if rank == 1:
        while not Path(f"{path}-0").exists():
            time.sleep(0.01)
        os.kill(frozen, signal.SIGCONT)
    if rank == 2:
        _save(rank, world_size, path)


def test_a_host_that_ends_without_a_word(connected: Job) -> None:
    connected.hosts.isolate(2)
    os.kill(connected.pool.pids[2], signal.SIGSTOP)
    begun = time.monotonic()
    try:
        found = connected.pool.run(_save, str(connected.folder / "dead"), world_size=2, backend=None)
    finally:
        os.kill(connected.pool.pids[2], signal.SIGCONT)
    for _, text, _ in found:
        assert "Nothing arrives on node0 from rank(s) 2 on node2" in text
    assert time.monotonic() - begun < time_limit(60)


def test_a_firewall_that_lets_only_the_store_through(job: Job) -> None:
    """All ranks raise the cause, with the address, the port and firewalls, and none waits much longer than another."""
    arguments = (job.hosts.pids, job.hosts.addresses[0], job.hosts.addresses[0])
    port = _free_port()
    job.hosts.allow_only(port)
    found = job.pool.run(_connect, *arguments, port, time_limit(10), backend=None)
    assert len({text for _, text, _ in found}) == 1, "\n".join(map(str, found))
    text = found[0][1]
    assert "10.77.0.1" in text
    assert "firewall" in text
