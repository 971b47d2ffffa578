"""Plans of ranks that name a mesh layout are those of ranks that list the same boxes."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_plans import plan_save, rank_plan
from sampling import examples

from bytecheckpoint.errors import PlanError
from bytecheckpoint.planners.local_plan import OWN_BOXES, WHOLE, LocalPlan, PlanTable
from bytecheckpoint.planners.plan_groups import mesh_boxes
from bytecheckpoint.tensors.dtypes import DTYPES
from bytecheckpoint.tensors.geometry import Box
from bytecheckpoint.tensors.mesh_layout import MeshLayout
from bytecheckpoint.tensors.metadata import BasicMeta
from bytecheckpoint.tensors.tables import BoxTable, TensorTable


@given(st.data())
@settings(deadline=None, max_examples=examples(200))
def test_boxes_of_blocks_are_parts_of_each_block(data: st.DataObject) -> None:
    ndim = data.draw(st.integers(1, 3))
    blocks = tuple(data.draw(st.lists(st.integers(1, 3), min_size=ndim, max_size=ndim)))
    inner = data.draw(st.lists(st.integers(0, 7), min_size=ndim, max_size=ndim))
    axis, pieces = data.draw(st.integers(0, ndim - 1)), data.draw(st.integers(1, 4))
    shape = tuple(n * block for n, block in zip(inner, blocks))
    layout = MeshLayout((pieces,), tuple((0,) if d == axis else () for d in range(ndim)), blocks)
    offsets, lengths = mesh_boxes(layout, shape, np.arange(pieces)[:, None])
    assert len(offsets) == pieces * layout.boxes
    found = list(zip(map(tuple, offsets.tolist()), map(tuple, lengths.tolist())))
    numbers = np.arange(int(np.prod(shape))).reshape(shape)
    for piece in range(pieces):
        held = [numbers[Box(*one).slices()] for one in found[piece * layout.boxes : (piece + 1) * layout.boxes]]
        expected = []
        for index in product(*map(range, blocks)):
            block = numbers[tuple(slice(i * n, (i + 1) * n) for i, n in zip(index, inner))]
            step = -(-inner[axis] // pieces)
            cut = tuple(slice(piece * step, (piece + 1) * step) if d == axis else slice(None) for d in range(ndim))
            expected.append(block[cut])
        assert [one.tolist() for one in held if one.size] == [one.tolist() for one in expected if one.size]


def test_blocks_that_do_not_fit() -> None:
    with pytest.raises(PlanError, match="blocks"):
        MeshLayout((2,), ((0,), ()), (2,))
    with pytest.raises(PlanError, match="blocks"):
        MeshLayout((2,), ((0,),), (0,))
    with pytest.raises(PlanError, match="2,\\) equal blocks"):
        mesh_boxes(MeshLayout((2,), ((0,),), (2,)), (5,), np.array([[0]]))


_META = {
    "model.cut": BasicMeta(DTYPES["bfloat16"], (12, 4)),
    "model.halves": BasicMeta(DTYPES["bfloat16"], (8, 4)),
    "model.whole": BasicMeta(DTYPES["bfloat16"], (3,)),
    "optimizer.a": BasicMeta(DTYPES["float32"], (12, 4)),
    "optimizer.b": BasicMeta(DTYPES["float32"], (8, 4)),
    "optimizer.step": BasicMeta(DTYPES["float32"], ()),
}


def _plan(data_rank: int, tensor_rank: int, *, derived: bool) -> LocalPlan:
    """Two tensor parallel ranks, and two data parallel ones that have one tensor of the optimizer each."""
    own = "optimizer.b" if data_rank else "optimizer.a"
    names = ["model.cut", "model.halves", "model.whole", own, "optimizer.step"]
    layouts = [MeshLayout((2,), ((0,), ())), MeshLayout((2,), ((0,), ()), (2, 1))]
    held = [1, 2, WHOLE, OWN_BOXES, WHOLE] if derived else [OWN_BOXES] * 5
    size = _META[own].shape[0] // 2
    boxes = [
        (0, Box((6 * tensor_rank, 0), (6, 4))),
        (1, Box((2 * tensor_rank, 0), (2, 4))),
        (1, Box((4 + 2 * tensor_rank, 0), (2, 4))),
        (2, Box((0,), (3,))),
        (4, Box((), ())),
        (3, Box((size * tensor_rank, 0), (size, 4))),
    ]
    rows = [(*name.split(".", 1), _META[name]) for name in names]
    return rank_plan(
        TensorTable.build(rows),
        BoxTable.build(boxes),
        held=held,
        layouts=layouts if derived else [],
        coordinates=[(tensor_rank,)] * 2 if derived else [],
    )


def test_ranks_that_share_only_a_section_are_planned_as_if_they_listed_their_boxes() -> None:
    places = list(product(range(2), range(2)))
    plans = [[_plan(*place, derived=derived) for place in places] for derived in (True, False)]
    derived, listed = map(plan_save, plans)
    assert derived.tensors.names == listed.tensors.names
    assert list(derived.shards) == list(listed.shards)
    assert derived.owner.tolist() == listed.owner.tolist()
    assert derived.files == listed.files
    for plan, ranks in ((derived, plans[0]), (listed, plans[1])):
        for shard, (rank, row) in enumerate(zip(plan.owner.tolist(), plan.source.tolist())):
            local = ranks[rank]
            assert local.shards.box_of(row) == plan.shards.box_of(shard)
            name = local.table.tensors.names[int(local.shards.tensor[row])]
            assert name == plan.tensors.names[int(plan.shards.tensor[shard])]


def test_blocks_of_layouts_arrive() -> None:
    table = PlanTable.from_bytes(_plan(0, 1, derived=True).packed_table)
    assert table.layouts == _plan(0, 1, derived=True).table.layouts
    assert table.common_boxes().tolist() == [1, 2, 1, 0, 1]
