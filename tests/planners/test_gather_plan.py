"""Fragments to whole tensors: every byte from exactly one place, the same cuts on both sides, and a fair share each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_plans import assignment_of, plan_save, rank_plan
from sampling import examples

from bytecheckpoint.planners.gather_plan import GatherPlan, plan_gather
from bytecheckpoint.planners.gather_share import GatherShare
from bytecheckpoint.planners.local_plan import LocalPlan
from bytecheckpoint.planners.save_plan import SavePlan, plan_columns
from bytecheckpoint.tensors.dtypes import DTYPES
from bytecheckpoint.tensors.geometry import Box, decompose, row_major_strides
from bytecheckpoint.tensors.metadata import BasicMeta
from bytecheckpoint.tensors.tables import BoxTable, TensorTable

Tilings = Callable[[tuple[int, ...]], st.SearchStrategy[list[Box]]]
Holding = list[tuple[str, Box]]

WORLD = 4
PIECE = 64
NAMES = ["model.a", "model.b.c", "model.z", "optimizer.a", "optimizer.m"]
DTYPE_NAMES = ["uint8", "bfloat16", "float32", "float64", "complex128"]


@dataclass
class World:
    metas: dict[str, BasicMeta]
    held: list[Holding]

    def plans(self) -> list[LocalPlan]:
        plans = []
        for held in self.held:
            table = TensorTable.build((*name.split(".", 1), meta) for name, meta in self.metas.items())
            rows = {name: row for row, name in enumerate(table.names)}
            plans.append(rank_plan(table, BoxTable.build([(rows[name], box) for name, box in held])))
        return plans


metas = st.dictionaries(
    st.sampled_from(NAMES),
    st.builds(
        BasicMeta,
        st.sampled_from([DTYPES[name] for name in DTYPE_NAMES]),
        st.lists(st.integers(0, 7), max_size=3).map(tuple),
    ),
    min_size=1,
    max_size=4,
)


@st.composite
def worlds(draw: st.DrawFn, tilings: Tilings) -> World:
    """Random tensors in random tilings, each box on one rank or several."""
    tensors = draw(metas)
    held: list[Holding] = [[] for _ in range(WORLD)]
    for name, meta in tensors.items():
        for box in draw(tilings(meta.shape)):
            for rank in draw(st.sets(st.integers(0, WORLD - 1), min_size=1)):
                held[rank].append((name, box))
    return World(tensors, [draw(st.permutations(one)) for one in held])


def content(number: int, meta: BasicMeta) -> np.ndarray:
    """Bytes of a tensor, ``[*shape, itemsize]``, that identify tensors and positions."""
    size = meta.nbytes
    return ((np.arange(size) * 7 + number * 31) % 251).astype(np.uint8).reshape(*meta.shape, meta.dtype.itemsize)


def shard_bytes(world: World, rank: int, row: int) -> np.ndarray:
    name, box = world.held[rank][row]
    whole = content(list(world.metas).index(name), world.metas[name])
    return np.ascontiguousarray(whole[box.slices()]).reshape(-1)


def run_stage(world: World, gather: GatherPlan) -> list[dict[str, np.ndarray]]:
    """All ranks' outputs, by section, as the engine makes them: streams, pieces, and boxes of boxes."""
    plans = world.plans()
    shares = [GatherShare.from_bytes(gather.share(r).to_bytes()) for r in range(WORLD)]
    wires: dict[tuple[int, int], bytes] = {}
    for rank, share in enumerate(shares):
        cuts = share.outgoing(plans[rank])
        keys = list(zip(cuts.piece.tolist(), cuts.peer.tolist()))
        assert keys == sorted(keys), "not in the one order of all pieces"
        for peer, fragment, start, stop in zip(
            *(c.tolist() for c in (cuts.peer, cuts.fragment, cuts.start, cuts.stop))
        ):
            part = shard_bytes(world, rank, int(share.sent[fragment]))[start:stop].tobytes()
            wires[rank, peer] = wires.get((rank, peer), b"") + part
    return [gather_one(world, rank, share, wires) for rank, share in enumerate(shares)]


