from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_plans import assignment_of, plan_save, rank_plan
from sampling import examples

from bytecheckpoint.errors import PlanError
from bytecheckpoint.planners.local_plan import LocalPlan
from bytecheckpoint.planners.save_plan import SavePlan, consecutive_offsets, plan_columns
from bytecheckpoint.tensors.dtypes import DTYPES
from bytecheckpoint.tensors.geometry import Box
from bytecheckpoint.tensors.metadata import BasicMeta
from bytecheckpoint.tensors.tables import BoxTable, TensorTable

Tilings = Callable[[tuple[int, ...]], st.SearchStrategy[list[Box]]]
Metas = dict[str, BasicMeta]
Holding = list[tuple[str, Box]]

WORLD = 4
NAMES = ["model.a", "model.b.c", "model.z", "optimizer.a", "optimizer.m"]
DTYPE_NAMES = ["uint8", "bfloat16", "float32", "float64", "complex128"]

metas = st.dictionaries(
    st.sampled_from(NAMES),
    st.builds(
        BasicMeta,
        st.sampled_from([DTYPES[name] for name in DTYPE_NAMES]),
        st.lists(st.integers(0, 5), max_size=3).map(tuple),
    ),
    max_size=4,
)


def local_plan(tensors: Metas, held: Holding, **more: object) -> LocalPlan:
    table = TensorTable.build((*name.split(".", 1), meta) for name, meta in tensors.items())
    rows = {name: row for row, name in enumerate(table.names)}
    return rank_plan(table, BoxTable.build([(rows[name], box) for name, box in held]), **more)  # type: ignore[arg-type]


@dataclass
class World:
    metas: Metas
    held: list[Holding]

    def plans(self) -> list[LocalPlan]:
        return [local_plan(self.metas, held) for held in self.held]


@st.composite
def worlds(draw: st.DrawFn, tilings: Tilings) -> World:
    """Random tensors in random tilings, each box on one rank or several, in any order, empty boxes among them."""
    tensors = draw(metas)
    held: list[Holding] = [[] for _ in range(WORLD)]
    for name, meta in tensors.items():
        for box in draw(tilings(meta.shape)):
            for rank in draw(st.sets(st.integers(0, WORLD - 1), min_size=1)):
                held[rank].append((name, box))
    for rank in range(WORLD):
        held[rank] = draw(st.permutations(held[rank]))
    return World(tensors, held)


def boxes_of(plan: SavePlan) -> list[tuple[str, Box]]:
    rows = range(len(plan.shards))
    return [(plan.tensors.names[int(plan.shards.tensor[row])], plan.shards.box_of(row)) for row in rows]


@given(st.data())
@settings(deadline=None, max_examples=examples(60))
def test_every_byte_is_written_once_and_where_the_plan_says(tilings: Tilings, data: st.DataObject) -> None:
    world = data.draw(worlds(tilings))
    plan = plan_save(world.plans())
    written = {name: np.zeros(meta.shape, np.int64) for name, meta in world.metas.items()}
    images: dict[tuple[str, int], np.ndarray] = {}
    sizes = {(file.section, file.rank): file.data_size for file in plan.files}
    places: dict[tuple[str, int], list[tuple[str, Box, int]]] = {}
    for rank, local in enumerate(world.plans()):
        assignment = assignment_of(plan, rank)
        for section, rows in assignment.files:
            offsets, size = consecutive_offsets(local.shards.nbytes(local.table.tensors)[rows])
            assert size == sizes[section, rank]
            image = images[section, rank] = np.zeros(size, np.int64)
            for row, offset in zip(rows.tolist(), offsets.tolist()):
                name, box = world.held[rank][row]
                meta = world.metas[name]
                assert name.startswith(section + ".")
                assert offset % meta.dtype.itemsize == 0
                written[name][box.slices()] += 1
                image[offset : offset + box.numel * meta.dtype.itemsize] += 1
                places.setdefault((section, rank), []).append((name, box, offset))
    assert all((count == 1).all() for count in written.values())
    assert all((image == 1).all() for image in images.values())
    assert set(images) == set(sizes)

    shards = boxes_of(plan)
    assert shards == sorted(shards, key=lambda pair: (pair[0], pair[1].offsets))
    assert plan.tensors.names == sorted(world.metas)
    for row, (name, box) in enumerate(shards):
        owner, file = int(plan.owner[row]), plan.files[int(plan.file[row])]
        assert file.rank == owner
        source_name, source = world.held[owner][int(plan.source[row])]
        assert source_name == name
        assert source == box or source.numel == box.numel == 0
        stored = [(n, o) for n, b, o in places[file.section, owner] if n == name and (b == box or b.numel == 0)]
        assert (name, int(plan.offset[row])) in stored


