"""Steps of a group, played through: everything arrives, nobody waits for ever, no slot gets two waves at a time."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytecheckpoint.dtypes import dtype_named
from bytecheckpoint.geometry import Box
from bytecheckpoint.inference.parts import Part
from bytecheckpoint.inference.push import steps
from bytecheckpoint.inference.push.layout import Layout
from bytecheckpoint.inference.push.planning import Write
from bytecheckpoint.inference.push.steps import (
    Message,
    Take,
    Turn,
    pack_takes,
    plan_steps,
    sends_of,
    takes_by_target,
    unpack_takes,
)
from bytecheckpoint.inference.push.waves import Waves

UINT8 = dtype_named("uint8")


class World:
    """``chunks``: sender, bytes and targets of each, in the one order of all."""

    def __init__(
        self, senders: int, chunks: list[tuple[int, int, list[int]]], slots: list[int], step_bytes: int
    ) -> None:
        self.senders, self.slots = senders, slots
        wanted: list[list[int]] = [[] for _ in slots]
        self.order: list[tuple[int, Write]] = []
        for number, (sender, nbytes, targets) in enumerate(chunks):
            box = Box((0,), (nbytes,))
            at = tuple((target, len(wanted[target])) for target in targets)
            self.order.append((sender, Write(f"t{number}", box, UINT8, at)))
            for target in targets:
                wanted[target].append(nbytes)
        longest = max(nbytes for _, nbytes, _ in chunks)
        self.waves = [Waves(_layout(sizes), count, -(-longest // 64) * 64) for sizes, count in zip(wanted, slots)]
        self.turns = plan_steps(self.order, self.waves, step_bytes)
        self.takes = [
            unpack_takes(pack_takes(of)) for of in takes_by_target(self.order, self.turns, senders, len(slots))
        ]

    def messages(self, party: int, step: int) -> tuple[list[Message], list[Message]]:
        """What it sends and receives."""
        if party < self.senders:
            sent = []
            for (sender, write), turn in zip(self.order, self.turns, strict=True):
                if sender == party and turn.step == step:
                    sent += sends_of(turn, write.nbytes, [self.senders + target for target, _ in write.chunks])
            return sent, []
        takes = self.takes[party - self.senders]
        due = [take for take in takes if step in (take.turn.step, take.last_step)]
        due.sort(key=lambda take: take.turn.step)  # what is relayed comes first
        received = [message for take in due for message in take.receives(step)]
        return [message for take in due for message in take.relays(step)], received

    def play(self) -> None:
        parties = range(self.senders + len(self.takes))
        agenda = [
            [step for step in range(self.turns[-1].step + 2) if any(self.messages(party, step))] for party in parties
        ]
        taken = [0] * len(self.takes)
        posted: dict[tuple[int, int], None] = {}
        while any(agenda):
            before = len(posted), sum(map(len, agenda))
            for party in parties:
                if agenda[party] and self._has_room(party, agenda[party][0], taken):
                    posted[party, agenda[party][0]] = None
            for party in parties:
                if agenda[party] and (party, agenda[party][0]) in posted:
                    step = agenda[party][0]
                    sent, received = self.messages(party, step)
                    if all((peer, step) in posted for peer, _, _ in sent + received):
                        agenda[party].pop(0)
                        if party >= self.senders:
                            taken[party - self.senders] = self._complete_waves(party - self.senders, step)
            assert before != (len(posted), sum(map(len, agenda))), f"all wait: {agenda}"

    def _has_room(self, party: int, step: int, taken: list[int]) -> bool:
        if party < self.senders:
            return True
        target = party - self.senders
        waves = [self.waves[target].wave_of[take.chunk] for take in self.takes[target] if take.turn.step == step]
        return all(wave < taken[target] + self.slots[target] for wave in waves)

    def _complete_waves(self, target: int, step: int) -> int:
        there = {take.chunk for take in self.takes[target] if take.last_step <= step}
        waves = self.waves[target]
        return next((wave for wave in range(waves.count) if not there.issuperset(waves.chunks(wave))), waves.count)


def _layout(sizes: list[int]) -> Layout:
    parts = tuple(Part(f"p{n}", (size,), Box((0,), (size,)), UINT8) for n, size in enumerate(sizes))
    return Layout(parts, tuple((n, part.box) for n, part in enumerate(parts)))


@st.composite
def worlds(draw: st.DrawFn) -> World:
    senders, targets = draw(st.integers(1, 3)), draw(st.integers(1, 10))
    sizes = st.sampled_from([64, 1000, steps.SPLIT_BYTES - 1, steps.SPLIT_BYTES, 3 * steps.SPLIT_BYTES + 17])
    some = st.lists(st.integers(0, targets - 1), min_size=1, max_size=targets, unique=True)
    chunks = draw(st.lists(st.tuples(st.integers(0, senders - 1), sizes, some), min_size=1, max_size=25))
    slots = draw(st.lists(st.integers(1, 4), min_size=targets, max_size=targets))
    return World(senders, chunks, slots, draw(st.sampled_from([1, 100_000, 1 << 30])))


@settings(max_examples=150, deadline=None)
@given(worlds())
def test_all_come_to_an_end(world: World) -> None:
    world.play()


@settings(max_examples=100, deadline=None)
@given(worlds())
def test_everything_arrives_once_from_who_has_it(world: World) -> None:
    last = world.turns[-1].step + 1
    sent: dict[tuple[int, int, int], list[Message]] = {}
    for party in range(world.senders + len(world.takes)):
        for step in range(last + 1):
            for to, begin, end in world.messages(party, step)[0]:
                sent.setdefault((party, to, step), []).append(Message(party, begin, end))
    for target, takes in enumerate(world.takes):
        party = world.senders + target
        assert [take.chunk for take in takes] == list(range(len(takes)))
        for step in range(last + 1):
            received = world.messages(party, step)[1]
            for peer in {message.party for message in received}:
                assert [one for one in received if one.party == peer] == sent.pop((peer, party, step))
        for take in takes:
            got = [message for step in {take.turn.step, take.last_step} for message in take.receives(step)]
            _assert_covers(got, take.nbytes)
            for step in {take.turn.step, take.last_step} - {take.turn.step}:
                _assert_has(take, [(begin, end) for _, begin, end in take.relays(step)])
    assert not sent


def _assert_covers(messages: list[Message], nbytes: int) -> None:
    at = 0
    for _, begin, end in sorted(messages, key=lambda one: one.begin):
        assert begin == at < end
        at = end
    assert at == nbytes


def _assert_has(take: Take, relayed: list[tuple[int, int]]) -> None:
    assert set(relayed) <= {(begin, end) for _, begin, end in take.receives(take.turn.step)}


def test_what_many_want_leaves_its_sender_once() -> None:
    nbytes, targets = 4 << 20, list(range(64))
    world = World(1, [(0, nbytes, targets)] * 64, [4] * 64, 1 << 30)
    relayed: Counter[int] = Counter()
    for target, takes in enumerate(world.takes):
        for take in takes:
            relayed[target] += sum(end - begin for _, begin, end in take.relays(take.last_step))
    left = [sends_of(turn, nbytes, targets) for turn in world.turns]
    assert {sum(end - begin for _, begin, end in messages) for messages in left} == {nbytes}
    # 63 of 64 copies are made by targets, by each of them as many.
    assert set(relayed.values()) == {63 * nbytes}


def test_short_chunks_are_sent_to_each() -> None:
    world = World(1, [(0, 1000, [0, 1, 2])], [1, 1, 1], 1 << 30)
    assert world.turns == [Turn(0, 0, 0)]
    assert sends_of(world.turns[0], 1000, [1, 2, 3]) == [Message(1, 0, 1000), Message(2, 0, 1000), Message(3, 0, 1000)]


@pytest.mark.parametrize(("step_bytes", "expected"), [(1, 8), (2000, 4), (1 << 30, 1)])
def test_steps_are_so_long(step_bytes: int, expected: int) -> None:
    world = World(1, [(0, 1000, [0])] * 8, [8], step_bytes)
    assert len({turn.step for turn in world.turns}) == expected
