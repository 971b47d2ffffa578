"""Hostile peers of the one network module, at the listener of a rank and at that of a worker that is pushed to."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgpack
import pytest

from bytecheckpoint.control import connections
from bytecheckpoint.control.acceptor import Acceptor
from bytecheckpoint.control.addresses import LOOPBACK, listen
from bytecheckpoint.control.connections import (
    Endpoint,
    LoopThread,
    accept,
    at_most,
    connect,
    introduce,
    new_key,
    receive,
    send,
    welcome,
)
from bytecheckpoint.control.messages import Introduction
from bytecheckpoint.control.network import Network
from bytecheckpoint.testing import time_limit

pytestmark = pytest.mark.sampled(13, of=__name__)

KEY = new_key()
TIMEOUT_S = time_limit(20)
STREAM = msgpack.packb(Introduction(3, "stream", "save/1", "ring"))


class Listening:
    """A listener, and what it has let in."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.admitted: list[Any] = []
        self.changed = threading.Condition()

    def admit(self, what: Any) -> None:
        with self.changed:
            self.admitted.append(what)
            self.changed.notify_all()

    def wait_for(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.admitted) == count, TIMEOUT_S)

    def stranger(self) -> socket.socket:
        made = socket.create_connection((LOOPBACK, self.endpoint.port))
        made.settimeout(TIMEOUT_S)
        return made


@contextlib.contextmanager
def rank() -> Iterator[Listening]:
    network = Network(0, KEY)
    listening = Listening(Endpoint([LOOPBACK], network.listen(LOOPBACK), KEY))

    class Handler:
        def add_stream(self, introduction: Introduction, connection: socket.socket) -> None:
            connection.close()
            listening.admit(introduction)

        def add_peer(self, peer: int) -> None:
            listening.admit(peer)

        def lose_peer(self, peer: int, reason: str) -> None:
            pass

        def receive(self, sender: int, data: bytes) -> None:
            pass

        def may_see_end_of(self, peer: int) -> bool:
            return False

    network.attach(Handler())
    yield listening
    network.close()


@contextlib.contextmanager
def worker() -> Iterator[Listening]:
    class Server(Acceptor):
        def _serve(self, connection: socket.socket) -> None:
            listening.admit(connection)

    server = Server()
    listening = Listening(Endpoint([LOOPBACK], server.endpoint.port, server.endpoint.key))
    yield listening
    server.close()


@pytest.fixture(params=[rank, worker])
def listening(request: pytest.FixtureRequest) -> Iterator[Listening]:
    with request.param() as started:
        yield started


def ended(connection: socket.socket) -> bool:
    """Read until the other end closes the connection."""
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(1000):
            pass
    return True


def run_handshake(connector_key: bytes = KEY, listener_key: bytes = KEY, after: bytes = b"") -> tuple[Any, Any, bytes]:
    """Run both sides of a handshake; return their results or errors, and what follows on the listener's side."""

    async def run() -> tuple[Any, Any, bytes]:
        one, other = socket.socketpair()
        with one, other:
            one.setblocking(False)
            other.setblocking(False)

            async def connecting() -> None:
                await introduce(one, connector_key, STREAM)
                await asyncio.get_running_loop().sock_sendall(one, after)

            async def listening() -> bytes:
                try:
                    return await welcome(other, listener_key)
                except ValueError:
                    other.shutdown(socket.SHUT_RDWR)
                    raise

            results = await asyncio.gather(connecting(), listening(), return_exceptions=True)
            return *results, await asyncio.get_running_loop().sock_recv(other, 100) if after else b""

    return asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


def test_a_handshake_identifies_the_connector_and_reads_nothing_more() -> None:
    assert run_handshake(after=b"the stream") == (None, STREAM, b"the stream")


def test_a_handshake_needs_the_same_key_on_both_sides() -> None:
    connector, listener, _rest = run_handshake(listener_key=new_key())
    assert isinstance(connector, ConnectionError)
    assert isinstance(listener, ValueError)
    assert "key" in str(listener)