@given(st.data())
@settings(deadline=None, max_examples=examples(60))
def test_within_a_file_large_elements_come_first_then_names_then_boxes(tilings: Tilings, data: st.DataObject) -> None:
    plan = plan_save(data.draw(worlds(tilings)).plans())
    shards, itemsize = boxes_of(plan), plan.tensors.itemsize()[plan.shards.tensor]
    for index, file in enumerate(plan.files):
        rows = plan.order[plan.file_starts[index] : plan.file_starts[index + 1]].tolist()
        keys = [(-int(itemsize[row]), shards[row][0], shards[row][1].offsets) for row in rows]
        assert keys == sorted(keys)
        assert {int(plan.file[row]) for row in rows} == {index}
        assert {shards[row][0].split(".")[0] for row in rows} == {file.section}
    assert [(file.section, file.rank) for file in plan.files] == sorted({(f.section, f.rank) for f in plan.files})


@given(st.data())
@settings(deadline=None, max_examples=examples(60))
def test_the_order_of_rows_does_not_matter(tilings: Tilings, data: st.DataObject) -> None:
    world = data.draw(worlds(tilings))
    plan = plan_save(world.plans())
    shuffled = replace(world, held=[data.draw(st.permutations(held)) for held in world.held])
    other = plan_save(shuffled.plans())
    assert boxes_of(plan) == boxes_of(other)
    for column in ("owner", "file", "offset"):
        assert getattr(plan, column).tolist() == getattr(other, column).tolist()
    assert plan.files == other.files


@given(st.data())
@settings(deadline=None, max_examples=examples(60))
def test_columns_in_any_order_of_ranks(tilings: Tilings, data: st.DataObject) -> None:
    world = data.draw(worlds(tilings))
    plan = plan_save(world.plans())
    names = {name: row for row, name in enumerate(plan.tensors.names)}
    rows = [(r, i, names[name], box) for r, held in enumerate(world.held) for i, (name, box) in enumerate(held)]
    rows = data.draw(st.permutations(rows))
    boxes = BoxTable.build([(tensor, box) for _, _, tensor, box in rows])
    rank, source = (np.array([row[i] for row in rows], np.int64) for i in range(2))
    other = plan_columns(plan.tensors, boxes, rank, source, world_size=WORLD)
    assert boxes_of(plan) == boxes_of(other)
    assert plan.owner.tolist() == other.owner.tolist()
    assert plan.offset.tolist() == other.offset.tolist()


@st.composite
def damaged_worlds(draw: st.DrawFn, tilings: Tilings) -> tuple[World, str]:
    """A world in which one box of one tensor is missing, cut, larger, displaced or also elsewhere; and the tensor."""
    world = draw(worlds(tilings).filter(lambda world: any(box.numel for held in world.held for _, box in held)))
    boxes = sorted({(name, box) for held in world.held for name, box in held if box.numel}, key=str)
    name, box = draw(st.sampled_from(boxes))
    axes = [axis for axis in range(box.ndim) if box.lengths[axis] > 1]
    shape = world.metas[name].shape
    roomy = [axis for axis in range(box.ndim) if box.lengths[axis] < shape[axis]]
    damages = ["drop", *(["shrink", "shrink"] if axes else []), *(["grow", "move", "duplicate"] if roomy else [])]
    damage = draw(st.sampled_from(damages))
    replacement: list[Box] = []
    if damage == "shrink":
        axis = draw(st.sampled_from(axes))
        lost = draw(st.integers(1, box.lengths[axis] - 1))
        start = draw(st.sampled_from([0, lost]))
        replacement = [box.narrow(axis, start, start + box.lengths[axis] - lost)]
    elif damage != "drop":  # by one element along one axis, in a direction that stays inside
        axis = draw(st.sampled_from(roomy))
        is_lower = box.offsets[axis] > 0 and (draw(st.booleans()) or box.stops[axis] == shape[axis])
        offsets, lengths = [*box.offsets], [*box.lengths]
        offsets[axis] += -1 if is_lower else int(damage != "grow")
        lengths[axis] += int(damage == "grow")
        moved = Box(tuple(offsets), tuple(lengths))
        replacement = [box, moved] if damage == "duplicate" else [moved]
    for held in world.held:
        damaged = [entry for entry in held if entry != (name, box)]
        if len(damaged) < len(held):
            held[:] = damaged + [(name, one) for one in replacement]
    return world, name


