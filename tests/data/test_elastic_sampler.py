"""The arithmetic of an epoch's order that changing numbers of ranks divide, against a list of what was seen."""

from __future__ import annotations

import tracemalloc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data.distributed import DistributedSampler

from bytecheckpoint.data import ElasticSampler
from bytecheckpoint.data.sampler import Remainder
from bytecheckpoint.errors import StateError, UsageError

STAGES = st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=5), max_size=4)
"""For each stage, how many samples each of its ranks takes."""


def samplers(size: int, world_size: int, **options: object) -> list[ElasticSampler]:
    made = [ElasticSampler(size, rank=rank, world_size=world_size, seed=3, **options) for rank in range(world_size)]
    for one in made:
        one.set_epoch(2)
    return made


def divided(old: list[ElasticSampler], world_size: int, **options: object) -> list[ElasticSampler]:
    whole = old[0].merge([one.state_dict() for one in old])
    new = samplers(old[0]._size, world_size, **options)
    for one in new:
        one.load_state_dict(one.split(whole, one.rank, world_size))
    return new


@given(size=st.integers(0, 40), stages=STAGES, last=st.integers(1, 5), shuffle=st.booleans())
def test_every_sample_is_seen_once(size: int, stages: list[list[int]], last: int, shuffle: bool) -> None:
    seen: list[int] = []
    now = samplers(size, len(stages[0]) if stages else last, shuffle=shuffle)
    for number, counts in enumerate(stages):
        for sampler, count in zip(now, counts, strict=True):
            iterator = iter(sampler)
            seen += [index for _, index in zip(range(count), iterator)]
        now = divided(now, len(stages[number + 1]) if number + 1 < len(stages) else last, shuffle=shuffle)
    rest = [list(sampler) for sampler in now]
    assert max(map(len, rest)) - min(map(len, rest)) <= 1
    assert sorted(seen + [index for of_rank in rest for index in of_rank]) == list(range(size))


@given(size=st.integers(0, 30), consumed=st.lists(st.integers(0, 9), min_size=1, max_size=4), data=st.data())
def test_a_remainder_is_what_a_list_would_be(size: int, consumed: list[int], data: st.DataObject) -> None:
    position = data.draw(st.integers(0, size))
    behind = sorted(data.draw(st.sets(st.integers(0, position - 1)))) if position else []
    left = Remainder(size, position, tuple(behind))
    listed = [*behind, *range(position, size)]
    assert [left[index] for index in range(len(left))] == listed
    ranks = range(len(consumed))
    shares = [listed[rank :: len(consumed)] for rank in ranks]
    assert [left.share(rank, len(consumed)) for rank in ranks] == [len(share) for share in shares]
    taken = [min(count, len(share)) for count, share in zip(consumed, shares)]
    gone = {number for count, share in zip(taken, shares) for number in share[:count]}
    after = left.without(taken)
    assert [after[index] for index in range(len(after))] == [number for number in listed if number not in gone]


def test_ranks_in_step_need_no_list_of_positions() -> None:
    left = Remainder(10**12).without([5 * 10**10] * 8)
    assert left == Remainder(10**12, 4 * 10**11)


