"""Shards that changing numbers of readers divide, and shards that cannot be divided."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytecheckpoint.data import ElasticDataset
from bytecheckpoint.errors import StateError, UsageError


class Stateful:
    """A shard that continues from its own state, and counts how many samples it produced."""

    def __init__(self, first: int, size: int) -> None:
        self.numbers, self.at, self.produced = range(first, first + size), 0, 0

    def __iter__(self) -> Iterator[int]:
        while self.at < len(self.numbers):
            self.at += 1
            self.produced += 1
            yield self.numbers[self.at - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def parts(sizes: list[int], stateful: bool) -> list[Any]:
    firsts = [sum(sizes[:index]) for index in range(len(sizes))]
    if stateful:
        return [Stateful(first, size) for first, size in zip(firsts, sizes)]
    return [range(first, first + size) for first, size in zip(firsts, sizes)]


def readers(sizes: list[int], world_size: int, stateful: bool) -> list[ElasticDataset]:
    shards = [parts(sizes, stateful) for _ in range(world_size)]
    made = [ElasticDataset(shards[rank], rank=rank, world_size=world_size, seed=1) for rank in range(world_size)]
    for one in made:
        one.set_epoch(4)
    return made


@given(
    sizes=st.lists(st.integers(0, 6), max_size=7),
    stages=st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=4), min_size=1, max_size=4),
    stateful=st.booleans(),
)
def test_every_sample_is_seen_once(sizes: list[int], stages: list[list[int]], stateful: bool) -> None:
    seen: list[int] = []
    now = readers(sizes, len(stages[0]), stateful)
    for number, counts in enumerate(stages):
        for dataset, count in zip(now, counts, strict=True):
            iterator = iter(dataset)
            seen += [sample for _, sample in zip(range(count), iterator)]
        world_size = len(stages[number + 1]) if number + 1 < len(stages) else 1
        whole = now[0].merge([one.state_dict() for one in now])
        now = readers(sizes, world_size, stateful)
        for one in now:
            one.load_state_dict(one.split(whole, one.rank, world_size))
            one.set_epoch(4)
    assert sorted([*seen, *now[0]]) == list(range(sum(sizes)))


def test_a_shard_continues_from_its_own_state() -> None:
    first = readers([10], 1, stateful=True)[0]
    iterator = iter(first)
    assert [next(iterator) for _ in range(7)] == list(range(7))
    shards = parts([10], stateful=True)
    second = ElasticDataset(shards, seed=1)
    second.set_epoch(4)
    second.load_state_dict(first.state_dict())
    assert list(second) == [7, 8, 9]
    assert shards[0].produced == 3
    assert list(second) == list(range(10)), "the next epoch does not begin at the start"


def test_the_order_of_shards_changes_with_the_epoch() -> None:
    dataset = ElasticDataset(parts([2] * 8, stateful=False))
    orders = []
    for epoch in range(3):
        dataset.set_epoch(epoch)
        orders.append(list(dataset))
        assert dataset.epoch == epoch
    assert len(set(map(tuple, orders))) == 3
    assert list(ElasticDataset(parts([2] * 8, stateful=False), shuffle=False)) == list(range(16))


def test_states_that_do_not_fit_are_refused() -> None:
    first, second = readers([3, 3], 2, stateful=False)
    with pytest.raises(StateError, match=r"read the shards \[\d\]; make it with the data-parallel rank"):
        first.merge([first.state_dict(), first.state_dict()])
    with pytest.raises(StateError, match="of 2 shards, but this one has 3"):
        readers([3, 3, 3], 1, stateful=False)[0].load_state_dict(first.state_dict())
    with pytest.raises(StateError, match="not the state of an ElasticDataset"):
        first.load_state_dict({"left": []})
    second.load_state_dict(first.state_dict())
    with pytest.raises(StateError, match="reader 0 of 2 of an ElasticDataset was loaded by reader 1 of 2"):
        iter(second)
    second = readers([3, 3], 2, stateful=False)[1]
    second.set_epoch(5)
    with pytest.raises(StateError, match="in the epochs 4 and 5"):
        first.merge([first.state_dict(), second.state_dict()])


def test_shards_that_cannot_be_read_again_are_refused() -> None:
    for shard in (iter([1]), 3):
        with pytest.raises(UsageError, match=r"shard 1 is a .*cannot be iterated again"):
            ElasticDataset([[0], shard])
    with pytest.raises(UsageError, match="rank 2 and world_size 2"):
        ElasticDataset([[0]], rank=2, world_size=2)


def _rows(numbers: list[int]) -> Iterator[dict[str, int]]:
    for number in numbers:
        yield {"number": number}


def test_streams_that_hold_samples_back_are_refused() -> None:
    datasets = pytest.importorskip("datasets")
    from datasets.distributed import split_dataset_by_node

    stream = datasets.IterableDataset.from_generator(_rows, gen_kwargs={"numbers": list(range(4))})
    assert [row["number"] for row in ElasticDataset([stream.shard(4, index) for index in range(4)], shuffle=False)] == [
        0,
        1,
        2,
        3,
    ]
    for changed, text in [
        (stream.shuffle(buffer_size=10), "shuffles in a buffer"),
        (stream.shuffle(buffer_size=10).map(lambda row: row), "shuffles in a buffer"),
        (split_dataset_by_node(stream, 0, 2), "split_dataset_by_node"),
        (stream.with_format("arrow"), "has the format 'arrow'"),
    ]:
        with pytest.raises(UsageError, match=f"shard 0 .*{text}|shard 0 was split by {text}"):
            ElasticDataset([changed])
