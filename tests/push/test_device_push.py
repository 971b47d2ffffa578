"""Pushes into the memory of workers' devices. A stand-in replaces the device (``host_device``);
``tests/gpu`` uses real ones."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from host_device import HostDevice, host_device
from join_probes import until
from streams import RING, push_and_look, watch_sent
from toy_engine import ToyEngine, ToyTrainee, expected_digests, toy_engine

from bytecheckpoint.errors import EngineError, StateError, UsageError
from bytecheckpoint.inference.push import HttpEngine, Pusher
from bytecheckpoint.inference.push.transports import cuda_ipc as device_arena
from bytecheckpoint.inference.push.transports.base import word_digests
from bytecheckpoint.inference.push.transports.cuda_ipc import DeviceArena, attach_device
from bytecheckpoint.inference.push.transports.shared_memory import ArenaAddress, open_arena
from bytecheckpoint.testing import time_limit

DEVICE = {**RING, "cuda_ipc": True}


@pytest.fixture(scope="module")
def engine() -> Iterator[ToyEngine]:
    with toy_engine(2, devices=["host", "host"]) as started:
        yield started


def _push(engine: ToyEngine, version: int) -> None:
    with Pusher(HttpEngine(engine.url), deadline_s=time_limit(30), **DEVICE) as pusher:
        pusher.push(ToyTrainee(version), version=version)
    assert engine.look()["digests"] == expected_digests(version, 2)
    assert engine.look()["arenas"] == [0, 0]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return watch_sent(monkeypatch)


def test_bytes_go_from_device_to_device(engine: ToyEngine, sent: list[int]) -> None:
    with host_device():
        _push(engine, 1)
        assert not HostDevice.opened
    assert sent
    assert not any(sent)


def test_a_sender_that_does_not_see_the_device_uses_tcp(
    engine: ToyEngine, sent: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    _push(engine, 2)
    assert sum(sent) > 90_000
    assert "GPU-of-the-host is on this host, but not visible here (CUDA_VISIBLE_DEVICES); using TCP" in caplog.text


@pytest.mark.parametrize("error", [EngineError, RuntimeError])
def test_a_sender_that_cannot_open_the_memory_uses_tcp(
    engine: ToyEngine,
    sent: list[int],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    error: type[Exception],
) -> None:
    monkeypatch.setattr(HostDevice, "refusal", error)
    with host_device():
        _push(engine, 3)
    assert sum(sent) > 90_000
    assert "it cannot be opened; using TCP" in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_workers_without_a_device() -> None:
    with toy_engine(1) as engine:
        with pytest.raises(StateError, match=r"worker 0 of .*: this worker has no CUDA device.*push without cuda_ipc"):
            push_and_look(0, 1, [engine.url], [1], DEVICE)
        assert engine.look()["digests"] == expected_digests(0, 1)
        assert not engine.paused


def test_options_that_exclude_each_other() -> None:
    with pytest.raises(UsageError, match="use group or cuda_ipc, not both"):
        Pusher(group="gloo", cuda_ipc=True)
    with (
        Pusher(HttpEngine("http://127.0.0.1:9"), cuda_ipc=True) as pusher,
        pytest.raises(StateError, match="or by CUDA IPC; create another Pusher"),
    ):
        pusher.push(HttpEngine("http://127.0.0.1:9"))


# The memory


@pytest.fixture
def device() -> Iterator[None]:
    with host_device():
        yield
    assert not HostDevice.taken
    assert not HostDevice.opened


@pytest.mark.usefixtures("device")
def test_opening_in_the_allocating_process() -> None:
    arena = DeviceArena(100)
    there = attach_device(arena.address)
    assert there is not None
    assert there.memory.data_ptr() == arena.memory.data_ptr()
    there.close()
    address = arena.address
    arena.close()
    arena.close()
    assert attach_device(address) is None


_GUEST = """
import sys
from host_device import HostDevice, host_device
from bytecheckpoint.inference.push.transports.cuda_ipc import attach_device
from bytecheckpoint.inference.push.transports.shared_memory import ArenaAddress

pid, descriptor, token, nbytes = sys.argv[1:]
with host_device():
    there = attach_device(ArenaAddress(int(pid), int(descriptor), token, int(nbytes)))
    there.memory[:5] = 7
    print("there", flush=True)
    sys.stdin.readline()
    there.close()
    print("left", flush=True)
    sys.stdin.readline()
"""


def _guest(address: ArenaAddress) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _GUEST, *map(str, address)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    guest = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert guest.stdout is not None
    assert guest.stdout.readline() == "there\n"
    return guest


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("end", ["leaves", "is killed", "is stopped, and killed"])
@pytest.mark.sampled(1)
def test_memory_stays_while_another_process_has_it_open(end: str) -> None:
    arena = DeviceArena(100)
    address = arena.address
    with _guest(address) as guest:
        assert guest.stdin is not None
        assert word_digests([arena.memory[:5]]) == word_digests([torch.full((5,), 7, dtype=torch.uint8)])
        if "stopped" in end:
            os.kill(guest.pid, signal.SIGSTOP)
        arena.close()
        assert HostDevice.taken  # the guest is there
        if end == "leaves":
            guest.stdin.write("leave\n")
            guest.stdin.flush()
        else:
            guest.kill()
        until(lambda: not HostDevice.taken, "given back")
        assert attach_device(address) is None
        guest.stdin.close()


@pytest.mark.usefixtures("device")
def test_memory_cannot_be_opened_while_it_is_freed() -> None:
    arena = DeviceArena(100)
    address = arena.address
    descriptor = open_arena(address)
    assert descriptor is not None
    arena.close()
    assert device_arena._open(address, descriptor) is None
    os.close(descriptor)


@pytest.mark.usefixtures("device")
def test_memory_that_cannot_be_closed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def close(device: HostDevice, memory: torch.Tensor) -> None:
        raise EngineError("it cannot be closed")

    monkeypatch.setattr(HostDevice, "close", close)
    device_arena.OpenArena(os.open("/dev/null", os.O_RDONLY), torch.zeros(1), HostDevice()).close()
    assert "it cannot be closed" in caplog.text


@pytest.mark.usefixtures("device")
def test_memory_that_cannot_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    def handle(device: HostDevice, memory: torch.Tensor) -> bytes:
        raise EngineError("it cannot be shared")

    monkeypatch.setattr(HostDevice, "handle", handle)
    with pytest.raises(EngineError, match="it cannot be shared"):
        DeviceArena(100)


@pytest.mark.usefixtures("device")
def test_memory_that_is_lost(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def free(device: HostDevice, memory: torch.Tensor) -> None:
        device.taken.pop(memory.data_ptr())
        raise EngineError("it cannot be given back")

    monkeypatch.setattr(HostDevice, "free", free)
    with caplog.at_level(logging.WARNING):
        DeviceArena(100).close()
    assert "100 bytes of GPU-of-the-host are lost" in caplog.text
