"""Leaving an operation: marks, counters, and sweeping, so that a store holds nothing of operations that are over.

Each rank leaves a mark with the keys that it made in the store of its group. In rank 0's store the last one to leave
sweeps; in a leader's, its relay does, once the whole group has left, and then it leaves the group's mark with rank 0.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterable

import msgpack

from .keys import failure_key, left_counter, left_mark
from .line import Line, LineLost
from .outcome import LONGEST_PAUSE_S, OperationContext
from .peers import PeerWatch
from .tree import Tree

__all__ = ["RootMarks", "all_left", "await_leavers", "leave", "sweep"]

_log = logging.getLogger(__name__)

_MOST_OWED = 64  # operations
_LAST_WORD_S = 2.0  # for a rank whose leader has ended, to tell rank 0 that it has left


def leave(context: OperationContext, keys_above: Collection[str], keys_below: Collection[str]) -> bool:
    """This rank makes nothing any more; whether, on rank 0, others may still be in. Raises ``LineLost``."""
    ranks, prefix = context.communicator, context.prefix
    home = ranks.tree.store_of_group(ranks.rank)
    if home == 0:
        return not ranks.root_marks.leave(context.above, prefix, {*keys_above, *keys_below})
    if home == ranks.rank:
        line = context.below()
        line.put(left_mark(prefix, home), msgpack.packb(sorted(keys_below)))
        line.add(left_counter(prefix), 1)
        return False
    line = context.above()
    try:
        line.put(left_mark(prefix, ranks.rank), msgpack.packb(sorted(keys_above)))
        line.add(left_counter(prefix), 1)
    except LineLost:
        # Rank 0 may wait to hear that nobody writes any more.
        ranks.lines.borrow(0, _LAST_WORD_S).put(left_mark(prefix, ranks.rank), msgpack.packb([]))
    return False


class RootMarks:
    """What a rank, for itself or for its group, leaves in rank 0's store. What could not be told, since rank 0 did not
    answer, is told with the next operation. Thread-safe."""

    def __init__(self, rank: int, tree: Tree) -> None:
        self._rank, self._tree = rank, tree
        self._owed: collections.deque[tuple[str, list[str]]] = collections.deque(maxlen=_MOST_OWED)

    def leave(self, root: Callable[[], Line], prefix: str, keys: Iterable[str]) -> bool:
        """Leave that operation; whether this was the last one to leave it, and has swept. Raises ``LineLost``."""
        is_over = self._leave(root, prefix, sorted(keys))
        with contextlib.suppress(IndexError):
            while True:
                self._leave(root, *self._owed.popleft())
        return is_over

    def _leave(self, root: Callable[[], Line], prefix: str, keys: list[str]) -> bool:
        try:
            line = root()
            line.put(left_mark(prefix, self._rank), msgpack.packb(keys))
        except LineLost:
            self._owed.append((prefix, keys))
            raise
        # Where this is lost it is not known whether it has been counted, and to count twice would be worse.
        if line.add(left_counter(prefix), 1) <= self._tree.child_count(0):
            return False
        sweep(line, prefix, [0, *self._tree.children(0)])
        return True


def sweep(line: Line, prefix: str, ranks: Iterable[int]) -> None:
    """Delete what these ranks made in the store and said so in their marks."""
    marks = [left_mark(prefix, rank) for rank in ranks]
    keys = {key for mark in marks for key in msgpack.unpackb(line.read(mark)[0])}
    # The counter goes last: rank 0 may end its process once it is gone.
    line.delete([*sorted(keys), *marks, failure_key(prefix), left_counter(prefix)])


def all_left(line: Line, prefix: str, tree: Tree, watch: PeerWatch) -> bool:
    """Whether, as rank 0 sees it, all others have left or ended."""
    ended = {peer.rank for peer in watch.ended()}

    def is_gone(rank: int) -> bool:
        return rank in ended or line.has(left_mark(prefix, rank))

    def is_branch_gone(child: int) -> bool:
        if line.has(left_mark(prefix, child)):
            return True
        return child in ended and all(is_gone(rank) for rank in tree.branch(child)[1:])

    return all(is_branch_gone(child) for child in tree.children(0))


def await_leavers(line: Line, prefix: str, tree: Tree, watch: PeerWatch, timeout_s: float) -> None:
    """Wait, on rank 0, until all others have left or ended. For a rank that is still in the operation itself: until it
    leaves, the others' marks stay."""
    give_up = time.monotonic() + timeout_s
    while not all_left(line, prefix, tree, watch) and time.monotonic() < give_up:
        time.sleep(LONGEST_PAUSE_S)