@given(st.data())
@settings(deadline=None, max_examples=examples(150))
def test_a_tiling_with_any_damage_is_refused(tilings: Tilings, data: st.DataObject) -> None:
    """By the planner, before anything is written, and by a brute-force count of the elements, too."""
    world, name = data.draw(damaged_worlds(tilings))
    count = np.zeros(world.metas[name].shape, np.int64)
    for box in {box for held in world.held for other, box in held if other == name}:
        count[box.slices()] += 1
    tiled = bool((count == 1).all())
    if tiled:
        plan_save(world.plans())
        return
    with pytest.raises(PlanError) as caught:
        plan_save(world.plans())
    text = str(caught.value)
    assert f"  {name} {world.metas[name]}: " in text
    assert ("no rank holds" in text) == bool((count == 0).any())
    assert ("overlaps" in text) == bool((count > 1).any())


F32 = BasicMeta(DTYPES["float32"], (8, 4))


def rows(low: int, high: int, name: str = "model.w") -> tuple[str, Box]:
    return name, Box((low, 0), (high - low, 4))


def plans_of(*held: Holding, tensors: Metas | None = None) -> list[LocalPlan]:
    return [local_plan({"model.w": F32} if tensors is None else tensors, one) for one in held]


def fault_of(plans: Sequence[LocalPlan]) -> str:
    with pytest.raises(PlanError) as caught:
        plan_save(plans)
    return str(caught.value)


def test_a_hole_names_tensor_region_and_holders() -> None:
    text = fault_of(plans_of([rows(0, 2)], [rows(2, 4)], [rows(6, 8)]))
    assert "model.w float32[8, 4]: no rank holds [4:6,0:4] (held by ranks 0-2)" in text


def test_an_overlap_names_both_boxes_and_their_ranks() -> None:
    text = fault_of(plans_of([rows(0, 5)], [rows(4, 8)], [rows(4, 8)]))
    assert "[0:5,0:4] of rank 0 overlaps [4:8,0:4] of ranks 1-2" in text


def test_boxes_that_begin_together_and_end_apart_overlap() -> None:
    text = fault_of(plans_of([rows(0, 4), rows(4, 8)], [rows(0, 8)]))
    assert "[0:4,0:4] of rank 0 overlaps [0:8,0:4] of rank 1" in text


def test_overlap_of_boxes_with_gaps() -> None:
    left, right = ("model.w", Box((0, 0), (8, 3))), ("model.w", Box((0, 2), (8, 2)))
    assert "[0:8,0:3] of rank 0 overlaps [0:8,2:4] of rank 1" in fault_of(plans_of([left], [right]))


@pytest.mark.parametrize("boxes", [1, 4, 100])
def test_overlaps_in_tensors_that_are_looked_at_apart(monkeypatch: pytest.MonkeyPatch, boxes: int) -> None:
    """However many boxes are looked at together, a tensor's are, and none is left out."""
    monkeypatch.setattr("bytecheckpoint.planners.coverage._CHUNK", boxes)
    names = [f"model.{letter}" for letter in "abcde"]
    meta = BasicMeta(DTYPES["float32"], (8, 6))
    tensors = dict.fromkeys(names, meta)

    def columns(name: str, low: int, high: int) -> tuple[str, Box]:
        return name, Box((0, low), (8, high - low))

    held = [[columns(name, low, low + 2) for name in names] for low in (0, 2, 4)]
    assert len(plan_save(plans_of(*held, tensors=tensors)).shards) == 15
    for bad in names:
        wider = [columns(name, 2, 5 if name == bad else 4) for name in names]
        text = fault_of(plans_of(held[0], wider, held[2], tensors=tensors))
        assert f"1 of 5 tensors:\n  {bad} " in text
        assert "[0:8,2:5] of rank 1 overlaps [0:8,4:6] of rank 2" in text


def test_an_overlap_that_hides_a_hole_reports_both() -> None:
    text = fault_of(plans_of([rows(0, 4), rows(2, 4)], [rows(6, 8)]))
    assert "overlaps" in text
    assert "no rank holds [4:6,0:4]" in text


