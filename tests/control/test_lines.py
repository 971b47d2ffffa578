from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from torch._C._distributed_c10d import TCPStore

from bytecheckpoint.control import connecting
from bytecheckpoint.control.connecting import _facing
from bytecheckpoint.control.line import Line, LineLost

SERVER = """
import sys
from bytecheckpoint.control.connecting import serve_store
store, port = serve_store("127.0.0.1")
print(port, flush=True)
sys.stdin.read()
"""
PATIENCE_S = 0.5
ELSEWHERE = 7  # the rank that serves the store


def start_server():
    command = [sys.executable, "-c", SERVER]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return process, int(process.stdout.readline())


def end(process):
    process.kill()
    process.communicate()


@pytest.fixture(scope="module")
def lasting_server():
    process, port = start_server()
    yield process, port
    end(process)


@pytest.fixture
def server(lasting_server):
    """A store in a process of its own, and its port."""
    yield lasting_server
    lasting_server[0].send_signal(signal.SIGCONT)


def stop(process):
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


def connect(port, patience_s=20.0):
    return Line.connect(["127.0.0.1"], port, ELSEWHERE, patience_s=patience_s)


def test_a_message_of_any_size_can_be_taken(server):
    line = connect(server[1])
    for size in (0, 1, 4 << 20, (9 << 20) + 1):
        payload = os.urandom(size)
        keys = line.put("a", payload)
        assert len(keys) == (1 if size <= 4 << 20 else 4)
        assert line.has("a")
        assert line.take("a") == payload
        assert not line.has("a")
    assert line.put_first("b", b"first") == line.put_first("b", b"second") == b"first"
    assert [line.add("c", 2), line.add("c", 0)] == [2, 2]


@pytest.mark.parametrize("request_", ["has", "put", "read"])
def test_a_request_to_a_stopped_process_ends(server, request_):
    process, port = server
    line = connect(port)
    line.put("key", b"value")
    line.be_patient(PATIENCE_S)
    stop(process)
    requests = {
        "has": lambda: line.has("key"),
        "put": lambda: line.put("key", bytes(64 << 20)),
        "read": lambda: line.read("key"),
    }
    start = time.monotonic()
    with pytest.raises(LineLost) as lost:
        requests[request_]()
    assert PATIENCE_S / 2 < time.monotonic() - start < 20
    assert lost.value.is_silent
    assert lost.value.server == ELSEWHERE
    process.send_signal(signal.SIGCONT)
    with pytest.raises(LineLost):
        line.has("key")
    assert line.is_lost, "a late answer is never taken for another one's"
    assert connect(port).has("key")


def test_connecting_to_a_stopped_process_ends_and_leaves_nothing(server):
    process, port = server
    stop(process)
    gc.collect()
    known = _facing(port)
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    with pytest.raises(LineLost) as lost:
        connect(port, patience_s=1.0)
    assert lost.value.is_silent
    assert _facing(port) == known
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before


def test_a_process_that_has_ended_is_not_silent():
    process, port = start_server()
    line = connect(port)
    end(process)
    with pytest.raises(LineLost) as lost:
        line.has("key")
    assert not lost.value.is_silent
    with pytest.raises(LineLost, match="cannot connect"):
        connect(port)


def test_a_process_that_ends_while_it_is_connected_to_is_noticed_then(monkeypatch):
    """Not when the store's own constructor would give up trying again."""
    process, port = start_server()
    bounds = []

    def late(*args, timeout, **more):
        end(process)
        bounds.append(timeout.total_seconds())
        return TCPStore(*args, timeout=timeout, **more)

    monkeypatch.setattr(connecting, "TCPStore", late)
    before = threading.active_count()
    with pytest.raises(LineLost, match="refused") as lost:
        connect(port)
    assert not lost.value.is_silent
    assert bounds == [0.5]
    assert threading.active_count() == before


def test_a_store_that_is_hard_to_meet_is_met(server, monkeypatch):
    tries = []

    def hard(*args, **more):
        tries.append(args)
        if len(tries) < 3:
            raise RuntimeError("The client socket has timed out after 500ms")
        return TCPStore(*args, **more)

    monkeypatch.setattr(connecting, "TCPStore", hard)
    line = connect(server[1])
    assert line.add("met", 1) == 1
    assert len(tries) == 3


def test_several_lines_are_told_apart(server):
    process, port = server
    patient, hasty = connect(port), connect(port)
    patient.be_patient(60)
    hasty.be_patient(PATIENCE_S)
    stop(process)
    with pytest.raises(LineLost):
        hasty.has("key")
    process.send_signal(signal.SIGCONT)
    assert patient.add("count", 0) == 0


def test_any_patience_will_do(server):
    line = connect(server[1], patience_s=float("inf"))
    line.be_patient(-1)
    line.be_patient(1e300)
    assert not line.has("no such key")
