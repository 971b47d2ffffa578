from __future__ import annotations

import os
import queue
import socket
import threading

import pytest
from leak_watch import held_now, left_since

from bytecheckpoint.control import connections
from bytecheckpoint.control import network as network_module
from bytecheckpoint.control.addresses import LOOPBACK
from bytecheckpoint.control.connections import Endpoint
from bytecheckpoint.control.network import Network

KEY = bytes(32)
TIMEOUT_S = 20.0


class Recorder:
    """A message handler that records what a network calls."""

    def __init__(self):
        self.messages, self.peers, self.streams, self.lost, self.replaced = [], [], [], [], []
        self.changed = threading.Condition()

    def receive(self, sender, data):
        self._record(self.messages, (sender, data))

    def add_peer(self, peer):
        self._record(self.peers, peer)

    def add_stream(self, introduction, connection):
        self._record(self.streams, (introduction, connection))

    def lose_peer(self, peer, reason):
        self._record(self.lost, peer)

    def replace_peer(self, peer):
        self._record(self.replaced, peer)

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
    one.set_endpoints({rank_of_other: Endpoint([LOOPBACK], other.listen(LOOPBACK), KEY)})
    one.connect(rank_of_other, TIMEOUT_S)


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
    one.set_endpoints({0: Endpoint([LOOPBACK], other.listen(LOOPBACK), KEY)})
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


def test_a_second_connection_does_not_take_the_place_of_a_connected_rank(make_network):
    (one, at_one), (other, at_listener) = make_network(1), make_network(0)

    def answer(sender, data):
        at_one._record(at_one.messages, (sender, data))
        one.send(0, b"alive")

    at_one.receive = answer
    connect(one, other, 0)
    at_listener.wait_for(lambda found: found.peers == [1])
    impostor, at_impostor = make_network(1)
    impostor.set_endpoints(one._endpoints)
    impostor.send(0, b"of an impostor")
    at_impostor.wait_for(lambda found: found.lost == [0])
    other.send(1, b"for the rank")
    at_one.wait_for(lambda found: (0, b"for the rank") in found.messages)
    assert {data for _, data in at_listener.messages} == {b"alive"}
    assert at_listener.lost == at_listener.replaced == []


def test_a_new_connection_takes_the_place_of_one_that_the_network_has_forgotten(make_network, monkeypatch):
    """A peer that does not answer on its connection has another, as when a firewall discards what it does not know."""
    monkeypatch.setattr(network_module, "REPLACE_S", 0.1)
    (one, at_one), (other, at_listener) = make_network(1), make_network(0)
    connect(one, other, 0)
    at_listener.wait_for(lambda found: found.peers == [1])
    again, at_again = make_network(1)
    again.set_endpoints(one._endpoints)
    again.send(0, b"of the same rank")
    at_listener.wait_for(lambda found: found.messages == [(1, b"of the same rank")])
    assert (at_listener.replaced, at_listener.lost) == ([1], [])
    at_one.wait_for(lambda found: found.lost == [0])
    other.send(1, b"answer")
    at_again.wait_for(lambda found: found.messages == [(0, b"answer")])


@pytest.mark.parametrize("by", ["the rank that had connected", "the rank at which it had"])
def test_a_connection_that_has_ended_is_made_again(make_network, by):
    (one, at_one), (other, at_other) = make_network(1), make_network(0)
    connect(one, other, 0)
    other.set_endpoints({1: Endpoint([LOOPBACK], one.listen(LOOPBACK), KEY)})
    at_other.wait_for(lambda found: found.peers == [1])
    first, peer = (one, 0) if by == "the rank that had connected" else (other, 1)
    first.disconnect(peer)
    at_one.wait_for(lambda found: found.lost == [0])
    at_other.wait_for(lambda found: found.lost == [1])
    first.restore(peer)
    first.send(peer, b"while it connects")
    (at_other if first is one else at_one).wait_for(lambda found: b"while it connects" in dict(found.messages).values())
    one.send(0, b"from 1")
    other.send(1, b"from 0")
    at_other.wait_for(lambda found: b"from 1" in [data for _, data in found.messages])
    at_one.wait_for(lambda found: b"from 0" in [data for _, data in found.messages])
    assert (at_one.peers, at_other.peers) == ([0, 0], [1, 1])


def test_a_connection_that_cannot_be_made_again_is_lost(make_network):
    (one, at_one), (other, _) = make_network(1), make_network(0)
    connect(one, other, 0)
    other.close()
    at_one.wait_for(lambda found: found.lost == [0])
    one.restore(0)
    at_one.wait_for(lambda found: found.lost == [0, 0])


def test_a_rank_whose_address_is_unknown_is_lost(make_network):
    one, recorder = make_network(1)
    one.send(0, b"dropped")
    recorder.wait_for(lambda found: found.lost == [0])


def test_an_unreachable_rank_is_reported_as_lost(make_network):
    one, recorder = make_network(1)
    with socket.create_server((LOOPBACK, 0)) as closed:
        port = closed.getsockname()[1]
    one.set_endpoints({0: Endpoint([LOOPBACK], port, KEY)})
    one.send(0, b"dropped")
    recorder.wait_for(lambda found: found.lost == [0])
    with pytest.raises(ConnectionError, match="cannot connect to port"):
        one.connect(0, TIMEOUT_S)


def test_connecting_to_a_process_that_does_not_answer_ends_and_leaves_nothing(make_network):
    one, _ = make_network(1)
    with socket.create_server((LOOPBACK, 0)) as silent:
        one.set_endpoints({0: Endpoint([LOOPBACK], silent.getsockname()[1], KEY)})
        before = held_now()
        with pytest.raises(TimeoutError, match=r"no answer in 0\.3 s"):
            one.connect(0, 0.3)
        assert left_since(before) == []


def test_an_address_that_does_not_answer_leaves_time_for_the_next(make_network, monkeypatch):
    monkeypatch.setattr(connections, "CONNECT_S", 0.1)
    (one, _), (other, recorder) = make_network(1), make_network(0)
    port = other.listen(LOOPBACK)
    with socket.create_server(("127.0.0.2", port)):
        one.set_endpoints({0: Endpoint(["127.0.0.2", LOOPBACK], port, KEY)})
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
