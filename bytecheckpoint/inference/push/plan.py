"""Who writes what: wanted boxes x held boxes. Pure, and the same wherever it is computed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...dtypes import DType
from ...errors import MismatchError, PlanError
from ...geometry import Box
from ..parts import Part
from .layout import Layout, cut_box
from .messages import Table
from .quantizing import Blocks, cut_blocks, without

__all__ = ["CHUNK_BYTES", "Holding", "Plan", "Write", "check_taken_whole", "plan_push"]

CHUNK_BYTES = 4 << 20


class Holding(NamedTuple):
    """A box of a tensor, and the senders that have it, in ascending order."""

    box: Box
    senders: tuple[int, ...]


@dataclass(frozen=True)
class Write:
    """One sender casts ``box`` of the tensor ``name`` to ``dtype`` and puts it into chunk ``c`` of target ``t`` for
    each ``(t, c)`` of ``chunks``."""

    name: str
    box: Box
    dtype: DType
    chunks: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Plan:
    """``layouts`` by target, ``writes`` by sender. Every chunk of every target is in exactly one write; the order of
    chunks and of writes is one order everywhere, near that in which targets want them: in that of all, the writes are
    of these ``senders``."""

    layouts: tuple[Layout, ...]
    writes: tuple[tuple[Write, ...], ...]
    senders: tuple[int, ...]

    def in_order(self) -> list[tuple[int, Write]]:
        """All writes, each with its sender."""
        left = [iter(of_sender) for of_sender in self.writes]
        return [(sender, next(left[sender])) for sender in self.senders]


_Key = tuple[str, Box, DType]


def plan_push(
    wanted: Sequence[Sequence[Part]],
    held: Mapping[str, Sequence[Holding]],
    senders: int,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    blocks: Mapping[str, Blocks] | None = None,
) -> Plan:
    """``wanted`` by target (a worker of an engine), ``held`` by name.

    Holdings may overlap in any way: every wanted element is written by one sender. Where several have the same box, the
    work is spread by bytes. Chunks of a tensor that is quantised in ``blocks`` end where its blocks do. Raises one
    ``PlanError`` naming every tensor, and the first range of it, that a target wants and no sender has.
    """
    chunking = _Chunking(held, chunk_bytes, blocks or {})
    made = [[(at, box) for at, part in enumerate(parts) for box in chunking.chunks(part)] for parts in wanted]
    chunking.raise_faults()
    targets: dict[_Key, list[tuple[int, int]]] = {key: [] for key in _in_order(wanted, made)}
    rank = {key: number for number, key in enumerate(targets)}
    layouts: list[Layout] = []
    for number, (parts, chunks) in enumerate(zip(wanted, made, strict=True)):
        chunks.sort(key=lambda chunk: rank[_key(parts, chunk)])
        layouts.append(Layout(tuple(parts), tuple(chunks)))
        for at, chunk in enumerate(chunks):
            targets[_key(parts, chunk)].append((number, at))
    writes: list[list[Write]] = [[] for _ in range(senders)]
    order = _share_out(targets, chunking.owners, senders)
    for sender, key in order:
        writes[sender].append(Write(*key, tuple(targets[key])))
    return Plan(tuple(layouts), tuple(tuple(of_sender) for of_sender in writes), tuple(sender for sender, _ in order))


def _key(parts: Sequence[Part], chunk: tuple[int, Box]) -> _Key:
    part = parts[chunk[0]]
    return part.name, chunk[1], part.dtype


def _in_order(wanted: Sequence[Sequence[Part]], made: Sequence[Sequence[tuple[int, Box]]]) -> list[_Key]:
    """Chunks by when, on the way through its own, a target first wants them. One order for all targets and senders:
    what is streamed to several is then never waited for in a circle."""
    soonest: dict[_Key, float] = {}
    for parts, chunks in zip(wanted, made, strict=True):
        for at, chunk in enumerate(chunks):
            key = _key(parts, chunk)
            soonest[key] = min(soonest.get(key, 1.0), at / len(chunks))
    return sorted(soonest, key=soonest.__getitem__)


def check_taken_whole(engine: str, table: Table, wanted: Sequence[Sequence[Part]]) -> None:
    """Raise ``MismatchError`` where the workers of an engine together want a part of a tensor and not the rest: it is
    larger than the engine's model takes it to be. What they do not want at all is left out (a tied head)."""
    boxes: dict[str, set[Box]] = {}
    for part in (part for parts in wanted for part in parts):
        boxes.setdefault(part.name, set()).add(part.box)
    faults = []
    for name, meta in table.rows:
        taken = sum(box.numel for box in boxes.get(name, ()))
        if 0 < taken < meta.numel:
            faults.append(
                ("shape", name, f"{meta} is sent, of which the engine takes {taken:,} of {meta.numel:,} elements")
            )
    if faults:
        listed = "\n  ".join(f"{name}: {text}" for _, name, text in faults[:20])
        raise MismatchError(
            f"{engine} takes only a part of {len(faults)} tensor(s); nothing was sent:\n  {listed}", faults
        )


