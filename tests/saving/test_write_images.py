"""Writing staged pieces to files: checksums, files that remain after a failure, and when memory is released."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from counting_backend import CountingBackend

from bytecheckpoint.engine.blocks import PAGE
from bytecheckpoint.engine.checksums import chunk_checksums
from bytecheckpoint.engine.files import FileImage
from bytecheckpoint.engine.staging.arena import Arena
from bytecheckpoint.engine.staging.staging import Staging
from bytecheckpoint.engine.writing import FileWriter, WrittenFile, write_images
from bytecheckpoint.errors import StateError, StorageError
from bytecheckpoint.storage_backends.base import StorageBackend
from bytecheckpoint.storage_backends.memory import MemoryBackend
from bytecheckpoint.telemetry import Timings
from bytecheckpoint.tensors.geometry import Box
from bytecheckpoint.tensors.shards import Shard, basic_meta
from bytecheckpoint.testing import time_limit
from bytecheckpoint.testing.faults import Call, FaultRule, FaultyBackend

_random = np.random.default_rng(0)


@pytest.fixture
def backend() -> Iterator[MemoryBackend]:
    yield MemoryBackend("write-images")
    MemoryBackend.delete_store("write-images")


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


class _BackwardsExecutor(Executor):
    """Runs its tasks in ``run``, the last one first."""

    def __init__(self) -> None:
        self._tasks: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._tasks.append((future, partial(fn, *args, **kwargs)))
        return future

    def run(self) -> None:
        for future, task in reversed(self._tasks):
            if future.set_running_or_notify_cancel():
                future.set_result(task())


def _image(key: str, sizes: Sequence[int], head: int = 100) -> FileImage:
    shards = []
    for index, size in enumerate(sizes):
        tensor = torch.from_numpy(_random.integers(0, 256, size, dtype=np.uint8))
        meta = basic_meta(tensor.dtype, tensor.shape)
        shards.append(Shard(f"t{index}", meta, Box.whole(meta.shape), tensor))
    return FileImage(key, "model", "tensors", b"h" * head, [0, *accumulate(sizes)][: len(sizes)], sizes, shards)


def _content(image: FileImage) -> bytes:
    return image.head + b"".join(shard.tensor.numpy().tobytes() for shard in image.shards)


def _checksums(image: FileImage, content: bytes, chunk_size: int) -> list[bytes]:
    data = memoryview(content)[len(image.head) :]
    of_shards = [chunk_checksums(data[at : at + n], chunk_size) for at, n in zip(image.offsets, image.nbytes)]
    return [value for values in of_shards for value in values]


def _write(
    backend: StorageBackend,
    images: Sequence[FileImage],
    executor: ThreadPoolExecutor,
    *,
    chunk_size: int = 100,
    on_demand: int | None = None,
    point: Callable[[str], None] = lambda name: None,
) -> list[WrittenFile]:
    """Stage and write in blocks of one page; check that all memory is released."""
    arena = Arena()
    arena.block_size = PAGE
    timings = Timings("save")
    staging = Staging(arena, images, timings, deadline_s=time_limit(60), on_demand=on_demand)
    try:
        if on_demand is None:
            staging.fill(executor, 1)
        written = write_images(backend, staging, chunk_size, executor, timings, point)
        assert not arena._acquired
        assert timings.work["hash"].nbytes == timings.work["write"].nbytes == sum(image.size for image in images)
        return written
    finally:
        staging.discard(StateError("over"))
        assert not arena._acquired


_MODES = pytest.mark.parametrize("on_demand", [None, 1, 3], ids=["staged", "one block", "three blocks"])


@_MODES
@pytest.mark.parametrize("chunk_size", [1, 7, 300, PAGE, PAGE + 1, 3 * PAGE + 5, 1 << 20])
def test_checksums_run_over_every_shard(
    backend: MemoryBackend, executor: ThreadPoolExecutor, chunk_size: int, on_demand: int | None
) -> None:
    sizes = [0, 10, 2 * PAGE, 1, 0, 5 * PAGE + 77, 900, 0]
    images = [_image("a", sizes), _image("b", []), _image("c", [0, 0], 3 * PAGE)]
    contents = [_content(image) for image in images]
    written = _write(backend, images, executor, chunk_size=chunk_size, on_demand=on_demand)
    assert [file.key for file in written] == ["a", "b", "c"]
    for image, content, file in zip(images, contents, written):
        assert backend.get(image.key) == content
        assert file.checksums.tolist() == _checksums(image, content, chunk_size)
        assert file.size == image.size


@pytest.mark.parametrize("seed", range(5))
def test_pieces_of_any_length_are_hashed_in_order_and_written_in_any(backend: MemoryBackend, seed: int) -> None:
    image = _image("a", [0, 10, 2000, 1, 0, 5000, 900, 0])
    content = memoryview(_content(image))
    chance = random.Random(seed)
    cuts = sorted({0, image.size, *(chance.randrange(image.size) for _ in range(20))})
    pieces = list(pairwise(cuts))
    executor = _BackwardsExecutor()
    writer = FileWriter(backend, image, 700, executor, Timings("save"))
    released: list[int] = []
    for a, b in pieces:
        writer.write(a, content[a:b], partial(released.append, a))
    assert not released
    executor.run()
    writer.wait()
    assert released == [a for a, _ in reversed(pieces)]
    assert writer.finish().checksums.tolist() == _checksums(image, bytes(content), 700)
    assert backend.get("a") == content


def test_no_file_is_finished_with_bytes_that_were_not_hashed(
    backend: MemoryBackend, executor: ThreadPoolExecutor
) -> None:
    image = _image("a", [3000])
    writer = FileWriter(backend, image, 700, executor, Timings("save"))
    content = memoryview(_content(image))
    released: list[int] = []
    writer.write(0, content[:1000], partial(released.append, 0))
    with pytest.raises(ValueError, match="starts at byte 2000, but the hash is at byte 1000"):
        writer.write(2000, content[2000:], partial(released.append, 2000))
    writer.wait()
    with pytest.raises(ValueError, match="only 1 of 5 chunks"):
        writer.finish()
    writer.abandon()
    assert sorted(released) == [0, 2000]
    assert not list(backend.list())


def test_an_abandoned_file_releases_every_piece_once(backend: MemoryBackend) -> None:
    image = _image("a", [3000])
    content = memoryview(_content(image))
    executor = _BackwardsExecutor()
    writer = FileWriter(backend, image, 700, executor, Timings("save"))
    released: list[int] = []
    for start in range(0, image.size, 1000):
        writer.write(start, content[start : start + 1000], partial(released.append, start))
    writer.abandon()
    executor.run()
    assert released == [0, 1000, 2000, 3000]
    assert not list(backend.list())


@_MODES
def test_a_file_is_completed_while_the_next_is_written(
    backend: MemoryBackend, executor: ThreadPoolExecutor, on_demand: int | None
) -> None:
    counting = CountingBackend(backend)
    _write(counting, [_image(key, [3 * PAGE]) for key in "abcd"], executor, on_demand=on_demand)
    order = [(call.operation, call.key) for call in counting.calls if call.operation in ("create", "complete")]
    # Never more than two files are open, however many there are.
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


@_MODES
@pytest.mark.parametrize("operation", ["create", "write", "complete"])
@pytest.mark.parametrize("key", ["a", "b", "c"])
def test_a_failure_leaves_nothing_of_what_was_not_complete(
    backend: MemoryBackend, executor: ThreadPoolExecutor, operation: str, key: str, on_demand: int | None
) -> None:
    faulty = FaultyBackend(backend, [FaultRule(operation, key, nth=1, error=StorageError("refused by test"))])
    images = [_image(name, [5 * PAGE]) for name in "abc"]
    with pytest.raises(StorageError, match="refused by test"):
        _write(faulty, images, executor, on_demand=on_demand)
    left = [found.key for found in backend.list()]
    assert left == sorted("abc"[: len(left)])
    assert key not in left


def test_no_thread_uses_the_memory_after_an_error(backend: MemoryBackend, executor: ThreadPoolExecutor) -> None:
    failed, busy = threading.Event(), set[int]()
    waiting = threading.Semaphore(0)

    def hold(call: Call) -> None:
        busy.add(call.offset)
        waiting.release()
        assert failed.wait(time_limit(60))
        busy.discard(call.offset)

    def fail(call: Call) -> None:
        for _ in range(3):
            assert waiting.acquire(timeout=time_limit(60))
        failed.set()

    rules = [
        FaultRule("write", "a", nth=4, error=StorageError("refused by test"), hook=fail),
        FaultRule("write", "a", nth=1, times=3, hook=hold),
    ]
    counting = CountingBackend(FaultyBackend(backend, rules))
    with pytest.raises(StorageError, match="refused by test"):
        _write(counting, [_image("a", [20 * PAGE]), _image("b", [20 * PAGE])], executor)
    assert not busy
    assert counting.count("abort") == counting.count("create") > 0
    calls = len(counting.calls)
    executor.submit(lambda: None).result(time_limit(60))
    assert len(counting.calls) == calls