def test_a_listener_without_the_key_is_refused() -> None:
    """It may answer with the connector's own proof."""

    def listener() -> None:
        with listening.accept()[0] as connection:
            connection.sendall(bytes(32))
            head = connection.recv(10)
            connection.recv(len(STREAM) + 32)
            connection.sendall(connection.recv(32))
            assert head[:8] == b"bcpnet-1"

    with listen(LOOPBACK) as listening, ThreadPoolExecutor(1) as threads:
        served = threads.submit(listener)
        with pytest.raises(ConnectionError, match="does not have the key"):
            connect(Endpoint([LOOPBACK], listening.getsockname()[1], KEY), STREAM, TIMEOUT_S)
        served.result()


def test_an_introduction_is_bounded() -> None:
    with listen(LOOPBACK) as listening, pytest.raises(ValueError, match="too long"):
        connect(Endpoint([LOOPBACK], listening.getsockname()[1], KEY), bytes(5000), TIMEOUT_S)


def test_a_connector_with_the_key_is_admitted(listening: Listening) -> None:
    connect(listening.endpoint, STREAM, TIMEOUT_S).close()
    listening.wait_for(1)


@pytest.mark.parametrize("key", [b"x" * 32, b"x", b""])
def test_a_connector_without_the_key(listening: Listening, key: bytes) -> None:
    with pytest.raises(ConnectionError, match="cannot connect to port"):
        connect(listening.endpoint._replace(key=key), STREAM, TIMEOUT_S)
    assert not listening.admitted


def test_a_recorded_handshake_cannot_be_replayed(listening: Listening) -> None:
    with listen(LOOPBACK) as proxy, ThreadPoolExecutor(1) as threads:
        through = listening.endpoint._replace(port=proxy.getsockname()[1])
        connecting = threads.submit(connect, through, STREAM, TIMEOUT_S)
        inner, _address = proxy.accept()
        with inner, listening.stranger() as outer:
            inner.sendall(outer.recv(100))
            recorded = inner.recv(1000)
            outer.sendall(recorded)
            inner.sendall(outer.recv(100))
            connecting.result(TIMEOUT_S).close()
    listening.wait_for(1)
    with listening.stranger() as replay:
        replay.recv(100)
        replay.sendall(recorded)
        assert replay.recv(100) == b""
    assert len(listening.admitted) == 1


@pytest.mark.parametrize("greeting", [b"GET / HTTP/1.1\r\n\r\n", b"bcpnet-1\xff\xff" + bytes(1000), bytes(500)])
def test_other_protocols_are_refused(listening: Listening, greeting: bytes) -> None:
    with listening.stranger() as stranger:
        stranger.sendall(greeting)
        assert ended(stranger)
    assert not listening.admitted


