"""Who makes which scales, and what senders must tell each other for that. Pure, and computed by rank 0.

A sender that has all elements of a block needs nobody. Of a block that is cut between senders, each finds the maximum
of what it has; the largest of these is the block's, and all who write a part of the block get it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...geometry import Box, find_overlap
from .messages import Table
from .planning import Holding
from .quantizing import Blocks, blocks_of, grid_of, partial_blocks, scale_name

__all__ = ["Exchange", "Given", "holdings_of_blocks", "plan_exchange"]


@dataclass(frozen=True)
class Given:
    """The maxima of what ``box``, which a sender has, has of the blocks at ``grid``."""

    name: str
    box: Box
    grid: Box


@dataclass(frozen=True)
class Exchange:
    """Of each sender: what it finds out for others, and where in which tensors' grids it needs what they have found."""

    gives: list[list[Given]]
    takes: list[list[tuple[str, Box]]]
    grids: dict[str, tuple[int, ...]]

    @property
    def needed(self) -> bool:
        return any(self.takes)

    def merged(self, said: Sequence[bytes]) -> list[bytes]:
        """For each sender what it takes, of what all have ``said``: float32, one grid behind the other."""
        found = {name: np.zeros(shape, np.float32) for name, shape in self.grids.items()}
        for gives, values in zip(self.gives, said, strict=True):
            left = np.frombuffer(values, np.float32)
            for given in gives:
                part = left[: given.grid.numel].reshape(given.grid.lengths)
                left = left[given.grid.numel :]
                place = found[given.name][given.grid.slices()]
                np.maximum(place, part, out=place)  # which keeps NaN
        return [b"".join(found[name][grid.slices()].tobytes() for name, grid in takes) for takes in self.takes]


def holdings_of_blocks(
    held: Mapping[str, Sequence[Holding]], blocks: Mapping[str, Blocks], senders: int
) -> dict[str, list[Holding]]:
    """``held``, and who can write scales. Of replicas of a box one sender gets all, so that its blocks are looked at
    once."""
    load = [0] * senders
    found = {name: list(holdings) for name, holdings in held.items()}
    several: list[tuple[int, str, Holding]] = []
    for name in blocks:
        for holding in held.get(name, ()):
            if len(holding.senders) == 1:
                load[holding.senders[0]] += holding.box.numel
            else:
                several.append((-holding.box.numel, name, holding))
        found[name] = [holding for holding in held.get(name, ()) if len(holding.senders) == 1]
    for weight, name, holding in sorted(several):
        owner = min(holding.senders, key=lambda sender: (load[sender], sender))
        load[owner] -= weight
        found[name].append(Holding(holding.box, (owner,)))
    for name, size in blocks.items():
        by_box: dict[Box, set[int]] = {}
        for box, owners in found[name]:
            if box.numel:
                by_box.setdefault(blocks_of(box, size), set()).update(owners)
        found[scale_name(name)] = [Holding(box, tuple(sorted(owners))) for box, owners in by_box.items()]
    return found


def plan_exchange(
    held: Mapping[str, Sequence[Holding]], table: Table, blocks: Mapping[str, Blocks], senders: int
) -> Exchange:
    """``held`` and ``table`` as the senders have the tensors, before they are quantised."""
    exchange = Exchange([[] for _ in range(senders)], [[] for _ in range(senders)], {})
    shapes = {name: meta.shape for name, meta in table.rows if name in blocks}
    for name, shape in shapes.items():
        size = blocks[name]
        cut = {holding: partial_blocks(holding.box, shape, size) for holding in held.get(name, ())}
        if not any(cut.values()):
            continue
        exchange.grids[name] = grid_of(shape, size)
        for holding, grids in _given(cut, size):
            exchange.gives[holding.senders[0]] += [Given(name, holding.box, grid) for grid in grids]
        taken = dict.fromkeys((sender, grid) for one, grids in cut.items() for sender in one.senders for grid in grids)
        for sender, grid in taken:
            exchange.takes[sender].append((name, grid))
    return exchange


def _given(cut: Mapping[Holding, list[Box]], blocks: Blocks) -> Iterator[tuple[Holding, list[Box]]]:
    """Where each holding has a part of a block that some holding has only a part of."""
    boxes = [holding.box for holding in cut]
    if find_overlap(np.array([b.offsets for b in boxes]), np.array([b.lengths for b in boxes])) is None:
        yield from cut.items()
        return
    everywhere = dict.fromkeys(grid for grids in cut.values() for grid in grids)
    for holding in cut:
        if holding.box.numel:
            touched = blocks_of(holding.box, blocks)
            yield holding, [common for grid in everywhere if (common := touched.intersect(grid)) is not None]
