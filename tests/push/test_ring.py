"""The ring buffer: in whatever order a loader reads chunks, it gets each as it was sent, in bounded memory."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from leak_watch import threads_left
from sampling import examples

from bytecheckpoint.errors import BytecheckpointError, CorruptionError, DeadlineError, EngineError
from bytecheckpoint.inference.layouts.parts import TensorBox
from bytecheckpoint.inference.push.layout import ALIGNMENT_BYTES, ChunkTarget, Layout, Waves
from bytecheckpoint.inference.push.memory import ring_of
from bytecheckpoint.inference.push.transports.base import OutgoingChunk, TransportBroken
from bytecheckpoint.inference.push.transports.ring import RingBuffer
from bytecheckpoint.inference.push.transports.shared_memory import attach
from bytecheckpoint.inference.push.transports.tcp import FRAME, TcpTransport
from bytecheckpoint.tensors.dtypes import find_dtype
from bytecheckpoint.tensors.geometry import Box
from bytecheckpoint.testing import time_limit

UINT8 = find_dtype("uint8")


def _layout(sizes: list[int], vectors: frozenset[int] = frozenset()) -> Layout:
    """One part for each chunk: a matrix of one row, or a vector."""
    boxes = [Box((0,), (size,)) if n in vectors else Box((0, 0), (1, size)) for n, size in enumerate(sizes)]
    parts = tuple(TensorBox(f"t{n}", box.lengths, box, UINT8) for n, box in enumerate(boxes))
    return Layout(parts, tuple(enumerate(boxes)))


def _takes(layout: Layout, uses: list[int]) -> list[tuple[int, Box]]:
    return [layout.chunks[chunk] for chunk, count in enumerate(uses) for _ in range(count)]


def _bytes(chunk: int, size: int) -> torch.Tensor:
    return torch.full((size,), chunk % 251, dtype=torch.uint8)


def _digest(data: torch.Tensor) -> int:
    return xxhash.xxh3_64_intdigest(data.numpy())


class Sender:
    """One connection to a ring buffer."""

    def __init__(self, ring: RingBuffer, waves: Waves, *, shared: bool, deadline_s: float = time_limit(10)) -> None:
        self.waves = waves
        self.transport = TcpTransport(
            ring.endpoint, deadline_s, slots=waves.slots, memory=ring.address if shared else None
        )

    def write(self, chunk: int, damage: int = 0) -> None:
        data = _bytes(chunk, self.waves.layout.sizes[chunk])
        place = ChunkTarget(0, chunk, self.waves.offset(chunk), self.waves.wave_of[chunk])
        self.transport.write([OutgoingChunk([place], data, _digest(data) ^ damage)])

    def write_all(self, chunks: list[int]) -> None:
        for chunk in chunks:
            self.write(chunk)
        self.transport.finish()


def _ring_of(layout: Layout, limit: int) -> Waves:
    return ring_of(layout, limit)


@contextmanager
def _ring(waves: Waves, uses: list[int], deadline_s: float = time_limit(10)) -> Iterator[RingBuffer]:
    before = {*threading.enumerate()}
    ring = RingBuffer(waves, _takes(waves.layout, uses), deadline_s)
    try:
        yield ring
    finally:
        ring.close()
        assert threads_left("bcp-tcp", before) == []


@contextmanager
def _senders(ring: RingBuffer, waves: Waves, count: int, *, shared: bool) -> Iterator[list[Sender]]:
    made = [Sender(ring, waves, shared=shared) for _ in range(count)]
    try:
        yield made
    finally:
        for sender in made:
            sender.transport.close()


@given(st.lists(st.integers(1, 300), max_size=30), st.integers(320, 3000))
def test_waves_are_runs_that_fit_into_slots(sizes: list[int], limit: int) -> None:
    waves = _ring_of(_layout(sizes), limit)
    assert waves.nbytes <= limit
    assert [chunk for wave in range(waves.count) for chunk in waves.chunks(wave)] == list(range(len(sizes)))
    for wave in range(waves.count):
        spans = [(waves.offset(chunk), waves.offset(chunk) + sizes[chunk]) for chunk in waves.chunks(wave)]
        slot = wave % waves.slots * waves.slot_bytes
        assert all(slot <= begin and stop <= slot + waves.slot_bytes for begin, stop in spans)
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
        assert all(begin % ALIGNMENT_BYTES == 0 for begin, _ in spans)


def test_a_chunk_that_does_not_fit() -> None:
    with pytest.raises(EngineError, match="one chunk needs 320; raise memory_bytes of Pusher"):
        _ring_of(_layout([10, 300]), 319)
    assert _ring_of(_layout([10, 300]), 320).slots == 1


@settings(max_examples=examples(60), deadline=None)
@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=24),
    limit=st.integers(320, 2000),
    senders=st.integers(1, 3),
    shared=st.booleans(),
    seed=st.integers(0, 1 << 30),
    shuffled=st.sampled_from(["not", "near", "all"]),
)
def test_any_order_finishes(sizes: list[int], limit: int, senders: int, shared: bool, seed: int, shuffled: str) -> None:
    """Chunks are read as often as expected, less often, or not at all, and vectors more often; in about the recorded
    order, or in any order."""
    rng = random.Random(seed)
    vectors = frozenset(chunk for chunk in range(len(sizes)) if rng.random() < 0.2)
    waves = _ring_of(_layout(sizes, vectors), limit)
    uses = [rng.choice((0, 1, 1, 1, 2)) for _ in sizes]
    requested = [chunk for chunk, count in enumerate(uses) for _ in range(count if rng.random() < 0.9 else 0)]
    requested += [chunk for chunk in vectors if rng.random() < 0.5]
    if shuffled == "all":
        rng.shuffle(requested)
    elif shuffled == "near":
        requested.sort(key=lambda chunk: chunk + rng.uniform(-3, 3))
    writes: list[list[int]] = [[] for _ in range(senders)]
    for chunk in range(len(sizes)):
        writes[rng.randrange(senders)].append(chunk)
    with (
        _ring(waves, uses) as ring,
        _senders(ring, waves, senders, shared=shared) as made,
        ThreadPoolExecutor(senders) as threads,
    ):
        work = [threads.submit(sender.write_all, chunks) for sender, chunks in zip(made, writes, strict=True)]
        for chunk in requested:
            assert torch.equal(ring.get(chunk), _bytes(chunk, sizes[chunk]))
            ring.release(chunk)
        if all(uses) and requested == [chunk for chunk, count in enumerate(uses) for _ in range(count)]:
            assert not ring.set_aside
        ring.drain()
        for one in work:
            one.result(time_limit(10))
        assert ring.digests == [_digest(_bytes(chunk, size)) for chunk, size in enumerate(sizes)]


def test_a_chunk_that_is_read_once_more_than_expected() -> None:
    waves = Waves(_layout([64] * 4), 2, 64)
    with _ring(waves, [1] * 4) as ring, _senders(ring, waves, 1, shared=True) as (sender,):
        sender.write(0)
        ring.get(0)
        ring.release(0)
        with pytest.raises(EngineError, match=r"reads t0 .* more often than when it was recorded"):
            ring.get(0)


def _until_broken(sender: Sender, chunks: list[int]) -> str:
    with pytest.raises(TransportBroken) as raised:
        sender.write_all(chunks)
    return str(raised.value)


@pytest.mark.parametrize("shared", [False, True])
def test_a_damaged_chunk_fails_both_ends(shared: bool) -> None:
    waves = Waves(_layout([64] * 6), 2, 64)
    with _ring(waves, [1] * 6) as ring, _senders(ring, waves, 2, shared=shared) as (one, other):
        one.write(0, damage=1)
        with pytest.raises(CorruptionError, match=r"t0 \[0:1,0:64\] did not arrive as it was sent"):
            ring.get(0)
        for sender in (one, other):
            assert "ended the stream: CorruptionError: t0" in _until_broken(sender, [1, 2, 3, 4, 5])
        late = Sender(ring, waves, shared=shared)
        assert "ended the stream: CorruptionError: t0" in _until_broken(late, [4, 5])
        late.transport.close()


def test_a_sender_that_disconnects() -> None:
    waves = Waves(_layout([64] * 6), 2, 64)
    with _ring(waves, [1] * 6) as ring, _senders(ring, waves, 2, shared=True) as (one, other):
        one.write(0)
        one.transport.close()
        with pytest.raises(EngineError, match="too early"):
            ring.get(1)
        assert "too early" in _until_broken(other, [1, 2, 3, 4, 5])


def test_no_chunk_arrives() -> None:
    waves = Waves(_layout([64]), 1, 64)
    with _ring(waves, [1], deadline_s=0.2) as ring:
        with pytest.raises(DeadlineError, match=r"no sender wrote anything for 0\.2 s; this worker waits for t0"):
            ring.get(0)
        with pytest.raises(DeadlineError, match=r"this worker waits for the rest"):
            ring.drain()


@pytest.mark.parametrize("shared", [True, False])
def test_one_write_of_more_than_there_is_room_for(shared: bool) -> None:
    """What is before a chunk without room arrives first. The first one has two places, the second of which has none."""
    waves = Waves(_layout([64] * 6), 2, 64)
    places = [ChunkTarget(0, chunk, waves.offset(chunk), waves.wave_of[chunk]) for chunk in range(6)]
    data = [_bytes(number, 64) for number in range(5)]
    to = [places[:1] + places[2:3], places[1:2], places[3:4], places[4:5], places[5:]]
    with _ring(waves, [1] * 6) as ring, _senders(ring, waves, 2, shared=shared) as senders:
        chunks = [OutgoingChunk(places, one, _digest(one)) for places, one in zip(to, data, strict=True)]
        with ThreadPoolExecutor(2) as threads:
            writing = [
                threads.submit(senders[0].transport.write, [chunks[0], *chunks[2:]]),
                threads.submit(senders[1].transport.write, [chunks[1]]),
            ]
            for chunk, number in enumerate([0, 1, 0, 2, 3, 4]):
                assert torch.equal(ring.get(chunk), data[number]), chunk
                ring.release(chunk)
            for one in writing:
                one.result()
            for sender in senders:
                sender.transport.finish()


def test_no_room_is_made() -> None:
    waves = Waves(_layout([64] * 3), 2, 64)
    with _ring(waves, [1] * 3) as ring:
        sender = Sender(ring, waves, shared=True, deadline_s=0.2)
        assert "did not make room within 0.2 s; is its process stopped?" in _until_broken(sender, [0, 1, 2])
        sender.transport.close()


def test_a_model_that_fails() -> None:
    waves = Waves(_layout([64] * 3), 2, 64)
    with _ring(waves, [1] * 3) as ring, _senders(ring, waves, 1, shared=True) as (sender,):
        ring.fail(EngineError("RuntimeError: the layer does not fit"))
        assert "EngineError: RuntimeError: the layer does not fit" in _until_broken(sender, [0, 1, 2])


def _announce(sender: Sender, chunk: int, data: bytes = b"") -> None:
    sender.transport._send([FRAME.pack(chunk, len(data), 0), data])


@pytest.mark.parametrize(
    ("announce", "text"),
    [
        (lambda sender: _announce(sender, 3), "there is no chunk 3"),
        (lambda sender: _announce(sender, 0, b"x" * 63), "no chunk 0 of 63 bytes"),
        (lambda sender: _announce(sender, 2), "chunk 2 of wave 2 arrived when 0 waves had been taken"),
        (lambda sender: (sender.write(0), sender.write(0)), "chunk 0 of wave 0 arrived when"),
    ],
)
def test_a_sender_that_violates_the_protocol(announce: Callable[[Sender], object], text: str) -> None:
    waves = Waves(_layout([64] * 3), 2, 64)
    with _ring(waves, [1] * 3) as ring, _senders(ring, waves, 1, shared=True) as (sender,):
        announce(sender)
        with pytest.raises(BytecheckpointError, match=text):
            ring.drain()


def test_a_device_failure_is_reported() -> None:
    def digests(chunks: Sequence[torch.Tensor]) -> list[int]:
        raise RuntimeError("out of memory")

    waves = _ring_of(_layout([100, 100]), 1000)
    ring = RingBuffer(waves, _takes(waves.layout, [1, 1]), 10.0, digests=digests)
    with _senders(ring, waves, 1, shared=True) as (sender,):
        sender.write(0)
        with pytest.raises(EngineError, match="receiving failed: RuntimeError: out of memory"):
            ring.get(0)
        ring.close()
    assert ring.address is not None
    assert attach(ring.address) is None


def test_nothing_is_written_after_a_failure() -> None:
    waves = _ring_of(_layout([100, 100]), 1000)
    with _ring(waves, [1, 1]) as ring, _senders(ring, waves, 1, shared=True) as (sender,):
        ring.fail(EngineError("the layer does not fit"))
        sender.transport._listener.join()  # it has received the failure
        with pytest.raises(TransportBroken, match="the layer does not fit"):
            sender.write(0)
        assert not ring.claim(0, 0).any()
