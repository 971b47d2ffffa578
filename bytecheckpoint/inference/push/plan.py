"""Plan which sender writes which box into which chunk of which worker.

``plan_push`` is a pure function of the requested boxes and the held boxes. ``BoundPlan`` ties its result to the workers
and computes what each sender and each worker must know.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import msgpack

from ...errors import DisagreementError, PlanError
from ...planners.extents import split_box
from ...runtime.messages import listed
from ...tensors.dtypes import DType
from ...tensors.geometry import Box
from ..layouts.parts import TensorBox
from .block_quantization import Blocks
from .layout import ChunkTarget, Holding, Layout, Waves, Write, choose_senders
from .messages import Table, check_faults
from .quantizer import MaximaExchange, pack_task
from .transports.group_transport import plan_receptions
from .writing import SENT, fate_of, pack_writes

CHUNK_BYTES = 4 << 20
"""The default size limit of a chunk: small enough to overlap and to name a damaged range, large enough to hash and send
at full speed."""


@dataclass(frozen=True)
class Plan:
    """``layouts`` by target, and the ``order`` of all writes, each with its sender (of ``senders``). Every chunk of
    every target is in exactly one write.

    All chunks and writes follow this order, which is close to the order in which targets load them.
    """

    layouts: tuple[Layout, ...]
    order: tuple[tuple[int, Write], ...]
    senders: int

    @cached_property
    def writes(self) -> list[list[Write]]:
        """The writes of each sender."""
        found: list[list[Write]] = [[] for _ in range(self.senders)]
        for sender, write in self.order:
            found[sender].append(write)
        return found

    def for_group(self) -> Plan:
        """Return the plan of a push over a group, whose layouts state how the chunks of each target arrive."""
        arriving = map(msgpack.packb, plan_receptions(self.order, self.senders, len(self.layouts)))
        layouts = [replace(one, receptions=packed) for one, packed in zip(self.layouts, arriving, strict=True)]
        return replace(self, layouts=tuple(layouts))


_Key = tuple[str, Box, DType]


def plan_push(
    requested: Sequence[Sequence[TensorBox]],
    held: Mapping[str, Sequence[Holding]],
    senders: int,
    *,
    chunk_bytes: int = CHUNK_BYTES,
) -> Plan:
    """Assign every requested element to exactly one sender.

    Args:
        requested: The parts that each target (a worker of an engine) requests.
        held: The boxes that senders hold, by tensor; they may overlap in any way.
        senders: The number of senders. Where several hold the same box, the work is spread by bytes.
        chunk_bytes: The size limit of a chunk.

    Raises:
        PlanError: A target requests elements that no sender holds. The error names every such tensor and its first
            missing range.
    """
    chunking = _Chunking(held, chunk_bytes)
    made = [[(at, box) for at, part in enumerate(parts) for box in chunking.chunks(part)] for parts in requested]
    chunking.raise_faults()
    places: dict[_Key, list[ChunkTarget]] = {key: [] for key in _common_order(requested, made)}
    rank = {key: number for number, key in enumerate(places)}
    layouts: list[Layout] = []
    for number, (parts, chunks) in enumerate(zip(requested, made, strict=True)):
        chunks.sort(key=lambda chunk: rank[_key(parts, chunk)])
        layouts.append(Layout(tuple(parts), tuple(chunks)))
        for at, chunk in enumerate(chunks):
            places[_key(parts, chunk)].append(ChunkTarget(number, at))
    sizes = [box.numel * dtype.itemsize * len(where) for (_, box, dtype), where in places.items()]
    chosen = choose_senders(sizes, [chunking.owners[key] for key in places], senders)
    writes = (Write(*key, tuple(where)) for key, where in places.items())
    order = tuple(zip(chosen, writes, strict=True))
    return Plan(tuple(layouts), order, senders)


def _key(parts: Sequence[TensorBox], chunk: tuple[int, Box]) -> _Key:
    part = parts[chunk[0]]
    return part.name, chunk[1], part.dtype


def _common_order(requested: Sequence[Sequence[TensorBox]], made: Sequence[Sequence[tuple[int, Box]]]) -> list[_Key]:
    """Order chunks by when a target first loads them, relative to all of its chunks. Since all targets and senders
    share this order, a stream to several workers cannot deadlock."""
    first: dict[_Key, float] = {}
    for parts, chunks in zip(requested, made, strict=True):
        for at, chunk in enumerate(chunks):
            key = _key(parts, chunk)
            first[key] = min(first.get(key, 1.0), at / len(chunks))
    return sorted(first, key=first.__getitem__)


def check_taken_whole(engine: str, table: Table, requested: Sequence[Sequence[TensorBox]]) -> None:
    """Raise ``MismatchError`` when an engine requests only a part of a tensor: the tensor is larger than the engine's
    model expects. A tensor that the engine does not request at all (a tied head) is allowed."""
    boxes: dict[str, set[Box]] = {}
    for part in (part for parts in requested for part in parts):
        boxes.setdefault(part.name, set()).add(part.box)
    faults = []
    for name, meta in table.rows:
        taken = sum(box.numel for box in boxes.get(name, ()))
        if 0 < taken < meta.numel:
            text = f"it is {meta}, of which the engine uses {taken:,} of {meta.numel:,} elements"
            faults.append(("shape", name, text))
    check_faults(f"{engine} uses only a part of {len(faults)} tensor(s); no weight was changed", faults)


class _Chunking:
    """Cuts parts where holdings end and where chunks would become too long. Collects the ``owners`` of each chunk."""

    def __init__(self, held: Mapping[str, Sequence[Holding]], chunk_bytes: int) -> None:
        self._held = {name: _Held(holdings) for name, holdings in held.items()}
        self._chunk_bytes = chunk_bytes
        self._made: dict[_Key, list[Box]] = {}
        self._faults: dict[str, str] = {}
        self.owners: dict[_Key, tuple[int, ...]] = {}

    def chunks(self, part: TensorBox) -> list[Box]:
        key = (part.name, part.box, part.dtype)
        if key not in self._made:
            self._made[key] = made = []
            for box, senders in self._pieces(part):
                for chunk in split_box(box, box, part.dtype.itemsize, self._chunk_bytes, 0):
                    made.append(chunk)
                    self.owners[(part.name, chunk, part.dtype)] = senders
        return self._made[key]

    def _pieces(self, part: TensorBox) -> Iterator[Holding]:
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
                    left += box.without(common)
            missing = left
            if not missing:
                return
        if missing and part.name not in self._faults:
            range_text = f"{missing[0]} of shape {list(part.shape)}"
            self._faults[part.name] = f"{part.name}: no sender has {range_text if held is not None else 'it'}"

    def raise_faults(self) -> None:
        if self._faults:
            lines = listed([*self._faults.values()], 20, "\n  ")
            raise PlanError(f"no sender holds what the engines request:\n  {lines}")


class _Held:
    """The holdings of one tensor, sorted by their offset in the first dimension."""

    def __init__(self, holdings: Sequence[Holding]) -> None:
        self._holdings = sorted(holdings)
        self._begins = [box.offsets[0] if box.ndim else 0 for box, _ in self._holdings]
        self._longest = max((box.lengths[0] if box.ndim else 1 for box, _ in self._holdings), default=0)

    def near(self, box: Box) -> Sequence[Holding]:
        """Return the holdings that may intersect ``box``."""
        begin, length = (box.offsets[0], box.lengths[0]) if box.ndim else (0, 1)
        low = bisect_left(self._begins, begin - self._longest + 1)
        return self._holdings[low : bisect_left(self._begins, begin + length)]


@dataclass(frozen=True)
class Worker:
    """Worker ``number`` of an engine. A restarted worker has another ``receiver`` id."""

    engine: int
    number: int
    receiver: str
    host: str


Known = tuple[int | None, int | None]
"""The digests that a chunk has in a worker's arena and in what it serves."""