def test_all_bad_tensors_are_listed() -> None:
    tensors = {f"model.{name}": F32 for name in "abc"}
    held = [rows(0, 8, "model.a"), rows(0, 7, "model.b")]
    text = fault_of(plans_of(held, tensors=tensors))
    assert "2 of 3 tensors" in text
    assert "model.b float32[8, 4]: no rank holds [7:8,0:4]" in text
    assert "model.c float32[8, 4]: no rank holds any of it" in text
    assert "model.a" not in text


def test_a_box_outside_its_tensor() -> None:
    text = fault_of(plans_of([rows(0, 8)], [rows(6, 9)]))
    assert "model.w float32[8, 4]: offsets [6, 0], lengths [3, 4] of rank 1" in text


def test_disagreement_about_a_tensor_says_who_says_what() -> None:
    other = {"model.w": BasicMeta(DTYPES["bfloat16"], (8, 4)), "model.v": F32}
    plans = [*plans_of([rows(0, 8)], []), *plans_of([], [], tensors=other)]
    text = fault_of(plans)
    assert "describe 1 tensors differently" in text
    assert (
        "model.w: float32[8, 4] in section 'model' on ranks 0-1; bfloat16[8, 4] in section 'model' on ranks 2-3" in text
    )


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("other", [(8, 5), (4, 8), (32,), (8, 4, 1), ()])
def test_ranks_that_disagree_on_a_shape(order: tuple[int, int], other: tuple[int, ...]) -> None:
    """Whichever rank comes first, and although each rank's boxes tile the tensor that it describes."""
    metas = [BasicMeta(DTYPES["float32"], ((8, 4), other)[which]) for which in order]
    plans = [local_plan({"model.w": meta}, [("model.w", Box.whole(meta.shape))]) for meta in metas]
    text = fault_of(plans)
    assert "describe 1 tensors differently" in text
    assert f"model.w: {metas[0]} in section 'model' on rank 0; {metas[1]} in section 'model' on rank 1" in text


def test_tensors_of_one_rank_alone() -> None:
    alone = local_plan({"rng.state": F32, "model.w": F32}, [rows(0, 8, "rng.state"), rows(0, 8)], own=[True, False])
    saved = plan_save([alone] * 3)
    assert saved.tensors.names == ["model.w", "rng.state@0", "rng.state@1", "rng.state@2"]
    assert saved.scope.tolist() == [-1, 0, 1, 2]
    assert saved.owner.tolist()[1:] == [0, 1, 2]
    shared = local_plan({"rng.state@0": F32}, [rows(0, 8, "rng.state@0")])
    text = fault_of([alone, shared])
    assert "of rank 0 alone on rank 0; float32[8, 4] in section 'rng' on rank 1" in text


def test_aliases() -> None:
    def plans(*aliases: list[tuple[str, str]]) -> list[LocalPlan]:
        return [local_plan({"model.w": F32}, [rows(0, 8)], aliases=one) for one in aliases]

    assert plan_save(plans([("model.b", "model.w")], [("model.a", "model.w")], [])).aliases == [
        ("model.a", "model.w"),
        ("model.b", "model.w"),
    ]
    text = fault_of(plans([("model.a", "model.w")], [("model.a", "model.x")]))
    assert "alias model.a: target 'model.w' on rank 0; target 'model.x' on rank 1" in text
    assert "model.w is a tensor and also an alias" in fault_of(plans([("model.w", "model.w")]))
    assert "model.a is an alias of model.x, which no rank has" in fault_of(plans([("model.a", "model.x")]))


def test_sections_agree_on_their_adapter() -> None:
    plans = [local_plan({}, [], sections=[("model", kind)]) for kind in ("fsdp1", "fsdp1", "ddp")]
    assert "section model: adapter 'fsdp1' on ranks 0-1; adapter 'ddp' on rank 2" in fault_of(plans)
    assert plan_save(plans[:2]).sections == [("model", "fsdp1")]


