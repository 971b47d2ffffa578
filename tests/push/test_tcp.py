"""TCP into an arena: only an authenticated sender writes, only into the arena, and damage is detected."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
import torch
import xxhash
from leak_watch import threads_left

from bytecheckpoint.engine.tensor_bytes import byte_view
from bytecheckpoint.errors import DeadlineError, EngineError, UsageError
from bytecheckpoint.inference.layouts.parts import Part
from bytecheckpoint.inference.push.layout import Layout
from bytecheckpoint.inference.push.transports import connection as connection_module
from bytecheckpoint.inference.push.transports.base import Place
from bytecheckpoint.inference.push.transports.connection import (
    FAILED,
    FRAME,
    NONCE_BYTES,
    STATUS,
    TAKEN,
    Endpoint,
    connect,
    receive,
)
from bytecheckpoint.inference.push.transports.listening import (
    ADDRESS_VARIABLE,
    PORTS_VARIABLE,
    _listen_everywhere,
    listen,
    local_addresses,
    own_address,
)
from bytecheckpoint.inference.push.transports.shared_memory import Arena, ArenaChunks, SharedMemoryTransport, attach
from bytecheckpoint.inference.push.transports.tcp import ChunkServer, TcpTransport
from bytecheckpoint.tensors.dtypes import find_dtype
from bytecheckpoint.tensors.geometry import Box
from bytecheckpoint.testing import time_limit

DATA = torch.arange(1 << 20, dtype=torch.int32).view(torch.uint8)
DIGEST = xxhash.xxh3_64_intdigest(DATA.numpy())
BOXES = (Box((0,), (64,)), Box((0,), (DATA.numel(),)))
LAYOUT = Layout(
    tuple(Part(f"t{n}", box.lengths, box, find_dtype("uint8")) for n, box in enumerate(BOXES)), tuple(enumerate(BOXES))
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
    assert threads_left("bcp-push-tcp", before) == []


def _transport(server: ChunkServer, deadline_s: float | None = None) -> TcpTransport:
    return TcpTransport(server.endpoint, time_limit(5) if deadline_s is None else deadline_s)


def test_chunks_arrive(server: ChunkServer, memory: torch.Tensor) -> None:
    transports = [_transport(server) for _ in range(2)]
    transports[0].write([Place(0, 64, 1)], DATA, DIGEST)
    transports[1].write([Place(0, 0, 0)], DATA[:64], xxhash.xxh3_64_intdigest(DATA[:64].numpy()))
    for transport in transports:
        transport.finish()
        transport.close()
    assert torch.equal(memory[64:], DATA)
    assert torch.equal(memory[:64], DATA[:64])


def test_a_chunk_damaged_on_the_way(server: ChunkServer) -> None:
    transport = _transport(server)
    transport.write([Place(0, 64, 1)], DATA, DIGEST ^ 1)
    with pytest.raises(EngineError, match=r"t1 .* was damaged on the way; nothing was applied"):
        transport.finish()
    transport.close()


@pytest.mark.parametrize("chunk", [0, 2])
def test_a_chunk_that_is_not_in_the_layout(server: ChunkServer, memory: torch.Tensor, chunk: int) -> None:
    transport = _transport(server)
    with pytest.raises(EngineError, match=f"there is no chunk {chunk} of {DATA.numel()} bytes in this version"):
        _send(transport, chunk)
    transport.close()
    assert not memory.any()


def test_a_failed_stream_is_read_until_the_sender_ends_it(server: ChunkServer) -> None:
    """Closing it at once would reset the connection, and the sender could lose the reason."""
    connection, _ = connect(server.endpoint)
    with connection:
        connection.settimeout(time_limit(5))
        connection.sendall(FRAME.pack(2, DATA.numel(), DIGEST))
        frames = [STATUS.unpack(receive(connection, STATUS.size)) for _ in range(2)]
        assert [kind for kind, _ in frames] == [TAKEN, FAILED]
        assert b"there is no chunk 2" in receive(connection, frames[1][1])
        assert connection.recv(1) == b""
        for _ in range(16):
            connection.sendall(byte_view(DATA))


def _send(transport: TcpTransport, chunk: int) -> None:
    transport.write([Place(0, 0, chunk)], DATA, DIGEST)
    transport.finish()


def test_a_client_without_the_key(server: ChunkServer, memory: torch.Tensor) -> None:
    endpoint = server.endpoint
    with pytest.raises(EngineError, match="cannot be reached"):
        TcpTransport(Endpoint(("127.0.0.1",), endpoint.port, b"x" * NONCE_BYTES), 5.0)
    with socket.create_connection(("127.0.0.1", endpoint.port)) as connection:
        connection.settimeout(time_limit(5))
        connection.recv(NONCE_BYTES)
        connection.sendall(b"\0" * 2 * NONCE_BYTES)
        assert connection.recv(1) == b""
    assert not memory.any()


def test_strangers_do_not_keep_senders_out(server: ChunkServer) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.endpoint.port)))
        transport = _transport(server)
        transport.write([Place(0, 64, 1)], DATA, DIGEST)
        transport.finish()
        transport.close()


def test_a_handshake_may_not_take_long(server: ChunkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even when a byte arrives now and then."""
    monkeypatch.setattr(connection_module, "_HANDSHAKE_S", 0.2)
    with socket.create_connection(("127.0.0.1", server.endpoint.port)) as connection:
        receive(connection, NONCE_BYTES)
        connection.settimeout(0.05)
        for _ in range(2 * NONCE_BYTES - 1):
            try:
                connection.sendall(b"x")
                assert connection.recv(1) == b""
            except TimeoutError:
                continue
            except (ConnectionResetError, BrokenPipeError):
                pass  # it closed before it had read the last byte
            return
    raise AssertionError("the handshake did not end")


