"""The TCP road: only who knows the key writes, only into the arena, and what is damaged on the way is noticed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
import torch
import xxhash

from bytecheckpoint.errors import DeadlineError, EngineError
from bytecheckpoint.inference.push.arena import Arena, attach
from bytecheckpoint.inference.push.roads import Place, SharedMemory, Tcp
from bytecheckpoint.inference.push.tcp_server import TcpServer
from bytecheckpoint.inference.push.tcp_wire import NONCE_BYTES, TcpAddress

DATA = torch.arange(1 << 20, dtype=torch.int32).view(torch.uint8)
DIGEST = xxhash.xxh3_64_intdigest(DATA.numpy())


@pytest.fixture
def memory() -> torch.Tensor:
    return torch.zeros(DATA.numel() + 64, dtype=torch.uint8)


@pytest.fixture
def server(memory: torch.Tensor) -> Iterator[TcpServer]:
    started = TcpServer(memory, 5.0)
    yield started
    started.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("bcp-push-tcp")]


def test_what_is_sent_arrives(server: TcpServer, memory: torch.Tensor) -> None:
    roads = [Tcp(server.address, 5.0) for _ in range(2)]
    roads[0].write(Place(0, 64), DATA, DIGEST)
    roads[1].write(Place(0, 0), DATA[:64], xxhash.xxh3_64_intdigest(DATA[:64].numpy()))
    for road in roads:
        road.finish()
        road.close()
    assert torch.equal(memory[64:], DATA)
    assert torch.equal(memory[:64], DATA[:64])


def test_damage_on_the_way(server: TcpServer) -> None:
    road = Tcp(server.address, 5.0)
    road.write(Place(0, 64), DATA, DIGEST ^ 1)
    with pytest.raises(EngineError, match=f"bytes 64 to {64 + DATA.numel()} of an arena were damaged on the way"):
        road.finish()
    road.close()


def test_outside_the_arena(server: TcpServer) -> None:
    road = Tcp(server.address, 5.0)
    with pytest.raises(EngineError, match="are outside an arena"):
        _send(road)
    road.close()


def _send(road: Tcp) -> None:
    road.write(Place(0, 65), DATA, DIGEST)
    road.finish()


def test_who_does_not_know_the_key(server: TcpServer, memory: torch.Tensor) -> None:
    address = server.address
    with pytest.raises(EngineError, match="cannot be reached"):
        Tcp(TcpAddress(("127.0.0.1",), address.port, b"x" * NONCE_BYTES), 5.0)
    with socket.create_connection(("127.0.0.1", address.port)) as connection:
        connection.settimeout(5)
        connection.recv(NONCE_BYTES)
        connection.sendall(b"\0" * 2 * NONCE_BYTES)
        assert connection.recv(1) == b""
    assert not memory.any()


def test_a_worker_that_does_not_read() -> None:
    """Its port takes connections, as that of a stopped process does."""
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.MonkeyPatch.context() as patched:
        patched.setattr("bytecheckpoint.inference.push.roads._CONNECT_S", 0.2)
        with pytest.raises(EngineError, match=r"cannot be reached from .*timed out"):
            Tcp(TcpAddress(("127.0.0.1",), silent.getsockname()[1], b"x"), 0.2)


def test_a_confirmation_that_does_not_come(server: TcpServer, memory: torch.Tensor) -> None:
    road = Tcp(server.address, 0.2)
    # The worker waits for the rest of what it was told would come.
    road._connection.sendall((0).to_bytes(8, "big") + (1 << 20).to_bytes(8, "big") + (0).to_bytes(8, "big"))
    with pytest.raises(DeadlineError, match=r"did not confirm what was sent within 0\.2 s"):
        road.finish()
    road.close()


def test_closing_ends_connections_that_are_open(memory: torch.Tensor) -> None:
    server = TcpServer(memory, 60.0)
    road = Tcp(server.address, 5.0)
    server.close()
    with pytest.raises(EngineError):
        road.finish()
    road.close()


def test_an_arena_is_reached_by_its_token_only() -> None:
    arena = Arena(100)
    address = arena.address
    reached = attach(address)
    assert reached is not None
    reached[7] = 9
    assert arena.memory[7] == 9
    assert attach(type(address)(address.pid, address.descriptor, "0" * 32, 100)) is None
    assert attach(type(address)(address.pid, 0, address.token, 100)) is None
    assert attach(type(address)(address.pid, address.descriptor, address.token, 99)) is None
    arena.close()
    assert attach(address) is None
    reached[8] = 9  # a sender that is late writes into memory that is still there
    assert SharedMemory.open(address) is None