def test_values_are_written_once_where_equal_and_everywhere_where_not() -> None:
    held = [[b"same", b"rng", b"differs"], [b"differs", b"same", b"rng", b"late"], [b"late"]]
    plans = [local_plan({}, [], values=[("extra", path, path == b"rng") for path in paths]) for paths in held]
    plan = plan_save(plans, {("extra", b"differs")})
    values = plan.values
    found = list(
        zip([path for _, path in values.keys], values.rank.tolist(), values.shared.tolist(), values.index.tolist())
    )
    assert found == [
        (b"differs", 0, False, 2),
        (b"differs", 1, False, 0),
        (b"late", 1, True, 3),
        (b"rng", 0, False, 1),
        (b"rng", 1, False, 2),
        (b"same", 0, True, 0),
    ]
    assignment = assignment_of(plan, 1)
    assert assignment.values.tolist() == [0, 3, 2]
    assert assignment.shared.tolist() == [False, True, False]
    assert len(assignment_of(plan, 2).values) == 0


def test_a_tensor_without_elements_is_kept_as_one_whole_box() -> None:
    empty = BasicMeta(DTYPES["float32"], (0, 4))
    held: list[Holding] = [[], [("model.e", Box((0, 4), (0, 0)))], [("model.e", Box((0, 0), (0, 4)))]]
    plan = plan_save(plans_of(*held, tensors={"model.e": empty}))
    assert boxes_of(plan) == [("model.e", Box((0, 0), (0, 4)))]
    assert plan.owner.tolist() == [1]
    assert plan.source.tolist() == [0]
    assert plan.files[0].data_size == 0


def test_no_tensors_and_no_ranks() -> None:
    assert len(plan_save([]).shards) == 0
    plan = plan_save(plans_of([], [], tensors={}))
    assert plan.files == []
    assert assignment_of(plan, 0).files == []


def test_more_elements_than_numbers() -> None:
    shape = (2**31, 2**31, 3)
    huge = {"model.w": BasicMeta(DTYPES["uint8"], shape)}
    assert "2**62 elements" in fault_of(plans_of([("model.w", Box.whole(shape))], tensors=huge))


def test_a_grid_of_boxes_with_gaps_and_a_pinwheel() -> None:
    """Cuts on both axes, and five boxes that no straight cut separates."""
    shape = (60, 60)
    grid = [Box((i, j), (3, 2)) for i in range(0, 60, 3) for j in range(0, 60, 2)]
    wheel = [Box((0, 0), (20, 40)), Box((0, 40), (40, 20)), Box((40, 20), (20, 40)), Box((20, 0), (40, 20))]
    wheel.append(Box((20, 20), (20, 20)))
    tensors = {name: BasicMeta(DTYPES["uint8"], shape) for name in ("model.grid", "model.wheel")}
    held = [("model.grid", box) for box in grid] + [("model.wheel", box) for box in wheel]
    plan = plan_save(plans_of(held, held, tensors=tensors))
    assert len(plan.shards) == len(held)
    assert sum(file.data_size for file in plan.files) == 2 * prod(shape)
    wheel[4] = Box((19, 20), (21, 20))
    held = [("model.grid", box) for box in grid[1:]] + [("model.wheel", box) for box in wheel]
    text = fault_of(plans_of(held, tensors=tensors))
    assert "no rank holds [0:3,0:2]" in text
    assert "[0:20,0:40] of rank 0 overlaps [19:40,20:40] of rank 0" in text


@settings(deadline=None, max_examples=30)
@given(st.data(), st.sets(st.sampled_from(NAMES)))
def test_the_lowest_rank_writes_what_is_pinned(tilings: Tilings, data: st.DataObject, names: set[str]) -> None:
    """However the bytes are balanced: buffers that drifted apart must not be a mixture of several ranks'."""
    plans = data.draw(worlds(tilings)).plans()
    for plan in plans:
        plan.table.pinned = np.array([name in names for name in plan.table.tensors.names], np.bool_)
    plan = plan_save(plans)
    for row in range(len(plan.shards)):
        name, box = plan.tensors.names[int(plan.shards.tensor[row])], plan.shards.box_of(row)
        if name in names and box.numel:
            holders = [rank for rank, one in enumerate(plans) if _holds(one, name, box)]
            assert plan.owner[row] == min(holders)
        written = plans[int(plan.owner[row])].shards.box_of(int(plan.source[row]))
        assert written == box or box.numel == 0


def _holds(plan: LocalPlan, name: str, box: Box) -> bool:
    return any(
        plan.table.tensors.names[int(tensor)] == name and plan.shards.box_of(row) == box
        for row, tensor in enumerate(plan.shards.tensor)
    )
