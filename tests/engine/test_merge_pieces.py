"""The merge stage with tiny pieces and almost no buffers between ranks: all boundaries, and no deadlock."""

from __future__ import annotations

import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from itertools import count, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_plans import plan_save, rank_plan
from safetensors.torch import load as load_safetensors
from sampling import examples

from bytecheckpoint.control.base import SingleOperation, Streams
from bytecheckpoint.engine import writing
from bytecheckpoint.engine.checksums import ChunkHasher
from bytecheckpoint.engine.files import tensor_image
from bytecheckpoint.engine.merging.fragments import LiveFragments, StagedFragments, fragment_image
from bytecheckpoint.engine.merging.merge import MIN_MERGE_BLOCKS, MergeResources, MergeWork, merge
from bytecheckpoint.engine.staging.arena import BLOCK, Arena
from bytecheckpoint.engine.staging.staging import Staging
from bytecheckpoint.planners.gather_plan import plan_gather
from bytecheckpoint.storage_backends.memory import MemoryBackend
from bytecheckpoint.telemetry import Timings
from bytecheckpoint.tensors.dtypes import DTYPES
from bytecheckpoint.tensors.geometry import Box, decompose
from bytecheckpoint.tensors.metadata import BasicMeta
from bytecheckpoint.tensors.shards import Shard
from bytecheckpoint.tensors.tables import BoxTable, TensorTable

WORLD = 3
_numbers = count()
DTYPE_NAMES = ["uint8", "bfloat16", "float32", "float64"]


class _Wire:
    """Streams between threads. Each buffers at most ``room`` bytes, which may be less than on any real system."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.changed = threading.Condition()
        self.held: dict[tuple[int, int], bytearray] = defaultdict(bytearray)


class _WireStreams(Streams):
    def __init__(self, wire: _Wire, rank: int) -> None:
        self._wire, self._rank = wire, rank

    def send(self, to: int, channel: str, data: Any) -> None:
        view = memoryview(data).cast("B")
        with self._wire.changed:
            held, room = self._wire.held[self._rank, to], self._wire.room
            while len(view):
                assert self._wire.changed.wait_for(lambda h=held, r=room: len(h) < r, 20), "deadlock"
                count = self._wire.room - len(held)
                held += view[:count]
                view = view[count:]
                self._wire.changed.notify_all()

    def receive(self, source: int, channel: str, into: Any) -> None:
        view = memoryview(into).cast("B")
        with self._wire.changed:
            held = self._wire.held[source, self._rank]
            while len(view):
                assert self._wire.changed.wait_for(lambda h=held: h, 20), "deadlock"
                count = min(len(held), len(view))
                view[:count] = held[:count]
                del held[:count]
                view = view[count:]
                self._wire.changed.notify_all()


class _Op(SingleOperation):
    """The operation of one of several ranks in one process."""

    def __init__(self, wire: _Wire, rank: int) -> None:
        self._wire, self._rank = wire, rank

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return WORLD

    def streams(self) -> Streams:
        return _WireStreams(self._wire, self._rank)


@st.composite
def _boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Draw a tiling: flat ranges, or splits along several axes."""
    total = Box.whole(shape).numel
    if draw(st.booleans()):
        cuts = [0, *sorted(draw(st.lists(st.integers(0, total), max_size=4))), total]
        return [box for low, high in pairwise(cuts) for box in decompose(low, high - low, shape)]
    boxes = [Box.whole(shape)]
    for axis in draw(st.lists(st.integers(0, len(shape) - 1), max_size=3)) if shape else []:
        cut = []
        for box in boxes:
            size = box.lengths[axis]
            at = draw(st.integers(0, size))
            for begin, length in ((0, at), (at, size - at)):
                if length:
                    offsets, lengths = [*box.offsets], [*box.lengths]
                    offsets[axis] += begin
                    lengths[axis] = length
                    cut.append(Box(tuple(offsets), tuple(lengths)))
        boxes = cut or boxes
    return boxes


@st.composite
def _worlds(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], list[list[tuple[str, Box]]]]:
    full: dict[str, torch.Tensor] = {}
    held: list[list[tuple[str, Box]]] = [[] for _ in range(WORLD)]
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 9), max_size=3)))
        dtype = getattr(torch, draw(st.sampled_from(DTYPE_NAMES)))
        size = int(np.prod(shape, dtype=int))
        full[f"t{number}"] = ((torch.arange(size) * 7 + number * 31) % 120).reshape(shape).to(dtype)
        for box in draw(_boxes(shape)):
            held[draw(st.integers(0, WORLD - 1))].append((f"t{number}", box))
    return full, held


