"""Go back to an earlier step: abandon the checkpoints of later steps, so that none of them is the newest any more."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from ..errors import CheckpointError, CheckpointNotFoundError
from ..runtime import DEFAULT_DEADLINE_S
from ..storage_backends.base import StorageBackend
from .discovery import (
    CompleteCheckpoint,
    check_is_root,
    folders_of,
    is_exception_save,
    open_committed,
    open_complete,
)
from .lease import hold_root
from .lineage import ROLLBACK_KEY, Abandoned, abandoned_in
from .location import Location
from .nearest import open_nearest, open_tier

_PATIENCE_S = 10.0  # for others that hold the lease for a few requests

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rollback:
    """The checkpoint ``name`` is the newest of its root again; ``abandoned`` are the names of those after it."""

    name: str
    url: str
    step: int
    abandoned: tuple[str, ...]


def roll_back(root: Location, step: int, *, deadline_s: float = DEFAULT_DEADLINE_S) -> Rollback:
    """Let the checkpoint of ``step`` be the newest one below ``root``, also if it was abandoned before.

    Raises:
        UsageError: ``root`` is a checkpoint itself.
        CheckpointNotFoundError: There is no checkpoint of this step.
        CorruptionError: Files of it are missing or truncated.
        RootInUseError: A job saves below ``root``.
        StorageError: The store failed.
    """
    top = root.open(deadline_s)
    if not folders_of(check_is_root(top)):
        raise CheckpointNotFoundError(f"there are no checkpoints below {root}; check the path")
    with hold_root(top, patience_s=_PATIENCE_S):
        children = top.list_children("")
        found = list(_committed(root, folders_of(children), deadline_s))
        targets = [one for one in found if one.step == step]
        if not targets:
            steps = ", ".join(map(str, sorted({one.step for one in found}))) or "none"
            raise CheckpointNotFoundError(f"there is no checkpoint of step {step} below {root}; there are: {steps}")
        newest = max((open_complete(root, one.name, deadline_s) for one in targets), key=lambda one: one.order_key())
        later = [one for one in found if one.step > step]
        before = abandoned_in(top, children)
        there = before.attempts & {one.manifest.attempt for one in found}
        after = (there | _attempts(later)) - _attempts(targets)
        if after != before.attempts:
            top.put(ROLLBACK_KEY, before.followed_by(after).encode())
    names = tuple(one.name for one in sorted(later, key=lambda one: one.order_key()))
    return Rollback(newest.name, newest.backend.url, step, names)


def abandon_later(
    root: Location, step: int, *, is_earlier: Callable[[str], bool], deadline_s: float = DEFAULT_DEADLINE_S
) -> list[str]:
    """Abandon the checkpoints of steps after ``step``. The caller holds the lease of the root.

    Folders for whose names ``is_earlier`` returns True are not opened.

    Returns:
        The names of those that were not abandoned before, in the order of their steps.
    """
    top = open_nearest(root, deadline_s)
    children = top.list_children("")
    before = abandoned_in(top, children)
    names = [name for name in folders_of(children) if not is_earlier(name)]
    found = [one for one in _committed(root, names, deadline_s) if one.step > step]
    later = [one for one in found if one.manifest.attempt not in before.attempts]
    if later:
        top.put(ROLLBACK_KEY, before.followed_by(before.attempts | _attempts(later)).encode())
    return [one.name for one in sorted(later, key=lambda one: one.order_key())]


def complete_rollback(root: Location, store: StorageBackend) -> Abandoned:
    """Return what is abandoned below ``root``, after putting into its ``store`` what was recorded in its tier only.

    The store may not have answered when the job went back. No listing is consulted: it could lack what another host has
    just recorded.
    """
    found = abandoned_in(store, [ROLLBACK_KEY])
    if root.tier is not None:
        near = open_tier(root.tier.path, store)
        staged = abandoned_in(near, [ROLLBACK_KEY])
        if staged.count > found.count:
            store.put(ROLLBACK_KEY, staged.encode())
            return staged
    return found


def _attempts(found: Collection[CompleteCheckpoint]) -> frozenset[str]:
    return frozenset(one.manifest.attempt for one in found)


def _committed(root: Location, names: Collection[str], deadline_s: float) -> Iterator[CompleteCheckpoint]:
    """Yield what can be read, except what was saved on an exception, which is never the newest."""
    for name in names:
        try:
            found = open_committed(root, name, deadline_s)
        except CheckpointError:  # no search returns it either
            continue
        if not is_exception_save(found.manifest):
            yield found
