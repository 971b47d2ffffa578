from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples

from bytecheckpoint.planners.request_classes import BoxRequest, ClassSummary, classify_requests, find_rings, group_ranks
from bytecheckpoint.planners.ring_plan import SharedPart, plan_ring
from bytecheckpoint.tensors.dtypes import DTYPES
from bytecheckpoint.tensors.geometry import Box
from bytecheckpoint.tensors.metadata import BasicMeta
from bytecheckpoint.tensors.tables import BoxTable, TensorTable

F32 = DTYPES["float32"]
SHAPES = [(64, 32), (8,), (), (5, 6, 7), (1, 1000)]
TENSORS = TensorTable.build(
    [("model" if index < 3 else "optimizer", f"t{index}", BasicMeta(F32, shape)) for index, shape in enumerate(SHAPES)]
)
STORED = BoxTable.build([(row, Box.whole(shape)) for row, shape in enumerate(SHAPES)])


@st.composite
def parts(draw: st.DrawFn) -> list[SharedPart]:
    """Parts of stored boxes of any shape, each element of which has a unique identity."""
    found = []
    for row in range(draw(st.integers(0, 6))):
        stored = tuple(draw(st.lists(st.integers(1, 12), max_size=3)))
        offsets = tuple(draw(st.integers(0, length - 1)) for length in stored)
        lengths = tuple(draw(st.integers(1, length - offset)) for length, offset in zip(stored, offsets))
        itemsize, memory = draw(st.sampled_from([(4, 4), (2, 4), (8, 2), (1, 1)]))
        chunk = draw(st.sampled_from([7, 64, 256]))
        found.append(SharedPart(row, Box(offsets, lengths), Box((0,) * len(stored), stored), itemsize, memory, chunk))
    return found


def elements(row: int, box: Box) -> list[tuple[int, ...]]:
    ranges = (range(offset, offset + length) for offset, length in zip(box.offsets, box.lengths))
    return [(row, *index) for index in _product(list(ranges))]


