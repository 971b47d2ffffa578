from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples

from bytecheckpoint.planners.contents import ContentChecks, HeldContents, compare_contents, stack_digests

World = list[dict[str, int]]
"""By rank, what each item contains."""

MOST_BYTES = 16 + 2 * 64


def held(world: World) -> list[HeldContents]:
    """Ranks by the items that they have."""
    kinds: dict[tuple[str, ...], list[int]] = {}
    for rank, items in enumerate(world):
        kinds.setdefault(tuple(items), []).append(rank)
    return [
        HeldContents(keys, np.array(ranks), [contents(world[rank]) for rank in ranks]) for keys, ranks in kinds.items()
    ]


def contents(items: dict[str, int]) -> np.ndarray:
    return stack_digests([value.to_bytes(4, "little") for value in items.values()])


def is_unchanged(before: World, now: World, everywhere: list[bytes] | None = None) -> bool:
    """Whether the ranks' summaries of ``now`` match the comparison of ``before``."""
    comparison = compare_contents(held(before), len(before))
    summaries = []
    for rank, (packed, items) in enumerate(zip(comparison.checks(), now)):
        checks = ContentChecks.from_bytes(packed, rank, len(now))
        summaries.append(checks.summarize(contents(items), b"" if everywhere is None else everywhere[rank]))
    assert all(len(one) <= MOST_BYTES for one in summaries)
    return comparison.is_unchanged(summaries)


def equal_items(world: World) -> dict[str, bool]:
    """By item, whether all that have it hold the same."""
    found: dict[str, set[int]] = {}
    for items in world:
        for key, value in items.items():
            found.setdefault(key, set()).add(value)
    return {key: len(values) == 1 for key, values in found.items()}


item_sets = st.lists(st.sets(st.sampled_from("abcdefg")).map(sorted), min_size=1, max_size=6)


@given(item_sets, st.data())
@settings(deadline=None, max_examples=examples(200))
def test_it_is_unchanged_exactly_if_the_same_items_are_equal(keys: list[list[str]], data: st.DataObject) -> None:
    def fill() -> World:
        values = st.integers(0, 1)
        common = {key: data.draw(values) for key in "abcdefg"}
        drift = data.draw(st.sets(st.sampled_from("abcdefg"), max_size=3))
        return [{key: data.draw(values) if key in drift else common[key] for key in own} for own in keys]

    before, now = fill(), fill()
    assert compare_contents(held(before), len(before)).differing == [
        k for k, same in equal_items(before).items() if not same
    ]
    assert is_unchanged(before, now) == (equal_items(before) == equal_items(now))


def test_any_two_ranks_that_differ_are_noticed() -> None:
    """No two differences cancel each other, however the ranks are paired."""
    world = [{"x": 1} for _ in range(6)]
    assert is_unchanged(world, [{"x": 2} for _ in range(6)])
    for first in range(6):
        for second in range(6):
            changed = [{"x": 1 + (rank in (first, second))} for rank in range(6)]
            assert not is_unchanged(world, changed)
    assert not is_unchanged(world, [{"x": rank // 2} for rank in range(6)])


def test_what_must_be_equal_everywhere() -> None:
    world: World = [{} for _ in range(3)]
    assert is_unchanged(world, world, [b"step 1"] * 3)
    assert not is_unchanged(world, world, [b"step 1", b"step 1", b"step 2"])
    assert is_unchanged(world[:1], world[:1], [b"anything"])


@pytest.mark.parametrize(("count", "cacheable"), [(1, True), (64, True), (65, False)])
def test_so_many_may_differ(count: int, cacheable: bool) -> None:
    names = [f"{i:03d}" for i in range(count)]
    before = [{name: rank * 1000 + i for i, name in enumerate(names)} for rank in range(40)]
    comparison = compare_contents(held(before), len(before))
    assert comparison.is_cacheable == cacheable
    if cacheable:
        assert is_unchanged(before, before)
        met = [{**items, names[-1]: 5} for items in before]
        assert not is_unchanged(before, met)


def test_checks_survive_the_wire() -> None:
    packed = compare_contents(held([{"a": 1, "b": 2}] * 2), 2).checks()[1]
    assert ContentChecks.from_bytes(packed, 1, 2).equal[0].tolist() == [0, 1]