Rings = tuple[tuple[int, int], ...]
"""The slots and slot bytes of each target's ring buffer; empty when targets have arenas."""


class BoundPlan:
    """A plan, with the workers and tables for which it was made.

    ``tables`` holds the digest of each engine's table, ``blocks`` the blocks of the quantized tensors, and ``exchange``
    who finds their maxima. After ``place``, it has the ``writes`` of each
    sender, also ``packed``.
    """

    def __init__(
        self,
        plan: Plan,
        workers: list[Worker],
        tables: list[bytes],
        blocks: dict[str, Blocks],
        exchange: MaximaExchange,
    ) -> None:
        self.plan, self.workers, self.tables, self.exchange = plan, workers, tables, exchange
        self.tasks = [pack_task(blocks, exchange, sender) for sender in range(plan.senders)]
        self._rings: Rings | None = None
        self.writes: list[list[Write]] = []
        self.packed: list[bytes] = []

    def place(self, rings: Rings) -> None:
        """Put the chunks into arenas or into ring buffers."""
        if self._rings != rings:
            places = _places(self.plan.layouts, rings)
            self.writes = [
                [
                    replace(write, places=tuple(places[one.target][one.chunk] for one in write.places))
                    for write in writes
                ]
                for writes in self.plan.writes
            ]
            self.packed, self._rings = [pack_writes(writes) for writes in self.writes], rings

    def chunk_digests(self, sent: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return the digest of every chunk of each target. ``sent`` are those of each sender's writes."""
        digests = [[0] * len(layout.chunks) for layout in self.plan.layouts]
        for _, _, place, digest in self._placed(sent):
            digests[place.target][place.chunk] = digest
        return digests

    def nbytes_by_fate(
        self, sent: Sequence[Sequence[int]], known: Sequence[Sequence[Known]], *, is_broadcast: bool
    ) -> tuple[list[list[int]], list[int]]:
        """Return the bytes of each target by fate, and the bytes that left each sender; a broadcast chunk leaves it
        once. ``known`` are the digests that each target had of its chunks."""
        counted = [[0, 0, 0] for _ in self.plan.layouts]
        written = [0] * len(sent)
        for sender, write, place, digest in self._placed(sent):
            fate = fate_of(digest, *known[place.target][place.chunk])
            counted[place.target][fate] += write.nbytes
            if fate == SENT and not (is_broadcast and place != write.places[0]):
                written[sender] += write.nbytes
        return counted, written

    def _placed(self, sent: Sequence[Sequence[int]]) -> Iterator[tuple[int, Write, ChunkTarget, int]]:
        """Yield the sender, write, place and digest of each chunk of each target."""
        for sender, (writes, digests) in enumerate(zip(self.writes, sent, strict=True)):
            for write, digest in zip(writes, digests, strict=True):
                for place in write.places:
                    yield sender, write, place, digest


def _places(layouts: Sequence[Layout], rings: Rings) -> list[list[ChunkTarget]]:
    """Return the place of each chunk of each target, in its ring buffer or in its arena, which has one slot for all."""
    slots = rings or tuple((1, layout.nbytes) for layout in layouts)
    waves = [Waves(layout, *ring) for layout, ring in zip(layouts, slots, strict=True)]
    return [
        [ChunkTarget(target, chunk, of.offset(chunk), of.wave_of[chunk]) for chunk in range(len(of.layout.chunks))]
        for target, of in enumerate(waves)
    ]


def merge_descriptions(descriptions: Sequence[bytes]) -> tuple[Table, dict[str, list[Holding]]]:
    """Merge what all senders hold. Raises ``DisagreementError`` when senders mean different tensors by one name."""
    rows: dict[str, Any] = {}
    held: dict[tuple[str, Box], list[int]] = {}
    pinned: set[str] = set()
    for sender, description in enumerate(descriptions):
        packed, boxes, names = msgpack.unpackb(description, use_list=False)
        for name, meta in Table.unpack(packed).rows:
            if rows.setdefault(name, meta) != meta:
                raise DisagreementError(f"senders disagree on {name}: {rows[name]} before rank {sender}, {meta} on it")
        pinned.update(names)
        for name, *box in boxes:
            held.setdefault((name, Box(*box)), []).append(sender)
    found: dict[str, list[Holding]] = {}
    for (name, box), senders in held.items():
        owners = tuple(sorted(set(senders)))
        found.setdefault(name, []).append(Holding(box, owners[:1] if name in pinned else owners))
    return Table(tuple(rows.items())), found
