"""What rank 0 knows of both sides of a push, and the plan as each sender gets it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgpack
import xxhash

from ...errors import DisagreementError
from ...geometry import Box
from .block_plan import Exchange
from .layout import Layout
from .messages import Table
from .planning import Holding, Plan, Write
from .quantizer import pack_task
from .quantizing import Blocks, scale_name
from .roads import Place
from .steps import Turn, pack_takes, plan_steps, sends_of, takes_by_target
from .waves import Waves
from .writing import Job, pack_writes

__all__ = ["InSteps", "Jobs", "Outcome", "Planned", "Worker", "merged"]


@dataclass(frozen=True)
class Worker:
    """``number`` of an engine; ``receiver`` is another one after a restart."""

    engine: int
    number: int
    receiver: str
    host: str


@dataclass(frozen=True)
class Planned:
    """A plan, for the tensors and workers that it was made for. ``tables``: by engine, the digest of the tensors that
    it gets; ``blocks``: of those that are quantised for it, with the ``exchange`` of maxima."""

    plan: Plan
    workers: list[Worker]
    tables: list[bytes]
    blocks: dict[str, Blocks]
    exchange: Exchange

    def jobs(self, rings: tuple[tuple[int, int], ...]) -> Jobs:
        """With places in arenas, or in rings of so many slots of so many bytes."""
        if rings not in self._made:
            self._made.clear()
            self._made[rings] = self._jobs_in(rings)
        return self._made[rings]

    def in_steps(self, rings: tuple[tuple[int, int], ...]) -> InSteps:
        """The same for a group, which has its parties do everything in steps."""
        if rings not in self._made_in_steps:
            self._made_in_steps.clear()
            self._made_in_steps[rings] = self._steps_for(rings)
        return self._made_in_steps[rings]

    def _steps_for(self, rings: Sequence[tuple[int, int]]) -> InSteps:
        waves = [Waves(layout, *ring) for layout, ring in zip(self.plan.layouts, rings, strict=True)]
        order, senders = self.plan.in_order(), len(self.plan.writes)
        made = plan_steps(order, waves)
        turns: list[list[Turn]] = [[] for _ in range(senders)]
        left = [0] * senders
        for (sender, write), turn in zip(order, made, strict=True):
            turns[sender].append(turn)
            sends = sends_of(turn, write.nbytes, [target for target, _ in write.chunks])
            left[sender] += sum(end - begin for _, begin, end in sends)
        takes = [pack_takes(of_target) for of_target in takes_by_target(order, made, senders, len(waves))]
        return InSteps(turns, takes, left)

    @cached_property
    def _made_in_steps(self) -> dict[tuple[tuple[int, int], ...], InSteps]:
        return {}

    @cached_property
    def _made(self) -> dict[tuple[tuple[int, int], ...], Jobs]:
        return {}

    def _jobs_in(self, rings: Sequence[tuple[int, int]]) -> Jobs:
        senders, layouts = range(len(self.plan.writes)), self.plan.layouts
        jobs = [self._in_order(writes, bool(rings)) for writes in self.plan.writes]
        places = _places(layouts, rings)
        placed = [
            [Job(write, tuple(places[target][chunk] for target, chunk in write.chunks)) for write in writes]
            for writes in jobs
        ]
        packed = [pack_writes(of_sender) for of_sender in placed]
        tasks = [pack_task(self.blocks, self.exchange, sender) if self.blocks else b"" for sender in senders]
        digest = xxhash.xxh3_128_digest(b"".join([layout.digest for layout in layouts] + packed + tasks))
        return Jobs(placed, packed, tasks, digest)

    def _in_order(self, writes: Sequence[Write], streamed: bool) -> Sequence[Write]:
        """Where the order is free, scales come last: by then the blocks have been looked at."""
        if streamed or not self.blocks:
            return writes
        scales = {scale_name(name) for name in self.blocks}
        return sorted(writes, key=lambda write: write.name in scales)


@dataclass(frozen=True)
class Jobs:
    """By sender; ``digest`` of all of them."""

    jobs: list[list[Job]]
    packed: list[bytes]
    tasks: list[bytes]
    digest: bytes


@dataclass(frozen=True)
class InSteps:
    """``turns`` of each sender's jobs, for each target what it ``takes``, and the bytes that have ``left`` each sender
    when all is done: what is relayed, once."""

    turns: list[list[Turn]]
    takes: list[bytes]
    left: list[int]


@dataclass(frozen=True)
class Outcome:
    """What one sender did: digests of its chunks, and what became of each of their places."""

    digests: list[int]
    became: bytes


def _places(layouts: Sequence[Layout], rings: Sequence[tuple[int, int]]) -> list[list[Place]]:
    """By target and chunk: in its ring, or else in its arena."""
    if not rings:
        return [[Place(target, at) for at in layout.offsets] for target, layout in enumerate(layouts)]
    waves = [Waves(layout, *ring) for layout, ring in zip(layouts, rings, strict=True)]
    return [
        [Place(target, of.offset(chunk), chunk, of.wave_of[chunk]) for chunk in range(len(of.layout.chunks))]
        for target, of in enumerate(waves)
    ]


def merged(descriptions: Sequence[bytes]) -> tuple[Table, dict[str, list[Holding]]]:
    """What all senders have together. Raises ``DisagreementError`` where they mean different tensors by a name."""
    rows: dict[str, Any] = {}
    held: dict[tuple[str, Box], list[int]] = {}
    pinned: set[str] = set()
    for sender, description in enumerate(descriptions):
        packed, boxes, names, _ = msgpack.unpackb(description)
        for name, meta in Table.unpack(packed).rows:
            if rows.setdefault(name, meta) != meta:
                raise DisagreementError(f"senders disagree on {name}: {rows[name]} before rank {sender}, {meta} on it")
        pinned.update(names)
        for name, offsets, lengths in boxes:
            held.setdefault((name, Box(tuple(offsets), tuple(lengths))), []).append(sender)
    found: dict[str, list[Holding]] = {}
    for (name, box), senders in held.items():
        owners = tuple(sorted(set(senders)))
        found.setdefault(name, []).append(Holding(box, owners[:1] if name in pinned else owners))
    return Table(tuple(rows.items())), found
