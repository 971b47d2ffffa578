from __future__ import annotations

import asyncio
import os
import queue
import secrets
import socket
import threading

import pytest
from leak_watch import held_now, left_since

from bytecheckpoint.control import network as network_module
from bytecheckpoint.control.handshake import Introduction, introduce, welcome
from bytecheckpoint.control.network import LOOPBACK, Endpoint, Network

KEY = bytes(32)
STREAM = Introduction(3, "stream", "save/1", "ring")
TIMEOUT_S = 20.0


class Recorder:
    """A message handler that records what a network calls."""

    def __init__(self):
        self.messages, self.peers, self.streams, self.lost = [], [], [], []
        self.changed = threading.Condition()

    def receive(self, sender, data):
        self._record(self.messages, (sender, data))

    def add_peer(self, peer):
        self._record(self.peers, peer)

    def add_stream(self, introduction, connection):
        self._record(self.streams, (introduction, connection))

    def lose_peer(self, peer, reason):
        self._record(self.lost, peer)

    def may_see_end_of(self, peer):
        return False

    def wait_for(self, condition):
        with self.changed:
            assert self.changed.wait_for(lambda: condition(self), TIMEOUT_S)

    def _record(self, entries, entry):
        with self.changed:
            entries.append(entry)
            self.changed.notify_all()


@pytest.fixture
def make_network():
    made = []

    def make(rank, key=KEY):
        network, recorder = Network(rank, key), Recorder()
        network.attach(recorder)
        made.append((network, recorder))
        return network, recorder

    yield make
    for network, recorder in made:
        network.close()
        for _introduction, connection in recorder.streams:
            connection.close()


def connect(one, other, rank_of_other):
    one.set_endpoints({rank_of_other: Endpoint([LOOPBACK], other.listen(LOOPBACK))})
    one.connect(rank_of_other, TIMEOUT_S)


def run_handshake(connector_key=KEY, listener_key=KEY, introduction=STREAM, after=b""):
    """Run both sides of a handshake; return their results or errors, and what follows on the listener's side."""

    async def run():
        one, other = socket.socketpair()
        with one, other:
            one.setblocking(False)
            other.setblocking(False)

            async def connect():
                await introduce(one, connector_key, introduction)
                await asyncio.get_running_loop().sock_sendall(one, after)

            async def listen():
                try:
                    return await welcome(other, listener_key)
                except ValueError:
                    other.shutdown(socket.SHUT_RDWR)
                    raise

            results = await asyncio.gather(connect(), listen(), return_exceptions=True)
            return *results, await asyncio.get_running_loop().sock_recv(other, 100) if after else b""

    return asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


def test_a_handshake_identifies_the_connector_and_reads_nothing_more():
    assert run_handshake(after=b"the stream") == (None, STREAM, b"the stream")


def test_a_handshake_needs_the_same_key_on_both_sides():
    connector, listener, _rest = run_handshake(listener_key=secrets.token_bytes(32))
    assert isinstance(connector, ConnectionError)
    assert isinstance(listener, ValueError)
    assert "key" in str(listener)


def test_names_in_a_handshake_are_bounded():
    async def run():
        one, other = socket.socketpair()
        with one, other, pytest.raises(ValueError, match="too long"):
            await introduce(one, KEY, Introduction(0, "stream", "save/1", "x" * 5000))

    asyncio.run(run())


def test_a_recorded_handshake_cannot_be_replayed(make_network):
    listener, recorder = make_network(0)
    port = listener.listen(LOOPBACK)
    with socket.create_server((LOOPBACK, 0)) as proxy:
        connector, _ = make_network(1)
        connector.set_endpoints({0: Endpoint([LOOPBACK], proxy.getsockname()[1])})
        made = connector.open_stream(0, "save/1", "a")
        inner, _address = proxy.accept()
        with inner, socket.create_connection((LOOPBACK, port)) as outer:
            inner.sendall(outer.recv(100))
            recorded = inner.recv(1000)
            outer.sendall(recorded)
            inner.sendall(outer.recv(100))
            made.result(TIMEOUT_S).close()
    recorder.wait_for(lambda found: len(found.streams) == 1)
    with socket.create_connection((LOOPBACK, port)) as replay:
        replay.settimeout(TIMEOUT_S)
        replay.recv(100)
        replay.sendall(recorded)
        assert replay.recv(100) == b""
    assert len(recorder.streams) == 1


@pytest.mark.parametrize("greeting", [b"GET / HTTP/1.1\r\n\r\n", b"bcpctrl1\xff\xff" + bytes(1000), bytes(500)])
def test_other_protocols_are_refused(make_network, greeting):
    listener, recorder = make_network(0)
    with socket.create_connection((LOOPBACK, listener.listen(LOOPBACK))) as stranger:
        stranger.settimeout(TIMEOUT_S)
        stranger.sendall(greeting)
        received = b"x"
        try:
            while received:
                received = stranger.recv(100)
        except ConnectionResetError:
            pass
    assert not recorder.streams
    assert not recorder.peers