@pytest.mark.parametrize(("address", "found"), [("127.0.0.1", "127.0.0.1"), ("lo", "127.0.0.1"), ("::1", "::1")])
def test_a_configured_address(memory: torch.Tensor, monkeypatch: pytest.MonkeyPatch, address: str, found: str) -> None:
    monkeypatch.setenv(ADDRESS_VARIABLE, address)
    if ":" in address:
        try:
            socket.create_server((address, 0), family=socket.AF_INET6).close()
        except OSError:
            pytest.skip("this host has no IPv6")
    server = ChunkServer(ArenaChunks(LAYOUT, memory), time_limit(5))
    assert server.endpoint.hosts == (found,)
    assert server._listener.getsockname()[0] == found
    transport = _transport(server)
    transport.write([Place(0, 64, 1)], DATA, DIGEST)
    transport.finish()
    transport.close()
    server.close()


@pytest.mark.parametrize("address", ["0.0.0.0", "::"])
def test_all_addresses(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """The other side gets addresses to which it can connect."""
    monkeypatch.setenv(ADDRESS_VARIABLE, address)
    hosts = local_addresses()
    assert "127.0.0.1" in hosts
    assert not {"0.0.0.0", "::"} & set(hosts)
    with listen(1) as listener:
        with _listen_everywhere(0, 1) as everywhere:
            assert listener.family == (socket.AF_INET if address == "0.0.0.0" else everywhere.family)
        socket.create_connection(own_address(listener), time_limit(5)).close()


def test_a_configured_range_of_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as first:
        taken = first.getsockname()[1]
        monkeypatch.setenv(ADDRESS_VARIABLE, "127.0.0.1")
        monkeypatch.setenv(PORTS_VARIABLE, str(taken))
        with pytest.raises(EngineError, match=f"no port of {PORTS_VARIABLE}={taken} is free"):
            listen(1)
    with listen(1) as listener:
        assert listener.getsockname()[1] == taken


@pytest.mark.parametrize(
    ("variable", "value"), [(PORTS_VARIABLE, "a-b"), (PORTS_VARIABLE, "9-1"), (PORTS_VARIABLE, "70000"),
                            (ADDRESS_VARIABLE, "no.such.host.invalid")]
)  # fmt: skip
def test_an_invalid_variable(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(UsageError, match=f"{variable}={value}"):
        listen(1)


def test_a_worker_that_does_not_answer() -> None:
    """Its port accepts connections, like that of a stopped process."""
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.MonkeyPatch.context() as patched:
        patched.setattr("bytecheckpoint.inference.push.transports.connection._CONNECT_S", 0.2)
        with pytest.raises(EngineError, match=r"cannot be reached from .*timed out"):
            TcpTransport(Endpoint(("127.0.0.1",), silent.getsockname()[1], b"x"), 0.2)


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
    arena = Arena(100)
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
    assert SharedMemoryTransport.open(address) is None
