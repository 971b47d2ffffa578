from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples

from bytecheckpoint.planners.extents import plan_extents

Range = tuple[int, int, int]
"""File, begin, end."""


@st.composite
def ranges_in_shards(draw: st.DrawFn) -> tuple[list[Range], list[int]]:
    """Ranges within shards that are adjacent, each split at multiples of a separate step, and the steps."""
    ranges: list[Range] = []
    steps: list[int] = []
    for file in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, 9))
        for _ in range(draw(st.integers(0, 5))):
            step, length = draw(st.integers(1, 40)), draw(st.integers(1, 300))
            for _ in range(draw(st.integers(0, 3))):
                first = draw(st.integers(0, (length - 1) // step)) * step
                last = min(draw(st.integers(first // step + 1, length // step + 1)) * step, length)
                ranges.append((file, at + first, at + last))
                steps.append(step)
            at += length
    order = draw(st.permutations(range(len(ranges))))
    return [ranges[i] for i in order], [steps[i] for i in order]


@given(ranges_in_shards(), st.integers(1, 100), st.integers(0, 20), st.integers(0, 30))
@settings(deadline=None, max_examples=examples(200))
def test_every_byte_is_fetched_once(requested: tuple[list[Range], list[int]], size: int, slack: int, gap: int) -> None:
    ranges, steps = requested
    file, begin, end = np.array(ranges, np.int64).reshape(-1, 3).T
    plan = plan_extents(file, begin, end, np.array(steps, np.int64), size=size, slack=slack, gap=gap)
    blocks = list(zip(plan.file.tolist(), plan.begin.tolist(), plan.end.tolist()))

    covered = [(where, at) for where, low, high in blocks for at in range(low, high)]
    assert covered == sorted(set(covered)), "in order, and none twice"
    assert set(covered) == {(where, at) for where, low, high in ranges for at in range(low, high)}

    for i, (where, low, high) in enumerate(blocks):
        uses = plan.uses[plan.use_starts[i] : plan.use_starts[i + 1]].tolist()
        overlapping = [j for j, (f, b, e) in enumerate(ranges) if f == where and b < high and low < e]
        assert sorted(uses) == overlapping
        assert high - low <= max(size, steps[uses[0]])
        starts = [b for f, b, e in ranges if f == where and b <= low]
        ends = [e for f, b, e in ranges if f == where]
        assert any((low - b) % steps[uses[0]] == 0 for b in starts)
        assert high in ends or any((high - b) % steps[uses[0]] == 0 for b in starts)

    assert plan.starts[0] == 0
    assert plan.starts[-1] == len(blocks)
    for first, last in zip(plan.starts[:-1].tolist(), plan.starts[1:].tolist()):
        members = blocks[first:last]
        assert len({where for where, _, _ in members}) == 1
        assert len(members) == 1 or members[-1][2] - members[0][1] <= size + slack
        assert all(after[1] - before[2] <= gap for before, after in pairwise(members))


def test_neighbours_are_read_together_and_a_long_range_in_pieces() -> None:
    begin = np.array([0, 10, 20, 25, 1000], np.int64)
    end = np.array([10, 20, 25, 225, 1010], np.int64)
    file, step = np.zeros(5, np.int64), np.array([10, 10, 10, 50, 10], np.int64)
    plan = plan_extents(file, begin, end, step, size=100, slack=10, gap=5)
    assert list(zip(plan.begin.tolist(), plan.end.tolist())) == [
        (0, 10),
        (10, 20),
        (20, 25),
        (25, 125),
        (125, 225),
        (1000, 1010),
    ]
    assert plan.starts.tolist() == [0, 3, 4, 5, 6]


def test_nothing_to_read() -> None:
    none = np.empty(0, np.int64)
    assert len(plan_extents(none, none, none, none, size=1, slack=0, gap=0)) == 0
