from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator

import pytest
from counting_backend import CountingBackend

from bytecheckpoint.errors import AccessDeniedError, StorageError, StorageFullError
from bytecheckpoint.storage_backends.memory import MemoryBackend
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.faults import Call, FaultRule, FaultyBackend
from bytecheckpoint.testing.storage import StorageConformance


@pytest.fixture
def memory() -> Iterator[MemoryBackend]:
    name = uuid.uuid4().hex
    yield MemoryBackend(name)
    MemoryBackend.delete_store(name)


class TestWrappedBackend(StorageConformance):
    """Wrapping changes nothing, as long as no rule acts."""

    @pytest.fixture
    def backend(self, memory: MemoryBackend) -> FaultyBackend:
        return FaultyBackend(CountingBackend(memory), [FaultRule("put", nth=10**9, error=StorageError)])


def test_the_nth_matching_operation_fails(memory: MemoryBackend) -> None:
    backend = FaultyBackend(memory, [FaultRule("put", "*.bin", nth=2, times=2, error=StorageFullError("full"))])
    backend.put("1.bin", b"x")
    backend.put("other", b"x")
    for _ in range(2):
        with pytest.raises(StorageFullError, match="full"):
            backend.put("2.bin", b"x")
    backend.put("4.bin", b"x")
    assert [found.key for found in backend.list()] == ["1.bin", "4.bin", "other"]
    assert backend.rules[0].matched == 4


def test_for_ever_and_every_operation(memory: MemoryBackend) -> None:
    backend = FaultyBackend(memory, [FaultRule(times=None, error=lambda: AccessDeniedError("no"))])
    for attempt in (
        lambda: backend.put("a", b"x"),
        lambda: backend.create("a", 1),
        lambda: backend.get("a"),
        lambda: backend.read_into("a", 0, bytearray(1)),
        lambda: backend.stat("a"),
        lambda: backend.list(),
        lambda: backend.list_children(),
        lambda: backend.delete(["a"]),
    ):
        with pytest.raises(AccessDeniedError, match="no"):
            attempt()


def test_writers_fail_too_but_abort_never_raises(memory: MemoryBackend) -> None:
    rules = [
        FaultRule("write", nth=2, error=StorageError("cut off")),
        FaultRule("complete", error=StorageError("not durable")),
        FaultRule("abort", hook=lambda call: seen.append(call)),
    ]
    seen: list[Call] = []
    backend = FaultyBackend(memory, rules)
    writer = backend.create("a", 2)
    writer.write(0, b"x")
    with pytest.raises(StorageError, match="cut off"):
        writer.write(1, b"y")
    writer.abort()
    assert seen == [Call("abort", "a")]
    writer = backend.create("b", 0)
    with pytest.raises(StorageError, match="not durable"):
        writer.complete()
    assert [*memory.list()] == []


def test_torn_and_lost(memory: MemoryBackend) -> None:
    backend = FaultyBackend(
        memory,
        [
            FaultRule("put", "torn", cut=3),
            FaultRule("put", "lost-reply", error=StorageError("reset"), after=True),
            FaultRule("get", "whole", cut=2),
            FaultRule("read_into", "whole", cut=2),
        ],
    )
    backend.put("torn", b"abcdef")
    assert memory.get("torn") == b"abc"
    with pytest.raises(StorageError, match="reset"):
        backend.put("lost-reply", b"abc")
    assert memory.get("lost-reply") == b"abc"
    memory.put("whole", b"abcdef")
    assert backend.get("whole") == b"ab"
    buffer = bytearray(b"......")
    backend.read_into("whole", 0, buffer)
    assert buffer == b"ab...."


def test_waiting_and_hooks(memory: MemoryBackend) -> None:
    entered, go_on = threading.Event(), threading.Event()
    backend = FaultyBackend(memory, [FaultRule("put", hook=lambda call: entered.set(), wait=go_on)])
    thread = threading.Thread(target=backend.put, args=("a", b"x"))
    thread.start()
    assert entered.wait(time_limit(60))
    assert [*memory.list()] == []
    go_on.set()
    thread.join(time_limit(60))
    assert memory.get("a") == b"x"
    backend = FaultyBackend(memory, [FaultRule("put", wait=threading.Event(), wait_limit=0.01)])
    with pytest.raises(StorageError, match="was not set within"):
        backend.put("b", b"x")


def test_rules_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="'putt' is not an operation"):
        FaultRule("putt")
    with pytest.raises(ValueError, match="counted from 1"):
        FaultRule("put", nth=0)


def test_counting(memory: MemoryBackend) -> None:
    backend = CountingBackend(memory)
    backend.put("a/1", b"abc")
    with backend.create("a/2", 10) as writer:
        writer.write(0, b"01234")
        writer.write(5, b"56789")
        writer.complete()
    backend.get("a/1")
    backend.read_into("a/2", 2, bytearray(4))
    backend.delete(["a/1", "a/2"])
    assert backend.operations() == {
        "put": 1,
        "create": 1,
        "write": 2,
        "complete": 1,
        "get": 1,
        "read_into": 1,
        "delete": 2,
    }
    assert backend.bytes_written() == 13
    assert backend.bytes_written("a/2") == 10
    assert backend.bytes_read() == 7
    assert backend.count("write", "a/*") == 2
    assert backend.matching("read_into") == [Call("read_into", "a/2", 2, 4)]
    backend.reset()
    assert backend.calls == []
