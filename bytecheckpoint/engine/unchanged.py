"""Find the chunks of files that an older checkpoint has, where the tensors are, so that they need not be copied."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor, wait

import numpy as np
import numpy.typing as npt
import torch

from ..format.checksums import checksum_of
from ..telemetry.trace import Timings
from ..tensors.derived import is_derived
from .checksums import chunk_bounds
from .files import FileImage
from .tensor_bytes import byte_view, is_plain

_MIN_GAP = 1 << 20  # bytes; a shorter run of unchanged chunks is copied faster than it is left out


def find_unchanged(
    images: Sequence[FileImage], chunk_size: int, executor: Executor, helpers: int, timings: Timings
) -> None:
    """Set which chunks of these images their bases certainly have, and which bytes need no copy for that reason.

    Only tensors in host memory whose bytes are in order are compared, by this thread and up to ``helpers`` idle threads
    of ``executor``. A tensor whose first chunk has changed is not compared further: all of it has probably changed, and
    is hashed when it is copied.
    """
    for image in images:
        if image.base is not None:
            with timings.measure("hash", image.data_size):
                image.shared = _unchanged_chunks(image, chunk_size, executor, helpers)
            image.gaps = _gaps(image, chunk_size)


def _unchanged_chunks(image: FileImage, chunk_size: int, executor: Executor, helpers: int) -> npt.NDArray[np.bool_]:
    assert image.base is not None
    base, found = image.base, np.zeros(len(image.base.checksum), bool)
    tensors: deque[tuple[torch.Tensor, int, int]] = deque()  # with their first chunks, and how many they have
    first = 0
    for shard, nbytes in zip(image.shards, image.nbytes, strict=True):
        count = -(-nbytes // chunk_size)
        tensor = shard.tensor
        if count and not is_derived(tensor) and tensor.is_cpu and is_plain(tensor):
            tensors.append((tensor, first, count))
        first += count

    def compare() -> None:
        while tensors:
            try:
                tensor, first, count = tensors.popleft()
            except IndexError:  # another thread was faster
                return
            here = slice(first, first + count)
            expected = zip(base.is_usable[here].tolist(), base.checksum[here].tolist(), strict=True)
            data = byte_view(tensor)
            for chunk, (is_usable, checksum) in enumerate(expected):
                part = data[chunk * chunk_size : (chunk + 1) * chunk_size]
                if is_usable and checksum_of(part) == checksum:
                    found[first + chunk] = True
                elif chunk == 0:
                    break

    tasks = [executor.submit(compare) for _ in range(min(helpers, len(tensors) - 1))]
    try:
        compare()
    finally:
        tensors.clear()
        started = [task for task in tasks if not task.cancel()]
        wait(started)
    for task in started:
        task.result()
    return found


def _gaps(image: FileImage, chunk_size: int) -> list[tuple[int, int]]:
    """Return the long runs of shared chunks, as ranges of bytes of the file."""
    offsets = np.array(image.offsets, np.int64) + len(image.head)
    begins, ends = chunk_bounds(offsets, np.array(image.nbytes, np.int64), chunk_size)
    begins, ends = begins[image.shared], ends[image.shared]
    is_first = np.append(True, begins[1:] != ends[:-1])[: len(begins)]
    begins, ends = begins[is_first], ends[np.append(is_first[1:], True)[: len(ends)]]
    return [(begin, end) for begin, end in zip(begins.tolist(), ends.tolist(), strict=True) if end - begin >= _MIN_GAP]
