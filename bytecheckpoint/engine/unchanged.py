"""Find the chunks of a file that an older checkpoint has, where the tensors are, without copying them."""

from __future__ import annotations

from concurrent.futures import Executor

import numpy as np
import numpy.typing as npt
import torch
from xxhash import xxh3_128_intdigest

from ..tensors.derived import is_derived
from .files import FileImage
from .staging.piece_copy import is_plain
from .tensor_bytes import byte_view

__all__ = ["unchanged_chunks"]


def unchanged_chunks(image: FileImage, chunk_size: int, executor: Executor) -> npt.NDArray[np.bool_]:
    """Return for each chunk of a file whether its base certainly has it.

    Only tensors in host memory whose bytes are in order are compared, with threads of ``executor``. A tensor whose
    first chunk has changed is not compared further: all of it has probably changed, and is hashed when it is copied.
    """
    assert image.base is not None
    base, found = image.base, np.zeros(len(image.base.checksum), bool)

    def compare(tensor: torch.Tensor, first: int, count: int) -> None:
        here = slice(first, first + count)
        expected = zip(base.is_usable[here].tolist(), base.digest[here].tolist(), base.checksum[here].tolist())
        data = byte_view(tensor)
        for chunk, (is_usable, digest, checksum) in enumerate(expected):
            part = data[chunk * chunk_size : (chunk + 1) * chunk_size]
            if is_usable and xxh3_128_intdigest(part) == digest << 64 | checksum:
                found[first + chunk] = True
            elif chunk == 0:
                return

    tasks, first = [], 0
    for shard, nbytes in zip(image.shards, image.nbytes):
        count = -(-nbytes // chunk_size)
        tensor = shard.tensor
        if count and not is_derived(tensor) and tensor.is_cpu and is_plain(tensor):
            tasks.append(executor.submit(compare, tensor, first, count))
        first += count
    for task in tasks:
        task.result()
    return found