def _product(ranges: list[range]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for values in ranges:
        found = [(*index, value) for index in found for value in values]
    return found


@settings(deadline=None, max_examples=examples(80))
@given(parts(), st.integers(2, 5), st.sampled_from([16, 100, 4096]))
def test_each_element_is_read_by_one_rank_and_passed_on_once(shared, size, piece):
    ring = plan_ring(range(10, 10 + size), shared, packet_bytes=piece)
    expected = Counter(element for part in shared for element in elements(part.row, part.box))
    batches = [batch for segment in ring.segments for batch in segment]
    assert (
        Counter(e for batch in batches for part_box in batch.reads for e in elements(part_box.row, part_box.box))
        == expected
    )
    itemsize = {part.row: part.memory_itemsize for part in shared}
    for batch in batches:
        read = [e for part_box in batch.reads for e in elements(part_box.row, part_box.box)]
        passed = [e for packet in batch.packets for part_box in packet for e in elements(part_box.row, part_box.box)]
        assert sorted(read) == sorted(passed)
        for packet in batch.packets:
            assert all(part_box.nbytes == part_box.box.numel * itemsize[part_box.row] for part_box in packet)
            assert sum(part_box.nbytes for part_box in packet) <= max(piece, 8)


@settings(deadline=None, max_examples=examples(60))
@given(parts(), st.integers(2, 6), st.randoms(use_true_random=False))
def test_the_ring_ends_with_everything_everywhere(shared, size, chance: random.Random):
    """Links make a step in any order; a rank sends only what it has by then."""
    ring = plan_ring(range(size), shared, packet_bytes=16)
    everything = {(segment, index) for segment in range(size) for index in range(len(ring.packets(segment)))}
    links = [list(ring.link(at)) for at in range(size)]
    here = [{(at, index) for index in range(len(ring.packets(at)))} for at in range(size)]
    sent = [0] * size
    while any(sent[at] < len(links[at]) for at in range(size)):
        ready = [at for at in range(size) if sent[at] < len(links[at]) and links[at][sent[at]] in here[at]]
        assert ready, "deadlock"
        at = chance.choice(ready)
        item = links[at][sent[at]]
        assert item not in here[(at + 1) % size], "sent twice"
        here[(at + 1) % size].add(item)
        sent[at] += 1
    assert all(of_rank == everything for of_rank in here)


def whole(row: int, shape: tuple[int, ...], chunk: int = 1 << 20, itemsize: int = 4) -> SharedPart:
    box = Box.whole(shape)
    return SharedPart(row, box, box, itemsize, itemsize, chunk)


def test_shares_are_even_and_cut_where_chunks_begin():
    shared = [whole(0, (50257, 768)), *(whole(row, (768, 2304)) for row in range(1, 13)), whole(13, (768,))]
    ring = plan_ring(range(4), shared)
    total = sum(part.box.numel * 4 for part in shared)
    sizes = [sum(s.nbytes for batch in segment for s in batch.reads) for segment in ring.segments]
    assert sum(sizes) == total
    assert max(sizes) < 1.2 * total / 4
    for segment in ring.segments:
        for batch in segment:
            for part_box in batch.reads:
                if part_box.row < 13:
                    assert part_box.box.offsets[0] * part_box.box.lengths[1] * 4 % (1 << 20) == 0


def test_a_tensor_in_which_no_row_begins_a_chunk_is_cut_for_the_shares_alone():
    ring = plan_ring(range(2), [whole(0, (20_000, 1001))])
    assert [len(segment) for segment in ring.segments] == [1, 1]
    assert all(len(batch.packets) > 4 for segment in ring.segments for batch in segment)


def test_one_huge_row_is_dealt_out():
    ring = plan_ring(range(4), [whole(0, (2, 1 << 28))])
    sizes = [sum(s.nbytes for batch in segment for s in batch.reads) for segment in ring.segments]
    assert max(sizes) == min(sizes) == 1 << 29


def requests_of(rows: list[int]) -> list[BoxRequest]:
    return [BoxRequest(row, Box.whole(SHAPES[row]), "torch.float32") for row in rows]


def test_classes_do_not_depend_on_the_order_of_requests():
    one = classify_requests(TENSORS, STORED, requests_of([0, 1, 2, 3, 4]), salt="a", min_bytes=1)
    other = classify_requests(TENSORS, STORED, requests_of([4, 2, 3, 1, 0]), salt="a", min_bytes=1)
    assert [found.summary.digest for found in one] == [found.summary.digest for found in other]
    assert sorted(sorted(found.requests) for found in one) == [[0, 1, 2], [3, 4]], "one for each section"
    assert sorted(sorted(found.requests) for found in other) == [[0, 2], [1, 3, 4]]


def test_different_requests_have_different_classes():
    base = requests_of([0, 1])
    half = [BoxRequest(0, Box((0, 0), (32, 32)), "torch.float32"), base[1]]
    other_half = [BoxRequest(0, Box((32, 0), (32, 32)), "torch.float32"), base[1]]

    def digests(requests, salt="a"):
        return {found.summary.digest for found in classify_requests(TENSORS, STORED, requests, salt=salt, min_bytes=1)}

    assert not digests(base) & digests(base, salt="b")
    assert not digests(base) & digests([BoxRequest(0, base[0].box, "torch.bfloat16"), base[1]])
    assert len(digests(half)) == 2
    assert len(digests(half) & digests(other_half)) == 1, "replicated tensors are still equal"
    assert digests([*base, base[0]]) == digests(base), "a want twice is shared once"


def test_small_classes_are_left_out():
    (found,) = classify_requests(TENSORS, STORED, requests_of([0, 1, 2, 3, 4]), salt="a", min_bytes=5000)
    assert found.nbytes == 64 * 32 * 4 + 8 * 4 + 4


def test_groups_are_those_with_a_digest_in_common():
    a, b, c = (ClassSummary(digest, 1, 0) for digest in (b"a", b"b", b"c"))
    assert group_ranks([[a, b], [a], [c], [b, a], []]) == {b"a": [[0, 1, 3]], b"b": [[0, 3]]}


@pytest.mark.parametrize("size", [2, 64, 65, 1000])
def test_large_groups_make_several_rings(size):
    classes = classify_requests(TENSORS, STORED, requests_of([0, 3]), salt="a", min_bytes=1)
    group = list(range(3, 3 + 2 * size, 2))
    groups = {found.summary.digest: [group] for found in classes}
    rings = {}
    for rank in group:
        (ranks,) = find_rings(rank, classes, groups)
        assert rank in ranks
        rings[ranks] = len(ranks)
    assert sorted(rank for ranks in rings for rank in ranks) == group
    assert max(rings.values()) <= 64
    assert max(rings.values()) - min(rings.values()) <= 1
    assert len(rings) == -(-size // 64)


def test_classes_of_one_group_share_a_ring():
    classes = classify_requests(TENSORS, STORED, requests_of([0, 3]), salt="a", min_bytes=1)
    groups = {found.summary.digest: [[0, 1]] for found in classes}
    ((ranks, members),) = find_rings(1, classes, groups).items()
    assert ranks == (0, 1)
    assert [member.summary.digest for member in members] == sorted(found.summary.digest for found in classes)
    assert find_rings(1, classes, {}) == {}


def test_planning_is_quick_enough_to_be_forgotten():
    rows = np.arange(2000)
    ring = plan_ring(range(64), [whole(int(row), (256, 1024)) for row in rows])
    assert sum(len(batch.packets) for segment in ring.segments for batch in segment) < 4000