def _run_rank(
    rank: int, wire: _Wire, full: dict[str, torch.Tensor], world: Any, gather: Any, backend: MemoryBackend, live: bool
) -> int:
    plans, held = world
    work = MergeWork.of(gather.share(rank), plans[rank], {})
    metas = _metas(full)
    shards = {}
    for row in work.staged:
        name, box = held[rank][row]
        # Views of a larger tensor are not contiguous.
        shards[row] = Shard(name, metas[name], box, full[name][box.slices()])
    arena, ring, timings = Arena(), Arena(MIN_MERGE_BLOCKS * BLOCK), Timings("save")
    staging = None
    if live:
        fragments: Any = LiveFragments(shards)
    else:
        image = fragment_image(list(shards.values()))
        staging = Staging(arena, [image], timings)
        staging.fill()
        fragments = StagedFragments(staging, image, list(shards))
    images = [tensor_image(f"{rank}/{file.section}", file, [None] * len(file.offsets)) for file in work.files]
    with ThreadPoolExecutor(2) as threads, ThreadPoolExecutor(4) as io:
        resources = MergeResources(ring, threads, io, 20)
        merge(_Op(wire, rank), backend, work, images, fragments, resources, 64, timings)
    assert arena._acquired == 0, "a block was not returned"
    assert ring._acquired == 0
    return ring.nbytes


def _metas(full: dict[str, torch.Tensor]) -> dict[str, BasicMeta]:
    return {name: BasicMeta(DTYPES[str(t.dtype).removeprefix("torch.")], tuple(t.shape)) for name, t in full.items()}


@given(_worlds(), st.sampled_from([16, 48]), st.integers(1, 40), st.booleans())
@settings(deadline=None, max_examples=examples(40, 40))
def test_any_tiling_in_any_pieces(world: Any, piece: int, room: int, live: bool) -> None:
    full, held = world
    table = TensorTable.build(("model", name, meta) for name, meta in _metas(full).items())
    rows = {f"model.{name}": row for row, name in enumerate(full)}
    plans = [rank_plan(table, BoxTable.build([(rows[f"model.{n}"], b) for n, b in one])) for one in held]
    gather = plan_gather(plan_save(plans), "whole", world_size=WORLD, piece_size=piece)
    if gather is None:
        return
    backend, wire = MemoryBackend(f"merge-{next(_numbers)}"), _Wire(room)
    with ThreadPoolExecutor(WORLD) as pool:
        ranks = [pool.submit(_run_rank, r, wire, full, (plans, held), gather, backend, live) for r in range(WORLD)]
        assert all(rank.result() <= MIN_MERGE_BLOCKS * BLOCK for rank in ranks)
    assert not any(wire.held.values()), "bytes were sent but not received"
    found: dict[str, torch.Tensor] = {}
    for stat in backend.list():
        found |= load_safetensors(backend.get(stat.key))
    made = {gather.stored.tensors.fqn_of(t) for t in gather.stored.shards.tensor[gather.stored.source < 0].tolist()}
    assert made <= found.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, full[name]), name


@pytest.mark.parametrize("failing", ["send", "write", "hash"])
def test_a_failure_of_one_thread_ends_the_other(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After one rank fails, all blocks are returned and its incomplete files are removed."""
    full = {"a": torch.arange(4000, dtype=torch.float32), "b": torch.arange(4000, dtype=torch.float32)}
    half = Box((0,), (2000,)), Box((2000,), (2000,))
    held = [[("a", half[0]), ("b", half[0])], [("a", half[1]), ("b", half[1])], []]
    table = TensorTable.build(("model", name, meta) for name, meta in _metas(full).items())
    plans = [rank_plan(table, BoxTable.build([(int(n == "b"), b) for n, b in one])) for one in held]
    gather = plan_gather(plan_save(plans), "whole", world_size=WORLD, piece_size=4096)
    assert gather is not None
    work = MergeWork.of(gather.share(0), plans[0], {})
    assert len(work.outgoing), "this rank sends"
    assert len(work.files) == 1, "and gathers"

    class Broken(MemoryBackend):
        def create(self, key: str, size: int, *, at_most: bool = False) -> Any:
            if failing == "write":
                raise OSError("injected")
            return super().create(key, size, at_most=at_most)

    class BrokenHasher(ChunkHasher):
        def update(self, start: int, data: memoryview) -> None:
            if start:  # a piece that holds a block
                raise OSError("injected")
            super().update(start, data)

    if failing == "hash":
        monkeypatch.setattr(writing, "ChunkHasher", BrokenHasher)

    class BrokenStreams(_WireStreams):
        def send(self, to: int, channel: str, data: Any) -> None:
            if failing != "hash":
                raise OSError("injected")

        def receive(self, source: int, channel: str, into: Any) -> None:
            """The content does not matter here."""

    class Op(_Op):
        def streams(self) -> Streams:
            return BrokenStreams(self._wire, 0)

    backend, ring = Broken(f"merge-{next(_numbers)}"), Arena(MIN_MERGE_BLOCKS * BLOCK)
    shards = {row: Shard(n, _metas(full)[n], b, full[n][b.slices()]) for row, (n, b) in enumerate(held[0])}
    images = [tensor_image(f"0/{file.section}", file, [None] * len(file.offsets)) for file in work.files]
    with ThreadPoolExecutor(2) as threads, ThreadPoolExecutor(2) as io:
        resources = MergeResources(ring, threads, io, 20)
        with pytest.raises(OSError, match="injected"):
            merge(Op(_Wire(1), 0), backend, work, images, LiveFragments(shards), resources, 64, Timings("save"))
    assert ring._acquired == 0
    assert ring.blocks <= MIN_MERGE_BLOCKS
    # The save removes a file that was complete before the failure.
    assert failing == "send" or not list(backend.list())