class _Chunking:
    """Cuts parts where holdings end and where chunks would become too long. ``owners`` of each chunk made so far."""

    def __init__(self, held: Mapping[str, Sequence[Holding]], chunk_bytes: int, blocks: Mapping[str, Blocks]) -> None:
        self._held = {name: _Held(holdings) for name, holdings in held.items()}
        self._chunk_bytes, self._blocks = chunk_bytes, blocks
        self._made: dict[_Key, list[Box]] = {}
        self._faults: dict[str, str] = {}
        self.owners: dict[_Key, tuple[int, ...]] = {}

    def chunks(self, part: Part) -> list[Box]:
        key = (part.name, part.box, part.dtype)
        if key not in self._made:
            self._made[key] = made = []
            for box, senders in self._pieces(part):
                for chunk in self._cut(part, box):
                    made.append(chunk)
                    self.owners[(part.name, chunk, part.dtype)] = senders
        return self._made[key]

    def _cut(self, part: Part, box: Box) -> Iterator[Box]:
        blocks = self._blocks.get(part.name)
        for rows in [box] if blocks is None else cut_blocks(box, blocks, self._chunk_bytes // part.dtype.itemsize):
            yield from cut_box(rows, part.dtype.itemsize, self._chunk_bytes)

    def _pieces(self, part: Part) -> Iterator[Holding]:
        held = self._held.get(part.name)
        missing = [part.box]
        for holding in held.near(part.box) if held is not None else ():
            left: list[Box] = []
            for box in missing:
                common = box.intersect(holding.box)
                if common is None:
                    left.append(box)
                else:
                    yield Holding(common, holding.senders)
                    left += without(box, common)
            missing = left
            if not missing:
                return
        if missing and part.name not in self._faults:
            range_text = f"{missing[0]} of shape {list(part.shape)}"
            self._faults[part.name] = f"{part.name}: no sender has {range_text if held is not None else 'it'}"

    def raise_faults(self) -> None:
        if self._faults:
            listed = [*self._faults.values()]
            more = [f"and {len(listed) - 20} more"] if len(listed) > 20 else []
            raise PlanError("what the engine wants is not there:\n  " + "\n  ".join(listed[:20] + more))


class _Held:
    """The holdings of one tensor, by where they begin in its first dimension."""

    def __init__(self, holdings: Sequence[Holding]) -> None:
        self._holdings = sorted(holdings)
        self._begins = [box.offsets[0] if box.ndim else 0 for box, _ in self._holdings]
        self._longest = max((box.lengths[0] if box.ndim else 1 for box, _ in self._holdings), default=0)

    def near(self, box: Box) -> Sequence[Holding]:
        """Those that may have a part of ``box``."""
        begin, length = (box.offsets[0], box.lengths[0]) if box.ndim else (0, 1)
        low = bisect_left(self._begins, begin - self._longest + 1)
        return self._holdings[low : bisect_left(self._begins, begin + length)]


def _share_out(
    targets: Mapping[_Key, Sequence[tuple[int, int]]], owners: Mapping[_Key, tuple[int, ...]], senders: int
) -> list[tuple[int, _Key]]:
    """``(sender, key)`` in the order of ``targets``: those with no choice first, then the largest to the idlest."""
    load = [0] * senders
    chosen: dict[_Key, int] = {}
    free: list[tuple[int, int, _Key]] = []
    for number, (key, where) in enumerate(targets.items()):
        weight = key[1].numel * key[2].itemsize * len(where)
        if len(owners[key]) == 1:
            chosen[key] = owners[key][0]
            load[chosen[key]] += weight
        else:
            free.append((-weight, number, key))
    for weight, _, key in sorted(free, key=lambda one: one[:2]):
        chosen[key] = min(owners[key], key=lambda sender: (load[sender], sender))
        load[chosen[key]] -= weight
    return [(chosen[key], key) for key in targets]
