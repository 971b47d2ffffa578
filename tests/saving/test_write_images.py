"""From staged pieces to files: what is hashed, what is left when a write fails, and when memory is given back."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch

from bytecheckpoint.engine.checksums import chunk_checksums
from bytecheckpoint.engine.files import FileImage
from bytecheckpoint.engine.staging.arena import PAGE, Arena
from bytecheckpoint.engine.staging.staging import Staging
from bytecheckpoint.engine.writing.image_write import ImageWrite, WrittenFile
from bytecheckpoint.engine.writing.writer import write_images
from bytecheckpoint.errors import StateError, StorageError
from bytecheckpoint.geometry import Box
from bytecheckpoint.shards import Shard, basic_meta
from bytecheckpoint.storage_backends.base import StorageBackend
from bytecheckpoint.storage_backends.memory import MemoryBackend
from bytecheckpoint.testing.faults import Call, CountingBackend, FaultRule, FaultyBackend
from bytecheckpoint.trace import Timings

_random = np.random.default_rng(0)


@pytest.fixture
def backend() -> Iterator[MemoryBackend]:
    yield MemoryBackend("write-images")
    MemoryBackend.drop("write-images")


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def _image(key: str, sizes: Sequence[int], head: int = 100) -> FileImage:
    shards = []
    for index, size in enumerate(sizes):
        tensor = torch.from_numpy(_random.integers(0, 256, size, dtype=np.uint8))
        meta = basic_meta(tensor.dtype, tensor.shape)
        shards.append(Shard(f"t{index}", meta, Box.whole(meta.shape), tensor))
    return FileImage(key, "model", "tensors", b"h" * head, [0, *accumulate(sizes)][: len(sizes)], sizes, shards)


def _content(image: FileImage) -> bytes:
    return image.head + b"".join(shard.tensor.numpy().tobytes() for shard in image.shards)


def _checksums(image: FileImage, content: bytes, chunk_size: int) -> list[int]:
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
    """Stage and write in blocks of a page, and see that all memory was given back."""
    arena = Arena()
    arena.block_size = PAGE
    timings = Timings("save")
    staging = Staging(arena, images, timings, deadline_s=60.0, on_demand=on_demand)
    try:
        if on_demand is None:
            staging.fill(executor, 1)
        written = write_images(backend, staging, chunk_size, executor, timings, point)
        assert not arena._lent
        assert timings.work["hash"].nbytes == timings.work["write"].nbytes == sum(image.size for image in images)
        return written
    finally:
        staging.release(StateError("over"))
        assert not arena._lent


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
        assert file.checksums.dtype == np.uint64
        assert file.size == image.size


@pytest.mark.parametrize("seed", range(5))
def test_pieces_of_any_length_are_hashed_in_order_and_written_in_any(backend: MemoryBackend, seed: int) -> None:
    image = _image("a", [0, 10, 2000, 1, 0, 5000, 900, 0])
    content = memoryview(_content(image))
    chance = random.Random(seed)
    cuts = sorted({0, image.size, *(chance.randrange(image.size) for _ in range(20))})
    pieces = list(pairwise(cuts))
    write = ImageWrite(backend, image, 700, Timings("save"))
    for a, b in pieces:
        write.hash_piece(a, content[a:b])
    with ThreadPoolExecutor(len(pieces)) as pool:
        for task in [pool.submit(write.write_piece, a, content[a:b]) for a, b in reversed(pieces)]:
            task.result(60)
    assert write.finish().checksums.tolist() == _checksums(image, bytes(content), 700)
    assert backend.get("a") == content


def test_no_file_is_recorded_with_bytes_that_were_not_hashed(backend: MemoryBackend) -> None:
    image = _image("a", [3000])
    write = ImageWrite(backend, image, 700, Timings("save"))
    content = memoryview(_content(image))
    write.write_piece(0, content)
    write.hash_piece(0, content[:1000])
    with pytest.raises(ValueError, match="from 2000 on, where 1000 were hashed"):
        write.hash_piece(2000, content[2000:])
    with pytest.raises(ValueError, match="1000 bytes were hashed, of 3100"):
        write.finish()
    write.abandon()


@_MODES
def test_a_file_is_completed_while_the_next_is_written(
    backend: MemoryBackend, executor: ThreadPoolExecutor, on_demand: int | None
) -> None:
    counting = CountingBackend(backend)
    _write(counting, [_image(key, [3 * PAGE]) for key in "abcd"], executor, on_demand=on_demand)
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
    counting = CountingBackend(FaultyBackend(backend, rules))
    with pytest.raises(StorageError, match="refused by test"):
        _write(counting, [_image("a", [20 * PAGE]), _image("b", [20 * PAGE])], executor)
    assert not busy
    assert counting.count("abort") == counting.count("create") > 0
    calls = len(counting.calls)
    executor.submit(lambda: None).result(60)
    assert len(counting.calls) == calls
