"""The order of a group, simulated: every chunk arrives, no member waits forever, and each slot has room in time."""

from __future__ import annotations

import msgpack
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples

from bytecheckpoint.inference.layouts.parts import TensorBox
from bytecheckpoint.inference.push.layout import ChunkTarget, Layout, Waves, Write, align
from bytecheckpoint.inference.push.transports.group_transport import plan_receptions
from bytecheckpoint.tensors.dtypes import find_dtype
from bytecheckpoint.tensors.geometry import Box

UINT8 = find_dtype("uint8")


class World:
    """``chunks``: the sender, size and targets of each, in the common order."""

    def __init__(self, senders: int, chunks: list[tuple[int, int, list[int]]], slots: list[int]) -> None:
        self.senders = senders
        sizes: list[list[int]] = [[] for _ in slots]
        self.order: list[tuple[int, Write]] = []
        for number, (sender, nbytes, targets) in enumerate(chunks):
            at = []
            for target in targets:  # a target may request a box twice
                at.append(ChunkTarget(target, len(sizes[target])))
                sizes[target].append(nbytes)
            self.order.append((sender, Write(f"t{number}", Box((0,), (nbytes,)), UINT8, tuple(at))))
        longest = align(max(nbytes for _, nbytes, _ in chunks))
        self.waves = [Waves(_layout(of), count, longest) for of, count in zip(sizes, slots)]
        self.receptions = plan_receptions(self.order, senders, len(slots))

    def run(self) -> None:
        """Let every member do its next step when its partners are ready, until all are done."""
        sends = [[write for sender, write in self.order if sender == number] for number in range(self.senders)]
        receptions = [list(of_target) for of_target in self.receptions]
        arrived: list[set[int]] = [set() for _ in receptions]
        while any(sends) or any(receptions):
            assert self._finish_one(sends, receptions, arrived), "all members wait"
        assert [len(of_target) for of_target in arrived] == [len(waves.layout.chunks) for waves in self.waves]

    def _finish_one(self, sends: list[list[Write]], receptions: list[list], arrived: list[set[int]]) -> bool:  # type: ignore[type-arg]
        for sender, writes in enumerate(sends):
            if not writes:
                continue
            targets = sorted({place.target for place in writes[0].places})
            heads = [receptions[target][0] if receptions[target] else None for target in targets]
            if all(
                head is not None
                and (head.sender, set(head.chunks)) == (sender, _chunks_of(writes[0], target))
                and self._has_room(target, head.chunks, arrived[target])
                for target, head in zip(targets, heads, strict=True)
            ):
                for target in targets:
                    arrived[target].update(receptions[target].pop(0).chunks)
                writes.pop(0)
                return True
        return False

    def _has_room(self, target: int, chunks: tuple[int, ...], arrived: set[int]) -> bool:
        waves = self.waves[target]
        taken = next((wave for wave in range(waves.count) if not arrived.issuperset(waves.chunks(wave))), waves.count)
        return all(waves.wave_of[chunk] < taken + waves.slots for chunk in chunks)


def _chunks_of(write: Write, target: int) -> set[int]:
    return {place.chunk for place in write.places if place.target == target}


def _layout(sizes: list[int]) -> Layout:
    parts = tuple(TensorBox(f"p{n}", (size,), Box((0,), (size,)), UINT8) for n, size in enumerate(sizes))
    return Layout(parts, tuple((n, part.box) for n, part in enumerate(parts)))


@st.composite
def worlds(draw: st.DrawFn) -> World:
    senders, targets = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    some = st.lists(st.integers(0, targets - 1), min_size=1, max_size=targets, unique=True)
    sizes = st.sampled_from([64, 1000, 70_000])
    chunks = draw(st.lists(st.tuples(st.integers(0, senders - 1), sizes, some), min_size=1, max_size=25))
    slots = draw(st.lists(st.integers(1, 4), min_size=targets, max_size=targets))
    return World(senders, chunks, slots)


@settings(max_examples=examples(150), deadline=None)
@given(worlds())
def test_all_members_finish(world: World) -> None:
    world.run()


@settings(max_examples=examples(100), deadline=None)
@given(worlds())
def test_each_chunk_arrives_once_from_its_sender(world: World) -> None:
    for target, receptions in enumerate(world.receptions):
        member = world.senders + target
        chunks = [chunk for reception in receptions for chunk in reception.chunks]
        assert chunks == list(range(len(chunks)))
        expected = [(sender, write.nbytes) for sender, write in world.order if _chunks_of(write, target)]
        assert [(reception.sender, reception.nbytes) for reception in receptions] == expected
        for reception in receptions:
            assert member in reception.members
            assert reception.root in reception.members


def test_a_box_that_a_target_requests_twice_is_received_once() -> None:
    write = Write("t", Box((0,), (64,)), UINT8, (ChunkTarget(0, 0), ChunkTarget(0, 1), ChunkTarget(1, 0)))
    first, second = plan_receptions([(0, write)], 1, 2)
    assert [(reception.members, reception.chunks) for reception in first] == [((1, 2), (0, 1))]
    assert [(reception.members, reception.chunks) for reception in second] == [((1, 2), (0,))]


def test_roots_rotate() -> None:
    world = World(1, [(0, 64, [0, 1, 2, 3])] * 8, [8] * 4)
    assert [reception.root for reception in world.receptions[0]] == [1, 2, 3, 4] * 2
    assert msgpack.unpackb(msgpack.packb(world.receptions[0]))
