"""The ring: whatever the order in which a loader wants chunks, it gets each as it was sent, in bounded memory."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from bytecheckpoint.dtypes import dtype_named
from bytecheckpoint.errors import BytecheckpointError, CorruptionError, DeadlineError, EngineError
from bytecheckpoint.geometry import Box
from bytecheckpoint.inference.parts import Part
from bytecheckpoint.inference.push.arena import attach
from bytecheckpoint.inference.push.layout import ALIGNMENT, Layout
from bytecheckpoint.inference.push.ring import Ring
from bytecheckpoint.inference.push.ring_road import RingRoad, StreamBroken
from bytecheckpoint.inference.push.roads import Place
from bytecheckpoint.inference.push.waves import Waves, ring_of

UINT8 = dtype_named("uint8")


def _layout(sizes: list[int], vectors: frozenset[int] = frozenset()) -> Layout:
    """One part for each chunk: a matrix of one row, or a vector."""
    boxes = [Box((0,), (size,)) if n in vectors else Box((0, 0), (1, size)) for n, size in enumerate(sizes)]
    parts = tuple(Part(f"t{n}", box.lengths, box, UINT8) for n, box in enumerate(boxes))
    return Layout(parts, tuple(enumerate(boxes)))


def _takes(layout: Layout, uses: list[int]) -> list[tuple[int, Box]]:
    return [layout.chunks[chunk] for chunk, count in enumerate(uses) for _ in range(count)]


def _bytes(chunk: int, size: int) -> torch.Tensor:
    return torch.full((size,), chunk % 251, dtype=torch.uint8)


def _digest(data: torch.Tensor) -> int:
    return xxhash.xxh3_64_intdigest(data.numpy())


class Sender:
    """One connection to a ring."""

    def __init__(self, ring: Ring, waves: Waves, *, shared: bool, deadline_s: float = 10.0) -> None:
        self.waves = waves
        self.road = RingRoad(ring.port, ring.memory if shared else None, waves.slots, deadline_s)

    def write(self, chunk: int, damage: int = 0) -> None:
        data = _bytes(chunk, self.waves.layout.sizes[chunk])
        place = Place(0, self.waves.offset(chunk), chunk, self.waves.wave_of[chunk])
        self.road.write(place, data, _digest(data) ^ damage)

    def write_all(self, chunks: list[int]) -> None:
        for chunk in chunks:
            self.write(chunk)
        self.road.finish()


@contextmanager
def _ring(waves: Waves, uses: list[int], deadline_s: float = 10.0) -> Iterator[Ring]:
    ring = Ring(waves, _takes(waves.layout, uses), deadline_s)
    try:
        yield ring
    finally:
        ring.close()
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("bcp-push-tcp")]


@contextmanager
def _senders(ring: Ring, waves: Waves, count: int, *, shared: bool) -> Iterator[list[Sender]]:
    made = [Sender(ring, waves, shared=shared) for _ in range(count)]
    try:
        yield made
    finally:
        for sender in made:
            sender.road.close()


@given(st.lists(st.integers(1, 300), max_size=30), st.integers(320, 3000))
def test_waves_are_runs_that_fit_into_slots(sizes: list[int], limit: int) -> None:
    waves = ring_of(_layout(sizes), limit)
    assert waves.nbytes <= limit
    assert [chunk for wave in range(waves.count) for chunk in waves.chunks(wave)] == list(range(len(sizes)))
    for wave in range(waves.count):
        spans = [(waves.offset(chunk), waves.offset(chunk) + sizes[chunk]) for chunk in waves.chunks(wave)]
        slot = wave % waves.slots * waves.slot_bytes
        assert all(slot <= begin and stop <= slot + waves.slot_bytes for begin, stop in spans)
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
        assert all(begin % ALIGNMENT == 0 for begin, _ in spans)


def test_a_chunk_that_does_not_fit() -> None:
    with pytest.raises(EngineError, match="one chunk takes 320; give Pusher more memory_bytes"):
        ring_of(_layout([10, 300]), 319)
    assert ring_of(_layout([10, 300]), 320).slots == 1


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=24),
    limit=st.integers(320, 2000),
    senders=st.integers(1, 3),
    shared=st.booleans(),
    seed=st.integers(0, 1 << 30),
    shuffled=st.sampled_from(["not", "near", "all"]),
)
def test_any_order_comes_to_its_end(
    sizes: list[int], limit: int, senders: int, shared: bool, seed: int, shuffled: str
) -> None:
    """Chunks used as often as expected, more rarely, or not at all, and vectors more often; wanted in about the order,
    or in any."""
    rng = random.Random(seed)
    vectors = frozenset(chunk for chunk in range(len(sizes)) if rng.random() < 0.2)
    waves = ring_of(_layout(sizes, vectors), limit)
    uses = [rng.choice((0, 1, 1, 1, 2)) for _ in sizes]
    wanted = [chunk for chunk, count in enumerate(uses) for _ in range(count if rng.random() < 0.9 else 0)]
    wanted += [chunk for chunk in vectors if rng.random() < 0.5]
    if shuffled == "all":
        rng.shuffle(wanted)
    elif shuffled == "near":
        wanted.sort(key=lambda chunk: chunk + rng.uniform(-3, 3))
    writes: list[list[int]] = [[] for _ in range(senders)]
    for chunk in range(len(sizes)):
        writes[rng.randrange(senders)].append(chunk)
    with (
        _ring(waves, uses) as ring,
        _senders(ring, waves, senders, shared=shared) as made,
        ThreadPoolExecutor(senders) as threads,
    ):
        work = [threads.submit(sender.write_all, chunks) for sender, chunks in zip(made, writes, strict=True)]
        for chunk in wanted:
            assert torch.equal(ring.get(chunk), _bytes(chunk, sizes[chunk]))
            ring.used(chunk)
        if all(uses) and wanted == [chunk for chunk, count in enumerate(uses) for _ in range(count)]:
            assert not ring.set_aside
        ring.drain()
        for one in work:
            one.result(10)
        assert ring.digests == [_digest(_bytes(chunk, size)) for chunk, size in enumerate(sizes)]


def test_a_chunk_that_is_wanted_once_more_than_expected() -> None:
    waves = Waves(_layout([64] * 4), 2, 64)
    with _ring(waves, [1] * 4) as ring, _senders(ring, waves, 1, shared=True) as (sender,):
        sender.write(0)
        ring.get(0)
        ring.used(0)
        with pytest.raises(EngineError, match=r"wants t0 .* more often than it was seen to"):
            ring.get(0)


def _until_broken(sender: Sender, chunks: list[int]) -> str:
    with pytest.raises(StreamBroken) as raised:
        sender.write_all(chunks)
    return str(raised.value)


@pytest.mark.parametrize("shared", [False, True])
def test_a_damaged_chunk_ends_it_on_both_ends(shared: bool) -> None:
    waves = Waves(_layout([64] * 6), 2, 64)
    with _ring(waves, [1] * 6) as ring, _senders(ring, waves, 2, shared=shared) as (one, other):
        one.write(0, damage=1)
        with pytest.raises(CorruptionError, match=r"t0 \[0:1,0:64\] did not arrive as it was sent"):
            ring.get(0)
        for sender in (one, other):
            assert "ended the stream: CorruptionError: t0" in _until_broken(sender, [1, 2, 3, 4, 5])
        late = Sender(ring, waves, shared=shared)
        assert "ended the stream: CorruptionError: t0" in _until_broken(late, [4, 5])
        late.road.close()


def test_a_sender_that_goes_away() -> None:
    waves = Waves(_layout([64] * 6), 2, 64)
    with _ring(waves, [1] * 6) as ring, _senders(ring, waves, 2, shared=True) as (one, other):
        one.write(0)
        one.road.close()
        with pytest.raises(EngineError, match="too early"):
            ring.get(1)
        assert "too early" in _until_broken(other, [1, 2, 3, 4, 5])


def test_nothing_comes() -> None:
    waves = Waves(_layout([64]), 1, 64)
    with _ring(waves, [1], deadline_s=0.2) as ring:
        with pytest.raises(DeadlineError, match=r"no sender wrote anything for 0\.2 s; this worker waits for t0"):
            ring.get(0)
        with pytest.raises(DeadlineError, match=r"this worker waits for the rest"):
            ring.drain()


def test_no_room_is_made() -> None:
    waves = Waves(_layout([64] * 3), 2, 64)
    with _ring(waves, [1] * 3) as ring:
        sender = Sender(ring, waves, shared=True, deadline_s=0.2)
        assert "did not make room within 0.2 s; is its process stopped?" in _until_broken(sender, [0, 1, 2])
        sender.road.close()


def test_a_model_that_fails() -> None:
    waves = Waves(_layout([64] * 3), 2, 64)
    with _ring(waves, [1] * 3) as ring, _senders(ring, waves, 1, shared=True) as (sender,):
        ring.fail(EngineError("RuntimeError: the layer does not fit"))
        assert "EngineError: RuntimeError: the layer does not fit" in _until_broken(sender, [0, 1, 2])


@pytest.mark.parametrize(
    ("announce", "text"),
    [
        (lambda sender: sender.road._send(3, b"", 0), "there is no chunk 3"),
        (lambda sender: sender.road._send(0, b"x" * 63, 0), "no chunk 0 of 63 bytes"),
        (lambda sender: sender.road._send(2, b"", 0), "chunk 2 of wave 2 comes when 0 waves have been taken out"),
        (lambda sender: (sender.write(0), sender.write(0)), "chunk 0 of wave 0 comes when"),
    ],
)
def test_a_sender_that_breaks_the_rules(announce: Callable[[Sender], object], text: str) -> None:
    waves = Waves(_layout([64] * 3), 2, 64)
    with _ring(waves, [1] * 3) as ring, _senders(ring, waves, 1, shared=True) as (sender,):
        announce(sender)
        with pytest.raises(BytecheckpointError, match=text):
            ring.drain()


def test_a_failure_of_the_device_is_heard_of() -> None:
    def digest(data: torch.Tensor) -> int:
        raise RuntimeError("out of memory")

    waves = ring_of(_layout([100, 100]), 1000)
    ring = Ring(waves, _takes(waves.layout, [1, 1]), 10.0, digest=digest)
    with _senders(ring, waves, 1, shared=True) as (sender,):
        sender.write(0)
        with pytest.raises(EngineError, match="receiving failed: RuntimeError: out of memory"):
            ring.get(0)
        ring.close()
    assert ring.memory is not None
    assert attach(ring.memory) is None


def test_nothing_is_written_into_what_has_failed() -> None:
    waves = ring_of(_layout([100, 100]), 1000)
    with _ring(waves, [1, 1]) as ring, _senders(ring, waves, 1, shared=True) as (sender,):
        ring.fail(EngineError("the layer does not fit"))
        sender.road._ear.join()  # it has heard
        with pytest.raises(StreamBroken, match="the layer does not fit"):
            sender.write(0)
        assert not ring.claim(0, 0).any()