@pytest.mark.parametrize("positions", [(3, (3,)), (3, (2, 1)), (3, (-1,)), (11, ()), (3, (1, 1))])
def test_positions_out_of_order_are_refused(positions: tuple[int, tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match="increasing"):
        Remainder(10, *positions)


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_order_is_that_of_torch(shuffle: bool) -> None:
    for rank in range(3):
        theirs = DistributedSampler(range(24), 3, rank, shuffle=shuffle, seed=5)
        ours = ElasticSampler(range(24), rank=rank, world_size=3, shuffle=shuffle, seed=5)
        for epoch in (0, 4):
            theirs.set_epoch(epoch)
            ours.set_epoch(epoch)
            assert list(ours) == list(theirs)
            assert len(ours) == len(theirs)


def test_equal_shares_leave_out_less_than_one_round() -> None:
    now = samplers(23, 4, drop_last=True)
    assert [len(one) for one in now] == [5, 5, 5, 5]
    seen = [next(iterator) for one in now for iterator in [iter(one)] for _ in range(2)]
    rest = [list(one) for one in divided(now, 3, drop_last=True)]
    assert [len(of_rank) for of_rank in rest] == [5, 5, 5]
    assert len({*seen, *(index for of_rank in rest for index in of_rank)}) == 23


def test_a_loaded_place_serves_one_epoch() -> None:
    first = samplers(10, 1)[0]
    iterator = iter(first)
    seen = [next(iterator) for _ in range(4)]
    second = samplers(10, 1)[0]
    second.load_state_dict(first.state_dict())
    second.set_epoch(2)
    iter(second)  # loaders make iterators that they never use
    assert len(second) == 6
    assert seen + list(second) == list(samplers(10, 1)[0])
    assert len(list(second)) == 10
    second.load_state_dict(first.state_dict())
    second.set_epoch(3)
    assert len(list(second)) == 10


def test_a_place_of_another_order_is_refused() -> None:
    state = ElasticSampler(10, seed=3).state_dict()
    for other, text in [
        (ElasticSampler(11, seed=3), r"size 10 \(now 11\)"),
        (ElasticSampler(10, seed=4), r"seed 3 \(now 4\)"),
        (ElasticSampler(10, seed=3, shuffle=False), r"shuffle True \(now False\)"),
    ]:
        with pytest.raises(StateError, match=text):
            other.load_state_dict(state)
        with pytest.raises(StateError, match=text):
            other.merge([state])
    with pytest.raises(StateError, match="version of torch shuffles in another order"):
        ElasticSampler(10, seed=3).load_state_dict({**state, "order": 1})
    with pytest.raises(StateError, match="rank 0 of 1 does not belong to an ElasticSampler of rank 1 of 2"):
        ElasticSampler(10, seed=3, rank=1, world_size=2).load_state_dict(state)
    with pytest.raises(StateError, match="not the state of an ElasticSampler"):
        ElasticSampler(10).load_state_dict({"yielded": 3})
    with pytest.raises(StateError, match="not a valid state"):
        ElasticSampler(10, seed=3).load_state_dict({**state, "position": 11})
    for key in ("epoch", "position", "behind", "yielded", "world_size", "rank"):
        for value in (None, "x", 1.5, 1 << 70, ["x"], range(1 << 40)):
            with pytest.raises(StateError, match="not a valid state of an ElasticSampler"):
                ElasticSampler(10, seed=3).merge([{**state, key: value}])


def test_states_of_different_times_are_refused() -> None:
    first, second = samplers(10, 2)
    with pytest.raises(StateError, match=r"ranks \[0, 0\]"):
        first.merge([first.state_dict()] * 2)
    with pytest.raises(StateError, match="not those of 2 ranks"):
        first.merge([first.state_dict()])
    tracemalloc.start()
    try:
        with pytest.raises(StateError, match="not those of 10000000 ranks"):
            first.merge([{**first.state_dict(), "world_size": 10_000_000}])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    second.set_epoch(3)
    with pytest.raises(StateError, match=r"differ in epoch \(\[2, 3\]\)"):
        first.merge([first.state_dict(), second.state_dict()])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rank": 2, "world_size": 2}, "rank 2 is not below world_size 2"),
        ({"world_size": 0}, "world_size must be a whole number of at least 1, not 0"),
        ({"rank": -1}, "rank must be"),
        ({"seed": 1.5}, "seed must be"),
        ({"data": iter([])}, "data must have a length"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, object], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        ElasticSampler(**{"data": 10, **options})
    with pytest.raises(UsageError, match="epoch must be"):
        ElasticSampler(10).set_epoch(-1)


def test_shuffling_does_not_touch_the_global_generator() -> None:
    before = torch.get_rng_state()
    list(ElasticSampler(10))
    assert torch.equal(before, torch.get_rng_state())
