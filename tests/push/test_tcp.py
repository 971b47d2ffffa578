"""TCP into an arena: only an authenticated sender writes, only into the arena, and damage is detected."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
import torch
import xxhash
from leak_watch import threads_left

from bytecheckpoint.control import acceptor
from bytecheckpoint.control.acceptor import connect
from bytecheckpoint.control.addresses import ADDRESS_VARIABLE
from bytecheckpoint.control.connections import Endpoint, at_most, receive, send
from bytecheckpoint.engine.tensor_bytes import byte_view
from bytecheckpoint.errors import DeadlineError, EngineError
from bytecheckpoint.inference.layouts.parts import TensorBox
from bytecheckpoint.inference.push.layout import ChunkTarget, Layout
from bytecheckpoint.inference.push.transports.base import OutgoingChunk
from bytecheckpoint.inference.push.transports.shared_memory import ArenaChunks, SharedArena, attach
from bytecheckpoint.inference.push.transports.tcp import FAILED, FRAME, STATUS, TAKEN, ChunkServer, TcpTransport
from bytecheckpoint.tensors.dtypes import find_dtype
from bytecheckpoint.tensors.geometry import Box
from bytecheckpoint.testing import time_limit

DATA = torch.arange(1 << 20, dtype=torch.int32).view(torch.uint8)
DIGEST = xxhash.xxh3_64_intdigest(DATA.numpy())
BOXES = (Box((0,), (64,)), Box((0,), (DATA.numel(),)))
LAYOUT = Layout(
    tuple(TensorBox(f"t{n}", box.lengths, box, find_dtype("uint8")) for n, box in enumerate(BOXES)),
    tuple(enumerate(BOXES)),
)


@pytest.fixture
def memory() -> torch.Tensor:
    return torch.zeros(LAYOUT.nbytes, dtype=torch.uint8)


@pytest.fixture
def server(memory: torch.Tensor) -> Iterator[ChunkServer]:
    before = {*threading.enumerate()}
    started = ChunkServer(ArenaChunks(LAYOUT, memory), time_limit(5))
    yield started
    started.close()
    assert threads_left("bcp-tcp", before) == []


def _transport(server: ChunkServer, deadline_s: float | None = None) -> TcpTransport:
    return TcpTransport(server.endpoint, time_limit(5) if deadline_s is None else deadline_s)


def test_chunks_arrive(server: ChunkServer, memory: torch.Tensor) -> None:
    transports = [_transport(server) for _ in range(2)]
    transports[0].write([OutgoingChunk([ChunkTarget(0, 1, 64)], DATA, DIGEST)])
    small = DATA[:64]
    transports[1].write([OutgoingChunk([ChunkTarget(0, 0)], small, xxhash.xxh3_64_intdigest(small.numpy()))])
    for transport in transports:
        transport.finish()
        transport.close()
    assert torch.equal(memory[64:], DATA)
    assert torch.equal(memory[:64], DATA[:64])


@pytest.mark.parametrize("chunk", [0, 2])
def test_a_chunk_that_is_not_in_the_layout(server: ChunkServer, memory: torch.Tensor, chunk: int) -> None:
    transport = _transport(server)
    with pytest.raises(EngineError, match=f"there is no chunk {chunk} of {DATA.numel()} bytes in this version"):
        _send(transport, chunk)
    transport.close()
    assert not memory.any()


def test_a_failed_stream_is_read_until_the_sender_ends_it(server: ChunkServer) -> None:
    """Closing it at once would reset the connection, and the sender could lose the reason."""
    wait = at_most(time_limit(5))
    with connect(server.endpoint) as connection:
        send(connection, FRAME.pack(2, DATA.numel(), DIGEST), wait)
        frames = [STATUS.unpack(receive(connection, STATUS.size, wait)) for _ in range(2)]
        assert [kind for kind, _ in frames] == [TAKEN, FAILED]
        assert b"there is no chunk 2" in receive(connection, frames[1][1], wait)
        with pytest.raises(ConnectionError):
            receive(connection, 1, wait)
        for _ in range(16):
            send(connection, byte_view(DATA), wait)


def _send(transport: TcpTransport, chunk: int) -> None:
    transport.write([OutgoingChunk([ChunkTarget(0, chunk)], DATA, DIGEST)])
    transport.finish()


def test_a_client_without_the_key(server: ChunkServer, memory: torch.Tensor) -> None:
    """The other attacks on a listener are in ``tests/control/test_connections.py``."""
    with pytest.raises(EngineError, match="cannot be reached"):
        TcpTransport(Endpoint(["127.0.0.1"], server.endpoint.port, b"x" * 32), 5.0)
    assert not memory.any()


def test_a_configured_address(memory: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADDRESS_VARIABLE, "127.0.0.2")
    server = ChunkServer(ArenaChunks(LAYOUT, memory), time_limit(5))
    assert server.endpoint.addresses == ["127.0.0.2", "127.0.0.1"]
    transport = _transport(server)
    assert transport._connection.getpeername()[0] == "127.0.0.2"
    transport.write([OutgoingChunk([ChunkTarget(0, 1, 64)], DATA, DIGEST)])
    transport.finish()
    transport.close()
    server.close()


def test_a_worker_that_does_not_answer() -> None:
    """Its port accepts connections, like that of a stopped process."""
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.MonkeyPatch.context() as patched:
        patched.setattr(acceptor, "_CONNECT_S", 0.2)
        with pytest.raises(EngineError, match=r"cannot be reached from .*no answer in time"):
            TcpTransport(Endpoint(["127.0.0.1"], silent.getsockname()[1], b"x"), 0.2)


def test_a_missing_confirmation(server: ChunkServer) -> None:
    transport = _transport(server, 0.2)
    # The server waits for the rest of the announced chunk.
    transport._connection.sendall((1).to_bytes(8, "big") + DATA.numel().to_bytes(8, "big") + (0).to_bytes(8, "big"))
    with pytest.raises(DeadlineError, match=r"did not confirm what was sent within 0\.2 s"):
        transport.finish()
    transport.close()


def test_closing_the_server_ends_open_connections(memory: torch.Tensor) -> None:
    server = ChunkServer(ArenaChunks(LAYOUT, memory), time_limit(60))
    transport = _transport(server)
    server.close()
    with pytest.raises(EngineError):
        transport.finish()
    transport.close()


def test_an_arena_is_opened_only_with_its_token() -> None:
    arena = SharedArena(100)
    address = arena.address
    mapped = attach(address)
    assert mapped is not None
    mapped[7] = 9
    assert arena.memory[7] == 9
    assert attach(type(address)(address.pid, address.descriptor, "0" * 32, 100)) is None
    assert attach(type(address)(address.pid, 0, address.token, 100)) is None
    assert attach(type(address)(address.pid, address.descriptor, address.token, 99)) is None
    arena.close()
    assert attach(address) is None
    mapped[8] = 9  # a late sender writes into memory that still exists