def gather_one(
    world: World, rank: int, share: GatherShare, wires: dict[tuple[int, int], bytes]
) -> dict[str, np.ndarray]:
    places = share.item_places()
    ends = places + share.items.numel() * share.items.itemsize()
    size = int(ends.max(initial=0))
    out, count = np.zeros(size, np.uint8), np.zeros(size, np.int64)
    cuts = share.incoming()
    assert (np.diff(cuts.piece) >= 0).all()
    columns = (cuts.piece, cuts.peer, cuts.fragment, cuts.start, cuts.stop, cuts.at)
    for piece, peer, fragment, start, stop, at in zip(*(column.tolist() for column in columns)):
        if peer == rank:
            part = shard_bytes(world, rank, int(share.row[fragment]))[start:stop]
        else:
            wire = wires[peer, rank]
            part, wires[peer, rank] = np.frombuffer(wire[: stop - start], np.uint8), wire[stop - start :]
        item = int(share.boxes.tensor[fragment])
        where = positions(share, fragment, start, stop) + int(places[item])
        if at >= 0:
            first = piece * share.piece_size + at
            assert where.tolist() == list(range(first, first + stop - start))
        assert (where // share.piece_size == piece).all()
        out[where] = part
        np.add.at(count, where, 1)
    for key in wires:
        assert key[1] != rank or not wires[key], "bytes were sent that no rank expects"
    outputs: dict[str, np.ndarray] = {}
    for index, section in enumerate(share.items.sections):
        rows = np.flatnonzero(share.items.section == index)
        begin, end = int(places[rows[0]]), int(ends[rows[-1]])
        assert begin % share.piece_size == 0
        assert (count[begin:end] == 1).all(), "a byte comes from no fragment, or from two"
        outputs[section] = out[begin:end]
    return outputs


def positions(share: GatherShare, fragment: int, start: int, stop: int) -> np.ndarray:
    """Where bytes ``[start, stop)`` of a fragment lie in its item, one by one."""
    box, item = share.boxes.box_of(fragment), int(share.boxes.tensor[fragment])
    size = int(share.items.itemsize()[item])
    numbers = np.arange(prod(share.items.shape_of(item))).reshape(share.items.shape_of(item))[box.slices()].reshape(-1)
    return (numbers[:, None] * size + np.arange(size)).reshape(-1)[start:stop]


@given(st.data())
@settings(deadline=None, max_examples=examples(60))
def test_every_byte_of_every_whole_tensor_comes_from_one_fragment(tilings: Tilings, data: st.DataObject) -> None:
    world = data.draw(worlds(tilings))
    layout = data.draw(st.sampled_from(["merged", "whole"]))
    plan = plan_save(world.plans())
    gather = plan_gather(plan, layout, world_size=WORLD, piece_size=PIECE)
    if gather is not None:
        check_outputs(world, gather)


@given(st.data())
@settings(deadline=None, max_examples=examples(30))
def test_an_adapter_is_one_file_of_rank_0(tilings: Tilings, data: st.DataObject) -> None:
    drawn = data.draw(worlds(tilings))

    def renamed(name: str) -> str:
        return name.replace("model.", "adapter_model.")

    world = World(
        {renamed(name): meta for name, meta in drawn.metas.items()},
        [[(renamed(name), box) for name, box in held] for held in drawn.held],
    )
    plan = plan_save(world.plans())
    gather = plan_gather(plan, "whole", world_size=WORLD, piece_size=PIECE)
    stored = plan if gather is None else gather.stored
    for tensor, owner in zip(stored.shards.tensor.tolist(), stored.owner.tolist(), strict=True):
        assert owner == 0 or not stored.tensors.names[tensor].startswith("adapter_model.")
    if gather is not None:
        check_outputs(world, gather)


def check_outputs(world: World, gather: GatherPlan) -> None:
    outputs = run_stage(world, gather)
    stored = gather.stored
    for row in range(len(stored.shards)):
        tensor = int(stored.shards.tensor[row])
        name, box, file = stored.tensors.names[tensor], stored.shards.box_of(row), stored.files[int(stored.file[row])]
        assert file.rank == stored.owner[row]
        expected = np.ascontiguousarray(
            content(list(world.metas).index(name), world.metas[name])[box.slices()]
        ).reshape(-1)
        if gather.gathered[int(stored.file[row])]:
            at = int(stored.offset[row])
            assert np.array_equal(outputs[file.rank][file.section][at : at + len(expected)], expected)
        else:
            assert np.array_equal(shard_bytes(world, file.rank, int(stored.source[row])), expected)
    check_assignments(world, gather)


def check_assignments(world: World, gather: GatherPlan) -> None:
    """What is planned in two parts is all of what is stored, and what is staged is what was staged without."""
    for rank, local in enumerate(world.plans()):
        share, alone = gather.share(rank), assignment_of(gather, rank)
        sections = sorted(share.items.sections + [section for section, _ in alone.files])
        assert sections == sorted(file.section for file in gather.stored.files if file.rank == rank)
        staged = np.concatenate([share.staged, *(rows for _, rows in alone.files)])
        before = gather.row[gather.holder == rank]
        assert sorted(staged.tolist()) == sorted(before.tolist())
        cuts = share.outgoing(local)
        assert int(local.shards.nbytes(local.table.tensors)[share.sent].sum()) == int((cuts.stop - cuts.start).sum())


@given(st.data())
@settings(deadline=None, max_examples=examples(60))
def test_what_is_whole_afterwards(tilings: Tilings, data: st.DataObject) -> None:
    """``whole``: everything; ``merged``: just what was no grid; what was one box keeps its writer."""
    world = data.draw(worlds(tilings))
    plan = plan_save(world.plans())
    boxes: dict[str, list[Box]] = {name: [] for name in plan.tensors.names}
    for row, tensor in enumerate(plan.shards.tensor.tolist()):
        boxes[plan.tensors.names[tensor]].append(plan.shards.box_of(row))
    irregular = {name for name, parts in boxes.items() if not is_grid(world.metas[name].shape, parts)}
    several = {name for name, parts in boxes.items() if len(parts) > 1}
    for layout, expected in (("merged", irregular), ("whole", several)):
        gather = plan_gather(plan, layout, world_size=WORLD, piece_size=PIECE)
        made = set()
        if gather is not None:
            stored = gather.stored
            made = {stored.tensors.names[t] for t in stored.shards.tensor[stored.source < 0].tolist()}
            assert len(set(stored.shards.tensor[stored.source < 0].tolist())) == int((stored.source < 0).sum())
            kept = stored.source >= 0
            assert_same_rows(plan, stored, kept)
        assert made == expected
    assert plan_gather(plan, "shards", world_size=WORLD) is None


def is_grid(shape: tuple[int, ...], parts: list[Box]) -> bool:
    cuts = [sorted({box.offsets[axis] for box in parts} | {size}) for axis, size in enumerate(shape)]
    cells = {()}
    for axis in cuts:
        cells = {(*cell, (low, high)) for cell in cells for low, high in pairwise(axis)}
    found = {tuple(zip(box.offsets, box.stops)) for box in parts}
    return len(parts) <= 1 or found == cells


def assert_same_rows(plan: SavePlan, stored: SavePlan, kept: np.ndarray) -> None:
    def rows(one: SavePlan, which: list[int]) -> set[tuple[int, Box, int, int]]:
        return {(int(one.shards.tensor[r]), one.shards.box_of(r), int(one.owner[r]), int(one.source[r])) for r in which}

    assert rows(stored, np.flatnonzero(kept).tolist()) <= rows(plan, list(range(len(plan.shards))))


@given(st.data())
@settings(deadline=None, max_examples=examples(60))
def test_no_rank_writes_more_than_its_share_and_one_tensor(tilings: Tilings, data: st.DataObject) -> None:
    world = data.draw(worlds(tilings))
    plan = plan_save(world.plans())
    gather = plan_gather(plan, "whole", world_size=WORLD, piece_size=PIECE)
    again = plan_gather(plan_save(world.plans()), "whole", world_size=WORLD, piece_size=PIECE)
    if gather is None or again is None:
        assert gather is again
        return
    stored = gather.stored
    nbytes = stored.shards.nbytes(stored.tensors)
    loads = np.bincount(stored.owner, weights=nbytes, minlength=WORLD)
    alone = np.bincount(stored.owner, weights=nbytes * (stored.source >= 0), minlength=WORLD)
    fair = -(-int(nbytes.sum()) // WORLD)
    assert loads.max() <= max(alone.max(), fair + nbytes[stored.source < 0].max())
    assert np.array_equal(again.stored.owner, stored.owner)
    assert all(gather.share(rank).to_bytes() == again.share(rank).to_bytes() for rank in range(WORLD))


def columns(shapes: list[tuple[int, ...]], parts: list[list[tuple[int, Box]]]) -> tuple[SavePlan, TensorTable]:
    """A plan of tensors ``model.0``, ... in parts that are ``(rank, box)``."""
    tensors = TensorTable.build(("model", f"{i:06d}", BasicMeta(DTYPES["float32"], s)) for i, s in enumerate(shapes))
    boxes = BoxTable.build([(row, box) for row, held in enumerate(parts) for _, box in held])
    rank = np.array([r for held in parts for r, _ in held], np.int64)
    source = np.zeros(len(boxes), np.int64)
    for one in set(rank.tolist()):
        source[rank == one] = np.arange(int((rank == one).sum()))
    return plan_columns(tensors, boxes, rank, source, world_size=int(rank.max()) + 1), tensors


def test_the_rank_that_holds_most_becomes_the_owner() -> None:
    """Two flat tensors whose border between ranks runs through rows: little travels."""
    shape = (10, 10)
    plan, _ = columns(
        [shape, shape],
        [
            [(0, box) for box in decompose(0, 93, shape)] + [(1, box) for box in decompose(93, 7, shape)],
            [(0, box) for box in decompose(0, 5, shape)] + [(1, box) for box in decompose(5, 95, shape)],
        ],
    )
    gather = plan_gather(plan, "merged", world_size=2)
    assert gather is not None
    assert gather.stored.owner.tolist() == [0, 1]
    travels = gather.stored.owner[gather.target] != gather.holder
    assert int(gather.boxes.nbytes(gather.stored.tensors)[travels].sum()) == (7 + 5) * 4


def test_strided_boxes_of_one_rank_alternate_within_a_piece() -> None:
    """Columns dealt out in turn: the same rank's boxes take turns byte by byte, cut by cut."""
    shape = (6, 8)
    parts = [(column // 2 % 2, Box((0, column), (6, 2))) for column in range(0, 8, 2)]
    plan, _ = columns([shape], [parts])
    gather = plan_gather(plan, "whole", world_size=2, piece_size=32)
    assert gather is not None
    share = gather.share(0)
    cuts = share.incoming()
    assert (cuts.at == -1).all()
    assert cuts.piece.max() == 5
    strides = row_major_strides(shape)
    assert strides == (8, 1)
    assert (cuts.stop - cuts.start == 8).all(), "two columns of one row in each piece of one row"


def test_sixteen_thousand_ranks() -> None:
    world, tensors, per = 16384, 300, 64
    rng = np.random.default_rng(0)
    shapes = [(per * 8, 64)] * tensors
    table = TensorTable.build(("model", f"{i:06d}", BasicMeta(DTYPES["bfloat16"], s)) for i, s in enumerate(shapes))
    tensor = np.repeat(np.arange(tensors), per)
    rows = np.tile(np.arange(per) * 8, tensors)
    offsets = np.stack((rows, np.zeros_like(rows)), axis=1).reshape(-1)
    lengths = np.tile(np.array([8, 64]), len(rows))
    boxes = BoxTable.from_columns(table, tensor, offsets, lengths)
    first = rng.integers(0, world // per, tensors) * per
    rank = np.repeat(first, per) + np.tile(np.arange(per), tensors)
    source = np.zeros(len(rank), np.int64)
    plan = plan_columns(table, boxes, rank, source, world_size=world)
    gather = plan_gather(plan, "whole", world_size=world)
    assert gather is not None
    parts = sum(len(gather.share(one).incoming()) for one in set(gather.stored.owner.tolist()))
    assert parts == len(rank)
    loads = np.bincount(gather.stored.owner, minlength=world)
    assert loads.max() == 1, "300 equal tensors have 300 owners"