def test_the_oldest_of_too_many_silent_connections_is_refused(make_network, monkeypatch):
    monkeypatch.setattr(network_module, "_MOST_UNAUTHENTICATED", 2)
    listener, _ = make_network(0)
    port = listener.listen(LOOPBACK)
    silent = []
    for _number in range(3):
        silent.append(socket.create_connection((LOOPBACK, port)))
        assert silent[-1].recv(100)
    silent[0].settimeout(TIMEOUT_S)
    assert silent[0].recv(100) == b""
    for connection in silent:
        connection.close()


def test_messages_of_any_size_arrive_in_order(make_network):
    (one, _), (other, recorder) = make_network(1), make_network(0)
    connect(one, other, 0)
    payloads = [os.urandom(size) for size in (0, 1, 4 << 20, (9 << 20) + 1, 17)]
    for payload in payloads:
        one.send(0, payload)
    recorder.wait_for(lambda found: len(found.messages) == len(payloads))
    assert recorder.messages == [(1, payload) for payload in payloads]


def test_a_listener_answers_on_the_same_connection(make_network):
    (one, recorder), (other, at_listener) = make_network(1), make_network(0)
    connect(one, other, 0)
    at_listener.wait_for(lambda found: found.peers == [1])
    other.send(1, b"answer")
    recorder.wait_for(lambda found: found.messages == [(0, b"answer")])
    assert one.connected_peers() == {0}


def test_messages_to_an_unconnected_rank_connect_first_and_keep_their_order(make_network):
    (one, _), (other, recorder) = make_network(5), make_network(0)
    one.set_endpoints({0: Endpoint([LOOPBACK], other.listen(LOOPBACK))})
    for number in range(100):
        one.send(0, b"%d" % number)
    recorder.wait_for(lambda found: len(found.messages) == 100)
    assert recorder.messages == [(5, b"%d" % number) for number in range(100)]


def test_pending_messages_are_sent_before_a_network_closes(make_network):
    (one, _), (other, recorder) = make_network(1), make_network(0)
    connect(one, other, 0)
    one.send(0, bytes(32 << 20))
    one.close()
    recorder.wait_for(lambda found: found.messages == [(1, bytes(32 << 20))])
    recorder.wait_for(lambda found: found.lost == [1])


def test_an_unreachable_rank_is_reported_as_lost(make_network):
    one, recorder = make_network(1)
    with socket.create_server((LOOPBACK, 0)) as closed:
        port = closed.getsockname()[1]
    one.set_endpoints({0: Endpoint([LOOPBACK], port)})
    one.send(0, b"dropped")
    recorder.wait_for(lambda found: found.lost == [0])
    with pytest.raises(ConnectionError, match="cannot connect to port"):
        one.connect(0, TIMEOUT_S)


def test_connecting_to_a_process_that_does_not_answer_ends_and_leaves_nothing(make_network):
    one, _ = make_network(1)
    with socket.create_server((LOOPBACK, 0)) as silent:
        one.set_endpoints({0: Endpoint([LOOPBACK], silent.getsockname()[1])})
        before = held_now()
        with pytest.raises(TimeoutError, match=r"no answer in 0\.3 s"):
            one.connect(0, 0.3)
        assert left_since(before) == []


def test_an_address_that_does_not_answer_leaves_time_for_the_next(make_network, monkeypatch):
    monkeypatch.setattr(network_module, "CONNECT_S", 0.1)
    (one, _), (other, recorder) = make_network(1), make_network(0)
    port = other.listen(LOOPBACK)
    with socket.create_server(("127.0.0.2", port)):
        one.set_endpoints({0: Endpoint(["127.0.0.2", LOOPBACK], port)})
        one.connect(0, TIMEOUT_S)
    recorder.wait_for(lambda found: found.peers == [1])


def test_sending_never_waits_for_a_peer_that_does_not_read(make_network):
    one, _ = make_network(1)
    other, recorder = make_network(0)
    released, read = threading.Event(), queue.SimpleQueue()
    recorder.receive = lambda sender, data: read.put(not read.empty() or released.wait(TIMEOUT_S))
    connect(one, other, 0)
    for _number in range(4):
        one.send(0, bytes(16 << 20))
    released.set()
    assert read.get(timeout=TIMEOUT_S), "the peer read only when everything was sent"


def test_a_closed_network_leaves_no_thread_and_no_descriptor():
    before = held_now()
    for _number in range(3):
        one, other = Network(1, KEY), Network(0, KEY)
        one.attach(Recorder())
        other.attach(Recorder())
        connect(one, other, 0)
        one.close()
        other.close()
        one.close()
    assert left_since(before, turns=3) == []
    one.send(0, b"dropped")
    with pytest.raises(ConnectionError, match="closed"):
        one.open_stream(0, "save/1", "a")
