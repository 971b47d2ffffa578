"""Requests that are stripes of frames, and the ranks that scatter them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from bytecheckpoint.planners.request_classes import (
    BoxRequest,
    ClassSummary,
    RequestClass,
    classify_requests,
    find_rings,
    find_scatters,
    find_stripe,
    group_ranks,
    is_scattered,
)
from bytecheckpoint.tensors.dtypes import DTYPES
from bytecheckpoint.tensors.geometry import Box
from bytecheckpoint.tensors.metadata import BasicMeta
from bytecheckpoint.tensors.tables import BoxTable, TensorTable

F32 = DTYPES["float32"]
SHAPES = {"up": (64, 32), "down": (32, 64), "norm": (32,), "experts": (8, 32, 64)}
NAMES = list(SHAPES)
TENSORS = TensorTable.build([("model", name, BasicMeta(F32, shape)) for name, shape in SHAPES.items()])
STORED = BoxTable.build([(row, Box.whole(shape)) for row, shape in enumerate(SHAPES.values())])


def part(name: str, axis: int, parts: int, number: int) -> BoxRequest:
    lengths = [*SHAPES[name]]
    lengths[axis] //= parts
    offsets = [0] * len(lengths)
    offsets[axis] = number * lengths[axis]
    return BoxRequest(NAMES.index(name), Box(tuple(offsets), tuple(lengths)), "f32")


def tensor_parallel(number: int, parts: int) -> list[RequestClass]:
    requests = [part("up", 0, parts, number), part("down", 1, parts, number), part("norm", 0, 1, 0)]
    return classify_requests(TENSORS, STORED, requests, salt="", min_bytes=1)


@settings(deadline=None)
@given(st.data())
def test_stripes_tile_their_frame(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 24), min_size=1, max_size=4)))
    lengths = tuple(data.draw(st.integers(1, size)) for size in shape)
    offsets = tuple(data.draw(st.integers(0, size - length)) for size, length in zip(shape, lengths))
    box = Box(offsets, lengths)
    stripe = find_stripe(BoxRequest(0, box, ""), shape, 4)
    if stripe is None:
        return
    assert stripe.box_of(stripe.number) == box
    assert stripe.parts > 1
    boxes = [stripe.box_of(number) for number in range(stripe.parts)]
    assert sum(one.numel for one in boxes) == stripe.frame.numel
    assert all(stripe.frame.contains(one) for one in boxes)
    assert stripe.frame.lengths[stripe.axis] == shape[stripe.axis]


def test_what_lies_together_or_in_long_runs_is_no_stripe() -> None:
    assert find_stripe(part("up", 0, 4, 1), SHAPES["up"], 4) is None
    assert find_stripe(part("norm", 0, 4, 1), SHAPES["norm"], 4) is None
    assert find_stripe(part("experts", 0, 4, 1), SHAPES["experts"], 4) is None
    assert find_stripe(BoxRequest(0, Box((0, 1 << 20), (8, 1 << 20)), ""), (8, 1 << 22), 4) is None
    assert find_stripe(BoxRequest(0, Box((3, 16), (1, 16)), ""), (8, 32), 4) is None, "one row"


def test_uneven_parts_are_no_stripes() -> None:
    assert find_stripe(BoxRequest(0, Box((0, 0), (8, 11)), ""), (8, 32), 4) is None
    assert find_stripe(BoxRequest(0, Box((0, 8), (8, 16)), ""), (8, 32), 4) is None
    assert find_stripe(BoxRequest(0, Box((0, 8), (8, 1)), ""), (8, 32), 4) is None, "too many"


def test_tensor_parallel_ranks_scatter_what_is_cut_by_columns_and_pass_on_replicas() -> None:
    classes = [tensor_parallel(rank, 4) for rank in range(4)]
    groups = group_ranks([[one.summary for one in of_rank] for of_rank in classes])
    for rank in range(4):
        ((ranks, (columns,)),) = find_scatters(rank, classes[rank], groups).items()
        assert ranks == (0, 1, 2, 3)
        assert [stripe.number for stripe in columns.stripes] == [rank]
        assert [stripe.frame for stripe in columns.stripes] == [Box.whole(SHAPES["down"])]
        ((ranks, (replicated,)),) = find_rings(rank, classes[rank], groups).items()
        assert ranks == (0, 1, 2, 3)
        assert replicated.requests == (2,)


def test_replicas_of_tensor_parallel_groups_scatter_each_by_itself() -> None:
    classes = [tensor_parallel(rank % 4, 4) for rank in range(8)]
    groups = group_ranks([[one.summary for one in of_rank] for of_rank in classes])
    found = [next(iter(find_scatters(rank, classes[rank], groups))) for rank in range(8)]
    assert found == [(0, 1, 2, 3)] * 4 + [(4, 5, 6, 7)] * 4


def test_many_replicas_of_few_stripes_read_less_in_rings() -> None:
    classes = [tensor_parallel(rank % 2, 2) for rank in range(8)]
    groups = group_ranks([[one.summary for one in of_rank] for of_rank in classes])
    for rank in range(8):
        assert not find_scatters(rank, classes[rank], groups)
        assert tuple(range(rank % 2, 8, 2)) in find_rings(rank, classes[rank], groups)


def test_a_stripe_without_requests_is_not_read() -> None:
    classes = [tensor_parallel(rank, 4) for rank in (0, 1, 3)]
    groups = group_ranks([[one.summary for one in of_rank] for of_rank in classes])
    assert not any(find_scatters(rank, classes[rank], groups) for rank in range(3))
    assert is_scattered([[0], [1]])
    assert not is_scattered([[0], []])
    assert not is_scattered([[0, 2], [1]])


def test_several_stripes_of_one_rank_are_left_alone() -> None:
    requests = [part("down", 1, 4, number) for number in (0, 1)]
    assert classify_requests(TENSORS, STORED, requests, salt="", min_bytes=1) == []


def test_who_is_offered_what_he_does_not_share_goes_on_alone() -> None:
    (one,) = classify_requests(TENSORS, STORED, [part("down", 1, 2, 0)], salt="", min_bytes=1)
    assert one.summary == ClassSummary(one.summary.digest, 2, 0)
    groups = {one.summary.digest: [[5], [6]]}
    assert find_scatters(4, [one], groups) == {}
    assert find_rings(4, [one], groups) == {}


def test_what_is_stored_in_stripes_is_read_in_stripes() -> None:
    def stored_in(parts: int) -> BoxTable:
        return BoxTable.build([(1, part("down", 1, parts, number).box) for number in range(parts)])

    requests = [part("down", 1, 4, 2)]
    for parts, stripes in ((1, 1), (2, 1), (4, 0), (8, 0)):
        (one,) = classify_requests(TENSORS, stored_in(parts), requests, salt="", min_bytes=1)
        assert len(one.stripes) == stripes
