"""Find the names of parameters that a state dict numbers, if the groups were filled in the model's order.

Scripts split a model's parameters into groups, such as those with and without weight decay, and keep the model's order
inside each group. So each group is a subsequence of the model's parameters. If their shapes allow only one way of
dividing the model's parameters among the groups, the names are known, whatever rule the script applied.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

__all__ = ["only_division"]

_MAX_STATES = 1 << 12  # more ways than this that fit a part of the model are not followed

Shape = tuple[int, ...]
Key = TypeVar("Key", bound=Hashable)


def only_division(
    groups: Sequence[Sequence[Key]], shapes: Mapping[Key, Shape], params: Iterable[tuple[str, Shape]]
) -> dict[Key, str] | None:
    """Return the name of each key, or None if the shapes allow no division, or several.

    Args:
        groups: The keys of each group, in the model's order.
        shapes: The shape of each key's parameter; a key whose shape is unknown fits every parameter.
        params: Names and shapes of the model's parameters, in its order.

    Returns:
        Each key's name.
    """
    # By the number of keys used of each group: in how many ways (1, or 2 for several), and the last of them.
    ways: dict[tuple[int, ...], tuple[int, tuple[int, ...]]] = {(0,) * len(groups): (1, ())}
    steps: list[tuple[str, dict[tuple[int, ...], tuple[int, tuple[int, ...]]]]] = []
    for name, shape in params:
        following: dict[tuple[int, ...], tuple[int, tuple[int, ...]]] = {}
        for used, (count, _) in ways.items():
            for number, group in enumerate(groups):
                if used[number] < len(group) and shapes.get(group[used[number]], shape) == shape:
                    after = (*used[:number], used[number] + 1, *used[number + 1 :])
                    following[after] = (min(2, count + following.get(after, (0, ()))[0]), used)
        if len(following) > _MAX_STATES:
            return None
        ways = following
        steps.append((name, ways))
    at = tuple(map(len, groups))
    if ways.get(at, (0, ()))[0] != 1:
        return None
    found: dict[Key, str] = {}
    for name, reached in reversed(steps):
        before = reached[at][1]
        number = next(i for i, (now, then) in enumerate(zip(at, before)) if now != then)
        found[groups[number][before[number]]] = name
        at = before
    return found