def test_a_handshake_may_not_take_long(listening: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even when a byte arrives now and then."""
    monkeypatch.setattr(connections, "HANDSHAKE_S", 0.2)
    with listening.stranger() as stranger:
        receive(stranger, 32, at_most(TIMEOUT_S))
        stranger.settimeout(0.05)
        for byte in b"bcpnet-1\x00\xff" + bytes(200):
            try:
                stranger.sendall(bytes([byte]))
                assert stranger.recv(1) == b""
            except TimeoutError:
                continue
            except (ConnectionResetError, BrokenPipeError):
                pass  # it closed before it had read the last byte
            return
    raise AssertionError("the handshake did not end")


def test_the_oldest_of_too_many_silent_connections_is_refused(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_MOST_STRANGERS", 2)
    with contextlib.ExitStack() as stack:
        silent = []
        for _number in range(3):
            silent.append(stack.enter_context(listening.stranger()))
            assert silent[-1].recv(100)
        assert silent[0].recv(100) == b""


def test_strangers_do_not_keep_others_out(listening: Listening) -> None:
    with contextlib.ExitStack() as stack:
        for _number in range(100):
            stack.enter_context(listening.stranger())
        connect(listening.endpoint, STREAM, TIMEOUT_S).close()
        listening.wait_for(1)


def test_connections_are_kept_alive(listening: Listening) -> None:
    """A firewall that forgets idle connections would otherwise end those of a job that saves once an hour."""
    with connect(listening.endpoint, STREAM, TIMEOUT_S) as connection:
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60


def test_a_flood_of_strangers_holds_few_descriptors(listening: Listening) -> None:
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(listening.stranger()) for _number in range(100)]
        assert all(map(ended, strangers[: 100 - connections._MOST_STRANGERS]))


def test_a_connection_that_cannot_be_taken_does_not_end_the_listener() -> None:
    taken: list[socket.socket] = []
    has_taken = threading.Event()

    def take(introduction: bytes, connection: socket.socket) -> None:
        if introduction:
            raise RuntimeError("there are no threads")
        taken.append(connection)
        has_taken.set()

    listener, thread = listen(LOOPBACK), LoopThread("test-accept")
    endpoint = Endpoint([LOOPBACK], listener.getsockname()[1], KEY)
    accepting = thread.submit(accept(listener, KEY, take))
    with connect(endpoint, b"fails", TIMEOUT_S) as refused:
        with pytest.raises(ConnectionError):
            receive(refused, 1, at_most(TIMEOUT_S))
    connect(endpoint, b"", TIMEOUT_S).close()
    assert has_taken.wait(TIMEOUT_S)
    taken[0].close()
    assert not accepting.done()
    thread.close()
    assert listener.fileno() == -1


def test_a_closed_listener_holds_nothing() -> None:
    """Neither strangers nor the port, whatever state they are in."""
    for kind in (rank, worker):
        with contextlib.ExitStack() as stack:
            with kind() as started:
                strangers = [stack.enter_context(started.stranger()) for _number in range(3)]
                strangers[0].recv(100)
            assert all(ended(stranger) for stranger in strangers)
            with pytest.raises(ConnectionError):
                started.stranger()


def test_a_closed_listener_keeps_nothing_alive() -> None:
    """A server refers to memory, which must be free when it is closed, and not at the next garbage collection."""

    class Server(Acceptor):
        def _serve(self, connection: socket.socket) -> None:
            has_served.set()

    has_served, server = threading.Event(), Server()
    gc.disable()
    try:
        with socket.create_connection((LOOPBACK, server.endpoint.port)):
            connect(server.endpoint._replace(addresses=[LOOPBACK]), b"", TIMEOUT_S).close()
            assert has_served.wait(TIMEOUT_S)
            server.close()
            known = weakref.ref(server)
            del server
            assert known() is None
    finally:
        gc.enable()


def test_connecting_works_while_an_event_loop_runs(listening: Listening) -> None:
    async def run() -> None:
        connect(listening.endpoint, STREAM, TIMEOUT_S).close()

    asyncio.run(run())
    listening.wait_for(1)


def test_bytes_are_moved_whatever_the_size_of_buffers() -> None:
    one, other = socket.socketpair()
    data = os.urandom(3 << 20)
    with one, other, ThreadPoolExecutor(1) as threads:
        one.setblocking(False)
        other.setblocking(False)
        sending = threads.submit(send, one, data, at_most(TIMEOUT_S))
        assert receive(other, len(data), at_most(TIMEOUT_S)) == data
        sending.result()


def test_bytes_that_do_not_move_end_a_wait() -> None:
    one, other = socket.socketpair()
    with one, other:
        one.setblocking(False)
        begin = time.monotonic()
        with pytest.raises(TimeoutError):
            receive(one, 1, at_most(0.05))
        with pytest.raises(TimeoutError):
            send(one, bytes(1 << 24), at_most(0.05))
        assert time.monotonic() - begin >= 0.1
        other.close()
        with pytest.raises(ConnectionError):
            receive(one, 1, at_most(TIMEOUT_S))


def test_keys_are_secret_and_different() -> None:
    assert len({new_key() for _number in range(10)}) == 10
    assert len(new_key()) == len(secrets.token_bytes(32))
