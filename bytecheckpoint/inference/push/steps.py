"""What goes over a group when, and by whom: pure numbers, the same at all parties.

Parties of a group are the senders, and behind them the targets. A chunk that several targets want leaves its sender
once: some of the targets get a piece of it each, and relay that to all others in the step after. Whatever a party sends
and receives in one step is under way at the same time, and all do their steps in one order, so nobody waits in a circle
as long as each finds room for what it gets: therefore a step has nothing for a slot that is not empty before it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgpack

from .layout import ALIGNMENT
from .planning import Write
from .waves import Waves

__all__ = [
    "Message",
    "Take",
    "Turn",
    "pack_takes",
    "plan_steps",
    "sends_of",
    "takes_by_target",
    "unpack_takes",
]

STEP_BYTES = 32 << 20
SPLIT_BYTES = 64 << 10  # of shorter chunks, messages cost more than what they save
_RELAYS = 8  # of a chunk: more would be many small messages


class Turn(NamedTuple):
    """When a write is sent; its ``number`` is that in the one order of all writes. It is relayed in so many ``pieces``,
    or sent to each of its targets where they are 0."""

    number: int
    step: int
    pieces: int


class Message(NamedTuple):
    """Bytes ``[begin, end)`` of a chunk, to or from ``party``."""

    party: int
    begin: int
    end: int


class _Piece(NamedTuple):
    relay: int
    begin: int
    end: int


def _pieces_of(turn: Turn, nbytes: int, targets: Sequence[int]) -> list[_Piece]:
    count = turn.pieces
    cuts = [nbytes * piece // count // ALIGNMENT * ALIGNMENT for piece in range(count)] + [nbytes]
    # Others each time, so that all of many targets relay as much.
    relays = [targets[(turn.number + piece * len(targets) // count) % len(targets)] for piece in range(count)]
    return [_Piece(*piece) for piece in zip(relays, cuts, cuts[1:], strict=False)]


def _how_many_pieces(nbytes: int, targets: Sequence[int]) -> int:
    count = min(len(targets), _RELAYS)
    return 0 if count < 2 or nbytes < SPLIT_BYTES or len(set(targets)) < len(targets) else count


def plan_steps(order: Sequence[tuple[int, Write]], waves: Sequence[Waves], step_bytes: int = STEP_BYTES) -> list[Turn]:
    """Of each write of ``order`` (with its sender); steps in that order. What is relayed has arrived after the step
    behind its own.

    In a step, nobody sends or gets more than ``step_bytes``, unless it is one write.
    """
    step, turns = 0, list[Turn]()
    moved: dict[tuple[bool, int], int] = defaultdict(int)
    there: list[list[int]] = [[-1] * of.count for of in waves]  # by target and wave: the step that completes it
    for number, (sender, write) in enumerate(order):
        targets = [target for target, _ in write.chunks]
        pieces = _how_many_pieces(write.nbytes, targets)
        costs = {(True, sender): write.nbytes * (1 if pieces else len(targets))}
        costs |= {(False, target): write.nbytes for target in targets}
        begin = step
        if any(moved[party] and moved[party] + cost > step_bytes for party, cost in costs.items()):
            begin += 1
        for target, chunk in write.chunks:
            before = waves[target].wave_of[chunk] - waves[target].slots
            if before >= 0:
                begin = max(begin, there[target][before] + 1)
        if begin > step:
            step = begin
            moved.clear()
        for party, cost in costs.items():
            moved[party] += cost
        for target, chunk in write.chunks:
            wave = waves[target].wave_of[chunk]
            there[target][wave] = max(there[target][wave], step + bool(pieces))
        turns.append(Turn(number, step, pieces))
    return turns


@dataclass(frozen=True)
class Take:
    """A chunk as its target gets it, who is the party ``targets[at]``."""

    turn: Turn
    sender: int
    chunk: int
    nbytes: int
    targets: tuple[int, ...]
    at: int

    @property
    def pieces(self) -> list[_Piece]:
        return _pieces_of(self.turn, self.nbytes, self.targets)

    @property
    def last_step(self) -> int:
        """After it, all is there."""
        return self.turn.step + bool(self.turn.pieces)

    def receives(self, step: int) -> list[Message]:
        me, pieces = self.targets[self.at], self.pieces
        if step == self.turn.step:
            if not pieces:
                return [Message(self.sender, 0, self.nbytes)]
            return [Message(self.sender, begin, end) for relay, begin, end in pieces if relay == me]
        return [Message(*piece) for piece in pieces if piece.relay != me]

    def relays(self, step: int) -> Iterator[Message]:
        me = self.targets[self.at]
        for relay, begin, end in self.pieces if step != self.turn.step else ():
            if relay == me:
                yield from (Message(party, begin, end) for party in self.targets if party != me)


def sends_of(turn: Turn, nbytes: int, targets: Sequence[int]) -> list[Message]:
    """What the sender of a write has to do for it."""
    pieces = _pieces_of(turn, nbytes, targets)
    return [Message(*piece) for piece in pieces] or [Message(target, 0, nbytes) for target in targets]


def takes_by_target(
    order: Sequence[tuple[int, Write]], turns: Sequence[Turn], senders: int, targets: int
) -> list[list[Take]]:
    """Of each target, in order."""
    found: list[list[Take]] = [[] for _ in range(targets)]
    for (sender, write), turn in zip(order, turns, strict=True):
        parties = tuple(senders + target for target, _ in write.chunks)
        for at, (target, chunk) in enumerate(write.chunks):
            found[target].append(Take(turn, sender, chunk, write.nbytes, parties, at))
    return found


def pack_takes(takes: Sequence[Take]) -> bytes:
    lists = {targets: number for number, targets in enumerate(dict.fromkeys(take.targets for take in takes))}
    rows = [[*take.turn, take.sender, take.chunk, take.nbytes, lists[take.targets], take.at] for take in takes]
    packed: bytes = msgpack.packb([list(lists), rows])
    return packed


def unpack_takes(data: bytes) -> list[Take]:
    lists, rows = msgpack.unpackb(data, use_list=False)
    return [
        Take(Turn(number, step, pieces), sender, chunk, nbytes, lists[targets], at)
        for number, step, pieces, sender, chunk, nbytes, targets, at in rows
    ]
