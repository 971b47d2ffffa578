"""From staged images to files: what is hashed, what is left when a write fails, and when memory is given back."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from bytecheckpoint.engine import writer
from bytecheckpoint.engine.arena import Arena, Slot
from bytecheckpoint.engine.checksums import chunk_checksums
from bytecheckpoint.engine.files import FileImage, Span, place_images
from bytecheckpoint.engine.writer import write_images
from bytecheckpoint.errors import StorageError
from bytecheckpoint.storage_backends.memory import MemoryBackend
from bytecheckpoint.testing.faults import Call, CountingBackend, FaultRule, FaultyBackend

_PIECE = 1000


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "PIECE", _PIECE)


@pytest.fixture
def backend() -> Iterator[MemoryBackend]:
    yield MemoryBackend("write-images")
    MemoryBackend.drop("write-images")


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def _image(key: str, sizes: Sequence[int], head: int = 100) -> FileImage:
    ends = np.cumsum([0, *sizes]).tolist()
    return FileImage(key, "model", "tensors", b"h" * head, [Span(None, at, n) for at, n in zip(ends, sizes)])


def _staged(images: Sequence[FileImage]) -> Slot:
    slot = Arena().acquire(place_images(images))
    slot.tensor.copy_(slot.tensor.new_tensor(np.random.default_rng(0).integers(0, 256, slot.nbytes, dtype=np.uint8)))
    return slot


@pytest.mark.parametrize("chunk_size", [1, 7, 300, _PIECE, 2500, 1 << 20])
def test_checksums_run_over_every_shard(backend: MemoryBackend, executor: ThreadPoolExecutor, chunk_size: int) -> None:
    images = [_image("a", [0, 10, 2999, 1, 0, 5000, 900, 0]), _image("b", []), _image("c", [0, 0], 3 * _PIECE)]
    slot = _staged(images)
    written = write_images(backend, images, slot, chunk_size, executor)
    assert [file.key for file in written] == ["a", "b", "c"]
    for image, file in zip(images, written):
        content = bytes(slot.view[image.place : image.place + image.size])
        assert backend.get(image.key) == content
        data = memoryview(content)[len(image.head) :]
        expected = [chunk_checksums(data[s.offset : s.offset + s.nbytes], chunk_size) for s in image.spans]
        assert file.checksums.tolist() == [value for values in expected for value in values]
        assert file.checksums.dtype == np.uint64
        assert file.size == image.size


def test_a_file_is_completed_while_the_next_is_written(backend: MemoryBackend, executor: ThreadPoolExecutor) -> None:
    counting = CountingBackend(backend)
    images = [_image(key, [3 * _PIECE]) for key in "abcd"]
    write_images(counting, images, _staged(images), 100, executor)
    order = [(call.operation, call.key) for call in counting.calls if call.operation in ("create", "complete")]
    # Never more than two at once, however many files there are.
    assert order == [
        ("create", "a"),
        ("create", "b"),
        ("complete", "a"),
        ("create", "c"),
        ("complete", "b"),
        ("create", "d"),
        ("complete", "c"),
        ("complete", "d"),
    ]


@pytest.mark.parametrize("operation", ["create", "write", "complete"])
@pytest.mark.parametrize("key", ["a", "b", "c"])
def test_a_failure_leaves_nothing_of_what_was_not_complete(
    backend: MemoryBackend, executor: ThreadPoolExecutor, operation: str, key: str
) -> None:
    faulty = FaultyBackend(backend, [FaultRule(operation, key, nth=1, error=StorageError("refused by test"))])
    images = [_image(name, [5 * _PIECE]) for name in "abc"]
    with pytest.raises(StorageError, match="refused by test"):
        write_images(faulty, images, _staged(images), 100, executor)
    left = [found.key for found in backend.list()]
    assert left == sorted("abc"[: len(left)])
    assert key not in left


def test_no_thread_uses_the_slot_after_an_error(backend: MemoryBackend, executor: ThreadPoolExecutor) -> None:
    failed, busy = threading.Event(), set[int]()
    waiting = threading.Semaphore(0)

    def hold(call: Call) -> None:
        busy.add(call.offset)
        waiting.release()
        assert failed.wait(60)
        busy.discard(call.offset)

    def fail(call: Call) -> None:
        for _ in range(3):
            assert waiting.acquire(timeout=60)
        failed.set()

    rules = [
        FaultRule("write", "a", nth=4, error=StorageError("refused by test"), hook=fail),
        FaultRule("write", "a", nth=1, times=3, hook=hold),
    ]
    images = [_image("a", [20 * _PIECE]), _image("b", [20 * _PIECE])]
    counting = CountingBackend(FaultyBackend(backend, rules))
    with pytest.raises(StorageError, match="refused by test"):
        write_images(counting, images, _staged(images), 100, executor)
    assert not busy
    assert counting.count("abort") == 2
    calls = len(counting.calls)
    executor.submit(lambda: None).result(60)
    assert len(counting.calls) == calls
