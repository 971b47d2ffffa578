"""What a sender writes at once, and in which order."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from bytecheckpoint.inference.push import writing
from bytecheckpoint.inference.push.layout import ChunkTarget, Write
from bytecheckpoint.inference.push.quantizer import Quantizer
from bytecheckpoint.inference.push.sources import StateSource
from bytecheckpoint.inference.push.transports.base import OutgoingChunk, Transport, xxh3_digests
from bytecheckpoint.tensors.dtypes import find_dtype
from bytecheckpoint.tensors.geometry import Box

SIZE = 64  # bytes of each chunk
FLOAT32 = find_dtype("float32")


class _Log(Transport):
    """Appends to ``log`` which chunks are written at once; has no room for those of wave 1."""

    def __init__(self, name: str, log: list[tuple[str, list[int]]]) -> None:
        self._name, self._log = name, log

    def write(self, chunks: Sequence[OutgoingChunk]) -> None:
        assert all(xxh3_digests([chunk.data]) == [chunk.digest] for chunk in chunks)
        self._log.append((self._name, [place.chunk for chunk in chunks for place in chunk.places]))

    def has_room(self, places: Sequence[ChunkTarget]) -> bool:
        return all(not place.wave for place in places)

    def close(self) -> None:
        """Do nothing."""


def _written(waves: dict[tuple[int, int], int], run_bytes: int, count: int = 6) -> list[tuple[str, list[int]]]:
    """Write ``count`` chunks to both of two targets; ``waves`` gives those of (target, chunk) that are not 0."""
    state = {f"t{number}": torch.full((SIZE // 4,), float(number)) for number in range(count)}
    source = StateSource({"model": state}, "model", framework=None, rank=0, world_size=1)
    names = [name for name, _ in source.table.rows]
    writes = []
    for number, name in enumerate(names):
        places = tuple(ChunkTarget(target, number, 0, waves.get((target, number), 0)) for target in range(2))
        writes.append(Write(name, Box.whole((SIZE // 4,)), FLOAT32, places))
    log: list[tuple[str, list[int]]] = []
    sent: list[int] = []
    transports: dict[int, Transport] = {0: _Log("a", log), 1: _Log("b", log)}
    known = [(None, None)] * (2 * count)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(writing, "_RUN_BYTES", run_bytes)
        writer = writing.ChunkWriter(transports, Quantizer(source, b""), on_device=False, finite=())
        digests = writer.run(writes, known, lambda: None, sent.append)
    assert digests == xxh3_digests([state[name].view(torch.uint8) for name in names])
    assert sum(sent) == 2 * count * SIZE
    return log


def test_small_chunks_are_written_together() -> None:
    assert _written({}, 6 * SIZE) == [("a", [0, 1, 2, 3, 4, 5]), ("b", [0, 1, 2, 3, 4, 5])]


def test_a_run_has_at_least_one_chunk() -> None:
    assert sorted(_written({}, SIZE - 1)) == [(name, [number]) for name in "ab" for number in range(6)]


def test_nothing_that_another_worker_may_need_is_held_back() -> None:
    """Worker a makes room for chunk 3 only when b has what is before it, because another sender may wait for b."""
    assert _written({(0, 3): 1}, 6 * SIZE) == [
        ("a", [0, 1, 2]),
        ("b", [0, 1, 2]),
        ("a", [3]),
        ("b", [3, 4, 5]),
        ("a", [4, 5]),
    ]
